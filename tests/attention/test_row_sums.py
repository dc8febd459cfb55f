"""Laws of planes, and the sums of one attention call by brute force."""

import itertools
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.handmade import call_of
from small_measurements import few, normal, seeds
from torch import Tensor
from torch.testing import assert_close

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
    head_dim = 2 * count + offset + rest
    return Planes(torch.tensor(speeds), head_dim, pairing, offset)


def rotated(x: Tensor, positions: Tensor, planes: Planes) -> Tensor:
    angle = (positions[:, None].float() * planes.inv_freq).double()
    turn = torch.polar(torch.ones_like(angle), angle)
    turned = turn * torch.complex(x[..., planes.first], x[..., planes.second])
    result = x.clone()
    result[..., planes.first] = turned.real
    result[..., planes.second] = turned.imag
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

    @kept(most=1)
    def negative(_: object, *numbers: Tensor) -> Tensor:
        return -numbers[0]

    def all_are_negative(number: int) -> bool:
        key = [torch.tensor(number)] * 20  # threads change while tensors are hashed
        return all(negative(owner, *key) == -number for _ in range(5000))

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(4) as pool:
            results_of_threads = pool.map(all_are_negative, range(1, 5))
            assert all(results_of_threads)
    finally:
        sys.setswitchinterval(interval)
    (results,) = vars(owner).values()
    assert len(results) <= 4


@few
@given(planes=any_planes(), seed=seeds)
def test_a_rotation_keeps_lengths_and_is_undone(planes: Planes, seed: int):
    x = normal(2, 3, 7, planes.head_dim, seed=seed)
    positions = torch.tensor([0, 1, 2, 3, 50, 999, 100_000])
    turned = rotated(x, positions, planes)
    undone = unrotate(turned, positions, planes)
    assert_close(planes.norms(turned), planes.norms(x))
    assert_close(undone, x, rtol=1e-6, atol=1e-6)


@few
@given(planes=any_planes(), seed=seeds)
def test_terms_add_up_to_the_score_and_lengths_bound_them(planes: Planes, seed: int):
    q, k = normal(2, 9, planes.head_dim, seed=seed)
    terms = planes.sum_coordinates(q * k)
    scores = (q * k).sum(-1)
    assert terms.shape[-1] == planes.terms == len(planes.term_inv_freq)
    assert_close(terms.sum(-1), scores)
    bound = planes.norms(q) * planes.norms(k)
    assert (terms.abs() <= bound * (1 + 1e-12)).all(), "Cauchy-Schwarz"


@dataclass(frozen=True)
class Sizes:
    """Sizes of an attention call."""

    batch: int
    kv_heads: int
    group: int
    context: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group


ANY_SIZES = st.builds(
    Sizes,
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    context=st.sampled_from([2, 3, 17, 40]),
)


@dataclass(frozen=True, eq=False)
class CallOfText:
    """A call, its planes, and the lengths and sinks of its sequences."""

    call: AttentionCall
    planes: Planes
    lengths: Tensor
    sinks: Tensor


def draw_lengths(draw: st.DrawFn, sizes: Sizes) -> Tensor:
    """Lengths from 2 tokens to the context. The first sequence fills the context."""
    lengths = range(2, sizes.context + 2)
    other_lengths = draw(st.permutations(lengths))
    drawn = [sizes.context, *other_lengths]
    return torch.tensor(drawn[: sizes.batch]).clamp(max=sizes.context)


def draw_sinks(draw: st.DrawFn, sizes: Sizes, generator: torch.Generator) -> Tensor:
    """Kinds of sinks by key, which heads share or each head has."""
    heads = draw(st.sampled_from([1, sizes.heads]))
    shape = (sizes.batch, heads, sizes.context)
    sinks = torch.randint(0, 9, shape, generator=generator)
    sinks[sinks > 3] = 0
    sinks[..., 0] = draw(st.integers(0, 1))
    return sinks


def draw_visibility(
    draw: st.DrawFn, sizes: Sizes, generator: torch.Generator
) -> Visibility:
    """A window, or a mask with gaps. Under a mask, rows may see keys ahead."""
    context = sizes.context
    window = draw(st.sampled_from([1, 2, 5, 16, 1000]))
    visibility = Visibility.causal(range(context), window=window)
    has_mask = draw(st.booleans())
    if not has_mask:
        return visibility
    mask = torch.rand(sizes.batch, context, context, generator=generator) < 0.4
    shift = draw(st.integers(-1, 1))
    mask |= torch.eye(context).bool().roll(shift, 0)
    keys_ahead = draw(st.sampled_from([1, context]))
    mask &= torch.ones(context, context).tril(keys_ahead).bool()
    return replace(visibility, mask=mask)


@st.composite
def any_call(draw: st.DrawFn) -> CallOfText:
    planes = draw(any_planes())
    sizes = draw(ANY_SIZES)
    seed = draw(seeds)
    generator = torch.Generator().manual_seed(seed)
    sharpness = draw(st.sampled_from([0.1, 1.0, 6.0]))
    vectors = (sizes.context, planes.head_dim)
    query = normal(sizes.batch, sizes.heads, *vectors, seed=seed)
    key = normal(sizes.batch, sizes.kv_heads, *vectors, seed=seed + 1)
    lengths = draw_lengths(draw, sizes)
    sinks = draw_sinks(draw, sizes, generator)
    sink_logits = normal(sizes.heads, seed=seed)
    call = AttentionCall(
        layer=0,
        query=query,
        key=key,
        value=key,
        output=query.transpose(1, 2),
        scale=sharpness / math.sqrt(planes.head_dim),
        softcap=draw(st.sampled_from([None, 2.0])),
        sink_logits=draw(st.sampled_from([None, sink_logits])),
        visibility=draw_visibility(draw, sizes, generator),
    )
    return CallOfText(call, planes, lengths, sinks)


@dataclass(frozen=True, eq=False)
class AttentionRow:
    """The attention of one row on the keys that it sees.

    `terms` are the contributions of the coordinates to the scores before any soft-cap.
    """

    keys: list[int]
    terms: Tensor  # [key, coordinate]
    scores: Tensor  # [key]
    is_sink: Tensor  # [key]

    @property
    def attention(self) -> Tensor:
        return self.scores.log_softmax(0).exp()

    def entropy(self) -> Tensor:
        return -(self.attention * self.scores.log_softmax(0)).sum()

    def sink_mass(self) -> Tensor:
        return self.attention[self.is_sink].sum()

    def selectivity(self) -> Tensor:
        beyond_uniform = self.attention - 1 / len(self.keys)
        return (beyond_uniform[:, None] * self.terms).sum(0)

    def sum_of_selectivity(self) -> Tensor:
        beyond_uniform = self.attention - 1 / len(self.keys)
        return (beyond_uniform * self.terms.sum(1)).sum()

    def selectivity_keys(self) -> Tensor:
        """The selectivity among the keys that are not sinks."""
        is_other = ~self.is_sink
        if not is_other.any():
            return torch.zeros_like(self.terms[0])
        attention = self.attention[is_other]
        terms = self.terms[is_other]
        evenly = (1 - self.sink_mass()) * terms.mean(0)
        return attention @ terms - evenly

    def learned_sink_mass(self, sink_logit: Tensor) -> Tensor:
        everything = torch.cat([self.scores, sink_logit[None]])
        return everything.softmax(0)[-1]


@dataclass(frozen=True, eq=False)
class Head:
    """One head of a call in one sequence."""

    call: AttentionCall
    sinks: Tensor  # [key]
    sequence: int
    head: int

    def row(self, position: int) -> AttentionRow:
        call = self.call
        group = call.query.shape[1] // call.key.shape[1]
        query = call.query[self.sequence, self.head, position]
        key = call.key[self.sequence, self.head // group]
        sees = call.visibility.sees()
        sees = sees.expand(len(call.query), -1, -1)[self.sequence, position]
        keys = sees.nonzero()[:, 0].tolist()
        terms = call.scale * query * key[keys]
        scores = terms.sum(1)
        if call.softcap is not None:
            scores = call.softcap * torch.tanh(scores / call.softcap)
        return AttentionRow(keys, terms, scores, is_sink=self.sinks[keys] > 0)

    def sums(self, weights: dict[int, float]) -> dict[str, Tensor]:
        """Sums over rows by loops; `weights` are by the position of the row."""
        context, coordinates = self.call.query.shape[2:]
        sums = {
            "sink_mass": torch.zeros(1).double(),
            "entropy": torch.zeros(1).double(),
            "learned_sink_mass": torch.zeros(1).double(),
            "offset_mass": torch.zeros(context).double(),
            "selectivity": torch.zeros(coordinates).double(),
            "selectivity_keys": torch.zeros(coordinates).double(),
        }
        for position, weight in weights.items():
            row = self.row(position)
            sums["sink_mass"] += weight * row.sink_mass()
            sums["entropy"] += weight * row.entropy()
            sums["selectivity"] += weight * row.selectivity()
            sums["selectivity_keys"] += weight * row.selectivity_keys()
            for key, mass in zip(row.keys, row.attention, strict=True):
                if 0 < key <= position:
                    sums["offset_mass"][position - key] += weight * mass
            if self.call.sink_logits is not None:
                sink_logit = self.call.sink_logits[self.head]
                mass_of_sink = row.learned_sink_mass(sink_logit)
                sums["learned_sink_mass"] += weight * mass_of_sink
        return sums

    def sum_of_selectivity(self, weights: dict[int, float]) -> Tensor:
        """The selectivity of all coordinates together, from scores before any soft-cap."""
        rows = [
            weight * self.row(position).sum_of_selectivity()
            for position, weight in weights.items()
        ]
        return sum(rows, start=torch.zeros(1).double())


def weights_of_rows(rows: Rows, sequence: int) -> dict[int, float]:
    """The weights of the rows of a sequence by position, without rows of weight 0."""
    weights = {}
    positions = rows.position[sequence].tolist()
    for position, weight in zip(positions, rows.weight[sequence].tolist(), strict=True):
        if weight:
            assert position not in weights
            weights[position] = weight
    return weights


@settings(deadline=None, max_examples=80, derandomize=True)
@given(drawn=any_call(), count=counts, block=st.sampled_from([1, 2000, 2**19]))
def test_row_sums_by_brute_force(drawn: CallOfText, count: int | None, block: int):
    call = drawn.call
    if count is None:
        rows = all_rows(drawn.lengths)
    else:
        rows = sample_rows(drawn.lengths, count=count, seed=3)
    sampled = SampledCall(call, rows, drawn.planes, sinks=drawn.sinks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fast_products.BLOCK_ELEMENTS, "cpu", block)
        sums = sum_attention(sampled, STATISTICS)
    batch, heads = call.query.shape[:2]
    for sequence, head in itertools.product(range(batch), range(heads)):
        sinks = drawn.sinks[sequence, head % drawn.sinks.shape[1]]
        weights = weights_of_rows(rows, sequence)
        assert_are_rows(weights, length=drawn.lengths[sequence])
        of_head = Head(call, sinks, sequence, head)
        assert_are_sums_of(of_head, weights, sums)


def assert_are_rows(weights: dict[int, float], *, length: Tensor) -> None:
    for position in weights:
        assert 1 <= position < length


def assert_are_sums_of(
    head: Head, weights: dict[int, float], sums: dict[str, Tensor]
) -> None:
    expected_total = head.sum_of_selectivity(weights)
    total = sums["selectivity"][head.sequence, head.head].sum()[None]
    assert_close(total, expected_total, rtol=1e-9, atol=1e-9)
    for name, expected in head.sums(weights).items():
        ours = sums[name][head.sequence, head.head].reshape(expected.shape)
        message = f"{name}: {ours}"
        assert_close(ours, expected, rtol=1e-9, atol=1e-9, msg=message)


@pytest.mark.parametrize("count", [1, 63, 64, 65, 200])
def test_a_running_sum_is_cumsum(count: int):
    x = normal(2, 3, count, 5, seed=count)
    expected = x.cumsum(2)
    assert_close(fast_products.running_sum(x), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("first_key", "past"), [(0, 20), (5, 15)])
def test_past_counts_the_keys_before_the_first_row(first_key: int, past: int):
    """A cache of a sliding window may have dropped the first keys."""
    query = torch.zeros(1, 1, 3, 2)
    key = torch.zeros(1, 1, 23 - first_key, 2)
    position = torch.arange(20, 23)[None]
    first_seen = torch.full_like(position, 5)
    visibility = Visibility(position, first_seen, range(first_key, 23))
    call = call_of(query, key)
    assert replace(call, visibility=visibility).past == past


def test_keys_under_a_mask_are_counted_by_offset():
    """Keys ahead of their row count at offset 0."""
    mask = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]])
    causal = Visibility.causal(range(4))
    visibility = replace(causal, mask=mask[None].bool())
    expected = [[2, 0, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    assert visibility.count_by_offset()[0].tolist() == expected


def test_masks_with_gaps_are_refused_in_chunks():
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()
    visibility = Visibility.from_mask(mask[None], range(3))
    later = Visibility.causal(range(3, 6))
    with pytest.raises(UnsupportedModel, match=r"^Sequences that run in chunks need"):
        visibility.append(later)
