"""Surrogates that are built as edits, and the laws of the verdict."""

from fractions import Fraction
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from oracles.handmade import call_of
from oracles.tiny import random_tokens, tiny
from scipy import stats
from small_measurements import normal, observed_calls
from torch.nn.functional import pad
from torch.testing import assert_close

from ropelens.attention.call import AttentionCall
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.sums import sum_attention
from ropelens.attention.visibility import Visibility, offset_edges
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


@pytest.mark.parametrize(
    ("name", "changes"), [*((x, {}) for x in NAMES), ("gpt_neox", ODD)]
)
def test_a_surrogate_is_the_layer_with_permuted_frequencies(name: str, changes: dict):
    tokens = random_tokens(sequences=4, length=40)
    sinks = known_sinks(tokens, bos=1)
    rows = sample_rows(torch.full((4,), 40), count=12, seed=0)
    of_keys = [row for row in STATISTICS if row.name == "selectivity_keys"]
    for call, planes in observed_calls(tiny(name, **changes), tokens):
        ours = draw_surrogates(
            SampledCall(call, rows, planes, sinks=sinks), draws=2, seed=3
        )
        orders = _orders(planes, call.key.shape[1], 2, seed=3, layer=call.layer)
        group = call.query.shape[1] // call.key.shape[1]
        for draw, order in enumerate(orders):
            frequency = planes.inv_freq.float()[order]
            frequencies = (frequency.repeat_interleave(group, 0), frequency)
            targets = [TargetRotation(f, torch.ones_like(f)) for f in frequencies]
            pairs = zip((call.query, call.key), targets, strict=True)
            positions = torch.arange(40)[None]
            q, k = [rotate_to(x, positions, planes, target) for x, target in pairs]
            turned = AttentionCall(**(vars(call) | {"query": q, "key": k}))
            of_turned = SampledCall(turned, rows, planes, sinks=sinks)
            weights = fit_models(of_turned)
            scores = score_models(of_turned, weights).sum((0, 1))
            nats = dict(zip(SCORES, scores.unbind(-1), strict=True))
            beyond_sinks = nats["information"] - nats["sink"]
            fraction = (nats["position"] - nats["sink"]) / beyond_sinks
            own = {name: numbers[draw] for name, numbers in ours.items()}
            assert_close(own["surrogate_offset_fraction"], fraction, rtol=0, atol=0.01)
            sums = sum_attention(of_turned, of_keys)
            push = planes.sum_coordinates(sums["selectivity_keys"].sum(0))
            wavelength = (2 * np.pi / frequency.abs()).log().repeat_interleave(group, 0)
            weight = push[:, : frequency.shape[1]].clamp(min=0)
            mean = (weight * wavelength).sum(-1) / weight.sum(-1)
            assert_close(own["surrogate_log_wavelength"], mean, rtol=1e-3, atol=1e-3)


def test_diffuse_heads_and_sink_heads_do_not_count():
    q = torch.zeros(1, 3, 50, 8)
    q[:, 1, :, 7] = 12.0
    q[:, 2] = torch.randn(50, 8) * 4
    k = torch.randn(1, 3, 50, 8)
    k[:, 1] = 0
    k[:, 1, 0, 7] = 1
    causal = Visibility.causal(range(50))
    call = AttentionCall(0, q, k, k, q.transpose(1, 2), 1.0, None, None, causal)
    planes = Planes(torch.tensor([1.0, 0.1, 0.01, 0.001]), 8, "half")
    sinks = known_sinks(torch.ones(1, 50, dtype=torch.long), bos=None)
    rows = sample_rows(torch.tensor([50]), count=40, seed=0)
    drawn = draw_surrogates(SampledCall(call, rows, planes, sinks=sinks), draws=3)
    for numbers in drawn.values():
        assert numbers[0].isnan().tolist() == [True, True, False]
        assert numbers[:, 0].isnan().all()
        assert not numbers[:, 2].isnan().any()


def test_sampled_offsets_stand_for_all_of_a_long_context(
    monkeypatch: pytest.MonkeyPatch,
):
    context = 1200
    places = torch.arange(1200)
    planes = Planes(2.0 ** -torch.arange(0, 16, 2), 16, "half")
    q, k = [
        normal(2, 4, context, 16, seed=s) + normal(4, 1, 16, seed=9) for s in (1, 2)
    ]
    q, k = [unrotate(x, -places, planes) for x in (q, k)]
    sinks = torch.zeros(2, 4, context, dtype=torch.long)
    sinks[..., ::200] = 2
    sinks[:, 1, 300] = 3
    sinks[..., 0] = 1
    rows = sample_rows(torch.tensor([context, 1100]), count=64, seed=0)
    rows = SampledCall(call_of(q, k), rows, planes, sinks=sinks)
    few = draw_surrogates(rows, draws=10)
    monkeypatch.setattr(offsets, "EVERY_OFFSET", context)
    every = draw_surrogates(rows, draws=10)
    for name, ours in few.items():
        error = (ours - every[name]).square().mean().sqrt()
        assert (
            0 < error < {"offset_fraction": 0.03, "log_wavelength": 0.1}[name[10:]]
        ), name


def test_attention_of_equal_keys_is_the_attention_of_model_s():
    context = 1200
    sigma = torch.tensor([3.0, 1.0, 2.0])
    sinks = torch.zeros(2, 1, context, dtype=torch.long)
    sinks[..., ::200] = 2
    sinks[..., 300] = 3
    sinks[..., 0] = 1
    q, k = torch.zeros(2, 2, 1, context, 4)
    q[..., 0] = 1
    k[..., 0] = pad(sigma, (1, 0))[sinks]
    rows = sample_rows(torch.tensor([context, 1100]), count=64, seed=0)
    rows = SampledCall(
        call_of(q, k), rows, Planes(torch.zeros(2), 4, "half"), sinks=sinks
    )
    rows = normalize_weights(rows)
    samples = sampled_offsets(context, generator=torch.Generator().manual_seed(0))
    table = OffsetRows.of(rows, samples)
    orders = torch.zeros(1, 1, 2, dtype=torch.long)
    sums = Draws(rows, table.float(), orders, samples).sums()
    masses = sums.masses[:1]
    information = sums.information[:1]
    weights = pad(sigma.double(), (0, masses.shape[1] - 3))[None]
    moments = table.moments(weights)
    assert_close(masses.double(), moments.expected, rtol=1e-4, atol=1e-6)
    log_p = (moments.expected * weights).sum(-1) - moments.log_z
    nats = log_p + table.uniform[0]
    assert_close(information.double(), nats, rtol=1e-4, atol=1e-5)
    assert sums.push.abs().max() < 1e-6


def test_uniform_attention_is_on_all_keys_that_a_row_sees():
    context = 12
    sinks = torch.zeros(1, 1, context, dtype=torch.long)
    sinks[..., [0, 5, 9]] = torch.tensor([1, 2, 2])  # early rows do not see all sinks
    x = torch.zeros(1, 1, context, 4)
    rows = all_rows(torch.tensor([context]))
    planes = Planes(torch.zeros(2), 4, "half")
    call = call_of(x, x)
    sampled = normalize_weights(SampledCall(call, rows, planes, sinks=sinks))
    numbers_of_keys = torch.arange(2.0, context + 1)
    expected = numbers_of_keys.log().mean().double()
    assert_close(OffsetRows.of(sampled).uniform[0, 0], expected)


def test_a_head_without_information_can_converge():
    assert fit_tolerance(torch.zeros(1)) > 0


def test_a_sharp_head_is_fitted_in_single_precision():
    """After a full first step of Newton, single precision cannot return to the minimum."""
    rows = all_rows(torch.tensor([300]))
    planes = Planes(torch.zeros(1), 2, "half")
    call = call_of(*torch.zeros(2, 1, 1, 300, 2))
    rows = normalize_weights(SampledCall(call, rows, planes))
    table = OffsetRows.of(rows)
    bins = len(offset_edges(300)) - 1
    weights = torch.zeros(1, 3 + 300 + bins, dtype=torch.float64)
    weights[0, 3 + 5] = 12
    masses = table.moments(weights).expected.float()
    found = fit_offsets(
        masses,
        table.float(),
        ridge=torch.tensor([1e-4]),
        tolerance=torch.tensor([1e-3]),
    ).position
    assert found.value < 0.06, "0.056 in double precision; 4.7 for uniform attention"


@pytest.mark.parametrize("context", [1, 511, 512, 513, 4096])
def test_an_offset_is_drawn_from_each_stretch(context: int):
    samples = sampled_offsets(context, generator=torch.Generator().manual_seed(1))
    offset = samples.offset
    size = samples.size
    first = size.cumsum(0) - size
    assert ((first <= offset) & (offset < first + size)).all()
    assert size.sum() == context
    assert (size[: 128 if context > 512 else 512] == 1).all()
    for low in (128, 256, 512, 1024, 2048) if context == 4096 else ():
        assert ((low <= first) & (first < 2 * low)).sum() == 64, "64 an octave"


def heads_of(rho: list[float], *, layers: int = 4, heads: int = 6) -> list[np.ndarray]:
    """Fractions, evenly over 0 to 1, and wavelengths, with about these correlations."""
    random = np.random.default_rng(0)
    x = random.permuted(
        np.tile(np.linspace(-1.7, 1.7, layers * heads), (len(rho), 1)), axis=1
    )
    slope = np.array(rho)[:, None]
    y = slope * x + np.sqrt(1 - slope**2) * random.normal(size=x.shape)
    return [v.reshape(-1, layers, heads) for v in (x / 3.4 + 0.5, y)]


def verdict_of(fraction: np.ndarray, wavelength: np.ndarray) -> SimpleNamespace:
    numbers = np.moveaxis(np.stack([fraction, wavelength]), (2, 3), (0, 1))
    arrays = {"head_numbers": numbers, "scored_rows": np.array([np.inf])}
    return SimpleNamespace(**judge_wavelengths(arrays))


def test_bounds_equal_an_exact_test():
    """At most 2.5 % of the ranks of n surrogates and a model lie beyond a bound."""
    for draws in range(1, 500):
        null = np.random.default_rng(draws).permutation(draws).astype(float)
        low, high = null_bounds(null)
        if draws < 39:
            assert np.isnan([low, high]).all()
            continue
        below = Fraction(
            int((null < low).sum()) + 1, draws + 1
        )  # ranks that "holds" takes
        assert below <= Fraction(1, 40) < below + Fraction(1, draws + 1), "the largest"
        assert low + high == draws - 1, "both tails alike"
    assert verdict_of(*heads_of([-0.99] + [0.5] * 39)).verdict == "holds"


def test_with_forty_surrogates_below_all_is_holds_and_above_all_contradicted():
    fraction, wavelength = heads_of([0.0] * 41)
    order = np.argsort(correlations(fraction, wavelength))
    verdicts = {0: "holds", 1: "unresolved", 39: "unresolved", 40: "contradicted"}
    for rank, verdict in verdicts.items():
        model_first = [order[rank], *np.delete(order, rank)]
        claim = verdict_of(fraction[model_first], wavelength[model_first])
        assert (claim.verdict, claim.null_draws, claim.heads) == (verdict, 40, 24), rank
        assert claim.low <= claim.rank_correlation <= claim.high
        assert claim.null_low <= claim.null_median <= claim.null_high
        assert f"{claim.rank_correlation:+.2f}, compared with" in claim.why
        assert claim.p_value == pytest.approx((rank + 1) / 41)


FRACTION, WAVELENGTH = heads_of([-0.99] + [0.0] * 40)
ENDS = (
    "the offset explains more than half of the choice of {} heads, and less of {} heads; a "
    "verdict needs 3 of each"
)
FEW_DRAWS = "{} draws have a number; a verdict needs 39 surrogates"
ALIKE = [x[:1].repeat(41, 0) for x in (FRACTION, WAVELENGTH)]
NOT_TESTABLE = [
    (FRACTION - 0.42, WAVELENGTH, ENDS.format(2, 22)),
    (FRACTION + 0.42, WAVELENGTH, ENDS.format(22, 2)),
    (FRACTION[:1], WAVELENGTH[:1], FEW_DRAWS.format(0)),
    (FRACTION[:39], WAVELENGTH[:39], FEW_DRAWS.format(38)),
    (FRACTION, WAVELENGTH * np.nan, "no head picks keys through planes that rotate"),
    (*ALIKE, "the order of the frequencies makes no difference"),
]


@pytest.mark.parametrize(("fraction", "wavelength", "why"), NOT_TESTABLE)
def test_claims_without_a_verdict_say_why(fraction, wavelength, why: str):
    claim = verdict_of(fraction, wavelength)
    assert (claim.verdict, claim.why) == ("not testable", why)
    assert np.isnan(claim.p_value)
    assert np.isnan(claim.null_median) == (len(fraction) == 1 or claim.heads == 0)
    assert np.isnan([claim.rank_correlation, claim.low, claim.high]).all() == (
        claim.heads == 0
    )


def test_heads_that_do_not_count_are_left_out_of_each_draw():
    fraction, wavelength = heads_of([-0.99] + [-0.5] * 40)
    fraction[0, 1:] = np.nan
    wavelength[3] = np.nan
    claim = verdict_of(fraction, wavelength)
    assert (claim.heads, claim.null_draws) == (6, 39)
    own = stats.spearmanr(fraction[0, 0], wavelength[0, 0]).statistic
    assert claim.rank_correlation == pytest.approx(own)


@pytest.mark.parametrize("digits", [1, 16])  # with ties, and without
def test_the_correlation_is_scipys(digits: int):
    random = np.random.default_rng(0)
    x = random.uniform(size=50)
    x, y = x.round(digits), (-x + random.normal(size=50)).round(digits)
    assert rank_correlation(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)
    assert np.isnan(rank_correlation(x[:3], y[:3]))
    assert np.isnan(rank_correlation(x, np.ones(50)))


def test_the_interval_covers_with_few_layers():
    """Six layers of six similar heads; a bootstrap over layers would cover less than 90 %."""
    random = np.random.default_rng(4)
    truth = 6 / np.pi * np.arcsin(-0.7 / 2)  # Spearman's of two normals
    mix = np.linalg.cholesky([[1, -0.7], [-0.7, 1]])
    hits = 0
    for _ in range(400):
        noise = random.normal(size=(2, 6, 1)) * 0.2**0.5
        own = noise + random.normal(size=(2, 6, 6)) * 0.8**0.5
        claim = verdict_of(*np.einsum("ij,jlh->ilh", mix, own)[:, None])
        hits += claim.low <= truth <= claim.high
    assert 0.92 <= hits / 400 <= 0.98


def test_a_perfect_order_has_an_interval():
    fraction = heads_of([-0.5], layers=4)[0]
    claim = verdict_of(fraction, -fraction)
    assert claim.rank_correlation == pytest.approx(-1)
    order = np.arange(fraction.size)
    swapped = float(stats.spearmanr(order, [1, 0, *order[2:]]).statistic)
    assert claim.low <= claim.rank_correlation < claim.high
    assert claim.high == pytest.approx(-(1 + swapped) / 2, abs=1e-9)


def test_the_model_is_draw_0_and_every_draw_has_the_same_frequencies():
    orders = _orders(Planes(torch.ones(5), 16, "half"), 3, 4, seed=0, layer=1)
    own = torch.arange(5).expand(3, 5)
    assert torch.equal(orders[0], own)
    assert torch.equal(orders.sort(-1).values, own.expand(5, 3, 5))
    assert not (orders[1:] == own).all(-1).any(0).all()
