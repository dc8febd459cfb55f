"""Numbers as figures, pages and sentences write them."""

from __future__ import annotations

import math

import numpy as np

NOTHING = "–"
ROUNDED_AWAY = 5e-4
"""Below this, three decimals are all 0."""
SMALLEST = 1e-6
"""Changes below this are the rounding of float32 losses."""


def number(value: float, form: str = ".2f") -> str:
    """`value` in a format, with a true minus sign; `NOTHING` where there is no number."""
    if math.isnan(value):
        return NOTHING
    return f"{value:{form}}".replace("-", "−") if math.isfinite(value) else "∞"


def signed(value: float) -> str:
    """Three decimals with a sign, or one digit that is not 0; `NOTHING` without a number."""
    if not math.isfinite(value):
        return NOTHING
    if abs(value) >= ROUNDED_AWAY or value == 0:
        return number(value, "+.3f")
    if abs(value) < SMALLEST:
        return "±0"
    digit = np.format_float_positional(
        value, precision=1, fractional=False, sign=True, trim="-"
    )
    return digit.replace("-", "−")


def change_and_interval(value: float, low: float, high: float) -> tuple[str, str]:
    """A change and the ends of its interval, `NOTHING` without one, all to one precision.

    Three decimals; where these would all be 0, `signed`.
    """
    known = [abs(v) for v in (value, low, high) if math.isfinite(v)]
    coarse = max(known, default=0) >= ROUNDED_AWAY
    told = [
        number(v, "+.3f") if coarse and math.isfinite(v) else signed(v)
        for v in (value, low, high)
    ]
    return told[0], f"{told[1]} to {told[2]}" if math.isfinite(low) else NOTHING


def mean_count(value: float) -> str:
    """A number of heads, the mean over some models: one decimal, none where it is whole."""
    return f"{value:.1f}".removesuffix(".0")


def short_count(value: float) -> str:
    """Three significant digits at most: 1000 as "1k", 2_512_345 as "2.51M", infinity as "∞"."""
    if math.isinf(value):
        return "∞"
    value = float(f"{value:.3g}")
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"
