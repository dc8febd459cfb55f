"""Payload of the script of a page: figures, arrays of all heads, and excerpts."""

from collections.abc import Mapping
from typing import Any, get_args

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from scipy.special import softmax

from ropelens.budget.labels import DOUBTS
from ropelens.figures import style
from ropelens.figures.attention import excerpt_tokens, farthest_distance
from ropelens.figures.follow import FOLLOWS
from ropelens.figures.formats import plotly_text, visible_token
from ropelens.figures.head_truncation import head_steps, kinds_of, rotating_shares
from ropelens.figures.inputs import bit_shares, is_true, kv_heads, numbers
from ropelens.figures.kernel import kernel_arrays
from ropelens.figures.planes import wavelength_positions
from ropelens.figures.reach import reach_arrays
from ropelens.report.catalog import (
    PageFigure,
    bare,
)
from ropelens.report.render import packed
from ropelens.report.tables import head_columns, model_name

HEAD_DIMS = ("layer", "head")
PLANE_ARRAYS = (
    *("selectivity_keys", "selectivity_sink"),
    *("q_norm", "q_coherence", "k_norm", "k_coherence"),
)
FINE_CELLS = 700_000  # a page with more attention weights stores whole percents
LARGEST_MISS = (
    0.01  # largest accepted error of an attention weight that the script computes
)
STEPS = (
    2**13 - 1
)  # steps from 0 to the largest coordinate: finer there than a half float
FINE_NUMBERS = 400_000  # a page with more queries and keys rounds them more coarsely
SCORE_NOISE = (
    0.008  # nats: standard deviation of a score of such a page, due to rounding
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
    """Payload of the page of a profile."""
    payload = model_payload(profile, heads, figures)
    payload |= {"name": model_name(profile), "selected": selected}
    payload |= {"templates": page_templates(), "labelOrder": style.LABEL_ORDER}
    payload |= {"colors": style.COLORS, "symbols": style.SYMBOLS}
    payload["farthest"] = [
        farthest_distance(profile, n) for n in range(profile.sizes["layer"])
    ]
    more: dict[str, np.ndarray] = {}
    if truncation is not None:
        more |= head_steps(truncation)
        kinds = kinds_of(truncation)
        payload["sweep"] = {
            kind: rotating_shares(truncation, kind).tolist() for kind in kinds
        }
    if reach is not None:
        more |= reach_arrays(reach)
        sizes = {"variants": "variant", "distances": "run_distance"}
        payload["reach"] = {
            name: reach[dim].values.tolist() for name, dim in sizes.items()
        }
    payload["arrays"] |= {
        name: packed(values, dims=HEAD_DIMS) for name, values in more.items()
    }
    return payload


def model_payload(
    profile: xr.Dataset, heads: pd.DataFrame, figures: Mapping[PageFigure, go.Figure]
) -> dict[str, Any]:
    """Arrays, excerpts and figures of one model."""
    rows = np.full((profile.sizes["layer"], profile.sizes["head"]), -1)
    rows[heads["layer"].to_numpy(int), heads["head"].to_numpy(int)] = np.arange(
        len(heads)
    )
    names = [column.name for column in head_columns(profile, heads)]
    names += [name for name in FOLLOWS if name in heads]
    return {
        "sizes": {name: profile.sizes[name] for name in ("layer", "head", "kv_head")},
        "rows": rows.tolist(),
        "kvHeads": kv_heads(profile).tolist(),
        "labels": heads["label"].tolist(),
        "doubts": {
            name: np.flatnonzero(is_true(heads, name)).tolist() for name in DOUBTS
        },
        "columns": {name: packed(numbers(heads, name)) for name in names},
        "shares": packed(bit_shares(heads)),
        **excerpt_payload(profile),
        "arrays": packed_head_arrays(profile),
        "figures": {
            row.name: _on_page(row, fig, profile) for row, fig in figures.items()
        },
    }


def _on_page(row: PageFigure, figure: go.Figure, profile: xr.Dataset) -> dict[str, Any]:
    layout = {"margin_t": 24, "showlegend": row.name not in ("map", "follow", "claim")}
    if row.section == "head":  # the script fills heat maps and reports missing data
        notes = [
            note for note in figure.layout.annotations if note.name != style.NO_DATA
        ]
        figure = go.Figure(figure).update_layout(annotations=notes)
        figure.update_traces({"z": None, "customdata": None}, {"type": "heatmap"})
    if row.name == "map":
        layout["height"] = max(420, 13 * profile.sizes["layer"] + 90)  # pixels
    return bare(figure, **(layout | row.layout))


def packed_head_arrays(profile: xr.Dataset) -> dict[str, dict]:
    arrays = {
        name: packed(v, dims=HEAD_DIMS) for name, v in kernel_arrays(profile).items()
    }
    for name in PLANE_ARRAYS:
        dims = ("layer", "kv_head" if name.startswith("k_") else "head")
        arrays[name] = packed(
            profile[name].transpose(*dims, "frequency").values, dims=dims
        )
    wavelength = profile["wavelength"].values
    places = {
        "wavelength": wavelength,
        "wavelength_position": wavelength_positions(wavelength),
    }
    return arrays | {
        name: packed(values, dims=("layer",)) for name, values in places.items()
    }


def page_templates() -> dict[str, dict]:
    return {
        theme: style.template(theme).to_plotly_json() for theme in get_args(style.Theme)
    }


def tokens_of(profile: xr.Dataset) -> list[list[str]]:
    return [
        excerpt_tokens(profile, number) for number in range(profile.sizes["excerpt"])
    ]


def stepped(
    values: np.ndarray, known: np.ndarray, size: np.ndarray | None
) -> tuple[np.ndarray, dict[str, Any]]:
    """Quantize queries or keys [layer, head, position, coordinate], and return JSON as well.

    `size` [layer, head, coordinate] is the size of a step; by default the largest coordinate of
    a head has `STEPS` steps. The JSON contains the heads in `known`: `place[layer][head]` is
    the index of a head in `step` [place, coordinate] and `steps` [place, coordinate, position].
    """
    values, fine = np.nan_to_num(values), size is None
    largest = np.abs(values).max(2)
    if size is None:
        size = np.maximum(largest.max(2, keepdims=True) / STEPS, 1e-30) + 0 * largest
    else:
        size = np.maximum(size, largest / 32767).clip(1e-30)
        size = np.exp2(np.ceil(2 * np.log2(size)) / 2)  # few numbers, which pack well
    steps = np.round(values / size[:, :, None]).astype(np.int16)
    coded = (
        steps if fine else (steps << 1) ^ (steps >> 15)
    )  # 0, -1, 1, ...: small upper bytes
    place = np.where(known, known.cumsum().reshape(known.shape) - 1, -1)
    sent = {"step": packed(size[known]), "steps": packed(coded[known].swapaxes(1, 2))}
    return steps * size[:, :, None], sent | {
        "zigzag": not fine,
        "place": place.tolist(),
    }


def _step_sizes(
    query: np.ndarray,
    key: np.ndarray,
    reads: np.ndarray,
    planes: np.ndarray,
    scale: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """Steps of queries and keys [layer, head, coordinate] for `SCORE_NOISE` in each score.

    The error of a coordinate is multiplied by the other vector, whose size sets the step.
    """
    sizes = []
    for x in (query, key):
        square = np.nan_to_num(x**2).mean(2)
        for layer, count in enumerate(
            planes
        ):  # a rotation mixes both coordinates of a plane
            both = square[layer, :, : 2 * count].reshape(len(square[layer]), 2, count)
            both[:] = both.mean(1, keepdims=True)
        sizes.append(np.sqrt(square))
    layers = np.arange(len(reads))[:, None]
    of_key = np.zeros_like(sizes[1])
    np.maximum.at(of_key, (layers, reads), sizes[0])
    unit = SCORE_NOISE * np.sqrt(6 / query.shape[-1]) / np.maximum(scale, 1e-30)
    return tuple(
        unit[:, None, None] / np.maximum(x, 1e-6)
        for x in (sizes[1][layers, reads], of_key)
    )


def excerpt_payload(profile: xr.Dataset) -> dict[str, Any]:
    """Excerpts for the script, and the rotation of each layer.

    `live[layer][head]` is True if the script can compute the attention of a head from its
    queries and keys, with an error of at most `LARGEST_MISS`. Otherwise (without queries, or
    with a soft-cap, a window or a sink) it gets a byte for each visible weight, ordered by key.
    A byte is `steps` times the square root of the weight, or whole percents if there are many
    weights.
    """
    planes, scale = (
        np.nan_to_num(profile[f"excerpt_{n}"].values) for n in ("planes", "scale")
    )
    planes = planes.astype(int)
    inv_freq, reads = profile["inv_freq"].values, kv_heads(profile)
    live = np.ones(reads.shape, bool)
    excerpts, measured = [], []
    for number, tokens in enumerate(tokens_of(profile)):
        excerpt, count = profile.isel(excerpt=number), len(tokens)
        causal = np.tril(np.ones((count, count), bool))
        weights = excerpt["excerpt_attention"].values[..., :count, :count]
        stills = (excerpt[f"excerpt_{side}_still"].values for side in ("query", "key"))
        queries, keys = (still[..., :count, :] for still in stills)
        known = np.isfinite(queries).any((2, 3))
        read = np.zeros(keys.shape[:2], bool)
        read[known.nonzero()[0], reads[known]] = True
        coarse = profile.sizes["excerpt"] * queries[known].size > FINE_NUMBERS
        sizes = (
            _step_sizes(queries, keys, reads, planes, scale) if coarse else (None, None)
        )
        queries, query = stepped(queries, known, sizes[0])
        keys, key = stepped(keys, read, sizes[1])
        live &= known
        for layer, head in np.argwhere(live):
            turning = inv_freq[layer, : planes[layer]]
            q = rotated(queries[layer, head], turning)
            k = rotated(keys[layer, reads[layer, head]], turning)
            scores = np.where(causal, scale[layer] * q @ k.T, -np.inf)
            miss = np.abs(softmax(scores, axis=-1) - weights[layer, head]).max()
            live[layer, head] = miss <= LARGEST_MISS
        words = [visible_token(token) for token in tokens]
        ticks = [plotly_text(visible_token(token, longest=12)) for token in tokens]
        shown = {"tokens": words, "names": [*map(plotly_text, words)], "ticks": ticks}
        vectors = {"query": query, "key": key, "lead": _lead(excerpt, causal, known)}
        excerpts.append(shown | vectors)
        measured.append(weights.swapaxes(-1, -2)[..., causal.T])
    given = [np.nan_to_num(weights[~live]).clip(0, 1) for weights in measured]
    steps, root = (
        (255, 2) if sum(cells.size for cells in given) <= FINE_CELLS else (100, 1)
    )
    for payload, cells in zip(excerpts, given, strict=True):
        payload["attention"] = packed(
            np.round(steps * cells ** (1 / root)).astype(np.uint8)
        )
    arrays = {"live": live, "planes": planes, "scale": scale}
    arrays["frequencies"] = np.nan_to_num(inv_freq)
    by_name = {name: array.tolist() for name, array in arrays.items()}
    return {"excerpts": excerpts, "coding": [steps, root], **by_name}


def _lead(
    excerpt: xr.Dataset, causal: np.ndarray, known: np.ndarray
) -> dict[str, Any] | None:
    """The two likeliest next tokens of an excerpt, the lead of the first, and its gradients.

    A byte n means `largest` times ((n - 127) / 127) squared, with the sign of n - 127.
    """
    nats = float(excerpt.get("excerpt_lead", np.nan))
    if not np.isfinite(nats):  # no gradient, or logits that overflow
        return None
    gradient = excerpt["excerpt_score_gradient"].values[
        ..., : len(causal), : len(causal)
    ]
    cells = np.nan_to_num(gradient[known].swapaxes(1, 2)[:, causal.T])
    largest = max(float(np.abs(cells).max(initial=0)), 1e-30)
    steps = 127 + np.round(127 * np.sign(cells) * np.sqrt(np.abs(cells) / largest))
    words = [visible_token(str(token)) for token in excerpt["excerpt_answer"].values]
    sent = {"steps": packed(steps.astype(np.uint8)), "largest": largest}
    return sent | {"words": words, "nats": nats}


def rotated(still: np.ndarray, inv_freq: np.ndarray) -> np.ndarray:
    """Queries or keys [position, coordinate], rotated to their positions."""
    count = len(inv_freq)
    plane = still[:, :count] + 1j * still[:, count : 2 * count]
    plane = plane * np.exp(1j * inv_freq * np.arange(len(still))[:, None])
    return np.concatenate([plane.real, plane.imag, still[:, 2 * count :]], axis=1)
