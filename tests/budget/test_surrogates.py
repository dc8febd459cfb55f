"""Surrogates that are built as edits, and the laws of the verdict."""

from dataclasses import dataclass, replace
from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracles.handmade import call_of
from oracles.tiny import random_tokens, tiny
from scipy import stats
from small_measurements import normal, observed_calls
from torch import Tensor
from torch.nn.functional import pad
from torch.testing import assert_close

from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.sums import sum_attention
from ropelens.attention.visibility import offset_edges
from ropelens.budget import offsets
from ropelens.budget.fits import fit_models
from ropelens.budget.logit import (
    SCORES,
    fit_tolerance,
    normalize_weights,
    score_models,
)
from ropelens.budget.offsets import OffsetRows, fit_offsets, sampled_offsets
from ropelens.budget.surrogate_attention import Draws
from ropelens.budget.surrogates import _orders, draw_surrogates
from ropelens.claims.classify import judge_wavelengths
from ropelens.claims.numbers import correlations, rank_correlation
from ropelens.claims.verdict import null_bounds
from ropelens.profiles.measures import STATISTICS
from ropelens.rope.planes import Planes, unrotate
from ropelens.rope.turn import TargetRotation, rotate_to
from ropelens.text.rows import all_rows, sample_rows
from ropelens.text.text import known_sinks

ODD = {"hidden_size": 60, "rotary_pct": 8 / 15}  # heads of 15 coordinates
NAMES = ("llama_gqa", "gemma2", "gpt_oss", "glm", "nanochat")
CASES = [*[(name, {}) for name in NAMES], ("gpt_neox", ODD)]
SELECTIVITY_KEYS = [x for x in STATISTICS if x.name == "selectivity_keys"]


def with_frequencies(sampled: SampledCall, frequency: Tensor) -> SampledCall:
    """The call if its planes rotated with other frequencies [kv_head, plane]."""
    call = sampled.call
    group = call.query.shape[1] // call.key.shape[1]
    by_head = frequency.repeat_interleave(group, 0)
    of_queries = TargetRotation(by_head, torch.ones_like(by_head))
    of_keys = TargetRotation(frequency, torch.ones_like(frequency))
    positions = torch.arange(40)[None]
    query = rotate_to(call.query, positions, sampled.planes, of_queries)
    key = rotate_to(call.key, positions, sampled.planes, of_keys)
    rotated = replace(call, query=query, key=key)
    return SampledCall(rotated, sampled.rows, sampled.planes, sinks=sampled.sinks)


def offset_fraction(sampled: SampledCall) -> Tensor:
    """Share of the information beyond sinks that the offset explains, by head."""
    weights = fit_models(sampled)
    scores = score_models(sampled, weights).sum((0, 1))
    information = scores[:, SCORES.index("information")]
    sink = scores[:, SCORES.index("sink")]
    position = scores[:, SCORES.index("position")]
    return (position - sink) / (information - sink)


def mean_log_wavelength(sampled: SampledCall, frequency: Tensor) -> Tensor:
    """Mean log wavelength of the planes of each head, weighted by their push toward keys."""
    sums = sum_attention(sampled, SELECTIVITY_KEYS)
    push = sampled.planes.sum_coordinates(sums["selectivity_keys"].sum(0))
    group = len(push) // len(frequency)
    of_planes = (2 * np.pi / frequency.abs()).log()
    by_head = of_planes.repeat_interleave(group, 0)
    weight = push[:, : frequency.shape[1]].clamp(min=0)
    return (weight * by_head).sum(-1) / weight.sum(-1)


def assert_are_numbers_of(
    surrogate: SampledCall, frequency: Tensor, numbers: dict[str, Tensor]
) -> None:
    fraction = numbers["surrogate_offset_fraction"]
    expected_fraction = offset_fraction(surrogate)
    assert_close(fraction, expected_fraction, rtol=0, atol=0.01)
    log_wavelength = numbers["surrogate_log_wavelength"]
    expected_log_wavelength = mean_log_wavelength(surrogate, frequency)
    assert_close(log_wavelength, expected_log_wavelength, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("name", "changes"), CASES)
def test_a_surrogate_is_the_layer_with_permuted_frequencies(name: str, changes: dict):
    tokens = random_tokens(sequences=4, length=40)
    sinks = known_sinks(tokens, bos=1)
    rows = sample_rows(torch.full((4,), 40), count=12, seed=0)
    for call, planes in observed_calls(tiny(name, **changes), tokens):
        sampled = SampledCall(call, rows, planes, sinks=sinks)
        drawn = draw_surrogates(sampled, draws=2, seed=3)
        orders = _orders(planes, call.key.shape[1], 2, seed=3, layer=call.layer)
        for draw, frequency in enumerate(planes.inv_freq.float()[orders]):
            surrogate = with_frequencies(sampled, frequency)
            numbers = {name: of_draws[draw] for name, of_draws in drawn.items()}
            assert_are_numbers_of(surrogate, frequency, numbers)


def test_diffuse_heads_and_sink_heads_do_not_count():
    """Head 0 is diffuse, head 1 attends to the first token, and head 2 counts."""
    q = torch.zeros(1, 3, 50, 8)
    q[:, 1, :, 7] = 12.0
    q[:, 2] = 4 * normal(50, 8, seed=0)
    k = normal(1, 3, 50, 8, seed=1).float()
    k[:, 1] = 0
    k[:, 1, 0, 7] = 1
    planes = Planes(torch.tensor([1.0, 0.1, 0.01, 0.001]), 8, "half")
    sinks = known_sinks(torch.ones(1, 50, dtype=torch.long), bos=None)
    rows = sample_rows(torch.tensor([50]), count=40, seed=0)
    sampled = SampledCall(call_of(q, k), rows, planes, sinks=sinks)
    drawn = draw_surrogates(sampled, draws=3)
    for numbers in drawn.values():
        assert numbers[0].isnan().tolist() == [True, True, False]
        assert numbers[:, 0].isnan().all()
        assert not numbers[:, 2].isnan().any()


LARGEST_ERRORS = {
    "surrogate_offset_fraction": 0.03,
    "surrogate_log_wavelength": 0.1,
}


def rotated_normal(seed: int, *, context: int, planes: Planes) -> Tensor:
    """Rotated vectors [sequence, head, position, coordinate] with a mean of each head."""
    mean = normal(4, 1, 16, seed=9)
    vectors = normal(2, 4, context, 16, seed=seed) + mean
    return unrotate(vectors, -torch.arange(context), planes)


def test_sampled_offsets_stand_for_all_of_a_long_context(
    monkeypatch: pytest.MonkeyPatch,
):
    context = 1200
    planes = Planes(2.0 ** -torch.arange(0, 16, 2), 16, "half")
    q = rotated_normal(1, context=context, planes=planes)
    k = rotated_normal(2, context=context, planes=planes)
    sinks = torch.zeros(2, 4, context, dtype=torch.long)
    sinks[..., ::200] = 2
    sinks[:, 1, 300] = 3
    sinks[..., 0] = 1
    rows = sample_rows(torch.tensor([context, 1100]), count=64, seed=0)
    sampled = SampledCall(call_of(q, k), rows, planes, sinks=sinks)

    from_sampled_offsets = draw_surrogates(sampled, draws=10)

    monkeypatch.setattr(offsets, "EVERY_OFFSET", context)
    from_every_offset = draw_surrogates(sampled, draws=10)
    for name, numbers in from_sampled_offsets.items():
        error = (numbers - from_every_offset[name]).square().mean().sqrt()
        assert 0 < error < LARGEST_ERRORS[name], name


def call_of_equal_keys(sigma: Tensor, *, context: int) -> SampledCall:
    """Keys whose scores are sigma of their kind of sink, and 0 if they are not sinks."""
    sinks = torch.zeros(2, 1, context, dtype=torch.long)
    sinks[..., ::200] = 2
    sinks[..., 300] = 3
    sinks[..., 0] = 1
    q = torch.zeros(2, 1, context, 4)
    q[..., 0] = 1
    k = torch.zeros(2, 1, context, 4)
    k[..., 0] = pad(sigma, (1, 0))[sinks]
    rows = sample_rows(torch.tensor([context, 1100]), count=64, seed=0)
    planes = Planes(torch.zeros(2), 4, "half")
    return SampledCall(call_of(q, k), rows, planes, sinks=sinks)


def test_attention_of_equal_keys_is_the_attention_of_model_s():
    context = 1200
    sigma = torch.tensor([3.0, 1.0, 2.0])
    sampled = normalize_weights(call_of_equal_keys(sigma, context=context))
    samples = sampled_offsets(context, generator=torch.Generator().manual_seed(0))
    table = OffsetRows.of(sampled, samples)
    orders = torch.zeros(1, 1, 2, dtype=torch.long)

    sums = Draws(sampled, table.float(), orders, samples).sums()

    masses = sums.masses[:1].double()
    information = sums.information[:1].double()
    weights = pad(sigma.double(), (0, masses.shape[1] - 3))[None]
    moments = table.moments(weights)
    log_p = (moments.expected * weights).sum(-1) - moments.log_z
    expected_information = log_p + table.uniform[0]
    assert_close(masses, moments.expected, rtol=1e-4, atol=1e-6)
    assert_close(information, expected_information, rtol=1e-4, atol=1e-5)
    assert sums.push.abs().max() < 1e-6


def test_uniform_attention_is_on_all_keys_that_a_row_sees():
    context = 12
    sinks = torch.zeros(1, 1, context, dtype=torch.long)
    sinks[..., 0] = 1
    sinks[..., [5, 9]] = 2  # early rows do not see these sinks
    x = torch.zeros(1, 1, context, 4)
    rows = all_rows(torch.tensor([context]))
    planes = Planes(torch.zeros(2), 4, "half")
    sampled = SampledCall(call_of(x, x), rows, planes, sinks=sinks)
    table = OffsetRows.of(normalize_weights(sampled))
    number_of_keys = torch.arange(2.0, context + 1)
    expected = number_of_keys.log().mean().double()
    assert_close(table.uniform[0, 0], expected)


def test_a_head_without_information_can_converge():
    assert fit_tolerance(torch.zeros(1)) > 0


def test_a_sharp_head_is_fitted_in_single_precision():
    """After a full first step of Newton, single precision cannot return to the minimum."""
    rows = all_rows(torch.tensor([300]))
    planes = Planes(torch.zeros(1), 2, "half")
    zeros = torch.zeros(1, 1, 300, 2)
    sampled = SampledCall(call_of(zeros, zeros), rows, planes)
    table = OffsetRows.of(normalize_weights(sampled))
    bins = len(offset_edges(300)) - 1
    weights = torch.zeros(1, 3 + 300 + bins, dtype=torch.float64)
    weights[0, 3 + 5] = 12
    masses = table.moments(weights).expected.float()
    fits = fit_offsets(
        masses,
        table.float(),
        ridge=torch.tensor([1e-4]),
        tolerance=torch.tensor([1e-3]),
    )
    assert fits.position.value < 0.06, (
        "0.056 in double precision; 4.7 for uniform attention"
    )


@pytest.mark.parametrize("context", [1, 511, 512, 513, 4096])
def test_an_offset_is_drawn_from_each_stretch(context: int):
    samples = sampled_offsets(context, generator=torch.Generator().manual_seed(1))
    offset = samples.offset
    size = samples.size
    first = size.cumsum(0) - size
    in_stretch = (first <= offset) & (offset < first + size)
    assert in_stretch.all()
    assert size.sum() == context
    every_offset_below = 128 if context > 512 else 512
    assert (size[:every_offset_below] == 1).all()
    if context == 4096:
        for low in (128, 256, 512, 1024, 2048):
            in_octave = (low <= first) & (first < 2 * low)
            assert in_octave.sum() == 64


@dataclass(frozen=True, eq=False)
class HeadNumbers:
    """The two numbers of each head [draw, layer, head]. Draw 0 is the model."""

    fraction: np.ndarray
    wavelength: np.ndarray

    def draws(self, index: object) -> "HeadNumbers":
        return HeadNumbers(self.fraction[index], self.wavelength[index])


def heads_of(rho: list[float], *, layers: int = 4, heads: int = 6) -> HeadNumbers:
    """Fractions, evenly over 0 to 1, and wavelengths, with about these correlations."""
    random = np.random.default_rng(0)
    evenly = np.linspace(-1.7, 1.7, layers * heads)
    in_each_draw = np.tile(evenly, (len(rho), 1))
    x = random.permuted(in_each_draw, axis=1)
    slope = np.array(rho)[:, None]
    noise = np.sqrt(1 - slope**2) * random.normal(size=x.shape)
    y = slope * x + noise
    fraction = x / 3.4 + 0.5
    return HeadNumbers(
        fraction=fraction.reshape(-1, layers, heads),
        wavelength=y.reshape(-1, layers, heads),
    )


def verdict_of(heads: HeadNumbers) -> SimpleNamespace:
    numbers = np.stack([heads.fraction, heads.wavelength])
    arrays = {
        "head_numbers": np.moveaxis(numbers, (2, 3), (0, 1)),
        "scored_rows": np.array([np.inf]),
    }
    return SimpleNamespace(**judge_wavelengths(arrays))


def test_bounds_equal_an_exact_test():
    """At most 2.5 % of the ranks of n surrogates and a model lie beyond a bound."""
    for draws in range(1, 500):
        null = np.random.default_rng(draws).permutation(draws).astype(float)
        low, high = null_bounds(null)
        if draws < 39:
            assert np.isnan([low, high]).all()
            continue
        # ranks at which the verdict is "holds", as a share of all ranks
        ranks_below = int((null < low).sum()) + 1
        below = Fraction(ranks_below, draws + 1)
        one_rank = Fraction(1, draws + 1)
        assert below <= Fraction(1, 40) < below + one_rank, "the largest"
        assert low + high == draws - 1, "both tails alike"
    heads = heads_of([-0.99] + [0.5] * 39)
    assert verdict_of(heads).verdict == "holds"


def test_with_forty_surrogates_below_all_is_holds_and_above_all_contradicted():
    heads = heads_of([0.0] * 41)
    order = np.argsort(correlations(heads.fraction, heads.wavelength))
    verdicts = {0: "holds", 1: "unresolved", 39: "unresolved", 40: "contradicted"}
    for rank, verdict in verdicts.items():
        model_first = [order[rank], *np.delete(order, rank)]
        claim = verdict_of(heads.draws(model_first))
        assert claim.verdict == verdict, rank
        assert claim.null_draws == 40, rank
        assert claim.heads == 24, rank
        assert claim.low <= claim.rank_correlation <= claim.high
        assert claim.null_low <= claim.null_median <= claim.null_high
        assert f"{claim.rank_correlation:+.2f}, compared with" in claim.why
        assert claim.p_value == pytest.approx((rank + 1) / 41)


@dataclass(frozen=True, eq=False)
class NotTestable:
    """Numbers of heads on which no verdict is possible, and the reason."""

    heads: HeadNumbers
    why: str


TESTABLE = heads_of([-0.99] + [0.0] * 40)
ENDS = (
    "the offset explains more than half of the choice of {} heads, and less of {} heads; a "
    "verdict needs 3 of each"
)
FEW_DRAWS = "{} draws have a number; a verdict needs 39 surrogates"
NOT_TESTABLE = {
    "2 positional heads": NotTestable(
        heads=replace(TESTABLE, fraction=TESTABLE.fraction - 0.42),
        why=ENDS.format(2, 22),
    ),
    "2 semantic heads": NotTestable(
        heads=replace(TESTABLE, fraction=TESTABLE.fraction + 0.42),
        why=ENDS.format(22, 2),
    ),
    "no surrogates": NotTestable(
        heads=TESTABLE.draws(slice(1)),
        why=FEW_DRAWS.format(0),
    ),
    "38 surrogates": NotTestable(
        heads=TESTABLE.draws(slice(39)),
        why=FEW_DRAWS.format(38),
    ),
    "no wavelengths": NotTestable(
        heads=replace(TESTABLE, wavelength=TESTABLE.wavelength * np.nan),
        why="no head picks keys through planes that rotate",
    ),
    "surrogates like the model": NotTestable(
        heads=TESTABLE.draws([0] * 41),
        why="the order of the frequencies makes no difference",
    ),
}


@pytest.mark.parametrize("case", NOT_TESTABLE.values(), ids=NOT_TESTABLE.keys())
def test_claims_without_a_verdict_say_why(case: NotTestable):
    claim = verdict_of(case.heads)
    assert claim.verdict == "not testable"
    assert claim.why == case.why
    assert np.isnan(claim.p_value)
    has_no_heads = claim.heads == 0
    has_no_surrogates = len(case.heads.fraction) == 1
    assert np.isnan(claim.null_median) == (has_no_surrogates or has_no_heads)
    interval = [claim.rank_correlation, claim.low, claim.high]
    assert np.isnan(interval).all() == has_no_heads


def test_heads_that_do_not_count_are_left_out_of_each_draw():
    heads = heads_of([-0.99] + [-0.5] * 40)
    heads.fraction[0, 1:] = np.nan
    heads.wavelength[3] = np.nan
    claim = verdict_of(heads)
    assert claim.heads == 6
    assert claim.null_draws == 39
    fraction = heads.fraction[0, 0]
    wavelength = heads.wavelength[0, 0]
    expected = stats.spearmanr(fraction, wavelength).statistic
    assert claim.rank_correlation == pytest.approx(expected)


@pytest.mark.parametrize("digits", [1, 16])  # with ties, and without
def test_the_correlation_is_scipys(digits: int):
    random = np.random.default_rng(0)
    exact_x = random.uniform(size=50)
    exact_y = -exact_x + random.normal(size=50)
    x = exact_x.round(digits)
    y = exact_y.round(digits)
    expected = stats.spearmanr(x, y).statistic
    assert rank_correlation(x, y) == pytest.approx(expected)
    of_three_heads = rank_correlation(x[:3], y[:3])
    of_equal_heads = rank_correlation(x, np.ones(50))
    assert np.isnan(of_three_heads)
    assert np.isnan(of_equal_heads)


def test_the_interval_covers_with_few_layers():
    """Six layers of six similar heads; a bootstrap over layers would cover less than 90 %."""
    random = np.random.default_rng(4)
    truth = 6 / np.pi * np.arcsin(-0.7 / 2)  # Spearman's of two normals
    mix = np.linalg.cholesky([[1, -0.7], [-0.7, 1]])
    hits = 0
    for _ in range(400):
        of_layers = random.normal(size=(2, 6, 1)) * 0.2**0.5
        independent = of_layers + random.normal(size=(2, 6, 6)) * 0.8**0.5
        fraction, wavelength = np.einsum("ij,jlh->ilh", mix, independent)
        claim = verdict_of(HeadNumbers(fraction[None], wavelength[None]))
        hits += claim.low <= truth <= claim.high
    assert 0.92 <= hits / 400 <= 0.98


def test_a_perfect_order_has_an_interval():
    fraction = heads_of([-0.5], layers=4).fraction
    claim = verdict_of(HeadNumbers(fraction, wavelength=-fraction))
    assert claim.rank_correlation == pytest.approx(-1)
    order = np.arange(fraction.size)
    order_with_a_swap = [1, 0, *order[2:]]
    swapped = float(stats.spearmanr(order, order_with_a_swap).statistic)
    assert claim.low <= claim.rank_correlation < claim.high
    half_a_swap_away = -(1 + swapped) / 2
    assert claim.high == pytest.approx(half_a_swap_away, abs=1e-9)


def test_the_model_is_draw_0_and_every_draw_has_the_same_frequencies():
    planes = Planes(torch.ones(5), 16, "half")
    orders = _orders(planes, 3, 4, seed=0, layer=1)
    order_of_model = torch.arange(5).expand(3, 5)
    assert torch.equal(orders[0], order_of_model)
    assert torch.equal(orders.sort(-1).values, order_of_model.expand(5, 3, 5))
    is_order_of_model = (orders[1:] == order_of_model).all(-1)
    assert not is_order_of_model.any(0).all()
