"""Numbers and token strings in the form that figures, pages and sentences show."""

import math
from collections.abc import Sequence
from unicodedata import category

import numpy as np

from ropelens.intervals import ROUNDING_ERROR

NO_NUMBER = "–"
ROUNDED_AWAY = 5e-4  # smaller numbers have three decimals of 0

VISIBLE = {" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥"}
INVISIBLE = {"Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp", "Zs"}
ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;"})


def number(value: float, form: str = ".2f") -> str:
    """Return `value` in the format `form`, with a true minus sign; `NO_NUMBER` for NaN."""
    if math.isnan(value):
        return NO_NUMBER
    return f"{value:{form}}".replace("-", "−") if math.isfinite(value) else "∞"


def signed(value: float, form: str = "+.3f") -> str:
    """Return `value` in the format `form`; a tiny number by its first digit that is not 0."""
    if not math.isfinite(value):
        return NO_NUMBER
    if abs(value) >= ROUNDED_AWAY or value == 0:
        return number(value, form)
    if abs(value) < ROUNDING_ERROR:
        return "±0"
    digit = np.format_float_positional(
        value, 1, fractional=False, sign="+" in form, trim="-"
    )
    return digit.replace("-", "−")


def change_and_interval(value: float, low: float, high: float) -> tuple[str, str]:
    """Return a change and its interval with three decimals, or `signed` if all would be 0."""
    finite = [abs(x) for x in (value, low, high) if math.isfinite(x)]
    if max(finite, default=0) >= ROUNDED_AWAY:
        texts = [_or_no_number(x) for x in (value, low, high)]
    else:
        texts = [signed(x) for x in (value, low, high)]
    change, *ends = texts
    return change, " to ".join(ends) if math.isfinite(low) else NO_NUMBER


def _or_no_number(value: float) -> str:
    """`value` with three decimals; `NO_NUMBER` if it is not finite."""
    return number(value, "+.3f") if math.isfinite(value) else NO_NUMBER


def mean_count(value: float) -> str:
    """Return a mean count with one decimal, or without decimals if it is an integer."""
    return number(value, ".1f").removesuffix(".0")


def short_count(value: float) -> str:
    """Return up to three significant digits: "1k", "2.51M" for 2_512_345, "∞"."""
    if not math.isfinite(value):
        return number(value)
    value = float(f"{value:.3g}")
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"


def visible_token(token: str, *, longest: int = 24) -> str:
    """Return `token` with visible white space, control characters and direction marks."""
    shown = "".join(_visible_character(character) for character in token)
    if len(shown) > longest:
        shown = shown[: longest - 1] + "…"
    return shown or "∅"


def _visible_character(character: str) -> str:
    if character in VISIBLE:
        return VISIBLE[character]
    if category(character) in INVISIBLE:
        return f"\\u{ord(character):04x}"
    return character


def plotly_text(text: str) -> str:
    """Escape HTML and "$...$" (MathJax) in `text`, which may come from a tokenizer file."""
    return text.translate(ENTITIES)


def plural(count: int, noun: str) -> str:
    """Return "1 head", "2 heads" or "1,024 heads"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def in_words(parts: Sequence[object]) -> str:
    """Return ["a", "b", "c"] as "a, b and c"."""
    *start, end = map(str, parts)
    return f"{', '.join(start)} and {end}" if start else end


def ranges(numbers: Sequence[int]) -> str:
    """Return ascending integers as ranges: [0, 1, 2, 5] as "0–2 and 5"."""
    firsts = [number for number in numbers if number - 1 not in numbers]
    lasts = [number for number in numbers if number + 1 not in numbers]
    parts = []
    for first, last in zip(firsts, lasts, strict=True):
        parts.append(f"{first}" if first == last else f"{first}–{last}")
    return in_words(parts)
