"""Numbers and token strings as figures, pages and sentences write them.

Token strings come from a tokenizer file, so from anyone. plotly reads a little HTML in every
label ("<b>", "<a href=...>", "&lt;") and hands "$...$" to MathJax where a notebook has it;
`plotly_text` takes that meaning away.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from unicodedata import category

import numpy as np

NOTHING = "–"  # what stands where there is no number
ROUNDED_AWAY = 5e-4  # below this, three decimals are all 0

VISIBLE = {" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥"}
INVISIBLE = {"Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp", "Zs"}
ENTITIES = str.maketrans({"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;"})


def number(value: float, form: str = ".2f") -> str:
    """`value` in a format, with a true minus sign; `NOTHING` for NaN."""
    if math.isnan(value):
        return NOTHING
    return f"{value:{form}}".replace("-", "−") if math.isfinite(value) else "∞"


def signed(value: float, form: str = "+.3f") -> str:
    """`value` in a format, or its first digit that is not 0; `NOTHING` if not finite."""
    if not math.isfinite(value):
        return NOTHING
    if abs(value) >= ROUNDED_AWAY or value == 0:
        return number(value, form)
    if abs(value) < 1e-6:  # the rounding of float32 losses
        return "±0"
    digit = np.format_float_positional(value, 1, fractional=False, sign="+" in form, trim="-")
    return digit.replace("-", "−")


def change_and_interval(value: float, low: float, high: float) -> tuple[str, str]:
    """A change and its interval (`NOTHING` without one), all three to the same precision.

    Three decimals; `signed` where these would all be 0.
    """
    known = [abs(v) for v in (value, low, high) if math.isfinite(v)]
    coarse = max(known, default=0) >= ROUNDED_AWAY
    texts = [
        number(v, "+.3f") if coarse and math.isfinite(v) else signed(v)
        for v in (value, low, high)
    ]
    return texts[0], f"{texts[1]} to {texts[2]}" if math.isfinite(low) else NOTHING


def mean_count(value: float) -> str:
    """A mean number of heads: one decimal, or none where the mean is whole."""
    return number(value, ".1f").removesuffix(".0")


def short_count(value: float) -> str:
    """Three significant digits at most: 1000 as "1k", 2_512_345 as "2.51M", infinity as "∞"."""
    if not math.isfinite(value):
        return number(value)
    value = float(f"{value:.3g}")
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{suffix}"
    return f"{value:g}"


def visible_token(token: str, *, longest: int = 24) -> str:
    """`token` with white space, control and direction marks shown as characters."""
    shown = "".join(
        VISIBLE.get(one) or (f"\\u{ord(one):04x}" if category(one) in INVISIBLE else one)
        for one in token
    )
    if not shown:
        return "∅"
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def plotly_text(text: str) -> str:
    """`text` so that plotly shows it letter by letter, in labels, ticks and hovers."""
    return text.translate(ENTITIES)


def plural(count: int, noun: str) -> str:
    """ "1 head", "2 heads", "1,024 heads"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def in_words(parts: Sequence[object]) -> str:
    """["a", "b", "c"] as "a, b and c"."""
    *some, end = map(str, parts)
    return f"{', '.join(some)} and {end}" if some else end


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "0–2 and 5"; `numbers` rise."""
    firsts = [n for n in numbers if n - 1 not in numbers]
    runs = zip(firsts, [n for n in numbers if n + 1 not in numbers], strict=True)
    return in_words([f"{a}" if a == b else f"{a}–{b}" for a, b in runs])
