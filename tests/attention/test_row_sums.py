"""Laws of planes, and the sums of one attention call by brute force."""

import itertools
import math
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.handmade import call_of
from small_measurements import few, normal, seeds
from torch import Tensor

from ropelens.attention import fast_products
from ropelens.attention.call import AttentionCall
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.sums import sum_attention
from ropelens.attention.visibility import Visibility
from ropelens.caches import kept, on_device
from ropelens.errors import UnsupportedModel
from ropelens.profiles.measures import STATISTICS
from ropelens.rope.planes import Planes, unrotate
from ropelens.text.rows import Rows, all_rows, sample_rows

counts = st.sampled_from([None, 1, 4, 16])


@st.composite
def any_planes(draw: st.DrawFn) -> Planes:
    count = draw(st.integers(1, 4))
    offset = draw(st.integers(0, 3))
    rest = draw(st.integers(0, 3))
    pairing = draw(st.sampled_from(["half", "interleaved"]))
    speed = st.floats(-3, 3, width=32)
    speeds = draw(st.lists(speed, min_size=count, max_size=count))
    return Planes(torch.tensor(speeds), 2 * count + offset + rest, pairing, offset)


def rotated(x: Tensor, positions: Tensor, planes: Planes) -> Tensor:
    angle = positions[:, None].float() * planes.inv_freq
    z = torch.complex(x[..., planes.first], x[..., planes.second])
    angle = angle.double()
    z = z * torch.polar(torch.ones_like(angle), angle)
    result = x.clone()
    result[..., planes.first] = z.real
    result[..., planes.second] = z.imag
    return result


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_table_moves_once_for_all_layers(mode: type):
    with mode():
        table = torch.arange(3)
        meta = torch.device("meta")
        assert on_device(table, meta) is on_device(table, meta)


def test_threads_do_not_lose_the_results_that_they_keep():
    """Models that are measured at the same time share tables of positions."""
    owner = SimpleNamespace()
    interval = sys.getswitchinterval()
    negative = kept(most=1)(lambda _, *numbers: -numbers[0])

    def repeat(number: int) -> bool:
        key = [torch.tensor(number)] * 20  # threads change while tensors are hashed
        return all(negative(owner, *key) == -number for _ in range(5000))

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(repeat, range(1, 5)))
    finally:
        sys.setswitchinterval(interval)
    (table,) = vars(owner).values()
    assert len(table) <= 4


@few
@given(planes=any_planes(), seed=seeds)
def test_a_rotation_keeps_lengths_and_is_undone(planes: Planes, seed: int):
    x = normal(2, 3, 7, planes.head_dim, seed=seed)
    positions = torch.tensor([0, 1, 2, 3, 50, 999, 100_000])
    turned = rotated(x, positions, planes)
    undone = unrotate(turned, positions, planes)
    torch.testing.assert_close(planes.norms(turned), planes.norms(x))
    torch.testing.assert_close(undone, x, rtol=1e-6, atol=1e-6)


@few
@given(planes=any_planes(), seed=seeds)
def test_terms_add_up_to_the_score_and_lengths_bound_them(planes: Planes, seed: int):
    q, k = normal(2, 9, planes.head_dim, seed=seed)
    terms = planes.sum_coordinates(q * k)
    assert terms.shape[-1] == planes.terms
    assert len(planes.term_inv_freq) == planes.terms
    score = (q * k).sum(-1)
    torch.testing.assert_close(terms.sum(-1), score)
    bound = planes.norms(q) * planes.norms(k)
    assert (terms.abs() <= bound * (1 + 1e-12)).all(), "Cauchy-Schwarz"


@dataclass(frozen=True, eq=False)
class Case:
    """A call of attention, and the kinds of sinks [sequence, 1 or head, key]."""

    call: AttentionCall
    planes: Planes
    lengths: Tensor
    sinks: Tensor


def any_sinks(
    draw: st.DrawFn, shape: tuple[int, int, int], generator: torch.Generator
) -> Tensor:
    sinks = torch.randint(0, 9, shape, generator=generator)
    sinks = sinks * (sinks <= 3)
    sinks[..., 0] = draw(st.integers(0, 1))
    return sinks


def any_visibility(
    draw: st.DrawFn, batch: int, context: int, generator: torch.Generator
) -> Visibility:
    """A window, and on top of it perhaps a mask with holes that shows some keys ahead."""
    window = draw(st.sampled_from([1, 2, 5, 16, 1000]))
    visibility = Visibility.causal(range(context), window=window)
    if not draw(st.booleans()):
        return visibility
    mask = torch.rand(batch, context, context, generator=generator) < 0.4
    shift = draw(st.integers(-1, 1))
    ahead = draw(st.sampled_from([1, context]))  # keys that a row may see ahead
    mask |= torch.eye(context).bool().roll(shift, 0)
    mask &= torch.ones(context, context).tril(ahead).bool()
    return replace(visibility, mask=mask)


@st.composite
def any_case(draw: st.DrawFn) -> Case:
    planes = draw(any_planes())
    batch = draw(st.integers(1, 3))
    kv_heads = draw(st.integers(1, 3))
    heads = kv_heads * draw(st.integers(1, 3))
    context = draw(st.sampled_from([2, 3, 17, 40]))
    seed = draw(seeds)
    generator = torch.Generator().manual_seed(seed)
    key = normal(batch, kv_heads, context, planes.head_dim, seed=seed + 1)
    query = normal(batch, heads, context, planes.head_dim, seed=seed)
    call = AttentionCall(
        0,
        query,
        key,
        value=key,
        output=query.transpose(1, 2),
        scale=draw(st.sampled_from([0.1, 1.0, 6.0])) / math.sqrt(planes.head_dim),
        softcap=draw(st.sampled_from([None, 2.0])),
        sink_logits=draw(st.sampled_from([None, normal(heads, seed=seed)])),
        visibility=any_visibility(draw, batch, context, generator),
    )
    other_lengths = draw(st.permutations(range(2, context + 2)))
    lengths = torch.tensor([context, *other_lengths][:batch]).clamp(max=context)
    sets_of_sinks = draw(st.sampled_from([1, heads]))
    sinks = any_sinks(draw, (batch, sets_of_sinks, context), generator)
    return Case(call, planes, lengths, sinks)


@dataclass(frozen=True, eq=False)
class Row:
    """One row of a head, with the keys that it sees."""

    position: int
    keys: list[int]
    terms: Tensor  # [key, plane coordinate], in nats
    is_sink: Tensor  # [key]
    softcap: float | None
    sink_logit: Tensor | None

    @property
    def scores(self) -> Tensor:
        scores = self.terms.sum(1)
        if self.softcap is None:
            return scores
        return self.softcap * torch.tanh(scores / self.softcap)

    def sums(self) -> dict[str, Tensor]:
        """The statistics of the row by their definitions."""
        log_attention = self.scores.log_softmax(0)
        attention = log_attention.exp()
        on_sinks = attention[self.is_sink].sum()
        lead = attention - 1 / len(self.keys)
        sums = {
            "selectivity": lead @ self.terms,
            "law": lead @ self.terms.sum(1),
            "entropy": -(attention * log_attention).sum(),
            "sink_mass": on_sinks,
            "offset_mass": self.mass_by_offset(attention),
        }
        other = ~self.is_sink
        if other.any():
            evenly = (1 - on_sinks) * self.terms[other].mean(0)
            sums["selectivity_keys"] = attention[other] @ self.terms[other] - evenly
        if self.sink_logit is not None:
            with_sink = torch.cat([self.scores, self.sink_logit])
            sums["learned_sink_mass"] = with_sink.softmax(0)[-1]
        return sums

    def mass_by_offset(self, attention: Tensor) -> Tensor:
        """Attention on earlier keys except position 0, by offset."""
        mass = torch.zeros(self.position + 1, dtype=torch.float64)
        for key, weight in zip(self.keys, attention, strict=True):
            if 0 < key <= self.position:
                mass[self.position - key] += weight
        return mass


def row_of(
    call: AttentionCall, sinks: Tensor, *, sequence: int, head: int, position: int
) -> Row:
    group = call.query.shape[1] // call.key.shape[1]
    visible = call.visibility.sees()
    visible = visible[min(sequence, len(visible) - 1)]
    keys = visible[position].nonzero().flatten().tolist()
    query = call.query[sequence, head, position]
    sink_logit = None
    if call.sink_logits is not None:
        sink_logit = call.sink_logits[head, None]
    return Row(
        position,
        keys,
        terms=call.scale * query * call.key[sequence, head // group, keys],
        is_sink=sinks[sequence, head % sinks.shape[1], keys] != 0,
        softcap=call.softcap,
        sink_logit=sink_logit,
    )


def brute_force(
    call: AttentionCall, rows: Rows, sinks: Tensor, *, sequence: int, head: int
) -> dict[str, Tensor]:
    """Weighted sums over the rows of one head, by loops over rows and keys."""
    context = call.query.shape[2]
    width = call.query.shape[3]
    sums = {
        "selectivity": torch.zeros(width).double(),
        "selectivity_keys": torch.zeros(width).double(),
        "offset_mass": torch.zeros(context).double(),
        "law": torch.zeros(1).double(),
        "entropy": torch.zeros(1).double(),
        "sink_mass": torch.zeros(1).double(),
        "learned_sink_mass": torch.zeros(1).double(),
    }
    positions = rows.position[sequence].tolist()
    weights = rows.weight[sequence].tolist()
    for position, weight in zip(positions, weights, strict=True):
        if weight == 0:
            continue
        row = row_of(call, sinks, sequence=sequence, head=head, position=position)
        for name, value in row.sums().items():
            size = value.numel()
            sums[name][:size] += weight * value
    return sums


@contextmanager
def blocks_of(elements: int) -> Iterator[None]:
    """Split products into blocks of this size."""
    before = fast_products.BLOCK_ELEMENTS["cpu"]
    fast_products.BLOCK_ELEMENTS["cpu"] = elements
    try:
        yield
    finally:
        fast_products.BLOCK_ELEMENTS["cpu"] = before


@settings(deadline=None, max_examples=80, derandomize=True)
@given(case=any_case(), count=counts, block=st.sampled_from([1, 2000, 2**19]))
def test_row_sums_by_brute_force(case: Case, count: int | None, block: int):
    call = case.call
    sinks = case.sinks
    if count is None:
        rows = all_rows(case.lengths)
    else:
        rows = sample_rows(case.lengths, count=count, seed=3)
    counted = rows.weight > 0
    assert (rows.position[counted] >= 1).all()
    assert (rows.position < case.lengths[:, None])[counted].all()
    sampled = SampledCall(call, rows, case.planes, sinks=sinks)
    with blocks_of(block):
        sums = sum_attention(sampled, STATISTICS)
    for sequence, head in itertools.product(*map(range, call.query.shape[:2])):
        expected = brute_force(call, rows, sinks, sequence=sequence, head=head)
        law = sums["selectivity"][sequence, head].sum()
        torch.testing.assert_close(law[None], expected.pop("law"), rtol=1e-9, atol=1e-9)
        for name, value in expected.items():
            ours = sums[name][sequence, head].reshape(value.shape)
            torch.testing.assert_close(
                ours, value, rtol=1e-9, atol=1e-9, msg=f"{name}: {ours}"
            )


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_a_running_sum_is_cumsum(count: int):
    x = normal(2, 3, count, 5, seed=count)
    ours = fast_products.running_sum(x)
    torch.testing.assert_close(ours, x.cumsum(2), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("first_key", "past"), [(0, 20), (5, 15)])
def test_past_counts_the_keys_before_the_first_row(first_key: int, past: int):
    """A cache of a sliding window may have dropped the first keys."""
    call = call_of(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 23 - first_key, 2))
    position = torch.arange(20, 23)[None]
    first_seen = torch.full_like(position, 5)
    visibility = Visibility(position, first_seen, range(first_key, 23))
    cached = replace(call, visibility=visibility)
    assert cached.past == past


def test_keys_under_a_mask_are_counted_by_offset():
    """Keys ahead of their row count at offset 0."""
    mask = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]])
    visibility = replace(Visibility.causal(range(4)), mask=mask.bool()[None])
    expected = [[2, 0, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    assert visibility.count_by_offset()[0].tolist() == expected


def test_masks_with_gaps_are_refused_in_chunks():
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]])
    first_chunk = Visibility.from_mask(mask.bool()[None], range(3))
    later = Visibility.causal(range(3, 6))
    with pytest.raises(UnsupportedModel, match=r"^Sequences that run in chunks need"):
        first_chunk.append(later)
