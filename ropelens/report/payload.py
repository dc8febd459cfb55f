"""What the page's script is given: the figures, every head's arrays, the excerpts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from scipy.special import softmax

from ropelens.figures.head import excerpt_tokens, farthest, kernel_arrays
from ropelens.figures.heads import bit_shares
from ropelens.figures.inputs import kv_heads, numbers
from ropelens.figures.style import COLORS, LABELS, PAPER, SYMBOLS, Theme, template
from ropelens.figures.text import plotly_text, visible_token
from ropelens.figures.truncated_heads import kinds_of, shares_of
from ropelens.figures.wavelengths import wavelength_positions
from ropelens.report.catalog import BESIDE, PROFILE, PageFigure, bare, draw
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
        "symbols": SYMBOLS,
        "labelOrder": list(LABELS),
        "farthest": [farthest(profile, layer) for layer in range(profile.sizes["layer"])],
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


LARGEST_MISS = 0.01
"""Largest difference of an attention weight that the script computes from the measured one."""

STEPS = 2**13 - 1
"""Steps from zero to the largest number of a head's queries, or keys: there as fine as half
precision, in which profiles hold them."""
LETTER = 67
"""The letter of 0 times 256 steps, "C": 32 such steps either way are letters of ASCII."""


class Stepped:
    """Queries or keys of some heads in whole steps, [place, position, coordinate] int16.

    `place[layer, head]` is where a head's are, -1 of a head without; `step` is the size of one
    step. Made from [layer, head, position, coordinate], for the heads that are `known`.
    """

    def __init__(self, values: np.ndarray, known: np.ndarray) -> None:
        chosen = np.nan_to_num(values[known])
        self.step = np.abs(chosen).max((1, 2), initial=1e-30) / STEPS
        self.steps = np.round(chosen / self.step[:, None, None]).astype(np.int16)
        self.place = np.where(known, known.cumsum().reshape(known.shape) - 1, -1)

    def __getitem__(self, at: tuple[int, int]) -> np.ndarray:
        place = self.place[at]
        return self.steps[place] * self.step[place]

    def payload(self) -> dict[str, Any]:
        return {
            "place": self.place.tolist(),
            "step": self.step.tolist(),
            # Low bytes are noise, high ones are not: apart, and as letters, these pack well.
            "low": packed((self.steps & 255).astype(np.uint8)),
            "high": "".join(map(chr, ((self.steps >> 8) + LETTER).ravel().tolist())),
        }


class Excerpt:
    """One excerpt of a profile: its tokens, attention as measured, and queries and keys.

    `live[layer, head]` is whether its attention follows from queries and keys alone.
    """

    def __init__(self, profile: xr.Dataset, number: int) -> None:
        self.tokens = excerpt_tokens(profile, number)
        one, count = profile.isel(excerpt=number), len(self.tokens)
        self.weights = one["excerpt_attention"].values[..., :count, :count]
        queries = one["excerpt_query_still"].values[..., :count, :]
        known = np.isfinite(queries).any((2, 3))
        layers, heads = known.nonzero()
        reads = kv_heads(profile)
        read = np.zeros((profile.sizes["layer"], profile.sizes["kv_head"]), bool)
        read[layers, reads[layers, heads]] = True
        self.query = Stepped(queries, known)
        self.key = Stepped(one["excerpt_key_still"].values[..., :count, :], read)
        self.live = np.zeros(known.shape, bool)
        planes = profile["excerpt_planes"].values
        for layer, head in zip(layers, heads, strict=True):
            turning = profile["inv_freq"].values[layer, : planes[layer]]
            q = turned(self.query[layer, head], turning)
            k = turned(self.key[layer, reads[layer, head]], turning)
            computed = attention(float(profile["excerpt_scale"][layer]) * q @ k.T)
            miss = np.abs(computed - self.weights[layer, head]).max()
            self.live[layer, head] = miss <= LARGEST_MISS

    def payload(self, live: np.ndarray) -> dict[str, Any]:
        """For the script, with the attention of heads that are not `live` in every excerpt."""
        visible = [visible_token(token) for token in self.tokens]
        return {
            "tokens": visible,
            "names": [plotly_text(token) for token in visible],
            "ticks": [plotly_text(visible_token(token, longest=12)) for token in self.tokens],
            "attention": packed(attention_bytes(self.weights[~live])),
            "query": self.query.payload(),
            "key": self.key.payload(),
        }


def excerpt_payload(profile: xr.Dataset) -> dict[str, Any]:
    """The excerpts for the script; `planes` is how many a layer has.

    `live[layer][head]` says whether the script can compute the head's attention from queries
    and keys, to `LARGEST_MISS`. It gets the weights instead where the profile holds none, or
    where a soft-cap, a window or a learned sink stands between scores and weights.
    """
    excerpts = [Excerpt(profile, number) for number in range(profile.sizes["excerpt"])]
    live = np.all([excerpt.live for excerpt in excerpts], axis=0)
    return {
        "excerpts": [excerpt.payload(live) for excerpt in excerpts],
        "live": live.tolist(),
        "planes": profile["excerpt_planes"].values.tolist(),
        "frequencies": np.nan_to_num(profile["inv_freq"].values).tolist(),
        "scale": np.nan_to_num(profile["excerpt_scale"].values).tolist(),
    }


def turned(still: np.ndarray, inv_freq: np.ndarray) -> np.ndarray:
    """Queries or keys [position, coordinate] rotated to their positions, as RoPE does."""
    count = len(inv_freq)
    plane = still[:, :count] + 1j * still[:, count : 2 * count]
    plane = plane * np.exp(1j * inv_freq * np.arange(len(still))[:, None])
    return np.concatenate([plane.real, plane.imag, still[:, 2 * count :]], axis=1)


def attention(scores: np.ndarray) -> np.ndarray:
    """Causal attention of [query, key] scores in nats."""
    ahead = np.triu(np.ones(scores.shape, bool), 1)
    return softmax(np.where(ahead, -np.inf, scores), axis=-1)


def attention_bytes(weights: np.ndarray) -> np.ndarray:
    """Attention [head, query, key] in a byte a cell, [head, cell] uint8.

    The byte is 255 times the square root of the weight, so small weights keep their digits
    (a step is at most 0.8% at weight 1 and far less below). Cells are the ones a query may
    see, row after row: half the square.
    """
    seen = np.tril(np.ones(weights.shape[-2:], bool))
    root = np.sqrt(np.nan_to_num(weights[..., seen]).clip(0, 1))
    return np.round(255 * root).astype(np.uint8)
