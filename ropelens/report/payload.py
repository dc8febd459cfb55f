"""Payload of the script of a page: figures and arrays of all heads."""

from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.budget.labels import DOUBTS
from ropelens.figures import style
from ropelens.figures.attention import farthest_distance
from ropelens.figures.follow import FOLLOWS
from ropelens.figures.head_truncation import head_steps, kinds_of, rotating_shares
from ropelens.figures.inputs import bit_shares, is_true, kv_heads, numbers
from ropelens.figures.kernel import kernel_arrays
from ropelens.figures.planes import wavelength_positions
from ropelens.figures.reach import reach_arrays
from ropelens.report.catalog import PageFigure, bare
from ropelens.report.excerpt_payload import excerpt_payload
from ropelens.report.render import packed
from ropelens.report.tables import head_columns, model_name

HEAD_DIMS = ("layer", "head")
PLANE_ARRAYS = (
    "selectivity_keys",
    "selectivity_sink",
    "q_norm",
    "q_coherence",
    "k_norm",
    "k_coherence",
)
WITHOUT_LEGEND = ("map", "follow", "claim")


def build_payload(
    profile: xr.Dataset,
    heads: pd.DataFrame,
    figures: Mapping[PageFigure, go.Figure],
    *,
    selected: tuple[int, int],
    truncation: xr.Dataset | None = None,
    reach: xr.Dataset | None = None,
) -> dict[str, Any]:
    """Payload of the page of a profile."""
    payload = model_payload(profile, heads, figures)
    payload["name"] = model_name(profile)
    payload["selected"] = selected
    payload["templates"] = page_templates()
    payload["labelOrder"] = style.LABEL_ORDER
    payload["colors"] = style.COLORS
    payload["symbols"] = style.SYMBOLS
    payload["farthest"] = [
        farthest_distance(profile, layer) for layer in range(profile.sizes["layer"])
    ]
    if truncation is not None:
        payload["arrays"].update(_packed_by_head(head_steps(truncation)))
        payload["sweep"] = {
            kind: rotating_shares(truncation, kind).tolist()
            for kind in kinds_of(truncation)
        }
    if reach is not None:
        payload["arrays"].update(_packed_by_head(reach_arrays(reach)))
        payload["reach"] = {
            "variants": reach["variant"].values.tolist(),
            "distances": reach["run_distance"].values.tolist(),
        }
    return payload


def model_payload(
    profile: xr.Dataset, heads: pd.DataFrame, figures: Mapping[PageFigure, go.Figure]
) -> dict[str, Any]:
    """Arrays, excerpts and figures of one model."""
    rows = np.full((profile.sizes["layer"], profile.sizes["head"]), -1)
    layer = heads["layer"].to_numpy(int)
    head = heads["head"].to_numpy(int)
    rows[layer, head] = np.arange(len(heads))
    columns = [column.name for column in head_columns(profile, heads)]
    columns += [name for name in FOLLOWS if name in heads]
    doubts = {}
    for name in DOUBTS:
        doubts[name] = np.flatnonzero(is_true(heads, name)).tolist()
    on_page = {}
    for row, figure in figures.items():
        on_page[row.name] = _on_page(row, figure, profile)
    return {
        "sizes": {dim: profile.sizes[dim] for dim in ("layer", "head", "kv_head")},
        "rows": rows.tolist(),
        "kvHeads": kv_heads(profile).tolist(),
        "labels": heads["label"].tolist(),
        "doubts": doubts,
        "columns": {name: packed(numbers(heads, name)) for name in columns},
        "shares": packed(bit_shares(heads)),
        **excerpt_payload(profile),
        "arrays": packed_head_arrays(profile),
        "figures": on_page,
    }


def _on_page(row: PageFigure, figure: go.Figure, profile: xr.Dataset) -> dict[str, Any]:
    layout: dict[str, Any] = {}
    layout["margin_t"] = 24
    layout["showlegend"] = row.name not in WITHOUT_LEGEND
    if row.name == "map":
        layout["height"] = max(420, 13 * profile.sizes["layer"] + 90)  # pixels
    layout.update(row.layout)
    if row.section == "head":  # the script fills heat maps and reports missing data
        notes = [
            note for note in figure.layout.annotations if note.name != style.NO_DATA
        ]
        figure = go.Figure(figure).update_layout(annotations=notes)
        figure.update_traces({"z": None, "customdata": None}, {"type": "heatmap"})
    return bare(figure, **layout)


def packed_head_arrays(profile: xr.Dataset) -> dict[str, dict]:
    """Kernels and numbers of planes of all heads, and the wavelengths of all layers."""
    arrays = _packed_by_head(kernel_arrays(profile))
    for name in PLANE_ARRAYS:
        dims = ("layer", "kv_head" if name.startswith("k_") else "head")
        values = profile[name].transpose(*dims, "frequency").values
        arrays[name] = packed(values, dims=dims)
    wavelength = profile["wavelength"].values
    positions = wavelength_positions(wavelength)
    arrays["wavelength"] = packed(wavelength, dims=("layer",))
    arrays["wavelength_position"] = packed(positions, dims=("layer",))
    return arrays


def _packed_by_head(arrays: Mapping[str, np.ndarray]) -> dict[str, dict]:
    """Packed arrays [layer, head, ...] by name."""
    return {name: packed(values, dims=HEAD_DIMS) for name, values in arrays.items()}


def page_templates() -> dict[str, dict]:
    return {
        theme: style.template(theme).to_plotly_json() for theme in get_args(style.Theme)
    }
