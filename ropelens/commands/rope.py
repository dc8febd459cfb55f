"""The command `ropelens rope`, which prints rotations as tables of planes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

import ropelens as rl
from ropelens.analysis.options import Model, with_options
from ropelens.models.loading import Loading, option

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
            "Of the model as this RoPE variant would make it: p-rope:0.75, yarn:4, ...",
        ),
    ] = None,
    against: Annotated[
        Literal["transformer-lens"] | None,
        option(
            None,
            "Compare with this implementation of the model, plane by plane. Exit status 1 "
            "if they differ.",
        ),
    ] = None,
    verbose: Annotated[
        bool, option(None, "A table a layer, also if layers are alike.", name="--verbose")
    ] = False,
    options: Loading,
) -> None:
    """Measure how each layer of a model rotates, from one forward pass, and print it.

    A row a plane: its angular frequency and wavelength as measured, and the frequency
    that the model states. With --variant, the rotation that an edit makes of it. With
    --against, each plane's angle where both differ most, and a verdict.

    \b
    Examples:
      ropelens rope ./my-llama
      ropelens rope ./my-llama --against transformer-lens
      ropelens rope ./my-llama --variant p-rope:0.75
    """
    from ropelens.models.row_order import row_order_losses, words_of_row_order

    if against is not None and variant is not None:
        raise typer.BadParameter("--against is for a model as it is, without --variant")
    loaded, tokenizer = rl.load(model, **asdict(options))
    if against is not None:
        from ropelens.models.bridge import bridge

        other, _ = rl.load(model, **asdict(options))  # a bridge changes its model
        compared = rl.compare_rope(loaded, bridge(other, tokenizer), context=context)
        print(_agreement_table(compared, ("transformers", against)))
        typer.echo(f"{compared.attrs['verdict'].upper()}. {compared.attrs['why']}")
        raise typer.Exit(compared.attrs["verdict"] != "same")
    with rl.edit_rope(loaded, *([variant] if variant else [])):
        rotation = rl.measure_rope(loaded, context=context)
    groups: list[list[int]] = []
    for layer in range(rotation.sizes["layer"]):
        same = (g for g in groups if not verbose and _alike(rotation.isel(layer=[g[0], layer])))
        group = next(same, None)
        if group is None:
            groups.append(group := [])
        group.append(layer)
    for group in groups:
        print(_rotation_table(rotation.isel(layer=group)))
    losses = None if tokenizer is None or variant else row_order_losses(loaded, tokenizer)
    if losses is not None:
        typer.echo(textwrap.fill(words_of_row_order(*losses), WIDTH))


def _alike(rope: xr.Dataset) -> bool:
    """Whether two layers rotate alike: as stated, and as measured up to its noise."""
    import numpy as np

    one, other = rope.isel(layer=0), rope.isel(layer=1)
    return (
        all(one[name].item() == other[name].item() for name in ("pairing", "rotary_dim"))
        and one["inv_freq_stated"].variable.equals(other["inv_freq_stated"].variable)
        and np.allclose(one["inv_freq"], other["inv_freq"], ALIKE, atol=0, equal_nan=True)
    )


def _rotation_table(rope: xr.Dataset) -> str:
    """The planes of layers that rotate alike."""
    names, rows = ["inv_freq", "wavelength", "inv_freq_stated"], []
    first = rope.isel(layer=0)
    rotary_dim, residual = int(first["rotary_dim"]), float(rope["residual"].max())
    planes = first[names].to_dataframe()[names].dropna(subset="inv_freq")
    for plane, inv_freq, wavelength, stated in planes.itertuples():
        rows.append(
            {
                "plane": str(plane) if 2 * plane < rotary_dim else "rest",
                "rad/token": f"{inv_freq:.9g}",
                "wavelength (tokens)": f"{wavelength:,.2f}",
                "stated": f"{stated:.9g}" if stated >= 0 else "",
                "measured/stated − 1": f"{inv_freq / stated - 1:.1e}" if stated > 0 else "",
            }
        )
    pairing = f"{rotary_dim // 2} planes, {first['pairing'].item()} pairing"
    what = pairing if rotary_dim else "no rotation"
    return _table(f"{_layers(rope)}: {what} (residual {residual:.1e})", rows)


def _agreement_table(compared: xr.Dataset, names: tuple[str, str]) -> str:
    """Each plane where two implementations, called `names`, differ most."""
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
    last = int(compared["position"].values[-1])
    return _table(f"{_layers(compared)}: angles in rad at positions 0 to {last:,}", rows)


def _layers(rotations: xr.Dataset) -> str:
    """Layers in words: "layer 3", "layers 0–4 and 6"."""
    from ropelens.report.words import ranges

    layers = rotations["layer"].values.tolist()
    return f"layer{'s' * (len(layers) > 1)} {ranges(layers)}"


def _table(title: str, rows: Sequence[dict[str, str]]) -> str:
    """Rows of texts under their headings, in columns."""
    import pandas as pd

    columns = pd.DataFrame(rows).to_string(index=False) if rows else ""
    return f"{textwrap.fill(title, WIDTH)}\n{columns}\n"
