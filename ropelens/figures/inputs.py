"""Profiles and tables of heads in the form that figures read."""

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.arguments import Count
from ropelens.budget.labels import DOUBTS
from ropelens.errors import BadArgument
from ropelens.figures import style
from ropelens.figures.formats import number, short_count

Selected = tuple[Count, Count] | str | None  # the head that a figure marks
Layer = Count | None
Head = Count | str  # a head as "2.3", or the head=3 of layer=2
NO_HEAD = (-9, -9)  # outside of every map


@dataclass(frozen=True)
class DrawnHead:
    """A head to draw, and the dataset in which its numbers are.

    `layer` and `index` are the head's indices in `dataset`. `name_of_layer` and `name_of_head`
    are its numbers in the model, which titles show.
    """

    dataset: xr.Dataset
    layer: int
    index: int
    name_of_layer: int
    name_of_head: int


def head_of(profile: xr.Dataset, layer: Layer, head: Head) -> DrawnHead:
    """The head to draw of a profile, or of a capture, which becomes a profile of one head."""
    in_model = place_of(layer, head)
    if profile.attrs.get("kind") != "capture":
        return DrawnHead(profile, *in_model, *in_model)
    name = f"{in_model[0]}.{in_model[1]}"
    if name not in profile["head"].values:
        raise BadArgument(
            f"The capture does not have head {name}.", hint=f'heads="{name}"'
        )
    return DrawnHead(_profile_of_capture(profile, name), 0, 0, *in_model)


def _profile_of_capture(capture: xr.Dataset, name: str) -> xr.Dataset:
    """The first prompt of a capture of head `name`, as a profile of one head."""
    prompts = capture.drop_vars(["layer", "head_of_layer"]).sel(head=name, drop=True)
    if "prompt" not in prompts.dims:
        prompts = prompts.expand_dims("prompt")
    tokens = prompts["key_token"].broadcast_like(prompts["prompt"])
    first = prompts.isel(prompt=0)
    push = _push_to_keys(first)
    variables = {
        "selectivity_keys": _with_dims(push, "layer", "head"),
        "selectivity_sink": _with_dims(push * np.nan, "layer", "head"),
        "q_norm": _with_dims(first["q_norm"].mean("query"), "layer", "head"),
        "q_coherence": _with_dims(_coherence(first, "q", "query"), "layer", "head"),
        "k_norm": _with_dims(first["k_norm"].mean("key"), "layer", "kv_head"),
        "k_coherence": _with_dims(_coherence(first, "k", "key"), "layer", "kv_head"),
        "excerpt_attention": _with_dims(prompts["attention"], "layer", "head"),
        "wavelength": _with_dims(first["wavelength"], "layer"),
        "excerpt_token": _with_dims(tokens),
        "excerpt_length": _with_dims((tokens != "").sum("key")),
    }
    return xr.Dataset(variables, attrs=capture.attrs).rename(
        prompt="excerpt", query="excerpt_query", key="excerpt_key"
    )


def _push_to_keys(prompt: xr.Dataset) -> xr.DataArray:
    """Push of each plane toward the keys that the head attends to: its selectivity."""
    seen = prompt["score"].notnull()
    excess = prompt["attention"].fillna(0) - seen / seen.sum("key")
    push = (prompt["contribution"].fillna(0) * excess).sum("key")
    return push.isel(query=slice(1, None)).mean("query")  # row 0 has no choice


def _coherence(prompt: xr.Dataset, side: str, dim: str) -> xr.DataArray:
    """Length of the mean query ("q") or key ("k") without rotation, by its mean length."""
    mean = prompt[f"{side}_still"].mean(dim)
    length = (mean**2).sum("part") ** 0.5
    return length / prompt[f"{side}_norm"].mean(dim)


def _with_dims(values: xr.DataArray, *dims: str) -> xr.DataArray:
    """`values` without coordinates, with new first dims of size 1."""
    return values.drop_vars([*values.coords]).expand_dims(list(dims))


def place_of(layer: Layer, head: Head | None) -> tuple[int, int]:
    """Layer and index of a head, from two numbers or from "2.3" (layer.head)."""
    numbers = str(head).split(".") if layer is None else [str(layer), str(head)]
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        raise BadArgument(
            "A figure of one head needs its layer and its index.",
            seen=f"layer {layer}, head {head}",
            hint='head="2.3", or layer=2, head=3',
        )
    return int(numbers[0]), int(numbers[1])


def selected_place(selected: Selected) -> tuple[int, int]:
    """Layer and index of the head that a figure marks."""
    if isinstance(selected, str):
        return place_of(None, selected)
    return selected or NO_HEAD


def frame_of(selected: Selected) -> dict[str, Any]:
    """The shape that frames the cell of a head in a map of layers and heads."""
    layer, head = selected_place(selected)
    return {
        "name": "selected",
        "type": "rect",
        "x0": head - 0.5,
        "x1": head + 0.5,
        "y0": layer - 0.5,
        "y1": layer + 0.5,
        "line": {"width": 3},
        "fillcolor": style.CLEAR,
    }


def head_table(profile: xr.Dataset, heads: pd.DataFrame | None) -> pd.DataFrame:
    """`heads`, or the default classification of `profile` if `heads` is None."""
    if heads is None:
        from ropelens.claims.classify import classify_heads  # slow: imports scipy

        return classify_heads(profile)
    of_profile = set(np.ndindex(profile.sizes["layer"], profile.sizes["head"]))
    of_table = list(
        zip(heads["layer"].astype(int), heads["head"].astype(int), strict=True)
    )
    labelled = heads["label"].isin(style.LABEL_ORDER).all()
    each_once = len(set(of_table)) == len(of_table)
    if not (of_table and each_once and labelled and of_profile.issuperset(of_table)):
        shared = len(set(of_table) & of_profile)
        raise BadArgument(
            "The table of heads and the profile do not describe the same model.",
            seen=f"{len(of_table)} rows, {shared} of the profile's heads",
            hint="pass the table that classify_heads(profile) returns",
        )
    return heads


def row_of(heads: pd.DataFrame, selected: Selected) -> int:
    """Row of the head `selected`. Raises `ValueError` if there is none."""
    rows = list(zip(heads["layer"], heads["head"], strict=True))
    return rows.index(selected_place(selected))


def numbers(heads: pd.DataFrame, name: str) -> np.ndarray:
    """Column of the table as float64, with NaN for empty cells."""
    column = pd.to_numeric(heads[name]).astype("Float64")
    return column.to_numpy(dtype=float, na_value=np.nan)


def is_true(heads: pd.DataFrame, name: str) -> np.ndarray:
    """The rows in which a column of the table is true; False if it is empty or missing."""
    column = heads.reindex(columns=[name])[name]
    return column.eq(True).fillna(False).to_numpy(bool)


def bit_shares(heads: pd.DataFrame) -> np.ndarray:
    """Share [row, part] of sinks, position, shared bits, content and interaction.

    Content excludes the shared bits. The shares are NaN if their sum is 0, and the share of
    shared bits is NaN if they were not measured.
    """
    columns = [
        "sink_bits",
        "position_bits",
        "shared_bits",
        "content_bits",
        "interaction_bits",
    ]
    bits = heads.reindex(columns=columns).to_numpy(float).clip(min=0)
    shared = np.nan_to_num(bits[:, columns.index("shared_bits")])
    bits[:, columns.index("content_bits")] -= shared
    total = np.nansum(bits, axis=1, keepdims=True)
    return np.divide(bits, total, out=np.full_like(bits, np.nan), where=total > 0)


def head_grid(
    profile: xr.Dataset, heads: pd.DataFrame, values: np.ndarray | pd.Series
) -> np.ndarray:
    """Objects [layer, head] from a value per row of the table; missing heads get None."""
    grid = np.full((profile.sizes["layer"], profile.sizes["head"]), None, dtype=object)
    grid[heads["layer"].to_numpy(int), heads["head"].to_numpy(int)] = values
    return grid


def idle_layers(profile: xr.Dataset) -> list[int]:
    """Layers of a hybrid model that have no attention, so that no head has numbers."""
    return np.flatnonzero(profile["entropy_bits"].isnull().all("head")).tolist()


def kv_heads(profile: xr.Dataset) -> np.ndarray:
    """Key-value head of each query head [layer, head]. NaN marks heads that a layer lacks."""
    queries = profile["q_norm"].notnull().any("frequency").sum("head").values
    keys = profile["k_norm"].notnull().any("frequency").sum("kv_head").values
    group = np.maximum(queries // np.maximum(keys, 1), 1)
    shared = np.arange(profile.sizes["head"])[None] // group[:, None]
    return np.minimum(shared, profile.sizes["kv_head"] - 1)


def hover_lines(heads: pd.DataFrame) -> np.ndarray:
    """Text for each row of the table: label, bits, and what the head follows."""
    marked = heads.copy()
    for name in DOUBTS:
        marked[name] = is_true(heads, name)
    lines = [_head_hover(row) for row in marked.to_dict("records")]
    return np.array(lines, dtype=object)


def _head_hover(head: Mapping[Hashable, Any]) -> str:
    return (
        f"<b>L{head['layer']} H{head['head']}</b> {head['label']}"
        f"{_offset_words(head)}{_doubt_words(head)}<br>"
        f"{head['total_bits']:.2f} bits: sink {head['sink_bits']:.2f}, "
        f"position {head['position_bits']:.2f}, content {head['content_bits']:.2f}, "
        f"interaction {head['interaction_bits']:.2f}<br>"
        f"{_follow_words(head)}"
        f"strongest plane: {short_count(head['top_wavelength'])} tokens, "
        f"{number(head['top_share'], '.0%')} of the push"
    )


def _offset_words(head: Mapping[Hashable, Any]) -> str:
    if not pd.isna(head["offset"]):
        return f", offset {int(head['offset'])}"
    if pd.isna(head["offset_low"]) or pd.isna(head["offset_high"]):
        return ""
    return f", offsets {int(head['offset_low'])} to {int(head['offset_high'])}"


def _doubt_words(head: Mapping[Hashable, Any]) -> str:
    words = ""
    if not pd.isna(head["confidence"]):
        words = f" (confidence {head['confidence']:.2f})"
    for name in DOUBTS:
        if head[name]:
            words += f", {name}"
    return words


def _follow_words(head: Mapping[Hashable, Any]) -> str:
    if pd.isna(head.get("follows_chance")):
        return ""
    return (
        f"keys exchange contents: {head['follows_position']:.0%} of the attention stays, "
        f"{head['follows_content']:.0%} moves (chance {head['follows_chance']:.0%})<br>"
    )
