"""The command `ropelens rope`, which prints the rotation of each layer as a table."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Annotated

import typer

import ropelens as rl
from ropelens.analysis.options import MODEL_HELP, with_options
from ropelens.checkpoints.load_options import Loading, option
from ropelens.commands.rope_table import WIDTH, groups_of_layers, summary, table
from ropelens.commands.terminal import print_lines


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

    fault_of_rows = ""
    remark = ""  # on the order of rows
    if Path(model).suffix in (".npz", ".safetensors") and not Path(model).is_dir():
        if variant:
            raise typer.BadParameter("--variant needs a model, not a file of arrays")
        rotation = rl.measure_rope(Path(model), config=config, context=context)
    else:
        opened = open_checkpoint(model, options)
        loaded = opened.read()
        edits = [variant] if variant else []
        with rl.edit_rope(loaded, *edits):
            rotation = rl.measure_rope(loaded, config=config, context=context)
        order = check_row_order(as_live_model(loaded, opened.tokenizer))
        if order.wrong:
            fault_of_rows = order.sentence
        else:
            remark = order.sentence
    print_lines(summary(rotation))
    for layers in groups_of_layers(rotation, by_layer=verbose):
        print_lines(table(rotation.isel(layer=layers)))
    if remark:
        print_lines(textwrap.fill(remark, WIDTH))
    faults = []
    if rotation.attrs["verdict"] == "different":
        faults.append(rotation.attrs["why"])
    if fault_of_rows:
        faults.append(fault_of_rows)
    print_lines("; ".join(faults) or rotation.attrs["why"])
    raise typer.Exit(1 if faults else 0)
