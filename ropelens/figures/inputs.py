"""What the figures are given: a profile and its table of heads, checked once, here."""

from __future__ import annotations

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.errors import BadArgument
from ropelens.figures.style import LABELS

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

    Raises `BadArgument` where the table is not about this profile: a column missing, a
    label nobody knows, or another set of heads.
    """
    if heads is None:
        # Only here: a figure of a saved table needs neither the bootstrap nor scipy.
        from ropelens.heads import classify_heads

        heads = classify_heads(profile)
    missing = [name for name in NEEDED if name not in heads]
    unknown = sorted(set(heads["label"].astype(str)) - set(LABELS)) if not missing else []
    if missing or unknown:
        raise BadArgument(
            "This table of heads cannot be drawn.",
            seen=f"columns missing: {missing}" if missing else f"labels {unknown}",
            attempt="pass what classify_heads(profile) gives",
        )
    expected = set(np.ndindex(profile.sizes["layer"], profile.sizes["head"]))
    given = set(zip(heads["layer"].astype(int), heads["head"].astype(int), strict=True))
    if given != expected or len(heads) != len(expected):
        raise BadArgument(
            "The table of heads and the profile are not about the same model.",
            seen=f"{len(heads)} rows, not the {len(expected)} of the profile's heads",
            attempt="pass what classify_heads(profile) gives",
        )
    return heads


def head_grid(profile: xr.Dataset, heads: pd.DataFrame, column: str) -> np.ndarray:
    """A column of the table as an array [layer, head]; NaN where it says nothing."""
    grid = np.full((profile.sizes["layer"], profile.sizes["head"]), np.nan)
    values = (
        pd.to_numeric(heads[column]).astype("Float64").to_numpy(dtype=float, na_value=np.nan)
    )
    grid[heads["layer"].to_numpy(int), heads["head"].to_numpy(int)] = values
    return grid


def kv_head_of(profile: xr.Dataset, head: int) -> int:
    """The key-value head that query head `head` reads (grouped-query attention)."""
    return head // (profile.sizes["head"] // profile.sizes["kv_head"])


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
        f"mean wavelength {row['mean_wavelength']:.3g} tokens"
    )
