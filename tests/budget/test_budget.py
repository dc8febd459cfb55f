"""The attention budget: offsets, bits from gains, and the rows that models are fitted to."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal
from oracles.handmade import call_of
from oracles.tiny import not_as_configured, random_tokens, tiny
from small_measurements import few, normal, observed_calls, seeds
from torch import Tensor
from torch.testing import assert_close

import ropelens as rl
from ropelens.attention.call import AttentionCall
from ropelens.attention.formulas import GAINS, attention_budget
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.visibility import offset_edges, sum_bins
from ropelens.budget import logit
from ropelens.budget.held_out import FOLD_ROWS, LayerFit, Sample, scored_rows
from ropelens.budget.offsets import OffsetRows
from ropelens.budget.solver import (
    Curvature,
    Moments,
    divide_by_curvature,
    fit_log_linear,
)
from ropelens.rope.planes import Planes
from ropelens.text.rows import Rows, all_rows, sample_rows
from ropelens.text.text import GROUPS, Text, assign_groups

SINK_KINDS = 3


@few
@given(context=st.integers(1, 5000))
def test_bins_are_exact_then_eight_an_octave(context: int):
    edges = offset_edges(context)
    assert edges[:65].tolist() == list(range(65))
    assert edges[-1] >= context
    assert (edges.diff() > 0).all()
    width = edges.diff()[64:]
    start = edges[64:-1]
    assert (8 * width <= start).all(), "at least eight an octave"
    assert (16 * width > start).all()
    longest = offset_edges(5000)
    assert torch.equal(edges, longest[: len(edges)]), "results of two contexts add up"
    mass = normal(2, context, seed=context)
    binned = sum_bins(mass, edges)
    bins = itertools.pairwise(edges.tolist())
    for offset_bin, (low, high) in enumerate(bins):
        expected = mass[:, low:high].sum(1)
        assert_close(binned[:, offset_bin], expected)


@dataclass(frozen=True, eq=False)
class PositionModel:
    """Weights of P for two heads, and the sinks of the keys that its rows see.

    The weights of a head are sigma by kind of sink, kappa by offset, and tau by bin of offsets.
    """

    weights: Tensor  # [head, variable]
    sinks: Tensor  # [sequence, head or 1, key]
    edges: Tensor  # [bin + 1]
    window: int

    def variables(self, sequence: int, head: int, row: int, key: int) -> list[int]:
        """The weights of a key: kappa of its offset, and sigma and tau if it is a sink."""
        offset = row - key
        heads = self.sinks.shape[1]
        sink = int(self.sinks[sequence, head % heads, key])
        variables = [SINK_KINDS + offset]
        if sink:
            context = self.sinks.shape[2]
            offset_bin = int((self.edges <= offset).sum()) - 1
            variables.append(sink - 1)
            variables.append(SINK_KINDS + context + offset_bin)
        return variables

    def variables_of_keys(self, sequence: int, head: int, row: int) -> list[list[int]]:
        """The weights of each key that a row sees."""
        first = max(0, row - self.window + 1)
        keys = range(first, row + 1)
        return [self.variables(sequence, head, row, key) for key in keys]

    def scores(self, head: int, keys: list[list[int]]) -> Tensor:
        """log P of each key up to a constant: the sum of its weights."""
        sums = [self.weights[head, variables].sum() for variables in keys]
        return torch.stack(sums)

    def moments(self, positions: Tensor, row_weights: Tensor) -> Moments:
        """Moments by loops over heads, rows and keys.

        Each sequence has its `positions`, and `row_weights` are for all rows in turn.
        """
        log_z = torch.zeros(2).double()
        expected = self.weights * 0
        squares = self.weights * 0
        rows = rows_in_turn(positions)
        for head in range(2):
            for (sequence, row), row_weight in zip(rows, row_weights, strict=True):
                keys = self.variables_of_keys(sequence, head, row)
                scores = self.scores(head, keys)
                log_z[head] += row_weight * scores.logsumexp(0)
                for variables, share in zip(keys, scores.softmax(0), strict=True):
                    expected[head, variables] += share * row_weight
                    squares[head, variables] += share**2 * row_weight
        return Moments(log_z, expected, Curvature(expected - squares))


def rows_in_turn(positions: Tensor) -> list[tuple[int, int]]:
    """The number of the sequence and the position of each row."""
    rows = []
    for sequence, of_sequence in enumerate(positions.tolist()):
        for position in of_sequence:
            rows.append((sequence, position))
    return rows


def draw_model(seed: int, *, context: int, window: int, by_head: bool) -> PositionModel:
    """Random weights, and random sinks, which differ by head if `by_head`."""
    generator = torch.Generator().manual_seed(seed)
    heads = 2 if by_head else 1
    numbers = torch.randint(0, 12, (2, heads, context), generator=generator)
    sinks = numbers * (numbers <= SINK_KINDS)
    edges = offset_edges(context)
    bins = len(edges) - 1
    weights = normal(2, SINK_KINDS + context + bins, seed=seed)
    return PositionModel(weights, sinks, edges, window)


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
    model = draw_model(seed, context=context, window=window, by_head=by_head)
    half = max(2, context // 2)
    rows = sample_rows(torch.tensor([context, half]), count=9, seed=seed)
    zeros = torch.zeros(2, 2, context, 2)
    call = call_of(zeros, zeros, window=window)
    planes = Planes(torch.zeros(1), 2, "half")
    sampled = SampledCall(call, rows, planes, sinks=model.sinks)
    table = OffsetRows.of(sampled).of_problems(torch.arange(2), 2)

    moments = table.moments(model.weights)

    true = model.moments(rows.position, table.weight[0])
    assert_close(moments.expected, true.expected)
    assert_close(moments.curvature.diagonal, true.curvature.diagonal)
    assert_close(moments.log_z, true.log_z)
    assert_s_is_p_without_offsets(table, model.weights)


def assert_s_is_p_without_offsets(table: OffsetRows, weights: Tensor) -> None:
    only_sigma = weights.clone()
    only_sigma[:, SINK_KINDS:] = 0
    sigma = only_sigma[:, :SINK_KINDS]
    of_s = table.sink_moments(sigma)
    of_p = table.moments(only_sigma)
    expected = of_p.expected[:, :SINK_KINDS]
    assert_close(of_s.log_z, of_p.log_z)
    assert_close(of_s.expected, expected, rtol=0, atol=1e-5)


BITS = st.floats(-3, 12, width=32)
BITS_OF_HEAD = st.tuples(*[BITS for _ in GAINS])


@few
@given(gains=st.lists(BITS_OF_HEAD, min_size=1, max_size=9))
def test_bits_add_up_and_never_go_below_zero(gains: list[tuple[float, ...]]):
    total, *models = np.array(gains, dtype=np.float64).T
    bits = attention_budget(np.maximum(total, 0), *models)
    whole = bits.pop("total")
    shared = bits.pop("shared")
    total_of_shares = sum(bits.values())
    assert_allclose(total_of_shares, whole, atol=1e-12)
    for never_negative in (shared, *bits.values()):
        assert (never_negative >= 0).all()
    assert (whole >= total).all()
    assert (shared <= bits["content"] + 1e-12).all()


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        # total, S, P, C, B -> total, sink, position, content, interaction, shared
        ((4.0, 1.0, 2.0, 3.0, 3.5), (4.0, 1.0, 0.5, 2.0, 0.5, 0.5)),
        # S counts as uniform
        ((4.0, -1.0, 2.0, 3.0, 3.5), (4.0, 0.0, 0.5, 3.0, 0.5, 1.5)),
        # P counts as S
        ((4.0, 1.0, 0.5, 3.0, 3.5), (4.0, 1.0, 0.5, 2.0, 0.5, 0)),
        # C counts as S
        ((4.0, 1.0, 2.0, -9.0, 3.5), (4.0, 1.0, 2.5, 0.0, 0.5, 0)),
        # B counts as C
        ((4.0, 1.0, 2.0, 3.0, -2.0), (4.0, 1.0, 0.0, 2.0, 1.0, 1.0)),
        # B counts as P
        ((4.0, 1.0, 3.0, 2.0, 2.5), (4.0, 1.0, 1.0, 1.0, 1.0, 1.0)),
        # B is larger by rounding
        ((4.0, 1.0, 2.0, 3.0, 4.1), (4.1, 1.0, 1.1, 2.0, 0.0, 0)),
        # all models count as uniform
        ((4.0, -1.0, -1.0, -1.0, -1.0), (4.0, 0.0, 0.0, 0.0, 4.0, 0)),
        # a head that its layer does not have
        ((np.nan,) * 5, (np.nan,) * 6),
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
    values = np.concatenate([*bits.values()])
    assert_allclose(values, expected)


def drawn(lengths: list[int], *, documents=None, seed: int = 0) -> Sample:
    """The sample of a text whose tokens are numbered."""
    count = len(lengths)
    context = max(lengths)
    tokens = torch.arange(count * context).view(count, context)
    text = Text(tokens, torch.tensor(lengths), documents=documents)
    return Sample.draw(text, seed=seed)


def test_a_sample_has_sequences_of_both_folds_from_many_groups():
    documents = torch.tensor([0] * 30 + [1, 2, 3, 4, 5, 6, 7, 8, 9])
    sample = drawn([20] * 39, documents=documents, seed=3)
    sequences = sample.text.ids[:, 0] // 20
    distinct = set(sequences.tolist())
    assert len(sequences) == len(distinct) == 10
    assert sample.text.fold.tolist() == [0, 1] * 5
    group = assign_groups(documents, 39)[sequences]
    one_of_each = "one of each document, although one has most sequences"
    assert len(group.unique()) == 10, one_of_each
    expected_ids = torch.arange(20) + 20 * sequences[:, None]
    assert (sample.text.ids == expected_ids).all()
    other = drawn([20] * 39, documents=documents, seed=4)
    assert not torch.equal(other.text.ids, sample.text.ids)


def test_a_fold_has_a_fixed_number_of_rows_and_tokens():
    short = drawn([100] * 40)
    long = drawn([4096] * 6)
    assert len(short.text) == 16
    assert len(long.text) == 4, "two of each fold: 8,192 tokens"
    for sample in (short, long):
        per_sequence = (sample.rows.weight > 0).sum(1)
        per_fold = per_sequence.view(-1, 2).sum(0)
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
    sampled_lengths = set(sample.text.lengths.tolist())
    assert sampled_lengths <= fitted
    assert text.single_long_sequence == (lengths == [17, 512])
    if not text.single_long_sequence:
        pairs = len(sample.text) // 2
        assert sample.text.fold.tolist() == [0, 1] * pairs


def test_a_single_sequence_is_scored_on_rows_of_the_opposite_fold():
    for length in (2, 3, 30, 5000):
        sample = drawn([length], seed=5)
        assert sample.text.single_long_sequence
        count = scored_rows(sample.text)
        scored = sample_rows(torch.tensor([length]), count=count, seed=5)
        assert torch.equal(scored.position, sample.rows.position)
        assert_folds_share_no_row(scored, length=length)


def positions_of(rows: Rows) -> set[int]:
    """The positions of the rows that have a weight."""
    has_weight = rows.weight > 0
    return set(rows.position[has_weight].tolist())


def assert_folds_share_no_row(scored: Rows, *, length: int) -> None:
    """Rows belong to two folds in turn, of the same size, and keep their weights."""
    even = scored.every(2, 0)
    odd = scored.every(2, 1)
    even_rows = positions_of(even)
    odd_rows = positions_of(odd)
    assert not even_rows & odd_rows
    expected_count = min(length - 1, 2 * FOLD_ROWS)
    assert len(even_rows) + len(odd_rows) == expected_count
    assert abs(len(even_rows) - len(odd_rows)) <= 1
    total = even.weight.sum() + odd.weight.sum()
    assert_close(total, scored.weight.sum())


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

    def moments(point: Tensor, *_: Tensor) -> Moments:
        """A parabola."""
        points.append(point)
        log_z = curvature * point.square().sum(-1) / 2
        diagonal = torch.full_like(point, curvature)
        return Moments(log_z, curvature * point, Curvature(diagonal))

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
    minimum = observed / curvature
    assert_close(points[-1], minimum)


def two_loops(
    gradient: Tensor, steps: Tensor, changes: Tensor, diagonal: Tensor
) -> Tensor:
    """Nocedal and Wright 2006, algorithm 7.4, for one problem."""
    result = gradient.clone()
    shares = []
    for step, change in zip(steps.flip(0), changes.flip(0), strict=True):
        share = (step @ result) / (step @ change)
        result -= share * change
        shares.append(share)
    result /= diagonal
    for step, change, share in zip(steps, changes, reversed(shares), strict=True):
        correction = (change @ result) / (step @ change)
        result += step * (share - correction)
    return result


@few
@given(seed=seeds, kept=st.integers(1, 6), skipped=st.booleans())
def test_the_compact_form_divides_as_the_two_loops_do(
    seed: int, kept: int, skipped: bool
):
    steps = normal(2, kept, 9, seed=seed)
    noise = normal(2, kept, 9, seed=seed + 1)
    changes = 2 * steps + 0.3 * noise
    gradient = normal(2, 9, seed=seed + 2)
    diagonal = normal(2, 9, seed=seed + 3).exp()
    if skipped:
        steps[0, kept // 2] = 0
        changes[0, kept // 2] = 0
    divided = divide_by_curvature(gradient, steps, changes, Curvature(diagonal))
    for problem in range(2):
        is_kept = steps[problem].any(1)
        expected = two_loops(
            gradient[problem],
            steps[problem][is_kept],
            changes[problem][is_kept],
            diagonal[problem],
        )
        assert_close(divided[problem], expected, rtol=1e-7, atol=1e-9)


def first_call(tokens: Tensor) -> tuple[AttentionCall, Planes]:
    """The first layer of a tiny Llama."""
    return observed_calls(tiny("llama_gqa"), tokens)[0]


def test_a_single_sequence_has_two_folds_of_rows():
    tokens = random_tokens(sequences=1, length=60)
    text = Text(tokens, torch.tensor([60]))
    sample = Sample.draw(text, seed=0)
    call, planes = first_call(tokens)
    fit = sample.fit(call, planes, surrogates=0, seed=0)
    even_rows, odd_rows = fit.weights.unbind(1)
    difference = (even_rows - odd_rows).abs()
    assert (difference.amax((1, 2)) > 0.1).all()


def test_groups_are_scored_by_models_of_the_opposite_fold():
    tokens = random_tokens(sequences=4, length=30)
    lengths = torch.full((4,), 30)
    text = Text(tokens, lengths, bos=1)
    call, planes = first_call(tokens)
    sample = Sample.draw(text, seed=0)
    sampled_call = first_call(sample.text.ids)[0]
    fit = sample.fit(sampled_call, planes, surrogates=0, seed=0)
    fit.weights[:, 1] = 0

    sampled = SampledCall(call, all_rows(lengths), planes, sinks=text.sinks)
    scores = fit.score(sampled, text, None)[:, 0]

    gains = logit.gains(scores)
    gain_in_fold_0 = gains["both_gain"][0:4:2]
    gain_in_fold_1 = gains["both_gain"][1:4:2]
    zeros = torch.zeros_like(gain_in_fold_0)
    assert_close(gain_in_fold_0, zeros, rtol=0, atol=1e-5)
    assert (gain_in_fold_1.abs() > 0.05).all()
    assert gains["total"].shape == (GROUPS, 4)
    assert gains["total"][4:].isnan().all()
    assert_scores_of_sets_add_up(fit, sampled, text, scores)


def assert_scores_of_sets_add_up(
    fit: LayerFit, sampled: SampledCall, text: Text, scores: Tensor
) -> None:
    """Even and odd rows together have the `scores` of all rows."""
    rows = all_rows(text.lengths)
    position = torch.arange(30)
    even = (position % 2 == 0).expand(4, 30)
    all_positions = torch.ones_like(even)
    sets = torch.stack([all_positions, even, ~even], 1)
    of_all, of_even, of_odd = fit.score(sampled, text, sets).unbind(1)
    assert_close(of_all, scores, rtol=1e-6, atol=1e-4)
    assert_close(of_even + of_odd, scores, rtol=1e-6, atol=1e-4)
    only_even = sampled.with_rows(rows.zero_hidden(~even))
    expected = fit.score(only_even, text, None)[:, 0]
    assert_close(of_even, expected, rtol=1e-6, atol=1e-4)


def test_groups_are_documents_or_stretches_of_one_text():
    five = assign_groups(None, 5)
    assert five.tolist() == [0, 1, 2, 3, 4]

    thirty_two = assign_groups(None, 32)
    in_pairs = [sequence // 2 for sequence in range(32)]
    assert thirty_two.tolist() == in_pairs

    two_documents = torch.tensor([5, 5, 5, 9])
    group = assign_groups(two_documents, 4)
    assert group.tolist() == [0, 1, 2, 3], "2 documents are too few for groups"

    documents = torch.tensor([30, 10, 20, 11, 12, 13, 14, 15]).repeat_interleave(3)
    expected = np.repeat([7, 0, 6, 1, 2, 3, 4, 5], 3).tolist()
    assert assign_groups(documents, 24).tolist() == expected

    many = assign_groups(torch.arange(200), 200)
    assert many.tolist() == sorted(many.tolist())
    assert len(many.unique()) == GROUPS == 64


def farthest_offsets(lengths: list[int], *, window: int) -> list[int]:
    """The farthest offset that each row of some sequences sees, except their first rows."""
    offsets = []
    for length in lengths:
        for row in range(1, length):
            offsets.append(min(row, window - 1))
    return offsets


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_sliding"])
def test_offsets_that_few_rows_see_are_left_out_of_kernels(name: str):
    lengths = [70, 40, 30]
    tokens = random_tokens(sequences=3, length=70)
    model = tiny(name)
    text = rl.Text(tokens, lengths=torch.tensor(lengths))
    profile = rl.profile(model, text, surrogates=0)
    kernel = profile["kernel"]
    width = profile["offset_stop"] - profile["offset_start"]
    total = (kernel * width).sum("offset_bin")
    assert_allclose(total, 1, rtol=1e-9)
    window = 70 if name == "llama_gqa" else model.config.sliding_window
    farthest = np.array(farthest_offsets(lengths, window=window))
    for offset in range(64):
        share_of_rows = np.mean(offset <= farthest)
        has_weight = kernel[..., offset].values > 0
        if share_of_rows >= 0.05:
            assert has_weight.all(), offset
        else:
            assert not has_weight.any(), offset


@not_as_configured
def test_without_rotation_nothing_is_positional():
    model = tiny("llama_gqa")
    model.model.rotary_emb.inv_freq.zero_()
    tokens = random_tokens(sequences=16, length=50)
    profile = rl.profile(model, tokens, surrogates=0)
    rest = profile["total_bits"] - profile["sink_bits"]
    content_share = profile["content_bits"] / rest
    assert float(rest.min()) > 0.1
    assert float(content_share.min()) > 0.98


@pytest.mark.parametrize("sequences", [1, 2])
def test_two_tokens_have_one_row_which_sees_no_second_offset(sequences: int):
    tokens = random_tokens(sequences=sequences, length=3)
    text = rl.Text(tokens, lengths=torch.full((sequences,), 2))
    profile = rl.profile(tiny("llama_gqa"), text, surrogates=2)
    total = profile["offset_mass"][..., 0] + profile["sink_mass"]
    assert_allclose(total, 1)
    assert np.isnan(profile["previous_token"]).all()
    assert np.isfinite(profile["total_bits"]).all()
    classified = rl.classify_heads(profile)
    assert classified.attrs["claim"]["verdict"] == "not testable"


def test_eight_documents_are_the_groups():
    tokens = random_tokens(sequences=9, length=4)
    text = rl.Text(tokens, documents=[0, 0, 1, 2, 3, 4, 5, 6, 7])
    profile = rl.profile(tiny("llama_gqa"), text, surrogates=0)
    assert profile.attrs["documents"] == profile.sizes["group"] == 8
    rows = profile["group_rows"]
    assert_array_equal(rows, [6, 3, 3, 3, 3, 3, 3, 3])
    assert_allclose(profile["group_scored"], rows, rtol=1e-5)


def test_sampled_rows_have_no_more_columns_than_the_longest_sequence_has_rows():
    rows = sample_rows(torch.tensor([5, 9]), count=500, seed=0)
    assert rows.position.shape == (2, 8)
    rows_of_sequences = (rows.weight > 0).sum(1)
    assert rows_of_sequences.tolist() == [4, 8]
