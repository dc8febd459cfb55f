"""The text that `ropelens rope` prints: a summary, and a table for layers that rotate alike."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

SAME_FREQUENCY = 1e-3  # relative difference between layers that share a table
WIDTH = 80  # characters in a line
STATED = ("pairing", "rotary_dim", "inv_freq_stated", "inv_freq_configured")
FREQUENCY_COLUMNS = (
    "inv_freq",
    "wavelength",
    "inv_freq_stated",
    "inv_freq_configured",
)


def groups_of_layers(rope: xr.Dataset, *, by_layer: bool) -> list[list[int]]:
    """Layers that rotate alike, or each layer by itself."""
    groups: dict[int, list[int]] = {}  # by their first layer
    for layer in range(rope.sizes["layer"]):
        first = layer
        if not by_layer:
            first = _first_alike(rope, layer, list(groups))
        groups.setdefault(first, []).append(layer)
    return list(groups.values())


def _first_alike(rope: xr.Dataset, layer: int, others: list[int]) -> int:
    """The first of the other layers that rotates as `layer`, or `layer` itself."""
    for other in others:
        if _alike(rope.isel(layer=[other, layer])):
            return other
    return layer


def _alike(rope: xr.Dataset) -> bool:
    """Whether the stated rotations of two layers are equal, and the measured up to noise."""
    first = rope.isel(layer=0)
    second = rope.isel(layer=1)
    names = list(STATED)
    if rope["residual"].isnull().all():  # layers without attention
        names.append("layer_type")
    for name in names:
        if not first[name].variable.equals(second[name].variable):
            return False
    if first["residual"].isnull() != second["residual"].isnull():
        return False
    for name in ("inv_freq", "query_scale"):
        ratio = first[name] / second[name]  # NaN: no rotation
        if (abs(ratio - 1) > SAME_FREQUENCY).any():
            return False
    return True


def summary(rope: xr.Dataset) -> str:
    """Three lines: the kinds of layers, the rotation of each kind, and the dead planes."""
    from ropelens.figures.formats import in_words, plural

    counts = []
    rotations = []
    for layer_type in dict.fromkeys(rope["layer_type"].values.tolist()):
        layers = rope.isel(layer=(rope["layer_type"] == layer_type).values)
        counts.append(_count_words(layers, layer_type))
        rotation = _rotation_words(layers)
        if rotation:
            rotations.append(f"{layer_type}: {rotation}".strip(": "))
    lines = (
        f"{plural(rope.sizes['layer'], 'layer')}: {in_words(counts)}",
        "; ".join(rotations) or "no rotation",
        f"dead planes: {_dead_planes(rope) or 'none'}",
    )
    wrapped = [textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in lines]
    return "\n".join(wrapped)


def _count_words(layers: xr.Dataset, layer_type: str) -> str:
    reach = layers["reach"].values[0]
    words = f"{layers.sizes['layer']} {layer_type}"
    return f"{words} (reach {int(reach):,} tokens)" if reach else words


def _rotation_words(layers: xr.Dataset) -> str:
    """Base, scaling and wavelengths of layers of one kind; "" if they do not rotate."""
    import numpy as np

    from ropelens.figures.formats import short_count

    turning = layers["wavelength"].where(np.isfinite(layers["wavelength"]))
    if not turning.notnull().any():
        return ""
    words = ""
    first = layers.isel(layer=0)
    if first["base"].notnull():
        words += f"base {float(first['base']):,.7g}, "
    if first["scaling"].item():
        words += f"{first['scaling'].item()}, "
    shortest = short_count(float(turning.min()))
    longest = short_count(float(turning.max()))
    return f"{words}wavelengths {shortest} to {longest} tokens"


def _dead_planes(rope: xr.Dataset) -> str:
    """The planes in which all queries or keys are 0, with their layers."""
    from ropelens.figures.formats import ranges

    is_plane = rope["frequency"] < rope["rotary_dim"] // 2
    attends = rope["residual"].notnull()
    dead = rope["inv_freq"].isnull() & is_plane & attends
    names = []
    for plane, in_layer in enumerate(dead.transpose("frequency", "layer").values):
        if in_layer.any():
            layers = rope["layer"].values[in_layer].tolist()
            names.append(f"{plane} (layer {ranges(layers)})")
    return ", ".join(names)


def table(rope: xr.Dataset) -> str:
    """A title, and a row for each plane of layers that rotate alike."""
    from ropelens.figures.formats import ranges

    layers = rope["layer"].values.tolist()
    title = f"layer {ranges(layers)}: "
    if len(layers) > 1:
        title = f"layers {ranges(layers)}: "
    first = rope.isel(layer=0)
    if rope["residual"].isnull().all():
        return f"{title}no attention ({first['layer_type'].item()})\n"
    rotary_dim = int(first["rotary_dim"])
    rotation = "no rotation"
    if rotary_dim:
        rotation = f"{rotary_dim // 2} planes, {first['pairing'].item()} pairing"
    title += f"{rotation} (residual {rope['residual'].max():.1e})"
    title += _growth_words(first["query_scale"])
    rows = _rows(rope, rotary_dim)
    return f"{textwrap.fill(title, WIDTH)}\n{rows}\n"


def _growth_words(scale: xr.DataArray) -> str:
    """How much longer queries become with their position; "" if they keep their length."""
    growth = scale[abs(scale - 1) > 0]  # NaN without attention
    if not growth.size:
        return ""
    return (
        "; queries grow with position,"
        f" to {_scale_words(growth[-1])}, from {_scale_words(growth[0])}"
    )


def _scale_words(scale: xr.DataArray) -> str:
    return f"{float(scale):.4g} at position {int(scale['position']):,}"


def _rows(rope: xr.Dataset, rotary_dim: int) -> str:
    """The rows of planes as text; "" without planes."""
    planes = _planes(rope)
    if not len(planes):
        return ""
    names = [str(n) if 2 * n < rotary_dim else "rest" for n in planes.index]
    planes.insert(0, "plane", names)
    formats = ("{}", "{:.9g}", "{:,.2f}", "{:.9g}", "{:.9g}", "{:.1e}")
    return planes.to_string(
        index=False,
        na_rep="",
        header=["plane", "rad/token", "wavelength", "stated", "configured", "off by"],
        formatters=[form.format for form in formats],
    )


def _planes(rope: xr.Dataset) -> pd.DataFrame:
    """Frequencies of each plane, and the relative difference of measured and stated."""
    import pandas as pd

    columns = {}
    for name in FREQUENCY_COLUMNS:
        # A plane that is dead in a layer is measured in another one.
        columns[name] = pd.DataFrame(rope[name].values).bfill().iloc[0]
    planes = pd.DataFrame(columns).dropna(subset="inv_freq")
    stated = planes["inv_freq_stated"]
    planes["difference"] = (planes["inv_freq"] / stated - 1).where(stated != 0)
    return planes
