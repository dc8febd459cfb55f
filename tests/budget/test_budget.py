"""The attention budget: offsets, bits from gains, and the rows that models are fitted to."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.handmade import call_of
from oracles.tiny import not_as_configured, random_tokens, tiny
from small_measurements import few, normal, observed_calls, seeds

import ropelens as rl
from ropelens.attention.formulas import GAINS, attention_budget
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.visibility import offset_edges, sum_bins
from ropelens.budget.held_out import FOLD_ROWS, Sample, scored_rows
from ropelens.budget.logit import gains
from ropelens.budget.offsets import OffsetRows
from ropelens.budget.solver import (
    Curvature,
    Moments,
    divide_by_curvature,
    fit_log_linear,
)
from ropelens.rope.planes import Planes
from ropelens.text.rows import all_rows, sample_rows
from ropelens.text.text import GROUPS, Text, assign_groups


@few
@given(context=st.integers(1, 5000))
def test_bins_are_exact_then_eight_an_octave(context: int):
    edges = offset_edges(context)
    assert edges[:65].tolist() == list(range(65))
    assert edges[-1] >= context
    assert (edges.diff() > 0).all()
    width = edges.diff()[64:]
    assert (8 * width <= edges[64:-1]).all(), "at least eight an octave"
    assert (16 * width > edges[64:-1]).all()
    longest = offset_edges(5000)
    assert torch.equal(edges, longest[: len(edges)]), "results of two contexts add up"
    mass = normal(2, context, seed=context)
    binned = sum_bins(mass, edges)
    bins = itertools.pairwise(edges.tolist())
    for place, (low, high) in enumerate(bins):
        expected = mass[:, low:high].sum(1)
        torch.testing.assert_close(binned[:, place], expected)


@few
@given(
    seed=seeds,
    context=st.sampled_from([3, 40, 90]),
    window=st.sampled_from([2, 30, 999]),
    by_head=st.booleans(),
)
def test_log_z_and_masses_by_brute_force(
    seed: int, context: int, window: int, by_head: bool
):
    generator = torch.Generator().manual_seed(seed)
    sinks = torch.randint(0, 12, (2, 2 if by_head else 1, context), generator=generator)
    sinks = sinks * (sinks <= 3)
    rows = sample_rows(
        torch.tensor([context, max(2, context // 2)]), count=9, seed=seed
    )
    edges = offset_edges(context)
    weights = normal(2, 3 + context + len(edges) - 1, seed=seed)
    call = call_of(*torch.zeros(2, 2, 2, context, 2), window=window)
    rows_of_call = SampledCall(
        call, rows, Planes(torch.zeros(1), 2, "half"), sinks=sinks
    )
    table = OffsetRows.of(rows_of_call).of_problems(torch.arange(2), 2)
    moments = table.moments(weights)
    expected = weights * 0
    squares = weights * 0
    norm = torch.zeros(2).double()
    each = [(b, int(i)) for b, own in enumerate(rows.position) for i in own]
    for head in range(2):
        for row, (b, i) in enumerate(each):
            score = []
            parts = []
            for j in range(max(0, i - window + 1), i + 1):
                kind = int(sinks[b, head if by_head else 0, j])
                place = int((edges <= i - j).sum()) - 1
                at = [3 + i - j] + ([kind - 1, 3 + context + place] if kind else [])
                score.append(weights[head, at].sum())
                parts.append(at)
            score = torch.stack(score)
            norm[head] += table.weight[0, row] * score.logsumexp(0)
            for at, share in zip(parts, score.softmax(0), strict=True):
                expected[head, at] += share * table.weight[0, row]
                squares[head, at] += share**2 * table.weight[0, row]
    torch.testing.assert_close(moments.expected, expected)
    torch.testing.assert_close(moments.curvature.diagonal, expected - squares)
    torch.testing.assert_close(moments.log_z, norm)
    only_sinks = weights.clone()
    only_sinks[:, 3:] = 0  # then P is S
    of_sinks = table.sink_moments(only_sinks[:, :3])
    of_all = table.moments(only_sinks)
    torch.testing.assert_close(of_sinks.log_z, of_all.log_z)
    torch.testing.assert_close(
        of_sinks.expected, of_all.expected[:, :3], rtol=0, atol=1e-5
    )


BITS = st.tuples(*[st.floats(-3, 12, width=32) for _ in GAINS])


@few
@given(gains=st.lists(BITS, min_size=1, max_size=9))
def test_bits_add_up_and_never_go_below_zero(gains: list[tuple[float, ...]]):
    total, *models = np.array(gains, dtype=np.float64).T
    bits = attention_budget(np.maximum(total, 0), *models)
    whole = bits.pop("total")
    shared = bits.pop("shared")
    np.testing.assert_allclose(sum(bits.values()), whole, atol=1e-12)
    assert all((part >= 0).all() for part in (shared, *bits.values()))
    assert (whole >= total).all()
    assert (shared <= bits["content"] + 1e-12).all()


@pytest.mark.parametrize(
    ("gains", "expected"),
    [  # total, S, P, C, B -> total, sink, position, content, interaction, shared
        ((4.0, 1.0, 2.0, 3.0, 3.5), (4.0, 1.0, 0.5, 2.0, 0.5, 0.5)),
        (
            (4.0, -1.0, 2.0, 3.0, 3.5),
            (4.0, 0.0, 0.5, 3.0, 0.5, 1.5),
        ),  # S counts as uniform
        ((4.0, 1.0, 0.5, 3.0, 3.5), (4.0, 1.0, 0.5, 2.0, 0.5, 0)),  # P as S
        ((4.0, 1.0, 2.0, -9.0, 3.5), (4.0, 1.0, 2.5, 0.0, 0.5, 0)),  # C as S
        ((4.0, 1.0, 2.0, 3.0, -2.0), (4.0, 1.0, 0.0, 2.0, 1.0, 1.0)),  # B as C
        ((4.0, 1.0, 3.0, 2.0, 2.5), (4.0, 1.0, 1.0, 1.0, 1.0, 1.0)),  # B as P
        ((4.0, 1.0, 2.0, 3.0, 4.1), (4.1, 1.0, 1.1, 2.0, 0.0, 0)),  # larger by rounding
        ((4.0, -1.0, -1.0, -1.0, -1.0), (4.0, 0.0, 0.0, 0.0, 4.0, 0)),
        ((np.nan,) * 5, (np.nan,) * 6),  # a head that its layer does not have
    ],
)
def test_a_model_gains_at_least_as_much_as_a_model_that_it_contains(gains, expected):
    arrays = [np.array([gain]) for gain in gains]
    bits = attention_budget(*arrays)
    assert list(bits) == [
        "total",
        "sink",
        "position",
        "content",
        "interaction",
        "shared",
    ]
    found = np.concatenate([*bits.values()])
    np.testing.assert_allclose(found, expected)


def drawn(lengths: list[int], *, documents=None, seed: int = 0) -> Sample:
    count = len(lengths)
    context = max(lengths)
    tokens = torch.arange(count * context).view(count, context)
    return Sample.draw(
        Text(tokens, torch.tensor(lengths), documents=documents), seed=seed
    )


def test_a_sample_has_sequences_of_both_folds_from_many_groups():
    documents = torch.tensor([0] * 30 + [1, 2, 3, 4, 5, 6, 7, 8, 9])
    sample = drawn([20] * 39, documents=documents, seed=3)
    taken = sample.text.ids[:, 0] // 20
    group = assign_groups(documents, 39)[taken]
    distinct = set(taken.tolist())
    assert len(taken) == len(distinct) == 10
    assert sample.text.fold.tolist() == [0, 1] * 5
    assert len(group.unique()) == 10, (
        "one of each document, although one has most sequences"
    )
    assert (sample.text.ids == torch.arange(20) + 20 * taken[:, None]).all()
    other = drawn([20] * 39, documents=documents, seed=4)
    assert not torch.equal(other.text.ids, sample.text.ids)


def test_a_fold_has_a_fixed_number_of_rows_and_tokens():
    short = drawn([100] * 40)
    long = drawn([4096] * 6)
    assert len(short.text) == 16
    assert len(long.text) == 4, "two of each fold: 8,192 tokens"
    for sample in (short, long):
        per_fold = (sample.rows.weight > 0).sum(1).view(-1, 2).sum(0)
        assert per_fold.tolist() == [FOLD_ROWS, FOLD_ROWS]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("lengths", "fitted"),
    [
        ([512, 512, 17], {512}),
        ([20, 256] * 8, {256}),
        ([17, 512], {512}),
        ([500, 300, 290, 310, 280], {500, 300, 290, 310, 280}),
        ([60, 60, 60, 60], {60}),
    ],
)
def test_models_are_fitted_to_long_sequences(
    lengths: list[int], fitted: set[int], seed: int
):
    """A short leftover sequence does not contain the offsets on which a model is scored."""
    tokens = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    text = Text(tokens, torch.tensor(lengths))
    sample = Sample.draw(text, seed=seed)
    assert set(sample.text.lengths.tolist()) <= fitted
    assert text.single_long_sequence == (lengths == [17, 512])
    if not text.single_long_sequence:
        assert sample.text.fold.tolist() == [0, 1] * (len(sample.text) // 2)


def test_a_single_sequence_is_scored_on_rows_of_the_opposite_fold():
    for length in (2, 3, 30, 5000):
        sample = drawn([length], seed=5)
        assert sample.text.single_long_sequence
        scored = sample_rows(
            torch.tensor([length]), count=scored_rows(sample.text), seed=5
        )
        assert torch.equal(scored.position, sample.rows.position)
        halves = [scored.every(2, first) for first in (0, 1)]
        first, second = [
            set(half.position[half.weight > 0].tolist()) for half in halves
        ]
        assert not first & second
        assert len(first) + len(second) == min(length - 1, 2 * FOLD_ROWS)
        assert abs(len(first) - len(second)) <= 1
        weights = sum(half.weight.sum() for half in halves)
        torch.testing.assert_close(weights, scored.weight.sum())


@pytest.mark.parametrize(
    ("sequences", "rows"), [(8, 256), (10, 205), (64, 32), (65, 32)]
)
def test_a_text_is_scored_on_2048_rows_and_each_sequence_on_32_at_least(
    sequences, rows
):
    text = Text(torch.ones(sequences, 4).long())
    assert scored_rows(text) == rows


def test_a_step_changes_no_weight_by_more_than_eight():
    curvature = 1e-3
    points = []

    def moments(point: torch.Tensor, *_: torch.Tensor) -> Moments:
        points.append(point)
        value = curvature * point.square().sum(-1) / 2
        diagonal = torch.full_like(point, curvature)
        return Moments(value, curvature * point, Curvature(diagonal))

    start = torch.zeros(1, 2).double()
    observed = torch.tensor([[0.5, 0.0]]).double()
    tolerance = torch.tensor([1e-9]).double()
    fit_log_linear(
        moments,
        observed,
        start=start,
        tolerance=tolerance,
        ridge=torch.zeros(1),
        smooth=slice(0, 0),
    )
    assert points[1].tolist() == [[8.0, 0.0]]
    torch.testing.assert_close(points[-1], observed / curvature)


@few
@given(seed=seeds, kept=st.integers(1, 6), skipped=st.booleans())
def test_the_compact_form_divides_as_the_two_loops_do(
    seed: int, kept: int, skipped: bool
):
    """Nocedal and Wright 2006, algorithm 7.4, for one problem at a time."""
    steps = normal(2, kept, 9, seed=seed)
    noise = normal(2, kept, 9, seed=seed + 1)
    changes = 2 * steps + 0.3 * noise
    gradient = normal(2, 9, seed=seed + 2)
    diagonal = normal(2, 9, seed=seed + 3).exp()
    if skipped:
        steps[0, kept // 2] = changes[0, kept // 2] = 0
    found = divide_by_curvature(gradient, steps, changes, Curvature(diagonal))
    for problem in range(2):
        pairs = torch.stack([steps[problem], changes[problem]], 1)[
            steps[problem].any(1)
        ]
        result = gradient[problem].clone()
        shares = []
        for step, change in pairs.flip(0):
            shares.append((step @ result) / (step @ change))
            result -= shares[-1] * change
        result /= diagonal[problem]
        for (step, change), share in zip(pairs, reversed(shares), strict=True):
            result += step * (share - (change @ result) / (step @ change))
        torch.testing.assert_close(found[problem], result, rtol=1e-7, atol=1e-9)


def test_a_single_sequence_has_two_folds_of_rows():
    tokens = random_tokens(sequences=1, length=60)
    sample = Sample.draw(Text(tokens, torch.tensor([60])), seed=0)
    call, planes = observed_calls(tiny("llama_gqa"), tokens)[0]
    one, other = sample.fit(call, planes, surrogates=0, seed=0).weights.unbind(1)
    difference = (one - other).abs()
    assert (difference.amax((1, 2)) > 0.1).all()


def test_groups_are_scored_by_models_of_the_opposite_fold():
    tokens = random_tokens(sequences=4, length=30)
    lengths = torch.full((4,), 30)
    text = Text(tokens, lengths, bos=1)
    call, planes = observed_calls(tiny("llama_gqa"), tokens)[0]
    sample = Sample.draw(text, seed=0)
    own = observed_calls(tiny("llama_gqa"), sample.text.ids)[0][0]
    fitted = sample.fit(own, planes, surrogates=0, seed=0)
    fitted.weights[:, 1] = 0
    of_call = SampledCall(call, all_rows(lengths), planes, sinks=text.sinks)
    scores = fitted.score(of_call, text, None)[:, 0]
    total = gains(scores)["total"]
    both = gains(scores)["both_gain"]
    assert (both[1:4:2].abs() > 0.05).all()
    torch.testing.assert_close(
        both[0:4:2], torch.zeros_like(both[0:4:2]), rtol=0, atol=1e-5
    )
    assert total.shape == (GROUPS, 4)
    assert total[4:].isnan().all()
    even = (torch.arange(30) % 2 == 0).expand(4, 30)
    parts = torch.stack([even | ~even, even, ~even], 1)
    every, some, rest = fitted.score(of_call, text, parts).unbind(1)
    for parts_together in (every, some + rest):
        torch.testing.assert_close(parts_together, scores, rtol=1e-6, atol=1e-4)
    alone = of_call.with_rows(all_rows(lengths).zero_hidden(~even))
    alone = fitted.score(alone, text, None)[:, 0]
    torch.testing.assert_close(some, alone, rtol=1e-6, atol=1e-4)


def test_groups_are_documents_or_stretches_of_one_text():
    assert assign_groups(None, 5).tolist() == [0, 1, 2, 3, 4]
    assert assign_groups(None, 32).tolist() == [i // 2 for i in range(32)]
    few = torch.tensor([5, 5, 5, 9])
    assert assign_groups(few, 4).tolist() == [0, 1, 2, 3], (
        "2 documents are too few for groups"
    )
    documents = torch.tensor([30, 10, 20, 11, 12, 13, 14, 15]).repeat_interleave(3)
    groups = np.repeat([7, 0, 6, 1, 2, 3, 4, 5], 3).tolist()
    assert assign_groups(documents, 24).tolist() == groups
    many = assign_groups(torch.arange(200), 200)
    assert many.tolist() == sorted(many.tolist())
    assert len(many.unique()) == GROUPS == 64


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_sliding"])
def test_offsets_that_few_rows_see_are_left_out_of_kernels(name: str):
    lengths = [70, 40, 30]
    tokens = random_tokens(sequences=3, length=70)
    model = tiny(name)
    profile = rl.profile(
        model, rl.Text(tokens, lengths=torch.tensor(lengths)), surrogates=0
    )
    window = 70 if name == "llama_gqa" else model.config.sliding_window
    width = profile["offset_stop"] - profile["offset_start"]
    np.testing.assert_allclose(
        (profile["kernel"] * width).sum("offset_bin"), 1, rtol=1e-9
    )
    farthest = [min(i, window - 1) for length in lengths for i in range(1, length)]
    for offset in range(64):
        seen = np.mean([offset <= most for most in farthest]) >= 0.05
        has = profile["kernel"][..., offset].values > 0
        assert has.all() if seen else not has.any(), offset


@not_as_configured
def test_without_rotation_nothing_is_positional():
    model = tiny("llama_gqa")
    model.model.rotary_emb.inv_freq.zero_()
    profile = rl.profile(model, random_tokens(sequences=16, length=50), surrogates=0)
    rest = profile["total_bits"] - profile["sink_bits"]
    assert float(rest.min()) > 0.1
    assert float((profile["content_bits"] / rest).min()) > 0.98


@pytest.mark.parametrize("sequences", [1, 2])
def test_two_tokens_have_one_row_which_sees_no_second_offset(sequences: int):
    tokens = random_tokens(sequences=sequences, length=3)
    lengths = torch.full((sequences,), 2)
    profile = rl.profile(
        tiny("llama_gqa"), rl.Text(tokens, lengths=lengths), surrogates=2
    )
    np.testing.assert_allclose(profile["offset_mass"][..., 0] + profile["sink_mass"], 1)
    assert np.isnan(profile["previous_token"]).all()
    assert np.isfinite(profile["total_bits"]).all()
    assert rl.classify_heads(profile).attrs["claim"]["verdict"] == "not testable"


def test_eight_documents_are_the_groups():
    tokens = random_tokens(sequences=9, length=4)
    documents = [0, 0, 1, 2, 3, 4, 5, 6, 7]
    profile = rl.profile(
        tiny("llama_gqa"), rl.Text(tokens, documents=documents), surrogates=0
    )
    assert profile.attrs["documents"] == profile.sizes["group"] == 8
    np.testing.assert_array_equal(profile["group_rows"], [6] + [3] * 7)
    np.testing.assert_allclose(
        profile["group_scored"], profile["group_rows"], rtol=1e-5
    )


def test_sampled_rows_have_no_more_columns_than_the_longest_sequence_has_rows():
    rows = sample_rows(torch.tensor([5, 9]), count=500, seed=0)
    assert rows.position.shape == (2, 8)
    assert (rows.weight > 0).sum(1).tolist() == [4, 8]
