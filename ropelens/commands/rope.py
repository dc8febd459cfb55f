"""The command `ropelens rope`, which prints the rotation of each layer as a table."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

import ropelens as rl
from ropelens.analysis.options import MODEL_HELP, with_options
from ropelens.checkpoints.load_options import Loading, option
from ropelens.commands.terminal import print_lines

if TYPE_CHECKING:
    import xarray as xr

SAME_FREQUENCY = 1e-3  # relative difference between layers that share a table
WIDTH = 80  # characters in a line


@with_options(Loading)
def rope_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help=f"{MODEL_HELP} Or ARRAYS: a .npz or .safetensors file with the queries and "
            "keys q and k of any runtime (see rl.measure_rope).",
        ),
    ] = "bundled",
    *,
    config: Annotated[
        str | None,
        option("CONFIG", "Compare with this config.json or model. [default: MODEL]"),
    ] = None,
    context: Annotated[
        int | None,
        option(
            "N",
            "Length for dynamic and longrope. [default: the trained context]",
            min=1,
        ),
    ] = None,
    variant: Annotated[
        str | None,
        option("NAME[:VALUE]", "Rotate as this variant: p-rope:0.75, yarn:4, ..."),
    ] = None,
    verbose: Annotated[
        bool, option(None, "Print a table per layer.", name="--verbose")
    ] = False,
    options: Loading,
) -> None:
    """Measure and print the rotation of a model or of arrays in a file.

    The first three lines name the kinds of layers, their bases and wavelengths, and the dead
    planes, in which all queries or keys are 0. A table with a row for each plane follows: the
    measured frequency (rad/token) and wavelength (tokens), the frequencies in the model's
    buffer ("stated") and configuration, and the relative difference of measured and stated.

    The last line is the verdict: "rotates as configured", or the fault. The exit status is 0,
    or 1 for a fault. Edits do not change the verdict.

    \b
    Examples:
      ropelens rope ./my-llama
      ropelens rope ./my-llama --variant p-rope:0.75
      ropelens rope dumped.npz --config ./my-llama/config.json
    """
    from ropelens.checkpoints.load import open_checkpoint
    from ropelens.measured_rotation.row_order import check_row_order
    from ropelens.model.as_live_model import as_live_model

    wrong, sentence = False, ""  # about the order of rows
    measure = partial(rl.measure_rope, config=config, context=context)
    if Path(model).suffix in (".npz", ".safetensors") and not Path(model).is_dir():
        if variant:
            raise typer.BadParameter("--variant needs a model, not a file of arrays")
        rotation = measure(Path(model))
    else:
        opened = open_checkpoint(model, options)
        loaded = opened.read()
        with rl.edit_rope(loaded, *([variant] if variant else [])):
            rotation = measure(loaded)
        order = check_row_order(as_live_model(loaded, opened.tokenizer))
        wrong = order.wrong
        sentence = order.sentence
    print_lines(_summary(rotation))
    for group in _groups(rotation, by_layer=verbose):
        print_lines(_table(rotation.isel(layer=group)))
    if sentence and not wrong:
        print_lines(textwrap.fill(sentence, WIDTH))
    faults = [rotation.attrs["why"]] * (rotation.attrs["verdict"] == "different")
    faults += [sentence] * wrong
    print_lines("; ".join(faults) or rotation.attrs["why"])
    raise typer.Exit(1 if faults else 0)


def _groups(rope: xr.Dataset, *, by_layer: bool) -> Iterable[list[int]]:
    """Layers that rotate alike, or each layer by itself."""
    groups: dict[int, list[int]] = {}  # by their first layer
    for layer in range(rope.sizes["layer"]):
        same = (
            n for n in groups if not by_layer and _alike(rope.isel(layer=[n, layer]))
        )
        groups.setdefault(next(same, layer), []).append(layer)
    return groups.values()


def _alike(rope: xr.Dataset) -> bool:
    """Whether the stated rotations of two layers are equal, and the measured up to noise."""
    first, second = rope.isel(layer=0), rope.isel(layer=1)
    names = ["pairing", "rotary_dim", "inv_freq_stated", "inv_freq_configured"]
    if rope["residual"].isnull().all():  # layers without attention
        names.append("layer_type")
    same = all(first[name].variable.equals(second[name].variable) for name in names)
    same &= bool(first["residual"].isnull() == second["residual"].isnull())
    ratios = [
        first[n] / second[n] for n in ("inv_freq", "query_scale")
    ]  # NaN: no rotation
    return same and not any((abs(ratio - 1) > SAME_FREQUENCY).any() for ratio in ratios)


def _summary(rope: xr.Dataset) -> str:
    """Three lines: the kinds of layers, the rotation of each kind, and the dead planes."""
    import numpy as np

    from ropelens.figures.formats import in_words, plural, ranges, short_count

    counts, rotations = [], []
    for kind in dict.fromkeys(rope["layer_type"].values.tolist()):
        part = rope.isel(layer=(rope["layer_type"] == kind).values)
        first = part.isel(layer=0)
        reach = f" (reach {int(first['reach']):,} tokens)" if first["reach"] else ""
        counts.append(f"{part.sizes['layer']} {kind}{reach}")
        turning = part["wavelength"].where(np.isfinite(part["wavelength"]))
        if turning.notnull().any():
            ends = " to ".join(
                short_count(float(x)) for x in (turning.min(), turning.max())
            )
            base = (
                f"base {float(first['base']):,.7g}, " if first["base"].notnull() else ""
            )
            scaled = f"{first['scaling'].item()}, " if first["scaling"].item() else ""
            rotations.append(
                f"{kind}: {base}{scaled}wavelengths {ends} tokens".strip(": ")
            )
    attends, planes = rope["residual"].notnull(), rope["rotary_dim"] // 2
    dead = rope["inv_freq"].isnull() & (rope["frequency"] < planes) & attends
    layers = {
        n: np.flatnonzero(x) for n, x in enumerate(dead.transpose().values) if x.any()
    }
    named = [
        f"{n} (layer {ranges(rope['layer'].values[x].tolist())})"
        for n, x in layers.items()
    ]
    lines = (
        f"{plural(rope.sizes['layer'], 'layer')}: {in_words(counts)}",
        "; ".join(rotations) or "no rotation",
        f"dead planes: {', '.join(named) or 'none'}",
    )
    return "\n".join(
        textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in lines
    )


def _table(rope: xr.Dataset) -> str:
    import pandas as pd

    from ropelens.figures.formats import ranges

    names = ["inv_freq", "wavelength", "inv_freq_stated", "inv_freq_configured"]
    first = rope.isel(layer=0)
    layers, rotary_dim = rope["layer"].values.tolist(), int(first["rotary_dim"])
    title = f"layer{'s' * (len(layers) > 1)} {ranges(layers)}: "
    if rope["residual"].isnull().all():
        return f"{title}no attention ({first['layer_type'].item()})\n"
    # A plane that is dead in a layer is measured in another one.
    columns = {name: pd.DataFrame(rope[name].values).bfill().iloc[0] for name in names}
    planes = pd.DataFrame(columns).dropna(subset="inv_freq")
    stated = planes["inv_freq_stated"]
    planes["difference"] = (planes["inv_freq"] / stated - 1).where(stated != 0)
    planes.insert(
        0, "plane", [str(n) if 2 * n < rotary_dim else "rest" for n in planes.index]
    )
    header = ["plane", "rad/token", "wavelength", "stated", "configured", "off by"]
    forms = ("{}", "{:.9g}", "{:,.2f}", "{:.9g}", "{:.9g}", "{:.1e}")
    formatters = [form.format for form in forms]
    rows = planes.to_string(
        index=False, na_rep="", header=header, formatters=formatters
    )
    rotation = f"{rotary_dim // 2} planes, {first['pairing'].item()} pairing"
    rotation = rotation if rotary_dim else "no rotation"
    title += f"{rotation} (residual {rope['residual'].max():.1e})"
    scale = first["query_scale"]
    growth = scale[abs(scale - 1) > 0]  # NaN without attention
    if growth.size:
        ends = [
            f"{float(x):.4g} at position {int(x['position']):,}"
            for x in growth[[-1, 0]]
        ]
        title += f"; queries grow with position, to {ends[0]}, from {ends[1]}"
    return f"{textwrap.fill(title, WIDTH)}\n{rows if len(planes) else ''}\n"
