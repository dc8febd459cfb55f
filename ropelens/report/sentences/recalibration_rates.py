"""Sentences about the learning rates of a study of recalibrations."""

import numpy as np
import xarray as xr

from ropelens.comparison.recalibration_table import (
    orders_are_certain,
    repeated_variants,
    swaps_at_rates,
)
from ropelens.figures.formats import in_words, signed
from ropelens.train.recalibration_settings import CONTROL

NOT_REPEATED = (
    "The learning rate was the same for all variants, and no run with another rate is "
    "compared. Another rate can change the numbers, and their order."
)


def rates_sentence(comparison: xr.Dataset) -> str:
    """Whether another learning rate changes the order of the variants."""
    if "rate" not in comparison.sizes:  # saved before other rates were tried
        return NOT_REPEATED
    study_rate = float(comparison.attrs["learning_rate"])
    repeated = repeated_variants(comparison)
    variants = [variant for variant in repeated if variant != CONTROL]
    if not repeated:
        return NOT_REPEATED
    sentences = []
    for rate in comparison["rate"].values.tolist():
        if rate != study_rate and variants:
            sentences.append(_gaps_sentence(comparison, variants, rate))
    if variants:
        sentences.append(_order_sentence(comparison, repeated))
    sentences.append(_control_sentence(comparison, study_rate))
    return " ".join(sentences)


def _gaps_sentence(comparison: xr.Dataset, variants: list[str], rate: float) -> str:
    """The gaps with a learning rate, and the variants without a finished run."""
    words = _rate_in_words(rate, float(comparison.attrs["learning_rate"]))
    gaps = []
    missing = []
    for variant in variants:
        gap = comparison["rate_gap"].sel(variant=variant, rate=rate)
        if np.isfinite(gap):
            gaps.append(f"{variant} {_number(comparison, 'rate_gap', variant, rate)}")
        else:
            missing.append(variant)
    sentences = []
    if gaps:
        sentences.append(f"Gaps with {words}: {', '.join(gaps)} nats/token.")
    if missing:
        sentences.append(f"No finished run with {words}: {in_words(missing)}.")
    return " ".join(sentences)


def _rate_in_words(rate: float, study_rate: float) -> str:
    """The rate, and its share of the rate of the study."""
    factor = rate / study_rate
    share = f"{factor:.3g} times" if factor >= 1 else f"1/{1 / factor:.3g} of"
    return f"the learning rate {rate:.3g} ({share} the study's rate)"


def _number(comparison: xr.Dataset, name: str, variant: str, rate: float) -> str:
    at_place = comparison.sel(variant=variant, rate=rate)
    value = signed(float(at_place[name]))
    low = signed(float(at_place[f"{name}_low"]))
    high = signed(float(at_place[f"{name}_high"]))
    return f"{value} ({low} to {high})"


def _order_sentence(comparison: xr.Dataset, repeated: list[str]) -> str:
    """Whether the order of the repeated variants and the control depends on the rate."""
    swaps = swaps_at_rates(comparison)
    names = in_words(repeated)
    others = []
    for variant in comparison["variant"].values.tolist():
        if variant not in repeated:
            others.append(variant)
    rest = f" Not repeated: {in_words(others)}." if others else ""
    if not swaps:
        certainty = "" if orders_are_certain(comparison) else ", but it is not certain"
        return f"The order of {names} is the same with all compared rates{certainty}.{rest}"
    parts = []
    for swap in swaps:
        certainty = "" if swap.certain else ", which is not certain"
        parts.append(f"with {swap.rate:.3g}, {swap.better} is better than {swap.worse}")
        parts[-1] += certainty
    return f"The order of {names} changes: {'; '.join(parts)}.{rest}"


def _control_sentence(comparison: xr.Dataset, study_rate: float) -> str:
    """How the loss of the control changes with the rate."""
    parts = []
    for rate in comparison["rate"].values.tolist():
        if rate != study_rate:
            change = _number(comparison, "rate_loss_change", CONTROL, rate)
            parts.append(f"{change} with {rate:.3g}")
    return f"The control's loss changes by {in_words(parts)} nats/token."
