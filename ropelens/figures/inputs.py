"""Profiles and tables of heads in the form that figures read."""

from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.arguments import Count
from ropelens.budget.labels import DOUBTS
from ropelens.errors import BadArgument
from ropelens.figures.formats import number, short_count
from ropelens.figures.style import LABEL_ORDER

BITS_HOVER = (
    "{total_bits:.2f} bits: sink {sink_bits:.2f}, position {position_bits:.2f}, "
    "content {content_bits:.2f}, interaction {interaction_bits:.2f}<br>"
)
FOLLOW_HOVER = (
    "keys exchange contents: {follows_position:.0%} of the attention stays, "
    "{follows_content:.0%} moves (chance {follows_chance:.0%})<br>"
)
PLANE_HOVER = "strongest plane: {} tokens, {} of the push"

Selected = (
    tuple[Count, Count] | str | None
)  # the head that a figure marks: (2, 3) or "2.3"

Layer = Count | None
Head = Count | str  # a head as "2.3", or the head=3 of layer=2


def head_of(
    profile: xr.Dataset, layer: Layer, head: Head
) -> tuple[xr.Dataset, int, int, tuple[int, int]]:
    """A profile (of one head if it is a capture), the head's indices in it, and its place."""
    place = place_of(layer, head)
    if profile.attrs.get("kind") != "capture":
        return profile, *place, place
    name = f"{place[0]}.{place[1]}"
    if name not in profile["head"].values:
        raise BadArgument(
            f"The capture does not have head {name}.", hint=f'heads="{name}"'
        )
    capture = profile.drop_vars(["layer", "head_of_layer"]).sel(head=name, drop=True)
    capture = capture if "prompt" in capture.dims else capture.expand_dims("prompt")
    one, tokens = (
        capture.isel(prompt=0),
        capture["key_token"].broadcast_like(capture["prompt"]),
    )
    seen = one["score"].notnull()
    shares = one["attention"].fillna(0) - seen / seen.sum("key")
    push = (one["contribution"].fillna(0) * shares).sum("key")
    push = push.isel(query=slice(1, None)).mean("query")  # row 0 has no choice
    by_head = {"selectivity_keys": push, "selectivity_sink": push * np.nan}
    for side, dim in (("q", "query"), ("k", "key")):
        by_head[f"{side}_norm"] = norm = one[f"{side}_norm"].mean(dim)
        length = (one[f"{side}_still"].mean(dim) ** 2).sum("part") ** 0.5
        by_head[f"{side}_coherence"] = length / norm
    by_head["excerpt_attention"] = capture["attention"]
    dims = {
        name: ["layer", "kv_head" if name[0] == "k" else "head"] for name in by_head
    }
    values = by_head | {"wavelength": one["wavelength"]}
    values |= {"excerpt_token": tokens, "excerpt_length": (tokens != "").sum("key")}
    dims |= {"wavelength": ["layer"]}
    values = {
        name: x.drop_vars([*x.coords]).expand_dims(dims.get(name, []))
        for name, x in values.items()
    }
    renamed = {"prompt": "excerpt", "query": "excerpt_query", "key": "excerpt_key"}
    return xr.Dataset(values, attrs=profile.attrs).rename(renamed), 0, 0, place


def place_of(layer: Layer, head: Head | None) -> tuple[int, int]:
    """Layer and index of a head, from two numbers or from "2.3" (layer.head)."""
    numbers = str(head).split(".") if layer is None else [str(layer), str(head)]
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        what = "A figure of one head needs its layer and its index."
        seen, hint = f"layer {layer}, head {head}", 'head="2.3", or layer=2, head=3'
        raise BadArgument(what, seen=seen, hint=hint)
    return int(numbers[0]), int(numbers[1])


def selected_place(selected: Selected) -> tuple[int, int]:
    """Layer and index of the head that a figure marks."""
    return (
        place_of(None, selected) if isinstance(selected, str) else selected or (-9, -9)
    )


def frame_of(selected: Selected) -> dict[str, Any]:
    """The shape that frames the cell of a head in a map of layers and heads."""
    layer, head = selected_place(selected)
    corners = {"x0": head - 0.5, "x1": head + 0.5, "y0": layer - 0.5, "y1": layer + 0.5}
    look = {"line": {"width": 3}, "fillcolor": "rgba(0,0,0,0)"}
    return {"name": "selected", "type": "rect"} | corners | look


def head_table(profile: xr.Dataset, heads: pd.DataFrame | None) -> pd.DataFrame:
    """`heads`, or the default classification of `profile` if `heads` is None."""
    if heads is None:
        from ropelens.claims.tables import classify_heads  # slow: imports scipy

        return classify_heads(profile)
    inside = set(np.ndindex(profile.sizes["layer"], profile.sizes["head"]))
    places = list(
        zip(heads["layer"].astype(int), heads["head"].astype(int), strict=True)
    )
    known = heads["label"].isin(LABEL_ORDER).all() and inside.issuperset(places)
    if not places or len(set(places)) != len(places) or not known:
        what = "The table of heads and the profile do not describe the same model."
        seen = f"{len(places)} rows, {len(set(places) & inside)} of the profile's heads"
        hint = "pass the table that classify_heads(profile) returns"
        raise BadArgument(what, seen=seen, hint=hint)
    return heads


def row_of(heads: pd.DataFrame, selected: Selected) -> int:
    """Row of the head `selected`. Raises `ValueError` if there is none."""
    return [*zip(heads["layer"], heads["head"], strict=True)].index(
        selected_place(selected)
    )


def numbers(heads: pd.DataFrame, name: str) -> np.ndarray:
    """Column of the table as float64, with NaN for empty cells."""
    return (
        pd.to_numeric(heads[name])
        .astype("Float64")
        .to_numpy(dtype=float, na_value=np.nan)
    )


def is_true(heads: pd.DataFrame, name: str) -> np.ndarray:
    """The rows in which a column of the table is true; False if it is empty or missing."""
    return heads.reindex(columns=[name])[name].eq(True).fillna(False).to_numpy(bool)


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
    rows: list[Any] = heads.assign(**{n: is_true(heads, n) for n in DOUBTS}).to_dict(
        "records"
    )
    return np.array([*map(_head_hover, rows)], dtype=object)


def _head_hover(row: dict[str, Any]) -> str:
    offset = ""
    if not pd.isna(row["offset"]):
        offset = f", offset {int(row['offset'])}"
    elif not (pd.isna(row["offset_low"]) or pd.isna(row["offset_high"])):
        offset = f", offsets {int(row['offset_low'])} to {int(row['offset_high'])}"
    sure = (
        "" if pd.isna(row["confidence"]) else f" (confidence {row['confidence']:.2f})"
    )
    doubt = "".join(f", {name}" for name in DOUBTS if row[name])
    follow = "" if pd.isna(row.get("follows_chance")) else FOLLOW_HOVER.format(**row)
    strongest = short_count(row["top_wavelength"]), number(row["top_share"], ".0%")
    first = (
        "<b>L{layer} H{head}</b> {label}".format(**row) + f"{offset}{sure}{doubt}<br>"
    )
    return first + BITS_HOVER.format(**row) + follow + PLANE_HOVER.format(*strongest)
