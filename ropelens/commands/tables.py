"""Measured rotations as tables for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import xarray as xr
from rich.table import Table
from rich.text import Text

from ropelens.rope.formulas import Shape
from ropelens.rope.variants import Variant

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


def variant_table(variant: Variant, shape: Shape) -> Table:
    """The planes of a variant on heads of `shape`, as its formula has them."""
    inv_freq, factor = variant.frequencies(shape)
    grow = "" if factor == 1 else f", queries and keys times {factor:.6g}"
    still = int((inv_freq == 0).sum())
    table = _planes_table(
        f"{variant.text}: {len(inv_freq)} planes, {still} of them still{grow}\n"
        f"{variant.row.meaning} ({variant.row.source})"
    )
    for plane, w in enumerate(inv_freq.double().tolist()):
        wavelength = 2 * np.pi / w if w else np.inf
        table.add_row(str(plane), f"{w:.9g}", f"{wavelength:,.2f}")
    return table


def agreement_tables(
    found: xr.Dataset, names: tuple[str, str], *, verbose: bool = False
) -> list[Table]:
    """For each plane where two implementations, called `names`, are farthest apart.

    One table over all layers, or a table a layer if `verbose`. `found` is what `compare_rope`
    returns.
    """
    layers = [[layer] for layer in found["layer"].values.tolist()]
    if not verbose:
        layers = [found["layer"].values.tolist()]
    return [_agreement_table(found.sel(layer=group), names) for group in layers]


def _agreement_table(found: xr.Dataset, names: tuple[str, str]) -> Table:
    """The planes of some layers: the largest difference of each, and both angles there."""
    positions = found["position"].values
    table = Table(
        title=Text(
            f"{_layers(found['layer'].values.tolist())}: angles at positions 0 to "
            f"{positions[-1]:,}, {names[0]} and {names[1]}"
        ),
        title_justify="left",
        min_width=72,
    )
    headings = ("plane", "largest dif-\nference [rad]", "layer", "position")
    for heading in (*headings, *(f"{name}\n[rad]" for name in names)):
        table.add_column(Text(heading), justify="right", no_wrap=True)
    for plane in range(found.sizes["frequency"]):
        # Of equal differences the farthest position.
        of_plane = found.isel(frequency=plane, position=slice(None, None, -1))
        if of_plane["difference"].isnull().all():
            continue
        worst = of_plane.isel(of_plane["difference"].fillna(-1).argmax(...))
        table.add_row(
            str(plane),
            f"{float(worst['difference']):.1e}",
            str(int(worst["layer"])),
            f"{int(worst['position']):,}",
            *(f"{angle:.6f}" for angle in worst["angle"].values.tolist()),
        )
    return table


def _planes_table(title: str, *further: str) -> Table:
    """An empty table of planes, with `further` headings."""
    table = Table(title=Text(title), title_justify="left", min_width=72)
    headings = ("plane", "inv_freq\n[rad/token]", "wavelength\n[tokens]", *further)
    for heading in headings:
        table.add_column(Text(heading), justify="right")  # a str's brackets are markup
    return table


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
    table = _planes_table(
        f"{_layers(rope['layer'].values.tolist())}: {what} (residual {residual:.1e})",
        "stated\n[rad/token]",
        "measured /\nstated − 1",
    )
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
            f"{inv_freq / stated - 1:.1e}" if stated > 0 else "",
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
