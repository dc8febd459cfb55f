"""Surrogates built in another way, and the laws of the verdict."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from observed import observed_calls
from oracles.tiny import random_tokens, tiny
from scipy import stats

from ropelens.rope.turn import Side, turn
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.claim import VERDICTS, judge, rank_correlation
from ropelens.statistics.gains import score
from ropelens.statistics.logit import fit
from ropelens.statistics.rows import sample_rows
from ropelens.statistics.sinks import known_sinks, sum_selectivity
from ropelens.statistics.surrogates import LayerSurrogates, _orders, draw_surrogates


@pytest.mark.parametrize("name", ["llama_gqa", "gemma2", "gpt_oss", "glm", "nanochat"])
def test_a_surrogate_is_the_layer_turned_by_other_frequencies(name: str):
    """Each draw, built as an edit would build it and measured as a profile would measure it."""
    tokens = torch.from_numpy(random_tokens(sequences=4, length=40))
    sinks = known_sinks(tokens)
    rows = sample_rows(torch.full((4,), 40), count=12, seed=0)
    for call, planes in observed_calls(tiny(name), tokens):
        ours = draw_surrogates(call, rows, planes, sinks, draws=2, seed=3)
        orders = _orders(planes, call.key.shape[1], 2, seed=3, layer=call.layer)
        group = call.query.shape[1] // call.key.shape[1]
        for draw, order in enumerate(orders):
            frequency = planes.inv_freq.float()[order]
            sides = [
                Side(f, torch.ones_like(f), torch.full((*f.shape, 2), torch.nan))
                for f in (frequency.repeat_interleave(group, 0), frequency)
            ]
            at = torch.arange(40)[None]
            q, k = turn(call.query, at, planes, sides[0]), turn(call.key, at, planes, sides[1])
            turned = AttentionCall(**(vars(call) | {"query": q, "key": k}))
            one = torch.zeros(4, dtype=torch.long)
            fits = fit(turned, rows, planes, sinks, part=one, parts=1)
            nats = score(turned, rows, planes, sinks, fits, by=one, slot=one, slots=1)
            fraction = (nats.position - nats.sink)[0] / (nats.information - nats.sink)[0]
            torch.testing.assert_close(
                ours.offset_fraction[draw].double(), fraction, rtol=0, atol=0.01
            )
            push = sum_selectivity(turned, rows, planes, sinks)[1].sum(0)
            wavelength = (2 * np.pi / frequency.abs()).log().repeat_interleave(group, 0)
            weight = push[:, : frequency.shape[1]].clamp(min=0)
            mean = (weight * wavelength).sum(-1) / weight.sum(-1)
            torch.testing.assert_close(ours.log_wavelength[draw], mean, rtol=1e-3, atol=1e-3)


def layers_of(
    rho_of_draws: list[float], *, layers: int = 4, heads: int = 6
) -> list[LayerSurrogates]:
    """Layers whose heads, all together, have about these correlations.

    What the offset explains is spread evenly over 0 to 1.
    """
    random = np.random.default_rng(0)
    x = random.permuted(
        np.tile(np.linspace(-1.7, 1.7, layers * heads), (len(rho_of_draws), 1)), axis=1
    )
    rho = np.array(rho_of_draws)[:, None]
    y = rho * x + np.sqrt(1 - rho**2) * random.normal(size=x.shape)
    x, y = ((v.reshape(-1, layers, heads)) for v in (x, y))
    every = torch.ones(len(x), heads, dtype=torch.bool)
    return [
        LayerSurrogates(
            torch.from_numpy(x[:, i] / 3.4 + 0.5), torch.from_numpy(y[:, i]), every.clone()
        )
        for i in range(layers)
    ]


@pytest.mark.parametrize(
    ("own", "verdict"), [(-0.99, "holds"), (-0.5, "unresolved"), (0.9, "contradicted")]
)
def test_the_verdict_follows_from_the_surrogates_alone(own: float, verdict: str):
    claim = judge(layers_of([own] + [-0.5] * 40))
    assert claim.verdict == verdict
    assert claim.verdict in VERDICTS
    assert claim.null_draws == 40
    assert claim.heads == 24
    assert claim.low <= claim.rank_correlation <= claim.high
    assert claim.null_low <= claim.null_median <= claim.null_high
    assert f"{claim.rank_correlation:+.2f} beside" in claim.why


@pytest.mark.parametrize(("lift", "ends"), [(-0.42, (2, 22)), (0.42, (22, 2))])
def test_too_few_heads_at_one_end_make_no_verdict(lift: float, ends: tuple[int, int]):
    layers = [
        LayerSurrogates(layer.offset_fraction + lift, layer.log_wavelength, layer.counts)
        for layer in layers_of([-0.99] + [0.0] * 40)
    ]
    claim = judge(layers)
    assert claim.verdict == "not testable"
    assert claim.why == (
        f"the offset explains more than half of what {ends[0]} heads choose and less of what "
        f"{ends[1]} do; it takes 3 heads of each"
    )


def test_heads_that_are_diffuse_or_sinks_do_not_count():
    layers = layers_of([-0.99] + [-0.5] * 40)
    for layer in layers[1:]:
        layer.counts[0] = False
    assert judge(layers).heads == 6


def test_no_verdict_where_nothing_rotates():
    nothing = torch.full((41, 6), torch.nan)
    layer = layers_of([-0.5] * 41, layers=1)[0]
    claim = judge([LayerSurrogates(layer.offset_fraction, nothing, layer.counts)] * 3)
    assert claim.verdict == "not testable"
    assert claim.heads == 0


def test_no_verdict_where_the_order_of_frequencies_makes_no_difference():
    layer = layers_of([-0.5], layers=1, heads=30)[0]
    same = LayerSurrogates(*(x.expand(41, -1) for x in vars(layer).values()))
    claim = judge([same, same])
    assert (claim.verdict, claim.why) == (
        "not testable",
        "the order of the frequencies makes no difference",
    )


def test_the_correlation_is_scipys():
    random = np.random.default_rng(0)
    x, y = random.integers(0, 5, size=(2, 50)).astype(float)
    assert rank_correlation(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)
    assert np.isnan(rank_correlation(x[:3], y[:3]))
    assert np.isnan(rank_correlation(x, np.ones(50)))


def test_the_interval_resamples_layers():
    """Layers that are copies of one another hold no more than one: the interval is a point."""
    one = layers_of([-0.5, -0.5], layers=1, heads=30)
    claim = judge(one * 5)
    assert claim.low == pytest.approx(claim.high)
    assert np.isnan(judge(one).low)
