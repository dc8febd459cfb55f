"""A profile and its table of heads, as the figures read them."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.errors import BadArgument
from ropelens.figures.style import LABELS
from ropelens.figures.text import number, short_count


def head_table(profile: xr.Dataset, heads: pd.DataFrame | None) -> pd.DataFrame:
    """`heads`, or the default classification of `profile` where it is None.

    Heads may be missing (layers of unequal width). Raises `BadArgument` where the table is
    about another model: no rows, an unknown label, a head twice or one the profile lacks.
    """
    if heads is None:
        # Imported here: a figure of a saved table needs neither the bootstrap nor scipy.
        from ropelens.claims.heads import classify_heads

        return classify_heads(profile)
    inside = set(np.ndindex(profile.sizes["layer"], profile.sizes["head"]))
    places = list(zip(heads["layer"].astype(int), heads["head"].astype(int), strict=True))
    known = heads["label"].isin(LABELS).all() and inside.issuperset(places)
    if not places or len(set(places)) != len(places) or not known:
        raise BadArgument(
            "The table of heads and the profile are not about the same model.",
            seen=f"{len(places)} rows, {len(set(places) & inside)} of the profile's heads",
            hint="pass what classify_heads(profile) gives",
        )
    return heads


def row_of(heads: pd.DataFrame, selected: tuple[int, int]) -> int:
    """The row of head `selected`, (layer, head), in the table; `ValueError` without one."""
    return [*zip(heads["layer"], heads["head"], strict=True)].index(selected)


def numbers(heads: pd.DataFrame, name: str) -> np.ndarray:
    """A column of the table as float64, NaN where it is empty."""
    return pd.to_numeric(heads[name]).astype("Float64").to_numpy(dtype=float, na_value=np.nan)


def head_grid(
    profile: xr.Dataset, heads: pd.DataFrame, values: np.ndarray | pd.Series
) -> np.ndarray:
    """`values`, one a row of the table, as objects [layer, head]; None for a missing head."""
    grid = np.full((profile.sizes["layer"], profile.sizes["head"]), None, dtype=object)
    grid[heads["layer"].to_numpy(int), heads["head"].to_numpy(int)] = values
    return grid


def idle_layers(profile: xr.Dataset) -> list[int]:
    """The layers of a hybrid model that do not attend: no head of theirs has numbers."""
    return np.flatnonzero(profile["entropy_bits"].isnull().all("head")).tolist()


def kv_heads(profile: xr.Dataset) -> np.ndarray:
    """The key-value head that each query head reads, [layer, head] (grouped queries).

    Counted within each layer: layers of unequal width hold NaN for the heads they lack.
    """
    queries, keys = (
        profile[name].notnull().any("frequency").sum(dim).values
        for name, dim in (("q_norm", "head"), ("k_norm", "kv_head"))
    )
    group = np.maximum(queries // np.maximum(keys, 1), 1)
    shared = np.arange(profile.sizes["head"])[None] // group[:, None]
    return np.minimum(shared, profile.sizes["kv_head"] - 1)


def hover_lines(heads: pd.DataFrame) -> np.ndarray:
    """One hover text a row of the table: the head, its label, its bits."""
    return np.array([_hover(row) for row in heads.to_dict("records")], dtype=object)


def _hover(row: dict[Hashable, Any]) -> str:
    offset = ""
    if not pd.isna(row["offset"]):
        offset = f", offset {int(row['offset'])}"
    elif not pd.isna(row["offset_low"]):
        offset = f", offsets {int(row['offset_low'])} to {int(row['offset_high'])}"
    sure = "" if pd.isna(row["confidence"]) else f" (confidence {row['confidence']:.2f})"
    return (
        f"<b>L{row['layer']} H{row['head']}</b> {row['label']}{offset}{sure}<br>"
        f"{row['total_bits']:.2f} bits: sink {row['sink_bits']:.2f}, "
        f"position {row['position_bits']:.2f}, content {row['content_bits']:.2f}, "
        f"both at once {row['interaction_bits']:.2f}<br>"
        f"strongest plane: {short_count(row['top_wavelength'])} tokens, "
        f"{number(row['top_share'], '.0%')} of its push"
    )
