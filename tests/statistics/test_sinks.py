"""Sinks wherever they stand, and selectivity split into what they take and the rest."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ropelens.rope.planes import Planes
from ropelens.statistics.attention import sum_attention
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.maps import attention_map
from ropelens.statistics.measures import named
from ropelens.statistics.rows import Rows, all_rows, sample_rows
from ropelens.statistics.sinks import find_sinks, known_sinks, sum_selectivity, with_found

few = settings(deadline=None, max_examples=25, derandomize=True)
seeds = st.integers(0, 2**20)


def call_of(q: Tensor, k: Tensor, *, scale: float, window: int) -> AttentionCall:
    return AttentionCall(
        layer=0,
        query=q,
        key=k,
        value=k,
        output=q.transpose(1, 2),
        scale=scale,
        softcap=None,
        sink_logits=None,
        start=(torch.arange(q.shape[2]) - window + 1).clamp(min=0),
    )


def random_call(*, seed: int, context: int, window: int, sharpness: float) -> AttentionCall:
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(3, 4, context, 8, generator=generator, dtype=torch.float64)
    k = torch.randn(3, 2, context, 8, generator=generator, dtype=torch.float64)
    return call_of(q, k, scale=sharpness, window=window)


PLANES = Planes(torch.tensor([1.0, 0.1, 0.01]), head_dim=8, pairing="half")


def dense(call: AttentionCall, rows: Rows, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The formula, one row and one key at a time: [batch, head, term] on sinks, on others."""
    attention = attention_map(call)
    shape = (*call.query.shape[:2], PLANES.terms)
    on_sinks, on_keys = torch.zeros(shape).double(), torch.zeros(shape).double()
    for b in range(shape[0]):
        for h in range(shape[1]):
            kind = sinks[b, h if sinks.shape[1] > 1 else 0]
            for i, weight in zip(
                rows.position[b].tolist(), rows.weight[b].tolist(), strict=True
            ):
                keys = range(int(call.start[i]), i + 1)
                c = {
                    j: call.scale
                    * PLANES.sum_coordinates(call.query[b, h, i] * call.key[b, h // 2, j])
                    for j in keys
                }
                a = {j: float(attention[b, h, i, j]) for j in keys}
                own = [j for j in keys if kind[j] > 0]
                others = [j for j in keys if kind[j] == 0]
                even = sum(c.values()) / len(c)
                whole = sum(a[j] * c[j] for j in keys) - even
                rest = torch.zeros(PLANES.terms).double()
                if others:
                    level = sum(c[j] for j in others) / len(others)
                    a0 = sum(a[j] for j in own)
                    rest = sum(a[j] * c[j] for j in others) - (1 - a0) * level
                on_keys[b, h] += weight * rest
                on_sinks[b, h] += weight * (whole - rest)
    return on_sinks, on_keys


@few
@given(
    seed=seeds,
    window=st.sampled_from([3, 1000]),
    sharpness=st.sampled_from([0.1, 1.0]),
    sampled=st.booleans(),
    by_head=st.booleans(),
)
def test_both_parts_by_brute_force_and_their_sum(seed, window, sharpness, sampled, by_head):
    call = random_call(seed=seed, context=19, window=window, sharpness=sharpness)
    length = torch.tensor([19, 12, 2])
    rows = sample_rows(length, count=5, seed=seed) if sampled else all_rows(length)
    generator = torch.Generator().manual_seed(seed)
    sinks = torch.randint(0, 9, (3, 4 if by_head else 1, 19), generator=generator)
    sinks = sinks * (sinks <= 3)
    sinks[..., 0] = 1
    ours = sum_selectivity(call, rows, PLANES, sinks)
    for part, true in zip(ours, dense(call, rows, sinks), strict=True):
        torch.testing.assert_close(part, true)
    (statistic,) = named("selectivity")
    ids = torch.zeros(call.key.shape[0], call.key.shape[2], dtype=torch.long)
    sums = sum_attention(call, rows, PLANES, tokens=ids, statistics=[statistic])
    whole = PLANES.sum_coordinates(sums["selectivity"])
    torch.testing.assert_close(ours[0] + ours[1], whole)


def test_one_sink_takes_what_the_formula_of_one_sink_says():
    call = random_call(seed=0, context=12, window=1000, sharpness=1.0)
    rows = all_rows(torch.tensor([12, 12, 12]))
    sinks = torch.zeros(3, 1, 12, dtype=torch.long)
    sinks[..., 0] = 1
    attention = attention_map(call)
    k = call.key.repeat_interleave(2, 1)
    true = torch.zeros(3, 4, PLANES.terms).double()
    for i in range(1, 12):
        c = call.scale * PLANES.sum_coordinates(call.query[:, :, i, None] * k[:, :, : i + 1])
        beyond = attention[:, :, i, :1] - 1 / (i + 1)
        true += beyond * (c[:, :, 0] - c[:, :, 1:].mean(2))
    torch.testing.assert_close(sum_selectivity(call, rows, PLANES, sinks)[0], true)


def test_the_first_token_marks_a_sink_where_all_sequences_begin_with_it():
    packed = torch.tensor([[7, 3, 4, 7, 5], [7, 7, 3, 9, 9]])
    assert known_sinks(packed)[:, 0].tolist() == [[1, 0, 0, 1, 0], [1, 1, 0, 0, 0]]
    text = torch.tensor([[7, 3, 4, 7, 5], [3, 7, 3, 9, 9]])
    assert known_sinks(text)[:, 0].tolist() == [[1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert known_sinks(text, named=[3, 5])[:, 0].tolist() == [[1, 2, 0, 0, 2], [1, 0, 2, 0, 0]]


def at_key(key: int, *, share: float, sequences: int, only: int) -> AttentionCall:
    """Two heads that look evenly; in `only` sequences head 1 puts `share` on a key."""
    context = 60
    q, k = torch.zeros(sequences, 2, context, 8), torch.zeros(sequences, 1, context, 8)
    row = torch.arange(context).clamp(min=1)
    q[:, 1, :, 7] = (share / (1 - share) * row).log()
    k[:only, 0, key, 7] = 1
    return call_of(q, k, scale=1.0, window=context)


def test_what_a_key_takes_of_its_own_row_does_not_make_it_a_sink():
    """16 rows behind it give it 0.29 each; its own gives all: with that, 0.33."""
    q, k = torch.zeros(1, 1, 60, 8), torch.zeros(1, 1, 60, 8)
    row = torch.arange(60)
    q[0, 0, :, 7] = (0.29 / 0.71 * row.clamp(min=1)).log()
    q[0, 0, 43, 7] = 20
    k[0, 0, 43, 7] = 1
    none = torch.zeros(1, 1, 60, dtype=torch.long)
    call, rows = call_of(q, k, scale=1.0, window=60), all_rows(torch.tensor([60]))
    assert not find_sinks(call, rows, PLANES, none)[0, 43]
    q[0, 0, 44:, 7] += 0.2
    assert find_sinks(call_of(q, k, scale=1.0, window=60), rows, PLANES, none)[0, 43]


@pytest.mark.parametrize(
    ("key", "share", "only", "found"),
    [
        (5, 0.4, 3, True),
        (5, 0.2, 3, False),
        (5, 0.4, 2, True),
        (5, 0.4, 1, False),
        (43, 0.9, 3, True),  # 16 rows behind it
        (44, 0.9, 3, False),  # and 15
    ],
)
def test_keys_that_take_most_rows_attention_are_found(key, share, only, found):
    call = at_key(key, share=share, sequences=3, only=only)
    rows = all_rows(torch.tensor([60, 60, 60]))
    known = torch.zeros(3, 1, 60, dtype=torch.long)
    known[..., 0] = 1
    seen = find_sinks(call, rows, PLANES, known)
    assert seen.any() == found
    assert bool(seen[1, key]) == found
    table = with_found(known, seen)
    assert table.shape[1] == (2 if found else 1)
    if found:
        assert table[:, 1, key].tolist() == [3, 3, 3]
        assert (table[:, :, 0] == 1).all()
        assert not find_sinks(call, rows, PLANES, table).any(), "a known sink is not found"
    assert math.isclose(float(seen.sum()), float(found))
