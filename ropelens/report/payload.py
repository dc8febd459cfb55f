"""What the page's script is given: the figures, every head's arrays, the excerpts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from scipy.special import softmax

from ropelens.figures import style
from ropelens.figures.formats import plotly_text, visible_token
from ropelens.figures.head import excerpt_tokens, farthest_distance, kernel_arrays, reach_arrays
from ropelens.figures.heads import bit_shares
from ropelens.figures.inputs import kv_heads, numbers
from ropelens.figures.truncated_heads import head_steps, kinds_of, rotating_shares
from ropelens.figures.wavelengths import wavelength_positions
from ropelens.report.catalog import BESIDE, PROFILE, PageFigure, bare, draw
from ropelens.report.render import packed
from ropelens.report.tables import head_columns, model_name

BY_HEAD = ("layer", "head")
OF_PLANES = (
    *("selectivity_keys", "selectivity_sink"),
    *("q_norm", "q_coherence", "k_norm", "k_coherence"),
)


def build_payload(
    profile: xr.Dataset,
    heads: pd.DataFrame,
    figures: Mapping[PageFigure, go.Figure],
    *,
    selected: tuple[int, int],
    truncation: xr.Dataset | None = None,
    reach: xr.Dataset | None = None,
) -> dict[str, Any]:
    """Everything the script shows of the page's model, ready for JSON."""
    payload = {
        **model_payload(profile, heads, figures),
        "name": model_name(profile),
        "selected": list(selected),
        "colors": style.COLORS,
        "symbols": style.SYMBOLS,
        "labelOrder": list(style.LABEL_ORDER),
        "farthest": [
            farthest_distance(profile, layer) for layer in range(profile.sizes["layer"])
        ],
        "templates": page_templates(),
        "beside": None,
    }
    more: dict[str, np.ndarray] = {}
    if truncation is not None:
        more |= head_steps(truncation)
        kinds = kinds_of(truncation)
        payload["sweep"] = {kind: rotating_shares(truncation, kind).tolist() for kind in kinds}
    if reach is not None:
        more |= reach_arrays(reach)
        payload["reach"] = {
            "variants": reach["variant"].values.tolist(),
            "distances": reach["run_distance"].values.tolist(),
        }
    payload["arrays"] |= {name: packed(values, dims=BY_HEAD) for name, values in more.items()}
    return payload


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
    """A figure as the page lays it out.

    Views of all heads share the legend in the page's text; a map has 13 pixels a layer where
    there are many.
    """
    layout = {"margin_t": 24, "showlegend": row.name not in ("map", "claim")}
    if row.section == "head":  # the script says so of each head
        notes = [note for note in figure.layout.annotations if note.name != style.NO_DATA]
        figure = go.Figure(figure).update_layout(annotations=notes)
        filled = {"z": None, "customdata": None}  # by the script too
        figure.update_traces(filled, {"type": "heatmap"})
    if row.name == "map":
        layout["height"] = max(420, 13 * profile.sizes["layer"] + 90)
    return bare(figure, **(layout | row.layout))


def head_arrays(profile: xr.Dataset) -> dict[str, dict]:
    """Every head's arrays by name: `dims` says which indices choose a head's part."""
    arrays = {}
    for name in OF_PLANES:
        dims = ("layer", "kv_head" if name.startswith("k_") else "head")
        values = profile[name].transpose(*dims, "frequency").values
        arrays[name] = packed(values, dims=dims)
    for name, kernel in kernel_arrays(profile).items():
        arrays[name] = packed(kernel, dims=BY_HEAD)
    wavelength = profile["wavelength"].values
    places = {"wavelength": wavelength, "wavelength_position": wavelength_positions(wavelength)}
    return arrays | {name: packed(values, dims=("layer",)) for name, values in places.items()}


def page_templates() -> dict[str, dict]:
    """What the figures look like on a light and on a dark page."""
    themes: tuple[style.Theme, ...] = ("light", "dark")
    return {theme: style.template(theme).to_plotly_json() for theme in themes}


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
    shown = sorted({number for number in same if number >= 0}) or [0]
    return {
        **model_payload(profile.isel(excerpt=shown), heads, drawn),
        "excerptOf": [shown.index(number) if number >= 0 else -1 for number in same],
    }


def one_range(*figures: go.Figure) -> None:
    """Give each x axis of figures of the same panels the range that holds those of all."""
    for axes in zip(*(figure.select_xaxes() for figure in figures), strict=True):
        if ranges := [axis.range for axis in axes if axis.range]:
            low, high = np.array(ranges, float).T
            for axis in axes:
                axis.range = [low.min(), high.max()]


def tokens_of(profile: xr.Dataset) -> list[list[str]]:
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


FINE_CELLS = 700_000  # attention weights that a page has to more than whole percents

LARGEST_MISS = 0.01
"""Largest difference of an attention weight that the script computes from the measured one."""

STEPS = 2**13 - 1  # from zero to a head's largest query or key: there finer than a half float


def stepped(values: np.ndarray, known: np.ndarray) -> tuple[np.ndarray, dict[str, Any]]:
    """Queries or keys [layer, head, position, coordinate] in whole steps, and for the script.

    The script gets those of the heads that are `known`: `place[layer][head]` is where they are
    among the `steps` [place, coordinate, position], of which one is `step[place]` large.
    """
    values = np.nan_to_num(values)
    step = np.maximum(np.abs(values).max((2, 3)) / STEPS, 1e-30)
    steps = np.round(values / step[..., None, None]).astype(np.int16)
    place = np.where(known, known.cumsum().reshape(known.shape) - 1, -1)
    sent = {"step": step[known].tolist(), "steps": packed(steps[known].swapaxes(1, 2))}
    return steps * step[..., None, None], sent | {"place": place.tolist()}


def excerpt_payload(profile: xr.Dataset) -> dict[str, Any]:
    """The excerpts for the script; `planes` is how many a layer has.

    `live[layer][head]` says whether the script can compute the head's attention from queries
    and keys, to `LARGEST_MISS`. It gets the weights instead where the profile holds none, or
    where a soft-cap, a window or a learned sink stands between scores and weights: a byte each,
    by the cells that a query may see, key after key, as packs best. The byte is `steps` times
    their `root`: by square roots small ones keep their digits; many are whole percents.
    """
    planes, scale = (np.nan_to_num(profile[f"excerpt_{n}"].values) for n in ("planes", "scale"))
    planes = planes.astype(int)
    inv_freq, reads = profile["inv_freq"].values, kv_heads(profile)
    live = np.ones(reads.shape, bool)
    excerpts, measured = [], []
    for number, tokens in enumerate(tokens_of(profile)):
        one, count = profile.isel(excerpt=number), len(tokens)
        seen = np.tril(np.ones((count, count), bool))
        weights = one["excerpt_attention"].values[..., :count, :count]
        queries, keys = (
            one[f"excerpt_{side}_still"].values[..., :count, :] for side in ("query", "key")
        )
        known = np.isfinite(queries).any((2, 3))
        read = np.zeros(keys.shape[:2], bool)
        read[known.nonzero()[0], reads[known]] = True
        (queries, query), (keys, key) = stepped(queries, known), stepped(keys, read)
        live &= known
        for layer, head in zip(*live.nonzero(), strict=True):
            turning = inv_freq[layer, : planes[layer]]
            q = turned(queries[layer, head], turning)
            k = turned(keys[layer, reads[layer, head]], turning)
            scores = np.where(seen, scale[layer] * q @ k.T, -np.inf)
            miss = np.abs(softmax(scores, axis=-1) - weights[layer, head]).max()
            live[layer, head] = miss <= LARGEST_MISS
        visible = [visible_token(token) for token in tokens]
        ticks = [plotly_text(visible_token(token, longest=12)) for token in tokens]
        words = {"tokens": visible, "names": [*map(plotly_text, visible)], "ticks": ticks}
        excerpts.append(words | {"query": query, "key": key, "lead": _lead(one, seen, known)})
        measured.append(weights.swapaxes(-1, -2)[..., seen.T])
    given = [np.nan_to_num(weights[~live]).clip(0, 1) for weights in measured]
    steps, root = (255, 2) if sum(cells.size for cells in given) <= FINE_CELLS else (100, 1)
    for excerpt, cells in zip(excerpts, given, strict=True):
        excerpt["attention"] = packed(np.round(steps * cells ** (1 / root)).astype(np.uint8))
    return {
        "excerpts": excerpts,
        "coding": [steps, root],
        "live": live.tolist(),
        "planes": planes.tolist(),
        "frequencies": np.nan_to_num(inv_freq).tolist(),
        "scale": scale.tolist(),
    }


def _lead(excerpt: xr.Dataset, seen: np.ndarray, known: np.ndarray) -> dict[str, Any] | None:
    """What comes of an excerpt: the likeliest next tokens, the lead, and what scores add to it.

    The gradients are those of the `known` heads, in their order, by `seen` cells as weights: a
    byte n stands for `largest` times the square of (n - 127) / 127, with the sign of n - 127.
    """
    nats = float(excerpt.get("excerpt_lead", np.nan))
    if not np.isfinite(nats):  # no gradient, or logits that overflow
        return None
    gradient = excerpt["excerpt_score_gradient"].values[..., : len(seen), : len(seen)]
    cells = np.nan_to_num(gradient[known].swapaxes(1, 2)[:, seen.T])
    largest = max(float(np.abs(cells).max(initial=0)), 1e-30)
    steps = 127 + np.round(127 * np.sign(cells) * np.sqrt(np.abs(cells) / largest))
    words = [visible_token(str(token)) for token in excerpt["excerpt_answer"].values]
    sent = {"steps": packed(steps.astype(np.uint8)), "largest": largest}
    return sent | {"words": words, "nats": nats}


def turned(still: np.ndarray, inv_freq: np.ndarray) -> np.ndarray:
    """Queries or keys [position, coordinate] rotated to their positions, as RoPE does."""
    count = len(inv_freq)
    plane = still[:, :count] + 1j * still[:, count : 2 * count]
    plane = plane * np.exp(1j * inv_freq * np.arange(len(still))[:, None])
    return np.concatenate([plane.real, plane.imag, still[:, 2 * count :]], axis=1)
