"""Laws of planes, and the sums of one attention call by brute force."""

import itertools
import math
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
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
from ropelens.text.rows import all_rows, sample_rows

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
    assert len(vars(owner)) == 1
    assert len(*vars(owner).values()) <= 4


@few
@given(planes=any_planes(), seed=seeds)
def test_a_rotation_keeps_lengths_and_is_undone(planes: Planes, seed: int):
    x = normal(2, 3, 7, planes.head_dim, seed=seed)
    positions = torch.tensor([0, 1, 2, 3, 50, 999, 100_000])
    turned = rotated(x, positions, planes)
    torch.testing.assert_close(planes.norms(turned), planes.norms(x))
    torch.testing.assert_close(
        unrotate(turned, positions, planes), x, rtol=1e-6, atol=1e-6
    )


@few
@given(planes=any_planes(), seed=seeds)
def test_terms_add_up_to_the_score_and_lengths_bound_them(planes: Planes, seed: int):
    q, k = normal(2, 9, planes.head_dim, seed=seed)
    terms = planes.sum_coordinates(q * k)
    assert terms.shape[-1] == planes.terms == len(planes.term_inv_freq)
    torch.testing.assert_close(terms.sum(-1), (q * k).sum(-1))
    bound = planes.norms(q) * planes.norms(k)
    assert (terms.abs() <= bound * (1 + 1e-12)).all(), "Cauchy-Schwarz"


@st.composite
def any_call(draw: st.DrawFn) -> tuple[AttentionCall, Planes, Tensor, Tensor]:
    planes = draw(any_planes())
    batch = draw(st.integers(1, 3))
    kv_heads = draw(st.integers(1, 3))
    group = draw(st.integers(1, 3))
    context = draw(st.sampled_from([2, 3, 17, 40]))
    window = draw(st.sampled_from([1, 2, 5, 16, 1000]))
    seed = draw(seeds)
    sharpness = draw(st.sampled_from([0.1, 1.0, 6.0]))
    q = normal(batch, kv_heads * group, context, planes.head_dim, seed=seed)
    k = normal(batch, kv_heads, context, planes.head_dim, seed=seed + 1)
    other_lengths = draw(st.permutations(range(2, context + 2)))
    lengths = torch.tensor([context, *other_lengths][:batch])
    generator = torch.Generator().manual_seed(seed)
    shared = draw(st.sampled_from([1, kv_heads * group]))
    sinks = torch.randint(0, 9, (batch, shared, context), generator=generator)
    sinks = sinks * (sinks <= 3)
    sinks[..., 0] = draw(st.integers(0, 1))
    visibility = Visibility.causal(range(context), window=window)
    if draw(st.booleans()):
        mask = torch.rand(batch, context, context, generator=generator) < 0.4
        shift = draw(st.integers(-1, 1))
        mask |= torch.eye(context).bool().roll(shift, 0)
        mask &= (
            torch.ones(context, context)
            .tril(draw(st.sampled_from([1, context])))
            .bool()
        )
        visibility = replace(visibility, mask=mask)
    output = q.transpose(1, 2)
    scale = sharpness / math.sqrt(planes.head_dim)
    softcap = draw(st.sampled_from([None, 2.0]))
    logits = normal(kv_heads * group, seed=seed)
    sink_logits = draw(st.sampled_from([None, logits]))
    call = AttentionCall(0, q, k, k, output, scale, softcap, sink_logits, visibility)
    return call, planes, lengths.clamp(max=context), sinks


def brute_force(
    call: AttentionCall, rows: list, sinks: Tensor, sequence: int, head: int
) -> dict:
    """Sums over `rows` (position, weight) of one head, by loops over rows and keys."""
    kv_head = head // (call.query.shape[1] // call.key.shape[1])
    q = call.query[sequence, head]
    k = call.key[sequence, kv_head]
    seen = call.visibility.sees()
    seen = seen[min(sequence, len(seen) - 1)]

    def squashed(x: Tensor) -> Tensor:
        return (
            x if call.softcap is None else call.softcap * torch.tanh(x / call.softcap)
        )

    names = ("sink_mass", "entropy", "learned_sink_mass", "law")
    sums = {name: torch.zeros(1, dtype=torch.float64) for name in names}
    sums["offset_mass"] = torch.zeros(len(q), dtype=torch.float64)
    sums["selectivity"], sums["selectivity_keys"] = torch.zeros(2, q.shape[1]).double()
    for i, weight in rows:
        keys = [j for j in range(len(k)) if seen[i, j]]
        terms = call.scale * q[i] * k[keys]
        scores = squashed(terms.sum(1))
        log_a = scores.log_softmax(0)
        a = log_a.exp()
        other = sinks[keys] == 0
        sums["selectivity"] += weight * ((a - 1 / len(keys))[:, None] * terms).sum(0)
        sums["law"] += weight * ((a - 1 / len(keys)) * terms.sum(1)).sum()
        sums["entropy"] -= weight * (a * log_a).sum()
        sums["sink_mass"] += weight * a[~other].sum()
        if other.any():
            evenly = (1 - a[~other].sum()) * terms[other].mean(0)
            sums["selectivity_keys"] += weight * (a[other] @ terms[other] - evenly)
        for j, mass in zip(keys, a, strict=True):
            if 0 < j <= i:
                sums["offset_mass"][i - j] += weight * mass
        if call.sink_logits is not None:
            everything = torch.cat([scores, call.sink_logits[head, None]])
            sums["learned_sink_mass"] += weight * everything.softmax(0)[-1]
    return sums


@settings(deadline=None, max_examples=80, derandomize=True)
@given(made=any_call(), count=counts, block=st.sampled_from([1, 2000, 2**19]))
def test_row_sums_by_brute_force(made: tuple, count: int | None, block: int):
    call, planes, lengths, sinks = made
    rows = (
        all_rows(lengths)
        if count is None
        else sample_rows(lengths, count=count, seed=3)
    )
    before = fast_products.BLOCK_ELEMENTS["cpu"]
    fast_products.BLOCK_ELEMENTS["cpu"] = block
    try:
        sums = sum_attention(SampledCall(call, rows, planes, sinks=sinks), STATISTICS)
    finally:
        fast_products.BLOCK_ELEMENTS["cpu"] = before
    for sequence, head in itertools.product(*map(range, call.query.shape[:2])):
        positions = rows.position[sequence].tolist()
        weights = rows.weight[sequence].tolist()
        taken = [
            (i, weight) for i, weight in zip(positions, weights, strict=True) if weight
        ]
        assert all(1 <= position < lengths[sequence] for position, _ in taken)
        kind = sinks[sequence, head % sinks.shape[1]]
        expected = brute_force(call, taken, kind, sequence, head)
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
    torch.testing.assert_close(
        fast_products.running_sum(x), x.cumsum(2), rtol=0, atol=1e-5
    )


@pytest.mark.parametrize(("first_key", "past"), [(0, 20), (5, 15)])
def test_past_counts_the_keys_before_the_first_row(first_key: int, past: int):
    """A cache of a sliding window may have dropped the first keys."""
    call = call_of(torch.zeros(1, 1, 3, 2), torch.zeros(1, 1, 23 - first_key, 2))
    position = torch.arange(20, 23)[None]
    visibility = Visibility(
        position, torch.full_like(position, 5), range(first_key, 23)
    )
    assert replace(call, visibility=visibility).past == past


def test_keys_under_a_mask_are_counted_by_offset():
    """Keys ahead of their row count at offset 0."""
    mask = torch.tensor(
        [[[1, 0, 1, 0], [0, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]]
    ).bool()
    visibility = replace(Visibility.causal(range(4)), mask=mask)
    expected = [[2, 0, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]
    assert visibility.count_by_offset()[0].tolist() == expected


def test_masks_with_gaps_are_refused_in_chunks():
    mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]]).bool()[None]
    later = Visibility.causal(range(3, 6))
    with pytest.raises(UnsupportedModel, match=r"^Sequences that run in chunks need"):
        Visibility.from_mask(mask, range(3)).append(later)
