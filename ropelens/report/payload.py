"""Payload of the script of the page of a profile: figures, arrays of heads, and excerpts."""

from collections.abc import Sequence
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
from ropelens.report.columns import head_columns
from ropelens.report.drawing import DrawnFigure, ProfileFigures, bare
from ropelens.report.excerpt_payload import excerpt_payload
from ropelens.report.render import packed
from ropelens.report.run_facts import model_name

HEAD_DIMS = ("layer", "head")
QUERY_ARRAYS = ("selectivity_keys", "selectivity_sink", "q_norm", "q_coherence")
KEY_ARRAYS = ("k_norm", "k_coherence")


def build_payload(
    profile: xr.Dataset,
    heads: pd.DataFrame,
    figures: ProfileFigures,
    *,
    selected: tuple[int, int],
    truncation: xr.Dataset | None = None,
    reach: xr.Dataset | None = None,
) -> dict[str, Any]:
    """Payload of the page of a profile."""
    layers = profile.sizes["layer"]
    payload = {
        "name": model_name(profile),
        "selected": selected,
        "sizes": {name: profile.sizes[name] for name in ("layer", "head", "kv_head")},
        "rows": _rows_of_heads(profile, heads).tolist(),
        "kvHeads": kv_heads(profile).tolist(),
        "farthest": [farthest_distance(profile, layer) for layer in range(layers)],
        "labels": heads["label"].tolist(),
        "labelOrder": style.LABEL_ORDER,
        "doubts": {name: _rows_where(heads, name) for name in DOUBTS},
        "colors": style.COLORS,
        "symbols": style.SYMBOLS,
        "columns": _packed_columns(profile, heads),
        "shares": packed(bit_shares(heads)),
        **excerpt_payload(profile),
        "arrays": packed_head_arrays(profile),
        "figures": _figures_on_page(figures, layers),
        "templates": page_templates(),
    }
    if truncation is not None:
        payload["sweep"] = {
            kind: rotating_shares(truncation, kind).tolist()
            for kind in kinds_of(truncation)
        }
        steps = head_steps(truncation)
        payload["arrays"].update(_by_head(steps))
    if reach is not None:
        payload["reach"] = {
            "variants": reach["variant"].values.tolist(),
            "distances": reach["run_distance"].values.tolist(),
        }
        shares = reach_arrays(reach)
        payload["arrays"].update(_by_head(shares))
    return payload


def _rows_of_heads(profile: xr.Dataset, heads: pd.DataFrame) -> np.ndarray:
    """The row of each head in the table [layer, head], or -1."""
    rows = np.full((profile.sizes["layer"], profile.sizes["head"]), -1)
    layer = heads["layer"].to_numpy(int)
    head = heads["head"].to_numpy(int)
    rows[layer, head] = np.arange(len(heads))
    return rows


def _rows_where(heads: pd.DataFrame, name: str) -> list[int]:
    return np.flatnonzero(is_true(heads, name)).tolist()


def _packed_columns(profile: xr.Dataset, heads: pd.DataFrame) -> dict[str, Any]:
    """The numbers of the table of heads, by column."""
    names = [column.name for column in head_columns(profile, heads)]
    names += [name for name in FOLLOWS if name in heads]
    return {name: packed(numbers(heads, name)) for name in names}


def packed_head_arrays(profile: xr.Dataset) -> dict[str, dict[str, object]]:
    """The arrays that the figures of a head name."""
    wavelength = profile["wavelength"].values
    positions = wavelength_positions(wavelength)
    return {
        **_by_head(kernel_arrays(profile)),
        **_planes(profile, QUERY_ARRAYS, HEAD_DIMS),
        **_planes(profile, KEY_ARRAYS, ("layer", "kv_head")),
        "wavelength": packed(wavelength, dims=("layer",)),
        "wavelength_position": packed(positions, dims=("layer",)),
    }


def _by_head(arrays: dict[str, np.ndarray]) -> dict[str, dict[str, object]]:
    return {name: packed(array, dims=HEAD_DIMS) for name, array in arrays.items()}


def _planes(
    profile: xr.Dataset, names: Sequence[str], dims: tuple[str, str]
) -> dict[str, dict[str, object]]:
    """Numbers of the planes of each head or each key-value head."""
    arrays = {}
    for name in names:
        values = profile[name].transpose(*dims, "frequency").values
        arrays[name] = packed(values, dims=dims)
    return arrays


def page_templates() -> dict[str, dict[str, Any]]:
    """plotly's templates for a light page and a dark page."""
    return {
        theme: style.template(theme).to_plotly_json() for theme in get_args(style.Theme)
    }


def _figures_on_page(figures: ProfileFigures, layers: int) -> dict[str, Any]:
    """JSON of the figures by their names."""
    sent = {}
    for drawn in figures.all_heads:
        layout = _layout_on_page(drawn)
        if drawn.name == "map":
            layout["height"] = max(420, 13 * layers + 90)  # pixels
        sent[drawn.name] = bare(drawn.figure, **layout)
    for drawn in figures.chosen_head:
        figure = _without_data(drawn.figure)
        sent[drawn.name] = bare(figure, **_layout_on_page(drawn))
    for drawn in figures.model:
        sent[drawn.name] = bare(drawn.figure, **_layout_on_page(drawn))
    return sent


def _layout_on_page(drawn: DrawnFigure) -> dict[str, Any]:
    return {"margin_t": 24, "showlegend": True, **drawn.row.layout}


def _without_data(figure: go.Figure) -> go.Figure:
    """The figure of a head without the parts that the script fills, such as heat maps."""
    annotations = figure.layout.annotations
    notes = [note for note in annotations if note.name != style.NO_DATA]
    figure = go.Figure(figure).update_layout(annotations=notes)
    return figure.update_traces({"z": None, "customdata": None}, {"type": "heatmap"})
