"""Measured rotations as tables for a terminal: a title, and a row a plane."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

import numpy as np
import pandas as pd
import xarray as xr

ALIKE = 1e-3
"""Relative difference of measured frequencies below which layers share a table."""

WIDTH = 80
"""Characters of a line."""


def _table(title: str, rows: Sequence[dict[str, str]]) -> str:
    """Rows of texts under their headings, in columns."""
    columns = pd.DataFrame(rows).to_string(index=False) if rows else ""
    return f"{textwrap.fill(title, WIDTH)}\n{columns}\n"


def rotation_tables(rope: xr.Dataset, *, verbose: bool = False) -> list[str]:
    """The planes of each layer as `measure_rope` returns them, once for layers that are alike.

    With `verbose` every layer has a table of its own.
    """
    groups: list[list[int]] = []
    for layer in range(rope.sizes["layer"]):
        one = rope.isel(layer=layer)
        alike = [g for g in groups if not verbose and _alike(one, rope.isel(layer=g[0]))]
        if alike:
            alike[0].append(layer)
        else:
            groups.append([layer])
    return [_rotation_table(rope.isel(layer=group)) for group in groups]


def agreement_tables(
    compared: xr.Dataset, names: tuple[str, str], *, verbose: bool = False
) -> list[str]:
    """Each plane where two implementations, called `names`, differ most, of all layers.

    With `verbose` a table a layer. `compared` is what `compare_rope` returns.
    """
    layers = compared["layer"].values.tolist()
    groups = [[layer] for layer in layers] if verbose else [layers]
    return [_agreement_table(compared.sel(layer=group), names) for group in groups]


def _agreement_table(compared: xr.Dataset, names: tuple[str, str]) -> str:
    rows = []
    for plane in range(compared.sizes["frequency"]):
        of_plane = compared.isel(frequency=plane)
        if of_plane["difference"].isnull().all():
            continue
        worst = of_plane.isel(of_plane["difference"].fillna(-1).argmax(...))
        angles = (f"{angle:.6f}" for angle in worst["angle"].values.tolist())
        rows.append(
            {
                "plane": str(plane),
                "largest difference": f"{float(worst['difference']):.1e}",
                "layer": str(int(worst["layer"])),
                "position": f"{int(worst['position']):,}",
                **dict(zip(names, angles, strict=True)),
            }
        )
    layers, last = compared["layer"].values.tolist(), int(compared["position"].values[-1])
    return _table(f"{_layers(layers)}: angles in rad at positions 0 to {last:,}", rows)


def _alike(one: xr.Dataset, other: xr.Dataset) -> bool:
    """Whether two layers rotate alike: as stated, and as measured up to its noise."""
    return (
        all(one[name].item() == other[name].item() for name in ("pairing", "rotary_dim"))
        and one["inv_freq_stated"].variable.equals(other["inv_freq_stated"].variable)
        and np.allclose(one["inv_freq"], other["inv_freq"], ALIKE, atol=0, equal_nan=True)
    )


def _rotation_table(rope: xr.Dataset) -> str:
    """The planes of layers that rotate alike."""
    first, rows = rope.isel(layer=0), []
    rotary_dim, residual = int(first["rotary_dim"]), float(rope["residual"].max())
    for plane in range(rope.sizes["frequency"]):
        of_plane = first.isel(frequency=plane)
        names = ("inv_freq", "inv_freq_stated", "wavelength")
        inv_freq, stated, wavelength = (float(of_plane[name]) for name in names)
        if not np.isnan(inv_freq):
            rows.append(
                {
                    "plane": str(plane) if 2 * plane < rotary_dim else "rest",
                    "rad/token": f"{inv_freq:.9g}",
                    "wavelength (tokens)": f"{wavelength:,.2f}",
                    "stated": "" if np.isnan(stated) else f"{stated:.9g}",
                    "measured/stated − 1": f"{inv_freq / stated - 1:.1e}" if stated > 0 else "",
                }
            )
    planes = f"{rotary_dim // 2} planes, {first['pairing'].item()} pairing"
    layers = _layers(rope["layer"].values.tolist())
    what = planes if rotary_dim else "no rotation"
    return _table(f"{layers}: {what} (residual {residual:.1e})", rows)


def _layers(layers: Sequence[int]) -> str:
    """Layers in words: "layer 3", "layers 0-4, 6-10"."""
    begins = [layer for layer in layers if layer - 1 not in layers]
    ends = [layer for layer in layers if layer + 1 not in layers]
    spans = zip(begins, ends, strict=True)
    words = [str(first) if first == last else f"{first}-{last}" for first, last in spans]
    return f"layer{'s' * (len(layers) > 1)} {', '.join(words)}"
