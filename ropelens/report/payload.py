"""What the page's script is given: the figures, and every head's arrays in few bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures.attention import farthest
from ropelens.figures.inputs import kv_heads, numbers
from ropelens.figures.kernel import kernel_arrays
from ropelens.figures.norms import PANELS
from ropelens.figures.style import COLORS, LABELS, PAPER, SIGNS, SYMBOLS, template
from ropelens.figures.triangle import bit_shares
from ropelens.figures.wavelengths import common_columns, wavelength_positions
from ropelens.report.inside import excerpt_payload
from ropelens.report.packed import packed
from ropelens.report.page_figures import BESIDE, PageFigure, bare
from ropelens.report.table import shown_columns

OF_HEAD = ("selectivity_keys", "selectivity_sink", "q_norm", "q_coherence")
OF_KV_HEAD = ("k_norm", "k_coherence")


def build_payload(
    profile: xr.Dataset,
    heads: pd.DataFrame,
    figures: Mapping[PageFigure, go.Figure],
    *,
    selected: tuple[int, int],
) -> dict[str, Any]:
    """Everything the script shows, ready for JSON; `heads` in the table's order."""
    return {
        **model_payload(profile, heads, figures),
        "selected": list(selected),
        "colors": COLORS,
        "glyphs": SIGNS,
        "symbols": SYMBOLS,
        "labelOrder": list(LABELS),
        "normColumns": common_columns(profile["wavelength"].values)[1].tolist(),
        "normNames": list(PANELS),
        "farthest": [farthest(profile, layer) for layer in range(profile.sizes["layer"])],
        "pinned": list(BESIDE),
        "templates": {theme: page_template(theme) for theme in ("light", "dark")},
    }


def model_payload(
    profile: xr.Dataset, heads: pd.DataFrame, figures: Mapping[PageFigure, go.Figure]
) -> dict[str, Any]:
    """What the script shows of the heads of one model, and in which figures."""
    rows = np.full((profile.sizes["layer"], profile.sizes["head"]), -1)
    rows[heads["layer"].to_numpy(int), heads["head"].to_numpy(int)] = np.arange(len(heads))
    return {
        "sizes": {name: profile.sizes[name] for name in ("layer", "head", "kv_head")},
        "rows": rows.tolist(),
        "kvHeads": kv_heads(profile).tolist(),
        "labels": heads["label"].tolist(),
        "columns": {
            c.name: packed(numbers(heads, c.name)) for c in shown_columns(profile, heads)
        },
        "shares": packed(bit_shares(heads)),
        **excerpt_payload(profile),
        "arrays": head_arrays(profile),
        "figures": {
            row.name: unfilled(row, bare(figure, **(page_layout(row, profile) | row.layout)))
            for row, figure in figures.items()
        },
    }


def page_layout(row: PageFigure, profile: xr.Dataset) -> dict[str, Any]:
    """What the page lays out otherwise than the figure does.

    Views of all heads share the legend in the page's text; a map has 13 pixels a layer where
    there are many.
    """
    if row.name == "map":
        return {
            "margin_t": 24,
            "showlegend": False,
            "height": max(420, 13 * profile.sizes["layer"] + 90),
        }
    return {"margin_t": 24, "showlegend": row.name not in ("triangle", "claim")}


def unfilled(row: PageFigure, figure: dict[str, Any]) -> dict[str, Any]:
    """The figure of an excerpt without what the script fills in."""
    if row.name in ("attention", "pair"):
        for trace in figure["data"]:
            for name in {"x", "y", "z", "width", "customdata"} & set(trace):
                trace[name] = []
    return figure


def head_arrays(profile: xr.Dataset) -> dict[str, dict]:
    """Every head's arrays by name: `dims` says which indices choose a head's part."""
    kernels = {
        name: packed(values, dims=("layer", "head"))
        for name, values in kernel_arrays(profile).items()
    }
    planes = {
        name: packed(
            profile[name].transpose("layer", dim, "frequency").values, dims=("layer", dim)
        )
        for names, dim in ((OF_HEAD, "head"), (OF_KV_HEAD, "kv_head"))
        for name in names
    }
    wavelength = profile["wavelength"].values
    return {
        **kernels,
        **planes,
        "wavelength": packed(wavelength, dims=("layer",)),
        "wavelength_position": packed(wavelength_positions(wavelength), dims=("layer",)),
    }


def page_template(theme: str) -> dict:
    """The template, on the page's own paper instead of a figure's."""
    look = template("dark" if theme == "dark" else "light")
    look.layout.paper_bgcolor = "rgba(0,0,0,0)"
    look.layout.hoverlabel.bgcolor = PAPER["dark" if theme == "dark" else "light"]
    return look.to_plotly_json()
