"""The command `ropelens rope`, which prints rotations as tables of planes."""

from __future__ import annotations

import textwrap
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

import ropelens as rl
from ropelens.analysis.options import Model, with_options
from ropelens.checkpoints.load_options import Loading, option

if TYPE_CHECKING:
    import xarray as xr

ALIKE = 1e-3
"""Relative difference of measured frequencies below which layers share a table."""

WIDTH = 80
"""Characters of a line."""


@with_options(Loading)
def rope(
    model: Model = "bundled",
    *,
    context: Annotated[
        int | None,
        option(
            "N",
            "Tokens, for RoPE variants that change with the length (dynamic, longrope). "
            "[default: what the model was trained for]",
            min=1,
        ),
    ] = None,
    variant: Annotated[
        str | None,
        option(
            "NAME[:VALUE]",
            "As this RoPE variant would rotate: p-rope:0.75, yarn:4, ...",
        ),
    ] = None,
    verbose: Annotated[
        bool, option(None, "A table a layer, also if layers are alike.", name="--verbose")
    ] = False,
    options: Loading,
) -> None:
    """Measure how each layer of a model rotates, from one forward pass, and print it.

    A row per plane: its angular frequency and wavelength as measured, the frequency that the
    model's buffer states and the one that its configuration asks for, and how far, relative to
    the stated one, the measured one is off. With --variant, the rotation that an edit makes of
    it.

    \b
    Examples:
      ropelens rope ./my-llama
      ropelens rope ./my-llama --variant p-rope:0.75
    """
    from ropelens.checkpoints.row_order import row_order

    loaded, tokenizer = rl.load(model, **asdict(options))
    with rl.edit_rope(loaded, *([variant] if variant else [])):
        rotation = rl.measure_rope(loaded, context=context)
    groups: dict[int, list[int]] = {}  # layers that rotate alike, by the first of them
    for layer in range(rotation.sizes["layer"]):
        same = (n for n in groups if not verbose and _alike(rotation.isel(layer=[n, layer])))
        groups.setdefault(next(same, layer), []).append(layer)
    for group in groups.values():
        print(_table(rotation.isel(layer=group)))
    order = None if tokenizer is None or variant else row_order(loaded, tokenizer)
    if order is not None:
        typer.echo(textwrap.fill(order[1], WIDTH))


def _alike(rope: xr.Dataset) -> bool:
    """Whether two layers rotate alike: as stated, and as measured up to its noise."""
    one, other = rope.isel(layer=0), rope.isel(layer=1)
    stated = ["pairing", "rotary_dim", "inv_freq_stated", "inv_freq_configured"]
    attend = [bool(side["residual"].notnull()) for side in (one, other)]
    if not any(attend):
        stated.append("layer_type")
    elif not all(attend):
        return False
    ratios = [one[n] / other[n] for n in ("inv_freq", "query_scale")]  # NaN: nothing turns
    return all(one[n].variable.equals(other[n].variable) for n in stated) and not any(
        bool((abs(ratio - 1) > ALIKE).any()) for ratio in ratios
    )


def _table(rope: xr.Dataset) -> str:
    """The planes of layers that rotate alike: a title, and a row per plane."""
    from ropelens.figures.formats import ranges

    names = ["inv_freq", "wavelength", "inv_freq_stated", "inv_freq_configured"]
    first = rope.isel(layer=0)
    layers, rotary_dim = rope["layer"].values.tolist(), int(first["rotary_dim"])
    planes = first[names].to_dataframe()[names].dropna(subset="inv_freq")
    stated = planes["inv_freq_stated"]
    planes["apart"] = (planes["inv_freq"] / stated - 1).where(stated != 0)
    planes.insert(0, "plane", [str(n) if 2 * n < rotary_dim else "rest" for n in planes.index])
    rows = planes.to_string(
        index=False,
        na_rep="",
        header=["plane", "rad/token", "wavelength", "stated", "configured", "off by"],
        formatters=[
            *(str, "{:.9g}".format, "{:,.2f}".format),
            *("{:.9g}".format, "{:.9g}".format, "{:.1e}".format),
        ],
    )
    what = f"{rotary_dim // 2} planes, {first['pairing'].item()} pairing"
    title = f"layer{'s' * (len(layers) > 1)} {ranges(layers)}: "
    if rope["residual"].isnull().all():
        return f"{title}no attention ({first['layer_type'].item()})\n"
    title += f"{what if rotary_dim else 'no rotation'} (residual {rope['residual'].max():.1e})"
    scale = first["query_scale"]
    grows = scale[abs(scale - 1) > 0][::-1]  # the farthest first; NaN without attention
    if grows.size:
        at = [f"{float(x):.4g} at position {int(x['position']):,}" for x in grows[[0, -1]]]
        title += f"; queries grow with position, to {at[0]}, from {at[1]}"
    return f"{textwrap.fill(title, WIDTH)}\n{rows if len(planes) else ''}\n"
