"""Colours, dashes and symbols of the groups of a comparison, and of RoPE variants."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import xarray as xr

from ropelens.comparison.pairs import group_names
from ropelens.figures import style

KNOWN_VARIANTS = (
    "p-rope-0.75",
    "p-rope-0.25",
    "p-rope-0.5",
    "p-rope-reversed-0.75",
    "nope",
)
VARIANT_SYMBOLS = (
    "square",
    "diamond",
    "triangle-up",
    "cross",
    "star",
    "pentagon",
    "x",
    "triangle-down",
    "hexagram",
    "hourglass",
    "bowtie",
)
DASHES = ("solid", "dash", "dot")


@dataclass(frozen=True)
class Look:
    """Marker symbol and plotly's line keywords of a group."""

    symbol: str
    line: dict[str, Any]


def group_looks(comparison: xr.Dataset) -> dict[str, Look]:
    """Look of each group. The baseline is first, and its line is grey and wide."""
    baseline, *others = group_names(comparison)
    line = {"color": style.MUTED, "dash": "solid", "width": 5}
    looks = {baseline: Look("circle", line)}
    looks.update(variant_looks(others))
    return looks


def variant_looks(names: Sequence[str]) -> dict[str, Look]:
    """Look of each variant: fixed for `KNOWN_VARIANTS`, the next unused look for others."""
    written = [name.replace(":", "-") for name in names]
    palette = _palette()
    unused = []
    for number, look in enumerate(palette):
        taken = number < len(KNOWN_VARIANTS) and KNOWN_VARIANTS[number] in written
        if not taken:
            unused.append(look)
    next_unused = itertools.cycle(unused)
    looks = {}
    for name, as_written in zip(names, written, strict=True):
        if as_written in KNOWN_VARIANTS:
            looks[name] = palette[KNOWN_VARIANTS.index(as_written)]
        else:
            looks[name] = next(next_unused)
    return looks


def _palette() -> list[Look]:
    """All colours solid, then all colours dashed, then dotted, with other symbols."""
    symbols = itertools.cycle(VARIANT_SYMBOLS)
    palette = []
    for dash, color in itertools.product(DASHES, style.VARIANT_COLORS):
        line = {"color": color, "dash": dash, "width": 2}
        palette.append(Look(next(symbols), line))
    return palette
