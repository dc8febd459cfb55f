"""One look for each group of a comparison, the same in all its figures."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xarray as xr

from ropelens.comparison.pairs import group_names
from ropelens.figures.style import MUTED
from ropelens.figures.text import plotly_text

COLORS = ("#6b66cc", "#c20074", "#479dc2", "#cc7566", "#a90aff", "#e60000")
"""Of variants: apart from those of labels, and from each other also for colour-blind eyes."""

KNOWN = ("p-rope-0.75", "p-rope-0.25", "p-rope-0.5", "p-rope-reversed-0.75", "nope")
"""Variants that look the same on every page: the first has the first colour, and so on."""

SYMBOLS = ("square", "diamond", "triangle-up", "cross", "star", "pentagon")
DASHES = ("solid", "dash", "dot")


@dataclass(frozen=True)
class Look:
    """How a group is drawn: its colour, marker and line."""

    color: str
    symbol: str
    dash: str
    width: float = 2

    @property
    def line(self) -> dict[str, object]:
        """As plotly's `line`."""
        return {"color": self.color, "dash": self.dash, "width": self.width}


def group_line(group: str, look: Look, values: xr.DataArray) -> dict[str, Any]:
    """Keywords of the scatter that draws a group's `values`, over `entry` and one axis more.

    The mean over `entry`; whiskers from the lowest entry to the highest, where there are some.
    """
    mean = values.mean("entry")
    return {
        "y": mean.values,
        "error_y": {
            "type": "data",
            "array": (values.max("entry") - mean).values,
            "arrayminus": (mean - values.min("entry")).values,
            "thickness": 1,
            "width": 2,
            "visible": values.sizes["entry"] > 1,
        },
        "name": plotly_text(group),
        "legendgroup": group,
        "mode": "lines+markers",
        "line": look.line,
    }


def looks(comparison: xr.Dataset) -> Mapping[str, Look]:
    """The look of each group; the first, the baseline, is grey, and shows under the others."""
    first, *rest = group_names(comparison)
    return {first: Look(MUTED, "circle", "solid", width=5)} | variant_looks(rest)


def variant_looks(names: Sequence[str]) -> dict[str, Look]:
    """The look of each variant, "p-rope:0.75" or "p-rope-0.75"; of others what is left."""
    every = [
        Look(color, symbol, dash)
        for dash in DASHES
        for color, symbol in zip(COLORS, SYMBOLS, strict=True)
    ]
    written = {name: name.replace(":", "-") for name in names}
    taken = {KNOWN.index(known) for known in written.values() if known in KNOWN}
    left = itertools.cycle(sorted(set(range(len(every))) - taken))
    return {
        name: every[KNOWN.index(known) if known in KNOWN else next(left)]
        for name, known in written.items()
    }
