"""Sinks by position, by token, and by the attention that a key takes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from oracles.handmade import call_of
from oracles.tiny import random_tokens, tiny
from torch import Tensor

import ropelens as rl
from ropelens.attention.call import AttentionCall, attention_map
from ropelens.attention.sampled_call import SampledCall
from ropelens.budget.found_sinks import add_found_sinks, find_sinks
from ropelens.rope.planes import Planes
from ropelens.text.rows import Rows, all_rows, sample_rows
from ropelens.text.text import known_sinks

PLANES = Planes(torch.tensor([1.0, 0.1, 0.01]), head_dim=8, pairing="half")


def found_in(call: AttentionCall, rows: Rows, known: Tensor) -> Tensor:
    return find_sinks(SampledCall(call, rows, PLANES, sinks=known))


def kinds(
    tokens: list[list[int]], *, bos: int | None, named: tuple[int, ...] = ()
) -> list[list[int]]:
    """0 for each token that is no sink, 1 for the first token and BOS, 2 for named ones."""
    sinks = known_sinks(torch.tensor(tokens), bos=bos, named=named)
    return sinks[:, 0].tolist()


def test_the_first_token_marks_a_sink_if_all_sequences_begin_with_it():
    packed = [[7, 3, 4, 7, 5], [7, 7, 3, 9, 9]]
    for bos in (None, 7, 3):
        assert kinds(packed, bos=bos) == [[1, 0, 0, 1, 0], [1, 1, 0, 0, 0]]
    text = [[7, 3, 4, 7, 5], [3, 7, 3, 9, 9]]
    for bos in (None, 7):
        assert kinds(text, bos=bos) == [[1, 0, 0, 0, 0], [1, 0, 0, 0, 0]]
    assert kinds(text, bos=None, named=(3, 5)) == [[1, 2, 0, 0, 2], [1, 0, 2, 0, 0]]
    assert kinds(packed, bos=7, named=(7, 9)) == [[1, 0, 0, 1, 0], [1, 1, 0, 2, 2]]


def test_the_first_token_of_one_sequence_marks_a_sink_if_it_is_bos():
    """A word such as "the" may begin a text and occur again without being a sink."""
    one = [[7, 3, 7, 7, 5]]
    assert kinds(one, bos=7) == [[1, 0, 1, 1, 0]]
    assert kinds(one, bos=None) == [[1, 0, 0, 0, 0]]
    assert kinds(one, bos=3) == [[1, 0, 0, 0, 0]]


def test_named_tokens_are_sinks_of_a_profile():
    model = tiny("llama_gqa")
    tokens = random_tokens(sequences=1, length=30)
    tokens[0, [4, 11, 12]] = 50
    with torch.no_grad():
        out = model(tokens, output_attentions=True)
    rows = [layer[0, :, 1:].double() for layer in out.attentions]
    weights = np.stack(rows)
    is_sink = tokens[0] == 50
    is_sink[0] = True
    expected = weights[..., is_sink].sum(-1).mean(-1)
    profile = rl.profile(model, tokens, sinks=[50], surrogates=0)
    assert profile["found_sink"].isnull().all()
    np.testing.assert_allclose(profile["sink_mass"], expected, rtol=1e-5)


def at_key(key: int, *, share: float, sequences: int, only: int) -> AttentionCall:
    """Two heads with even attention, but head 1 puts `share` on a key in `only` sequences."""
    context = 60
    q = torch.zeros(sequences, 2, context, 8)
    k = torch.zeros(sequences, 1, context, 8)
    q[:, 1, :, 7] = (share / (1 - share) * torch.arange(context).clamp(min=1)).log()
    k[:only, 0, key, 7] = 1
    return call_of(q, k, scale=1.0, window=context)


CASES = [
    (5, 0.4, 3, True),
    (5, 0.2, 3, False),
    (5, 0.4, 2, True),
    (5, 0.4, 1, False),
    (53, 0.9, 3, True),  # 6 later rows in each sequence
    (54, 0.9, 3, False),  # 5 later rows
]


@pytest.mark.parametrize(("key", "share", "only", "found"), CASES)
def test_keys_that_take_most_rows_attention_are_found(key, share, only, found):
    call = at_key(key, share=share, sequences=3, only=only)
    rows = all_rows(torch.tensor([60, 60, 60]))
    is_first = torch.arange(60) == 0
    known = is_first.long().expand(3, 1, 60)
    seen = found_in(call, rows, known)
    assert bool(seen[1, key]) == found
    assert int(seen.sum()) == found
    table = add_found_sinks(known, seen)
    assert table.shape[1] == (2 if found else 1)
    if found:
        assert table[:, 1, key].tolist() == [3, 3, 3]
        assert (table[:, :, 0] == 1).all()
        assert not found_in(call, rows, table).any(), "a known sink is not found"


@pytest.mark.parametrize(
    ("key", "share", "found"),
    [(1, 0.5, True), (1, 0.2, False), (12, 0.5, True), (20, 0.5, False)],
)
def test_one_sequence_finds_sinks_by_its_earlier_and_its_later_rows(key, share, found):
    """29 of the 59 rows are early, and only 9 early rows come after position 20."""
    call = at_key(key, share=share, sequences=1, only=1)
    is_first = torch.arange(60) == 0
    known = is_first.long()[None, None]
    rows = all_rows(torch.tensor([60]))
    of_head = found_in(call, rows, known)[1]
    expected = [key] if found else []
    assert of_head.nonzero().flatten().tolist() == expected
    late = call.query.clone()
    late[:, :, 31:] = 0  # the early rows are not enough
    assert not found_in(replace(call, query=late), rows, known).any()


THRESHOLD = 0.3  # mean attention of the later rows
LEAST_ROWS = 16


def sinks_by_loops(call: AttentionCall, rows: Rows) -> Tensor:
    """The keys [head, key] that take more than 0.3 in more than half of the sequences."""
    attention = attention_map(call)
    sequences, heads, context = attention.shape[:3]
    first = call.visibility.first[0].tolist()
    taken = torch.zeros(heads, context)
    seen_in = torch.zeros(context)  # sequences
    seen_by = torch.zeros(context)  # rows
    for sequence in range(sequences):
        positions = rows.position[sequence].tolist()
        weights = rows.weight[sequence].tolist()
        for key in range(context):
            mass = torch.zeros(heads).double()
            total = 0.0
            for position, weight in zip(positions, weights, strict=True):
                if weight and position > key >= first[position]:
                    mass += weight * attention[sequence, :, position, key]
                    total += weight
                    seen_by[key] += 1
            if total:
                seen_in[key] += 1
                taken[:, key] += mass / total > THRESHOLD
    return (taken > seen_in / 2) & (seen_by >= LEAST_ROWS)


def test_sinks_are_found_by_later_rows_by_brute_force():
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(3, 4, 60, 8, generator=generator, dtype=torch.float64)
    k = torch.randn(3, 2, 60, 8, generator=generator, dtype=torch.float64)
    call = call_of(q, k, scale=2.0, window=40)
    call.key[:, 0, 6] *= 5  # so that some keys take much attention
    lengths = torch.tensor([60, 50, 41])
    none = torch.zeros(3, 1, 60, dtype=torch.long)
    for rows in (all_rows(lengths), sample_rows(lengths, count=30, seed=1)):
        found = found_in(call, rows, none)
        assert torch.equal(found, sinks_by_loops(call, rows))
        assert found.any()
