"""What the page's script is given: the figures, and every head's arrays in few bytes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures.head import excerpt_tokens, farthest, kernel_arrays
from ropelens.figures.heads import bit_shares
from ropelens.figures.inputs import kv_heads, numbers
from ropelens.figures.style import COLORS, LABELS, PAPER, SIGNS, SYMBOLS, Theme, template
from ropelens.figures.truncated_heads import kinds_of, shares_of
from ropelens.figures.wavelengths import wavelength_positions
from ropelens.report.catalog import BESIDE, PROFILE, PageFigure, bare, draw
from ropelens.report.excerpts import excerpt_payload
from ropelens.report.render import packed
from ropelens.report.tables import head_columns

BY_HEAD, BY_KV_HEAD = ("layer", "head"), ("layer", "kv_head")
OF_PROFILE = {
    **dict.fromkeys(("selectivity_keys", "selectivity_sink", "q_norm", "q_coherence"), BY_HEAD),
    **dict.fromkeys(("k_norm", "k_coherence"), BY_KV_HEAD),
}


def build_payload(
    profile: xr.Dataset,
    heads: pd.DataFrame,
    figures: Mapping[PageFigure, go.Figure],
    *,
    selected: tuple[int, int],
) -> dict[str, Any]:
    """Everything the script shows of the page's model, ready for JSON."""
    return {
        **model_payload(profile, heads, figures),
        "selected": list(selected),
        "colors": COLORS,
        "glyphs": SIGNS,
        "symbols": SYMBOLS,
        "labelOrder": list(LABELS),
        "farthest": [farthest(profile, layer) for layer in range(profile.sizes["layer"])],
        "pinned": list(BESIDE),
        "templates": page_templates(),
    }


def model_payload(
    profile: xr.Dataset, heads: pd.DataFrame, figures: Mapping[PageFigure, go.Figure]
) -> dict[str, Any]:
    """What the script shows of the heads of one model, and in which figures."""
    rows = np.full((profile.sizes["layer"], profile.sizes["head"]), -1)
    rows[heads["layer"].to_numpy(int), heads["head"].to_numpy(int)] = np.arange(len(heads))
    names = [column.name for column in head_columns(profile, heads)]
    return {
        "sizes": {name: profile.sizes[name] for name in ("layer", "head", "kv_head")},
        "rows": rows.tolist(),
        "kvHeads": kv_heads(profile).tolist(),
        "labels": heads["label"].tolist(),
        "columns": {name: packed(numbers(heads, name)) for name in names},
        "shares": packed(bit_shares(heads)),
        **excerpt_payload(profile),
        "arrays": head_arrays(profile),
        "figures": {row.name: _on_page(row, fig, profile) for row, fig in figures.items()},
    }


def _on_page(row: PageFigure, figure: go.Figure, profile: xr.Dataset) -> dict[str, Any]:
    """A figure as the page lays it out, without what the script fills in.

    Views of all heads share the legend in the page's text; a map has 13 pixels a layer where
    there are many.
    """
    layout = {"margin_t": 24, "showlegend": row.name not in ("map", "triangle", "claim")}
    if row.name == "map":
        layout["height"] = max(420, 13 * profile.sizes["layer"] + 90)
    shown = bare(figure, **(layout | row.layout))
    if row.name == "attention":
        for trace in shown["data"]:
            for name in {"x", "y", "z", "width", "customdata"} & set(trace):
                trace[name] = []
    return shown


def head_arrays(profile: xr.Dataset) -> dict[str, dict]:
    """Every head's arrays by name: `dims` says which indices choose a head's part."""
    planes = {
        name: packed(profile[name].transpose(*dims, "frequency").values, dims=dims)
        for name, dims in OF_PROFILE.items()
    }
    wavelength = profile["wavelength"].values
    return {
        **{
            name: packed(kernel, dims=BY_HEAD)
            for name, kernel in kernel_arrays(profile).items()
        },
        **planes,
        "wavelength": packed(wavelength, dims=("layer",)),
        "wavelength_position": packed(wavelength_positions(wavelength), dims=("layer",)),
    }


def page_templates() -> dict[str, dict]:
    """The light and the dark template, on the page's paper instead of a figure's."""
    themes: tuple[Theme, Theme] = ("light", "dark")
    looks = {theme: template(theme) for theme in themes}
    for theme, look in looks.items():
        look.layout.paper_bgcolor = "rgba(0,0,0,0)"
        look.layout.hoverlabel.bgcolor = PAPER[theme]
    return {theme: look.to_plotly_json() for theme, look in looks.items()}


def stopped_payload(truncation: xr.Dataset) -> dict[str, Any]:
    """The steps of a sweep by kind, as shares that rotate."""
    return {
        "steps": {kind: shares_of(truncation, kind).tolist() for kind in kinds_of(truncation)}
    }


def reach_payload(reach: xr.Dataset) -> dict[str, Any]:
    """The variants of a reach, and its farthest distance."""
    variants = reach["variant"].values.tolist()
    return {"variants": variants, "farthest": int(reach["distance"].max())}


def packed_by_head(arrays: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Arrays [layer, head, ...] for the script."""
    return {name: packed(values, dims=BY_HEAD) for name, values in arrays.items()}


def beside_payload(
    profile: xr.Dataset,
    heads: pd.DataFrame,
    *,
    of_page: xr.Dataset,
    figures: dict[PageFigure, go.Figure],
    selected: tuple[int, int],
) -> dict[str, Any]:
    """What the script shows of another model beside the page of `of_page`, drawn as `figures`.

    The same figure of both has the same axis of wavelengths or offsets, for which `figures`
    is changed. `excerptOf[excerpt]` is the excerpt here with the same text, or -1.
    """
    rows = [row for row in PROFILE if row.name in BESIDE]
    drawn = draw(rows, profile, heads, selected)
    for row in rows:
        if row.name != "attention":  # its axes are tokens
            one_range(figures[row], drawn[row])
    same = same_text(tokens_of(of_page), tokens_of(profile))
    if missing := same.count(-1):
        warnings.warn(
            f"{profile.attrs['model']} has not read {missing} of the {len(same)} pieces of "
            f"text of {of_page.attrs['model']}: give both the same --prompt to see it there.",
            stacklevel=2,
        )
    shown = sorted({number for number in same if number >= 0}) or [0]
    return {
        **model_payload(profile.isel(excerpt=shown), heads, drawn),
        "excerptOf": [shown.index(number) if number >= 0 else -1 for number in same],
    }


def one_range(*figures: go.Figure) -> None:
    """Give each x axis of figures of the same panels the range that holds those of all."""
    for axes in zip(*(figure.select_xaxes() for figure in figures), strict=True):
        ranges = [axis.range for axis in axes if axis.range]
        if ranges:
            low, high = np.array(ranges, float).T
            for axis in axes:
                axis.range = [low.min(), high.max()]


def tokens_of(profile: xr.Dataset) -> list[list[str]]:
    """The tokens of every excerpt."""
    return [excerpt_tokens(profile, number) for number in range(profile.sizes["excerpt"])]


def same_text(shown: Sequence[list[str]], others: Sequence[list[str]]) -> list[int]:
    """For each text that is shown the place of the same text among the others, or -1.

    Texts may be cut into other tokens, and the first of them may be a BOS that one lacks.
    """

    def texts(tokens: list[str]) -> set[str]:
        return {"".join(some).strip() for some in (tokens, tokens[1:])} - {""}

    known = [texts(tokens) for tokens in others]
    return [
        next((i for i, text in enumerate(known) if text & texts(tokens)), -1)
        for tokens in shown
    ]
