"""The attention budget: offsets, bits from gains, and the rows that models are fitted to."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles.handmade import call_of
from oracles.tiny import not_as_configured, random_tokens, tiny
from small_measurements import few, normal, observed_calls, seeds
from torch import Tensor

import ropelens as rl
from ropelens.attention.formulas import GAINS, attention_budget
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.visibility import offset_edges, sum_bins
from ropelens.budget.held_out import FOLD_ROWS, LayerFit, Sample, scored_rows
from ropelens.budget.logit import gains
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
    for number, (low, high) in enumerate(bins):
        expected = mass[:, low:high].sum(1)
        torch.testing.assert_close(binned[:, number], expected)


@dataclass(frozen=True, eq=False)
class RowWeights:
    """The weights of one head, and the kinds of sinks of one sequence.

    The weights are those of the 3 kinds of sinks, of each offset, and of each bin of the
    offsets to sinks.
    """

    weights: Tensor
    sinks: Tensor
    edges: Tensor
    window: int

    def terms_of_key(self, row: int, key: int) -> list[int]:
        """The numbers of the weights that add up to the score of a key."""
        offset = row - key
        terms = [3 + offset]
        kind = int(self.sinks[key])
        if kind:
            bin_number = int((self.edges <= offset).sum()) - 1
            terms += [kind - 1, 3 + len(self.sinks) + bin_number]
        return terms

    def terms_of_row(self, row: int) -> list[list[int]]:
        keys = range(max(0, row - self.window + 1), row + 1)
        return [self.terms_of_key(row, key) for key in keys]

    def scores(self, row: int) -> Tensor:
        return torch.stack(
            [self.weights[terms].sum() for terms in self.terms_of_row(row)]
        )


@dataclass(eq=False)
class BruteForce:
    """Sums over the rows of a head: of log Z, of the expected terms, and of squared shares."""

    log_z: Tensor
    expected: Tensor
    squares: Tensor

    def add(self, row_weights: RowWeights, row: int, weight: Tensor) -> None:
        scores = row_weights.scores(row)
        self.log_z += weight * scores.logsumexp(0)
        shares = scores.softmax(0)
        for terms, share in zip(row_weights.terms_of_row(row), shares, strict=True):
            self.expected[terms] += share * weight
            self.squares[terms] += share**2 * weight


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
    sets_of_sinks = 2 if by_head else 1
    sinks = torch.randint(0, 12, (2, sets_of_sinks, context), generator=generator)
    sinks = sinks * (sinks <= 3)
    lengths = torch.tensor([context, max(2, context // 2)])
    rows = sample_rows(lengths, count=9, seed=seed)
    edges = offset_edges(context)
    weights = normal(2, 3 + context + len(edges) - 1, seed=seed)
    table = table_of(rows, sinks, window=window)
    moments = table.moments(weights)
    for head in range(2):
        of_head = weights[head]
        sums = BruteForce(torch.zeros(()).double(), of_head * 0, of_head * 0)
        number = 0
        for sequence, positions in enumerate(rows.position.tolist()):
            of_sequence = sinks[sequence, head if by_head else 0]
            row_weights = RowWeights(of_head, of_sequence, edges, window)
            for row in positions:
                sums.add(row_weights, row, table.weight[0, number])
                number += 1
        diagonal = sums.expected - sums.squares
        torch.testing.assert_close(moments.expected[head], sums.expected)
        torch.testing.assert_close(moments.curvature.diagonal[head], diagonal)
        torch.testing.assert_close(moments.log_z[head], sums.log_z)
    assert_sinks_alone_agree(table, weights)


def table_of(rows: Rows, sinks: Tensor, *, window: int) -> OffsetRows:
    """The rows of two heads with even attention."""
    context = sinks.shape[-1]
    x = torch.zeros(2, 2, context, 2)
    call = call_of(x, x, window=window)
    planes = Planes(torch.zeros(1), 2, "half")
    table = OffsetRows.of(SampledCall(call, rows, planes, sinks=sinks))
    return table.of_problems(torch.arange(2), 2)


def assert_sinks_alone_agree(table: OffsetRows, weights: Tensor) -> None:
    """Model P with weights of sinks only is model S."""
    only_sinks = weights.clone()
    only_sinks[:, 3:] = 0
    of_s = table.sink_moments(only_sinks[:, :3])
    of_p = table.moments(only_sinks)
    torch.testing.assert_close(of_s.log_z, of_p.log_z)
    torch.testing.assert_close(of_s.expected, of_p.expected[:, :3], rtol=0, atol=1e-5)


BITS = st.tuples(*[st.floats(-3, 12, width=32) for _ in GAINS])


@few
@given(gains=st.lists(BITS, min_size=1, max_size=9))
def test_bits_add_up_and_never_go_below_zero(gains: list[tuple[float, ...]]):
    total, *models = np.array(gains, dtype=np.float64).T
    bits = attention_budget(np.maximum(total, 0), *models)
    whole = bits.pop("total")
    shared = bits.pop("shared")
    np.testing.assert_allclose(sum(bits.values()), whole, atol=1e-12)
    for part in (shared, *bits.values()):
        assert (part >= 0).all()
    assert (whole >= total).all()
    assert (shared <= bits["content"] + 1e-12).all()


@pytest.mark.parametrize(
    ("gains", "expected"),
    [  # total, S, P, C, B -> total, sink, position, content, interaction, shared
        ((4.0, 1.0, 2.0, 3.0, 3.5), (4.0, 1.0, 0.5, 2.0, 0.5, 0.5)),
        # S counts as uniform
        ((4.0, -1.0, 2.0, 3.0, 3.5), (4.0, 0.0, 0.5, 3.0, 0.5, 1.5)),
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
    names = ["total", "sink", "position", "content", "interaction", "shared"]
    assert list(bits) == names
    np.testing.assert_allclose(np.concatenate([*bits.values()]), expected)


def drawn(
    lengths: list[int], *, documents: Tensor | None = None, seed: int = 0
) -> Sample:
    """A sample of sequences of different tokens."""
    count = len(lengths)
    context = max(lengths)
    tokens = torch.arange(count * context).view(count, context)
    text = Text(tokens, torch.tensor(lengths), documents=documents)
    return Sample.draw(text, seed=seed)


def test_a_sample_has_sequences_of_both_folds_from_many_groups():
    documents = torch.tensor([0] * 30 + [1, 2, 3, 4, 5, 6, 7, 8, 9])
    sample = drawn([20] * 39, documents=documents, seed=3)
    taken = sample.text.ids[:, 0] // 20
    group = assign_groups(documents, 39)[taken]
    distinct = set(taken.tolist())
    assert len(taken) == len(distinct) == 10
    assert sample.text.fold.tolist() == [0, 1] * 5
    words = "one of each document, although one has most sequences"
    assert len(group.unique()) == 10, words
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
        count = scored_rows(sample.text)
        scored = sample_rows(torch.tensor([length]), count=count, seed=5)
        assert torch.equal(scored.position, sample.rows.position)
        one = scored.every(2, 0)
        other = scored.every(2, 1)
        rows_of_one = set(one.position[one.weight > 0].tolist())
        rows_of_other = set(other.position[other.weight > 0].tolist())
        assert not rows_of_one & rows_of_other
        expected = min(length - 1, 2 * FOLD_ROWS)
        assert len(rows_of_one) + len(rows_of_other) == expected
        assert abs(len(rows_of_one) - len(rows_of_other)) <= 1
        weight = one.weight.sum() + other.weight.sum()
        torch.testing.assert_close(weight, scored.weight.sum())


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
        steps[0, kept // 2] = 0
        changes[0, kept // 2] = 0
    ours = divide_by_curvature(gradient, steps, changes, Curvature(diagonal))
    for problem in range(2):
        not_skipped = steps[problem].any(1)
        expected = two_loops(
            gradient[problem],
            steps[problem, not_skipped],
            changes[problem, not_skipped],
            diagonal[problem],
        )
        torch.testing.assert_close(ours[problem], expected, rtol=1e-7, atol=1e-9)


def two_loops(
    gradient: Tensor, steps: Tensor, changes: Tensor, diagonal: Tensor
) -> Tensor:
    result = gradient.clone()
    shares = []
    for step, change in zip(steps.flip(0), changes.flip(0), strict=True):
        share = (step @ result) / (step @ change)
        result -= share * change
        shares.append(share)
    result /= diagonal
    for step, change in zip(steps, changes, strict=True):
        share = shares.pop()
        result += step * (share - (change @ result) / (step @ change))
    return result


def test_a_single_sequence_has_two_folds_of_rows():
    tokens = random_tokens(sequences=1, length=60)
    sample = Sample.draw(Text(tokens, torch.tensor([60])), seed=0)
    call, planes = observed_calls(tiny("llama_gqa"), tokens)[0]
    one, other = sample.fit(call, planes, surrogates=0, seed=0).weights.unbind(1)
    difference = (one - other).abs()
    assert (difference.amax((1, 2)) > 0.1).all()


def test_groups_are_scored_by_models_of_the_opposite_fold():
    text, fitted, rows = fitted_to_four_sequences()
    fitted.weights[:, 1] = 0
    scores = fitted.score(rows, text, None)[:, 0]
    total = gains(scores)["total"]
    assert total.shape == (GROUPS, 4)
    assert total[4:].isnan().all()
    both = gains(scores)["both_gain"]
    assert (both[1:4:2].abs() > 0.05).all()
    of_zero_weights = both[0:4:2]
    expected = torch.zeros_like(of_zero_weights)
    torch.testing.assert_close(of_zero_weights, expected, rtol=0, atol=1e-5)


def test_scores_of_parts_of_the_rows_add_up():
    text, fitted, rows = fitted_to_four_sequences()
    expected = fitted.score(rows, text, None)[:, 0]
    even = (torch.arange(30) % 2 == 0).expand(4, 30)
    parts = torch.stack([even | ~even, even, ~even], 1)
    of_all, of_even, of_odd = fitted.score(rows, text, parts).unbind(1)
    torch.testing.assert_close(of_all, expected, rtol=1e-6, atol=1e-4)
    torch.testing.assert_close(of_even + of_odd, expected, rtol=1e-6, atol=1e-4)
    only_even = rows.with_rows(rows.rows.zero_hidden(~even))
    expected_of_even = fitted.score(only_even, text, None)[:, 0]
    torch.testing.assert_close(of_even, expected_of_even, rtol=1e-6, atol=1e-4)


def fitted_to_four_sequences() -> tuple[Text, LayerFit, SampledCall]:
    """A text, the models that are fitted to a sample of it, and all its rows."""
    tokens = random_tokens(sequences=4, length=30)
    lengths = torch.full((4,), 30)
    text = Text(tokens, lengths, bos=1)
    call, planes = observed_calls(tiny("llama_gqa"), tokens)[0]
    sample = Sample.draw(text, seed=0)
    call_of_sample, _ = observed_calls(tiny("llama_gqa"), sample.text.ids)[0]
    fitted = sample.fit(call_of_sample, planes, surrogates=0, seed=0)
    return text, fitted, SampledCall(call, all_rows(lengths), planes, sinks=text.sinks)


def test_groups_are_documents_or_stretches_of_one_text():
    assert assign_groups(None, 5).tolist() == [0, 1, 2, 3, 4]
    assert assign_groups(None, 32).tolist() == [i // 2 for i in range(32)]
    two_documents = torch.tensor([5, 5, 5, 9])
    groups = assign_groups(two_documents, 4).tolist()
    assert groups == [0, 1, 2, 3], "2 documents are too few for groups"
    documents = torch.tensor([30, 10, 20, 11, 12, 13, 14, 15]).repeat_interleave(3)
    expected = np.repeat([7, 0, 6, 1, 2, 3, 4, 5], 3).tolist()
    assert assign_groups(documents, 24).tolist() == expected
    many = assign_groups(torch.arange(200), 200)
    assert many.tolist() == sorted(many.tolist())
    assert len(many.unique()) == GROUPS == 64


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
    np.testing.assert_allclose(total, 1, rtol=1e-9)
    window = 70 if name == "llama_gqa" else model.config.sliding_window
    farthest = []
    for length in lengths:
        farthest += [min(row, window - 1) for row in range(1, length)]
    for offset in range(64):
        seen_by = np.mean([offset <= most for most in farthest])
        in_kernel = kernel[..., offset].values > 0
        assert (in_kernel == (seen_by >= 0.05)).all(), offset


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
    text = rl.Text(tokens, lengths=torch.full((sequences,), 2))
    profile = rl.profile(tiny("llama_gqa"), text, surrogates=2)
    on_itself = profile["offset_mass"][..., 0]
    np.testing.assert_allclose(on_itself + profile["sink_mass"], 1)
    assert np.isnan(profile["previous_token"]).all()
    assert np.isfinite(profile["total_bits"]).all()
    assert rl.classify_heads(profile).attrs["claim"]["verdict"] == "not testable"


def test_eight_documents_are_the_groups():
    tokens = random_tokens(sequences=9, length=4)
    text = rl.Text(tokens, documents=[0, 0, 1, 2, 3, 4, 5, 6, 7])
    profile = rl.profile(tiny("llama_gqa"), text, surrogates=0)
    assert profile.attrs["documents"] == 8
    assert profile.sizes["group"] == 8
    rows = profile["group_rows"]
    np.testing.assert_array_equal(rows, [6, 3, 3, 3, 3, 3, 3, 3])
    np.testing.assert_allclose(profile["group_scored"], rows, rtol=1e-5)


def test_sampled_rows_have_no_more_columns_than_the_longest_sequence_has_rows():
    rows = sample_rows(torch.tensor([5, 9]), count=500, seed=0)
    assert rows.position.shape == (2, 8)
    assert (rows.weight > 0).sum(1).tolist() == [4, 8]
