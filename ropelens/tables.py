"""Measured rotations as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import xarray as xr
from rich.table import Table
from rich.text import Text

ALIKE = 1e-3
"""Relative difference of measured frequencies below which layers share a table."""


def rotation_tables(rope: xr.Dataset, *, verbose: bool = False) -> list[Table]:
    """A table for all layers that rotate alike; for every layer its own if `verbose`.

    `rope` is what `measure_rope` returns.
    """
    groups: list[list[int]] = []
    for layer in range(rope.sizes["layer"]):
        for group in groups:
            if not verbose and _alike(rope.isel(layer=layer), rope.isel(layer=group[0])):
                group.append(layer)
                break
        else:
            groups.append([layer])
    return [_table(rope.isel(layer=group)) for group in groups]


def _alike(one: xr.Dataset, other: xr.Dataset) -> bool:
    """Whether two layers rotate alike: as stated, and as measured up to its noise."""
    if any(one[name].item() != other[name].item() for name in ("pairing", "rotary_dim")):
        return False
    stated = (one["inv_freq_stated"], other["inv_freq_stated"])
    measured = (one["inv_freq"], other["inv_freq"])
    return np.array_equal(*stated, equal_nan=True) and np.allclose(
        *measured, rtol=ALIKE, atol=0, equal_nan=True
    )


def _table(rope: xr.Dataset) -> Table:
    """The planes of layers that rotate alike."""
    row = rope.isel(layer=0)
    rotary_dim = int(row["rotary_dim"])
    what = (
        "no rotation"
        if rotary_dim == 0
        else f"{rotary_dim // 2} planes, {row['pairing'].item()} pairing"
    )
    residual = float(rope["residual"].max())
    table = Table(
        title=f"{_layers(rope['layer'].values.tolist())}: {what} (residual {residual:.1e})",
        title_justify="left",
    )
    headings = ("plane", "inv_freq [rad/token]", "wavelength [tokens]", "stated [rad/token]")
    for heading in headings:
        table.add_column(Text(heading), justify="right")  # a str's brackets are markup
    for plane in range(rope.sizes["frequency"]):
        inv_freq = float(row["inv_freq"][plane])
        if np.isnan(inv_freq):
            continue
        stated = float(row["inv_freq_stated"][plane])
        table.add_row(
            str(plane) if 2 * plane < rotary_dim else "rest",
            f"{inv_freq:.9g}",
            f"{float(row['wavelength'][plane]):,.2f}",
            "" if np.isnan(stated) else f"{stated:.9g}",
        )
    return table


def _layers(layers: Sequence[int]) -> str:
    """Layers in words: "layer 3", "layers 0-4, 6-10"."""
    runs = [[layers[0], layers[0]]]
    for before, layer in pairwise(layers):
        if layer == before + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    return ("layer " if len(layers) == 1 else "layers ") + ", ".join(words)
