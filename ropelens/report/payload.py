"""What the page's script is given: the figures, and every head's arrays in few bytes."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures.attention import query_positions
from ropelens.figures.inputs import kv_heads, numbers
from ropelens.figures.kernel import kernel_arrays
from ropelens.figures.norms import PANELS
from ropelens.figures.style import COLORS, LABELS, PAPER, template
from ropelens.figures.text import visible_token
from ropelens.figures.triangle import bit_shares
from ropelens.figures.wavelengths import common_columns, wavelength_positions
from ropelens.report.page_figures import PageFigure, bare
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
    rows = np.full((profile.sizes["layer"], profile.sizes["head"]), -1)
    rows[heads["layer"].to_numpy(int), heads["head"].to_numpy(int)] = np.arange(len(heads))
    return {
        "selected": list(selected),
        "sizes": {name: profile.sizes[name] for name in ("layer", "head", "kv_head")},
        "rows": rows.tolist(),
        "kvHeads": kv_heads(profile).tolist(),
        "labels": heads["label"].tolist(),
        "colors": COLORS,
        "labelOrder": list(LABELS),
        "columns": {c.name: packed(numbers(heads, c.name)) for c in shown_columns(heads)},
        "shares": packed(bit_shares(heads)),
        "tokens": [visible_token(str(token)) for token in profile["excerpt_token"].values],
        "queries": query_positions(profile).tolist(),
        "normColumns": common_columns(profile["wavelength"].values)[1].tolist(),
        "normNames": list(PANELS),
        "arrays": head_arrays(profile),
        "figures": {
            row.name: bare(figure, **(page_layout(row, profile) | row.layout))
            for row, figure in figures.items()
        },
        "templates": {theme: page_template(theme) for theme in ("light", "dark")},
    }


def page_layout(row: PageFigure, profile: xr.Dataset) -> dict[str, Any]:
    """What the page lays out otherwise than the figure does.

    Figures of all heads stand side by side, so they are of one height (13 pixels a layer where
    there are many) and share the legend in the page's text.
    """
    if row.section != "heads":
        return {"margin_t": 40 if row.section == "first" else 24}
    height = max(360, 13 * profile.sizes["layer"] + 90)
    return {"margin_t": 24, "showlegend": False, "height": height}


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
        "attention": packed(attention_bytes(profile), dims=("layer", "head")),
    }


def attention_bytes(profile: xr.Dataset) -> np.ndarray:
    """The excerpt's attention in a byte a cell, [layer, head, cell] uint8.

    The byte is 255 times the square root of the weight, so small weights keep their digits
    (a step is at most 0.8% at weight 1 and far less below). Cells are the ones a query may
    see, row after row: half the square.
    """
    weights = profile["excerpt_attention"].transpose(
        "layer", "head", "excerpt_query", "excerpt_key"
    )
    queries = query_positions(profile)
    seen = np.arange(profile.sizes["excerpt_key"])[None] <= queries[:, None]
    root = np.sqrt(np.nan_to_num(weights.values[..., seen]).clip(0, 1))
    return np.round(255 * root).astype(np.uint8)


def packed(values: np.ndarray, *, dims: tuple[str, ...] = ()) -> dict[str, object]:
    """An array as base64, little-endian: uint8 as it is, all else as float32."""
    dtype = np.dtype(np.uint8 if values.dtype == np.uint8 else "<f4")
    data = np.ascontiguousarray(values, dtype=dtype)
    return {
        "dtype": dtype.name,
        "shape": list(data.shape),
        "dims": list(dims),
        "data": base64.b64encode(data.tobytes()).decode(),
    }


def page_template(theme: str) -> dict:
    """The template, on the page's own paper instead of a figure's."""
    look = template("dark" if theme == "dark" else "light")
    look.layout.paper_bgcolor = "rgba(0,0,0,0)"
    look.layout.hoverlabel.bgcolor = PAPER["dark" if theme == "dark" else "light"]
    return look.to_plotly_json()
