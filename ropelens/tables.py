"""Measured rotations as tables for a terminal."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import xarray as xr
from rich.table import Table


def rotation_tables(rope: xr.Dataset, *, verbose: bool = False) -> list[Table]:
    """One table for every run of layers that rotate alike; for every layer if `verbose`.

    `rope` is what `measure_rope` returns.
    """
    layers = list(range(rope.sizes["layer"]))

    def likeness(layer: int) -> object:
        if verbose:
            return layer
        row = rope.isel(layer=layer)
        frequencies = np.nan_to_num(row["inv_freq"].values, nan=-1.0)
        return str(row["pairing"].values), tuple(np.float32(frequencies).round(9))

    runs = [list(run) for _, run in groupby(layers, key=likeness)]
    return [_table(rope.isel(layer=run)) for run in runs]


def _table(rope: xr.Dataset) -> Table:
    """The planes of layers that rotate alike."""
    first, last = int(rope["layer"][0]), int(rope["layer"][-1])
    where = f"layer {first}" if first == last else f"layers {first}-{last}"
    row = rope.isel(layer=0)
    rotary_dim = int(row["rotary_dim"])
    residual = float(rope["residual"].max())
    what = (
        "no rotation"
        if rotary_dim == 0
        else f"{rotary_dim // 2} planes, {row['pairing'].item()} pairing"
    )
    table = Table(title=f"{where}: {what} (residual {residual:.1e})", title_justify="left")
    headings = ("plane", "inv_freq [rad/token]", "wavelength [tokens]", "stated [rad/token]")
    for heading in headings:
        table.add_column(heading, justify="right")
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
