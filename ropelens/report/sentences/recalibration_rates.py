"""Sentences about the learning rates of a study of recalibrations."""

import itertools

import xarray as xr

from ropelens.comparison.recalibration_table import RateOrder, orders_at_rates
from ropelens.figures.formats import in_words, number, signed
from ropelens.train.recalibration_settings import CONTROL

NOT_REPEATED = (
    "The learning rate was the same for all variants, and no other rate was tried. Another "
    "rate can change the numbers, and their order."
)


def rates_sentence(comparison: xr.Dataset) -> str:
    """Whether another learning rate changes the order of the variants."""
    if "rate" not in comparison.sizes:  # saved before other rates were tried
        return NOT_REPEATED
    study_rate = float(comparison.attrs["learning_rate"])
    orders = orders_at_rates(comparison)
    of_study = next(order for order in orders if order.rate == study_rate)
    others = [order for order in orders if order.rate != study_rate]
    parts = []
    swaps = []
    for order in others:
        gaps = [
            f"{variant} {_gap(comparison, variant, order.rate)}"
            for variant in order.repeated
            if variant != CONTROL
        ]
        if gaps:
            parts.append(f"with {_rate(order.rate, study_rate)} {', '.join(gaps)}")
            swaps += _swaps(of_study, order)
    if not parts:
        return NOT_REPEATED
    words = f"Gaps with other learning rates: {'; '.join(parts)} nats/token."
    if swaps:
        words = f"{words} So the order of the variants changes: {'; '.join(swaps)}."
    else:
        words = f"{words} The order of the variants does not change."
    return f"{words} {_control_words(comparison, study_rate)}"


def _rate(rate: float, study_rate: float) -> str:
    """The rate, and its share of the rate of the study: "0.0003 (3 times)"."""
    factor = rate / study_rate
    share = f"{factor:.3g} times" if factor >= 1 else f"1/{1 / factor:.3g}"
    return f"{rate:.3g} ({share} the study's rate)"


def _gap(comparison: xr.Dataset, variant: str, rate: float) -> str:
    at_place = comparison.sel(variant=variant, rate=rate)
    gap = signed(float(at_place["rate_gap"]))
    low = signed(float(at_place["rate_gap_low"]))
    high = signed(float(at_place["rate_gap_high"]))
    return f"{gap} ({low} to {high})"


def _swaps(of_study: RateOrder, order: RateOrder) -> list[str]:
    """The pairs that change places at another rate, in words."""
    words = []
    for first, second in itertools.combinations(of_study.names, 2):
        # Only variants that were repeated can change their places.
        if order.names.index(first) > order.names.index(second):
            words.append(f"with {order.rate:.3g}, {second} is better than {first}")
    return words


def _control_words(comparison: xr.Dataset, study_rate: float) -> str:
    """Whether the study's rate is the best one for the control."""
    losses = comparison["rate_loss"].sel(variant=CONTROL).dropna("rate")
    parts = []
    for rate, loss in zip(losses["rate"].values, losses.values, strict=True):
        parts.append(f"{number(float(loss), '.3f')} with {rate:.3g}")
    best = float(losses["rate"].values[losses.values.argmin()])
    words = "is the best of these rates for the control"
    if best != study_rate:
        words = f"is not the best for the control, which prefers {best:.3g}"
    return f"The study's rate {words}: its loss is {in_words(parts)}."
