"""Sinks by position, by token, and by the attention that a key takes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
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


def found_in(call: AttentionCall, rows: Rows, sinks: Tensor) -> Tensor:
    """The keys [head, key] that are found in addition to `sinks`."""
    sampled = SampledCall(call, rows, PLANES, sinks=sinks)
    return find_sinks(sampled)


def first_token_of(sequences: int) -> Tensor:
    """A table of sinks [sequence, 1, key] of 60 tokens, of which the first is a sink."""
    is_first = torch.arange(60) == 0
    return is_first.long().expand(sequences, 1, 60)


def kinds(
    tokens: list[list[int]], *, bos: int | None, named: tuple[int, ...] = ()
) -> list[list[int]]:
    """The kind of sink of each token: 0 for none, 1 for the first token, 2 for named tokens."""
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
    assert kinds(one, bos=None) == kinds(one, bos=3) == [[1, 0, 0, 0, 0]]


def test_named_tokens_are_sinks_of_a_profile():
    model = tiny("llama_gqa")
    tokens = random_tokens(sequences=1, length=30)
    tokens[0, [4, 11, 12]] = 50
    with torch.no_grad():
        output = model(tokens, output_attentions=True)
    rows = [layer[0, :, 1:].double() for layer in output.attentions]
    weights = np.stack(rows)
    profile = rl.profile(model, tokens, sinks=[50], surrogates=0)
    assert profile["found_sink"].isnull().all()
    is_sink = tokens[0] == 50
    is_sink[0] = True
    expected = weights[..., is_sink].sum(-1).mean(-1)
    assert_allclose(profile["sink_mass"], expected, rtol=1e-5)


def at_key(key: int, *, share: float, sequences: int, only: int) -> AttentionCall:
    """Two heads with even attention, but head 1 puts `share` on a key in `only` sequences."""
    context = 60
    q = torch.zeros(sequences, 2, context, 8)
    k = torch.zeros(sequences, 1, context, 8)
    number_of_others = torch.arange(context).clamp(min=1)
    q[:, 1, :, 7] = (share / (1 - share) * number_of_others).log()
    k[:only, 0, key, 7] = 1
    return call_of(q, k, scale=1.0, window=context)


CASES = [
    (5, 0.4, 3, True),
    (5, 0.2, 3, False),
    (5, 0.4, 2, True),
    (5, 0.4, 1, False),
    # 6 and 5 later rows in each sequence
    (53, 0.9, 3, True),
    (54, 0.9, 3, False),
]


@pytest.mark.parametrize(("key", "share", "only", "is_found"), CASES)
def test_keys_that_take_most_rows_attention_are_found(key, share, only, is_found):
    call = at_key(key, share=share, sequences=3, only=only)
    rows = all_rows(torch.tensor([60, 60, 60]))
    sinks = first_token_of(3)
    found = found_in(call, rows, sinks)
    assert bool(found[1, key]) == is_found
    assert int(found.sum()) == is_found
    with_found = add_found_sinks(sinks, found)
    assert with_found.shape[1] == (2 if is_found else 1)
    if is_found:
        assert with_found[:, 1, key].tolist() == [3, 3, 3]
        assert (with_found[:, :, 0] == 1).all()
        found_again = found_in(call, rows, with_found)
        assert not found_again.any()


@pytest.mark.parametrize(
    ("key", "share", "is_found"),
    [(1, 0.5, True), (1, 0.2, False), (12, 0.5, True), (20, 0.5, False)],
)
def test_one_sequence_finds_sinks_by_its_earlier_and_its_later_rows(
    key, share, is_found
):
    """29 of the 59 rows are early, and only 9 early rows come after position 20."""
    call = at_key(key, share=share, sequences=1, only=1)
    sinks = first_token_of(1)
    rows = all_rows(torch.tensor([60]))
    found = found_in(call, rows, sinks)
    expected = [key] if is_found else []
    assert found[1].nonzero().flatten().tolist() == expected

    even_in_later_rows = call.query.clone()
    even_in_later_rows[:, :, 31:] = 0
    only_early = replace(call, query=even_in_later_rows)
    found_by_early_rows = found_in(only_early, rows, sinks)
    assert not found_by_early_rows.any()


def weights_of_rows(rows: Rows, sequence: int) -> dict[int, float]:
    """The weights of the rows of a sequence by position, without rows of weight 0."""
    positions = rows.position[sequence].tolist()
    weights = rows.weight[sequence].tolist()
    by_position = zip(positions, weights, strict=True)
    return {position: weight for position, weight in by_position if weight}


def found_by_brute_force(call: AttentionCall, rows: Rows) -> Tensor:
    """Keys with more than 0.3 of the attention of their later rows, in most sequences."""
    attention = attention_map(call)
    first = call.visibility.first[0].tolist()
    sequences_above = torch.zeros(4, 60)
    sequences = torch.zeros(60)  # in which a key has later rows
    number_of_rows = torch.zeros(60)
    for sequence in range(3):
        weights = weights_of_rows(rows, sequence)
        for key in range(60):
            later = [row for row in weights if row > key >= first[row]]
            number_of_rows[key] += len(later)
            if later:
                weight = torch.tensor([weights[row] for row in later]).double()
                on_key = attention[sequence, :, :, key]
                mass = on_key[:, later] @ weight
                sequences[key] += 1
                sequences_above[:, key] += mass / weight.sum() > 0.3
    return (sequences_above > sequences / 2) & (number_of_rows >= 16)


def test_sinks_are_found_by_later_rows_by_brute_force():
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(3, 4, 60, 8, generator=generator, dtype=torch.float64)
    k = torch.randn(3, 2, 60, 8, generator=generator, dtype=torch.float64)
    call = call_of(q, k, scale=2.0, window=40)
    lengths = torch.tensor([60, 50, 41])
    call.key[:, 0, 6] *= 5  # so that some keys take much attention
    no_sinks = torch.zeros(3, 1, 60, dtype=torch.long)
    for rows in (all_rows(lengths), sample_rows(lengths, count=30, seed=1)):
        found = found_in(call, rows, no_sinks)
        expected = found_by_brute_force(call, rows)
        assert torch.equal(found, expected)
        assert found.any()
