"""Ties, intervals and choices of heads: what could be wrong in a reach and still look right."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import xarray as xr
from oracles.tiny import random_tokens, tiny
from scipy.optimize import brentq
from scipy.stats import bootstrap

import ropelens as rl

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


def first_fall(
    product: np.ndarray, w: np.ndarray, level: float, *, within: int, farthest: int
) -> float:
    """Where a score first falls to a level: every whole distance, then scipy's root."""

    def above(d: float) -> float:
        return float((product * np.exp(1j * w * d)).sum().real - level)

    scores = (np.exp(1j * np.outer(np.arange(farthest + 1), w)) @ product).real
    higher = scores > level
    if not higher[:within].any():
        return 0.0
    falls = np.flatnonzero(higher[:-1] & ~higher[1:])
    return brentq(above, falls[0], falls[0] + 1, xtol=1e-12) if len(falls) else math.inf


def test_both_horizons_follow_from_the_scores_by_scipy():
    model, far = tiny("llama_gqa", rope_parameters=ROPE), 5000
    tokens = torch.from_numpy(random_tokens(sequences=6, length=40))
    variants = ("own", "p-rope:0.5", "yarn:4")
    found = rl.reach(model, tokens, variants=variants, distances=(0, far), resamples=0)
    levels = {"horizon": "others_level", "best_horizon": "others_best"}
    differ = 0
    for variant, layer, head in np.ndindex(found["horizon"].shape):
        of_head = found.isel(variant=variant, layer=layer, head=head)
        product = of_head["product_real"].values + 1j * of_head["product_imag"].values
        turning = np.isfinite(product)
        product = (product * of_head["variant_gain"].values)[turning]
        w = of_head["variant_inv_freq"].values[turning]
        for horizon, level in levels.items():
            expected = first_fall(product, w, float(of_head[level]), within=40, farthest=far)
            assert float(of_head[horizon]) == pytest.approx(expected, abs=1e-6)
        differ += float(of_head["horizon"]) != float(of_head["best_horizon"])
    assert differ > found["horizon"].size / 2


def test_copies_of_a_token_tie_where_nothing_rotates():
    """In layer 0 equal tokens have equal keys: no one of them scores above all others."""
    model = tiny("llama_gqa")
    tokens = torch.full((2, 40), 7)
    tokens[:, 0] = 3
    found = rl.reach(model, tokens, variants=("own", "nope"), rows="all").sel(layer=0)
    still, own = found.sel(variant="nope"), found.sel(variant="own")
    assert (still["win_share"] == 0).all()
    assert (still["unmoved_win_share"] == 0).all()
    assert (own["unmoved_win_share"] == 1).all()


def test_what_a_variant_leaves_unmoved():
    """All under the model's own rotation; where nothing rotates, what any distance leaves."""
    tokens = torch.from_numpy(random_tokens(sequences=4, length=40))
    variants = ("own", "p-rope:0.5", "nope")
    found = rl.reach(tiny("llama_gqa"), tokens, variants=variants, rows="all")
    unmoved = found["unmoved_win_share"]
    np.testing.assert_allclose(unmoved.sel(variant="own"), 1)
    still = found["win_share"].sel(variant="nope")
    same = np.broadcast_to(unmoved.sel(variant="nope").values[..., None], still.shape)
    np.testing.assert_allclose(still, same, atol=0.02)
    assert (unmoved.sel(variant="p-rope:0.5") < 1).any()


def test_some_heads_are_those_heads_of_all():
    tokens = torch.from_numpy(random_tokens(sequences=3, length=30))
    model = tiny("llama_gqa")
    every = rl.reach(model, tokens, rows=8, seed=-1)
    some = rl.reach(model, tokens, rows=8, seed=-1, heads="0.3,1.1,1.2")
    assert int(some["picked_distance"].notnull().sum()) == 3
    for layer, head in ((0, 3), (1, 1), (1, 2)):
        one = {"layer": layer, "head": head}
        xr.testing.assert_allclose(some.sel(one), every.sel(one), rtol=1e-5)


def test_copies_of_documents_tell_nothing_new():
    """Ten documents, each thrice, have the horizons and intervals of the ten."""
    model = tiny("llama_gqa")
    tokens = torch.from_numpy(random_tokens(sequences=10, length=24))
    options = {"variants": ("own",), "rows": "all", "distances": (0, 3000)}
    once = rl.reach(model, tokens, **options)
    thrice, of = tokens.repeat_interleave(3, dim=0), torch.arange(10).repeat_interleave(3)
    again = rl.reach(model, thrice, documents=of + 5, **options)
    for name in ("horizon", "horizon_low", "horizon_high"):
        np.testing.assert_allclose(again[name], once[name], rtol=1e-5)
    assert (again.attrs["documents"], once.attrs["documents"]) == (10, 0)
    alone = rl.reach(model, thrice, **options)  # stretches that cut through the documents
    assert not np.allclose(alone["horizon_low"], once["horizon_low"], rtol=1e-3)


def test_the_interval_is_the_percentile_bootstrap_of_scipy():
    """Of scipy's resampled horizons 2.5 % lie below the one end, 2.5 % above the other."""
    model, count, length, far = tiny("llama_gqa"), 10, 24, 3000
    tokens = torch.from_numpy(random_tokens(sequences=count, length=length))
    options = {"variants": ("own",), "rows": "all", "distances": (0, far)}
    found = rl.reach(model, tokens, resamples=4000, **options).squeeze("variant")
    alone = xr.concat(
        [rl.reach(model, one[None], resamples=0, **options) for one in tokens], "sequence"
    ).squeeze("variant")
    for layer, head in ((0, 2), (1, 1)):
        of_head = alone.sel(layer=layer, head=head)
        product = of_head["product_real"].values + 1j * of_head["product_imag"].values
        level = of_head["others_level"].values
        w = of_head["variant_inv_freq"].values[0]
        there = np.isfinite(product[0])

        def horizon(
            drawn: np.ndarray,
            product: np.ndarray = product[:, there],
            level: np.ndarray = level,
            w: np.ndarray = w[there],
        ) -> float:
            mean = product[drawn].mean(0), w, level[drawn].mean()
            return min(first_fall(*mean, within=length, farthest=far), 1e9)

        with np.errstate(all="ignore"):
            drawn = bootstrap(
                (np.arange(count),),
                horizon,
                n_resamples=1500,
                vectorized=False,
                method="percentile",
                rng=np.random.default_rng(1),
            ).bootstrap_distribution
        measured = found.sel(layer=layer, head=head)
        low, high = (min(float(measured[f"horizon_{end}"]), 1e9) for end in ("low", "high"))
        assert (drawn < low - 1e-6).mean() < 0.04
        assert (drawn <= low + 1e-6).mean() > 0.012
        assert (drawn > high + 1e-6).mean() < 0.04
        assert (drawn >= high - 1e-6).mean() > 0.012
