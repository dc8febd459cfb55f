"""What the figures are given: a profile and its table of heads, checked once, here."""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.errors import BadArgument
from ropelens.figures.style import LABELS
from ropelens.figures.wavelengths import short_count

NEEDED = (
    "layer",
    "head",
    "label",
    "confidence",
    "positional_fraction",
    "total_bits",
    "sink_bits",
    "position_bits",
    "content_bits",
    "offset",
    "mean_wavelength",
)


def head_table(profile: xr.Dataset, heads: pd.DataFrame | None) -> pd.DataFrame:
    """`heads`, or where it is None the classification of `profile` by its defaults.

    Heads may be missing (layers of unequal width). Raises `BadArgument` where the table is
    not about this profile: no rows, a column missing, a label nobody knows, a head twice
    or one that the profile does not have.
    """
    if heads is None:
        # Only here: a figure of a saved table needs neither the bootstrap nor scipy.
        from ropelens.measure.heads import classify_heads

        heads = classify_heads(profile)
    missing = [name for name in NEEDED if name not in heads]
    unknown = sorted(set(heads["label"].astype(str)) - set(LABELS)) if not missing else []
    if missing or unknown:
        raise BadArgument(
            "This table of heads cannot be drawn.",
            seen=f"columns missing: {missing}" if missing else f"labels {unknown}",
            attempt="pass what classify_heads(profile) gives",
        )
    inside = set(np.ndindex(profile.sizes["layer"], profile.sizes["head"]))
    given = list(zip(heads["layer"].astype(int), heads["head"].astype(int), strict=True))
    if not given or len(set(given)) != len(given) or not inside.issuperset(given):
        raise BadArgument(
            "The table of heads and the profile are not about the same model.",
            seen=f"{len(given)} rows, {len(set(given) & inside)} of the profile's heads",
            attempt="pass what classify_heads(profile) gives",
        )
    return heads


def row_of(heads: pd.DataFrame, selected: tuple[int, int]) -> int:
    """The row of the table that is about head `selected`, (layer, head)."""
    found = np.flatnonzero((heads["layer"] == selected[0]) & (heads["head"] == selected[1]))
    if not found.size:
        raise BadArgument(
            f"The table of heads has no layer {selected[0]}, head {selected[1]}.",
            attempt="count from 0",
        )
    return int(found[0])


def head_grid(profile: xr.Dataset, heads: pd.DataFrame, column: str) -> np.ndarray:
    """A column of the table as an array [layer, head]; NaN where it says nothing."""
    grid = np.full((profile.sizes["layer"], profile.sizes["head"]), np.nan)
    values = (
        pd.to_numeric(heads[column]).astype("Float64").to_numpy(dtype=float, na_value=np.nan)
    )
    grid[heads["layer"].to_numpy(int), heads["head"].to_numpy(int)] = values
    return grid


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


def check_head(profile: xr.Dataset, *, layer: int, head: int) -> None:
    """Raise `BadArgument` where the profile has no such head."""
    layers, heads = profile.sizes["layer"], profile.sizes["head"]
    if not (0 <= layer < layers and 0 <= head < heads):
        raise BadArgument(
            f"There is no layer {layer}, head {head}.",
            seen=f"layers 0 to {layers - 1}, heads 0 to {heads - 1}",
            attempt="count from 0",
        )


def hover_lines(heads: pd.DataFrame) -> np.ndarray:
    """One hover text a row of the table: the head, its label, its bits."""
    return np.array([_hover(row) for row in heads.to_dict("records")], dtype=object)


def _hover(row: dict) -> str:
    offset = "" if pd.isna(row["offset"]) else f", offset {int(row['offset'])}"
    sure = "" if pd.isna(row["confidence"]) else f" (confidence {row['confidence']:.2f})"
    return (
        f"<b>L{row['layer']} H{row['head']}</b> {row['label']}{offset}{sure}<br>"
        f"{row['total_bits']:.2f} bits: sink {row['sink_bits']:.2f}, "
        f"position {row['position_bits']:.2f}, content {row['content_bits']:.2f}<br>"
        f"mean wavelength {short_count(row['mean_wavelength'])} tokens"
    )
