"""One look for each group of a comparison, the same in all its figures."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import xarray as xr

from ropelens.comparison.pairs import group_names
from ropelens.figures.style import MUTED
from ropelens.figures.text import plotly_text

COLORS = ("#0f83c4", "#d9700f", "#12946f", "#b0579b", "#a88a00", "#7a6fd0")
"""Apart for colour-blind eyes on a white and on a near-black page; after Okabe and Ito."""

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
    styles = itertools.cycle(
        (color, symbol, dash)
        for dash in DASHES
        for color, symbol in zip(COLORS, SYMBOLS, strict=True)
    )
    return {first: Look(MUTED, "circle", "solid", width=5)} | {
        group: Look(*style) for group, style in zip(rest, styles, strict=False)
    }
