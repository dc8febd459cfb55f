"""Positional heads use short wavelengths, semantic ones long: a verdict, and what it rests on.

The rank correlation, over heads, of the share that the offset explains with the mean log
wavelength, beside that of surrogates (see surrogates.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jaxtyping import Float
from scipy import stats

from ropelens.intervals import jackknife_half

LEAST_HEADS = 3  # heads of either sort that a verdict takes: mostly by the offset, or not
TAIL = 0.025  # share of the surrogates beyond either bound


def judge(
    offset_fraction: Float[np.ndarray, "draw layer head"],
    log_wavelength: Float[np.ndarray, "draw layer head"],
) -> dict[str, Any]:
    """The claim's verdict, from both numbers of the model (draw 0) and of its surrogates.

    It **holds** where the model correlates more negatively than 97.5 % of its surrogates, is
    **contradicted** where less than 97.5 %, and **unresolved** between; why it is **not
    testable** is said. Heads that are NaN do not count.

    `low` to `high` is the 95 % interval of the rank correlation, over layers; `null_low` and
    `null_high` bound 95 % of the surrogates; `p_value` is the share of the model and its
    surrogates that correlate as negatively as the model or more.
    """
    rho = correlations(offset_fraction, log_wavelength)
    null = rho[1:][np.isfinite(rho[1:])]
    bounds = _bounds(null)
    counts = np.isfinite(offset_fraction[0]) & np.isfinite(log_wavelength[0])
    verdict, why = _verdict(rho[0], null, bounds, offset_fraction[0][counts])
    p_value = (1 + (null <= rho[0]).sum()) / (1 + len(null))
    low, high = _interval(offset_fraction[0], log_wavelength[0], rho[0])
    return {
        "rank_correlation": float(rho[0]),
        "low": low,
        "high": high,
        "heads": int(counts.sum()),
        "null_median": float(np.median(null)) if len(null) else np.nan,
        "null_low": bounds[0],
        "null_high": bounds[1],
        "null_draws": len(null),
        "p_value": float(p_value) if np.isfinite(rho[0]) else np.nan,
        "verdict": verdict,
        "why": why,
    }


def correlations(
    offset_fraction: Float[np.ndarray, "draw layer head"],
    log_wavelength: Float[np.ndarray, "draw layer head"],
) -> Float[np.ndarray, " draw"]:
    """The rank correlation of both numbers in each draw, over the heads that count."""
    both = zip(offset_fraction, log_wavelength, strict=True)
    return np.array([rank_correlation(x, y) for x, y in both])


def rank_correlation(x: Float[np.ndarray, "*head"], y: Float[np.ndarray, "*head"]) -> float:
    """Spearman's, over heads that have both; NaN for fewer than 4, or where all are alike."""
    known = np.isfinite(x) & np.isfinite(y)
    x, y = x[known], y[known]
    if len(x) < 4 or np.ptp(x) == 0 or np.ptp(y) == 0:
        return np.nan
    return float(np.corrcoef(stats.rankdata(x), stats.rankdata(y))[0, 1])


def _bounds(null: Float[np.ndarray, " draw"]) -> tuple[float, float]:
    """The surrogates beyond which, on either side, lie as many as a test at 2.5 % allows.

    NaN for fewer than 39, where not even the most extreme one is so rare.
    """
    beyond, in_order = int((1 + len(null)) * TAIL), np.sort(null)
    if beyond == 0:
        return np.nan, np.nan
    return float(in_order[beyond - 1]), float(in_order[-beyond])


def _verdict(
    rho: float,
    null: Float[np.ndarray, " draw"],
    bounds: tuple[float, float],
    fraction: Float[np.ndarray, " head"],
) -> tuple[str, str]:
    if not len(fraction):
        return "not testable", "no head picks keys through planes that rotate"
    more = int((fraction > 0.5).sum())
    if min(more, len(fraction) - more) < LEAST_HEADS:
        return "not testable", (
            f"heads whose choice the offset explains by more than half: {more}, by less: "
            f"{len(fraction) - more}; it takes {LEAST_HEADS} of each"
        )
    low, high = bounds
    if np.isfinite(rho) and not np.isfinite(low):
        return "not testable", f"{len(null)} surrogates have a correlation; it takes 39"
    if not np.isfinite(rho) or np.ptp(null) == 0:
        return "not testable", "the order of the frequencies makes no difference"
    beside = f"{rho:+.2f} beside {low:+.2f} to {high:+.2f} of {len(null)} surrogates"
    random = "negative than frequencies in a random order give"
    if rho < low:
        return "holds", f"{beside}: more {random}"
    if rho > high:
        return "contradicted", f"{beside}: less {random}"
    return "unresolved", f"{beside}: frequencies in a random order give as much"


def _interval(
    fraction: Float[np.ndarray, "layer head"],
    wavelength: Float[np.ndarray, "layer head"],
    rho: float,
) -> tuple[float, float]:
    """The ends of the 95 % interval of `rho`, that of all heads; NaN for one layer.

    Student's t around Fisher's z with the jackknife's standard error: heads of a layer are not
    independent, so each layer is left out in turn. Heads in perfect order count as half a swap
    of neighbours away from it.
    """
    counts = np.isfinite(fraction) & np.isfinite(wavelength)
    layers, size = np.flatnonzero(counts.any(1)), counts.sum()
    if len(layers) < 2:
        return np.nan, np.nan
    most = 1 - 6 / (size * (size**2 - 1))
    rest = [np.delete(np.arange(len(counts)), layer) for layer in layers]
    without = correlations(fraction[rest], wavelength[rest])
    z, *others = np.arctanh(np.clip([rho, *without], -most, most))
    half = jackknife_half(np.array(others))
    low, high = np.tanh([z - half, z + half])
    return float(min(low, rho)), float(max(high, rho))
