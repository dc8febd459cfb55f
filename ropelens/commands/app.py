"""The command line: a function for each command that `ropelens --help` lists."""

from __future__ import annotations

import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from ropelens.commands.options import (
    Backend,
    Context,
    Device,
    Dtype,
    Ends,
    Keep,
    Measures,
    Model,
    Offline,
    Out,
    RemoteCode,
    Revision,
    Rows,
    Seed,
    SequenceCount,
    Text,
    given,
)
from ropelens.commands.terminal import print_path, run_app
from ropelens.commands.train import train

app = typer.Typer(
    name="ropelens",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback(invoke_without_command=True)
def ropelens(
    context: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.")
    ] = False,
) -> None:
    """See how a language model uses the frequencies of its rotary position embedding."""
    if show_version:
        typer.echo(version("ropelens"))
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


@app.command(short_help="Measure a model on text, and make a page of it.")
def analyze(
    model: Model = "bundled",
    *,
    out: Out,
    text: Text = None,
    context: Context = None,
    sequences: SequenceCount = None,
    rows: Rows = "all",
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "float32",
    backend: Annotated[
        Backend, typer.Option(help="The library that runs the model.")
    ] = Backend.hf,
    revision: Revision = None,
    local_files_only: Offline = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Measure a model on text: which heads are positional, through which wavelengths.

    Writes index.html (the page), profile.nc (every number, netCDF), heads.csv (a row a
    head) and run.json (how to run it again) to DIR, and prints the path of the page.

    \b
    Examples:
      ropelens analyze --out out
      ropelens analyze ./my-llama --text book.txt --context 1024 --out out
    """
    from ropelens.commands.analyze import Job, run

    job = Job(
        model=model,
        out=out,
        text=tuple(text or ()),
        context=context,
        sequences=sequences,
        rows=rows,
        seed=seed,
        device=device,
        dtype=dtype,
        backend=backend.value,
        revision=revision,
        local_files_only=local_files_only,
        trust_remote_code=trust_remote_code,
    )
    print_path(run(job, command=_command()))


@app.command("list", short_help="Name the checkpoints that come with ropelens.")
def list_bundled() -> None:
    """Name the checkpoints that come with ropelens, which other commands take as MODEL.

    \b
    Example:
      ropelens list
    """
    from rich.console import Console

    from ropelens.commands.tables import bundled_table

    Console(highlight=False).print(bundled_table())


@app.command(short_help="Measure how each layer of a model rotates.")
def rope(
    run: typer.Context,
    model: Model = "bundled",
    *,
    context: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Tokens, for RoPE variants that change with the length (dynamic, longrope). "
            "[default: what the model was trained for]",
            show_default=False,
        ),
    ] = None,
    variant: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:VALUE]",
            help="Of the model as this RoPE variant would make it: p-rope:0.75, yarn:4, ...",
        ),
    ] = None,
    head_dim: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=2,
            max=65_536,
            help="With --variant: of heads of N coordinates, no model.",
        ),
    ] = None,
    base: Annotated[
        float,
        typer.Option(metavar="B", min=2, max=1e15, help="With --head-dim: the base."),
    ] = 10_000.0,
    trained_context: Annotated[
        int, typer.Option(metavar="N", min=1, help="With --head-dim: tokens trained for.")
    ] = 2048,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="A table a layer, also where layers are alike.")
    ] = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
    revision: Revision = None,
    local_files_only: Offline = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Measure how each layer of a model rotates, from one forward pass, and print it.

    A row a plane: its angular frequency and wavelength as measured, and the frequency
    that the model states. With --variant, the rotation that an edit makes of it; with
    --head-dim too, the variant's formula alone.

    \b
    Examples:
      ropelens rope ./my-llama
      ropelens rope --variant p-rope:0.75 --head-dim 128
    """
    from rich.console import Console

    from ropelens.commands.tables import rotation_tables, variant_table
    from ropelens.edit.rope import edit_rope
    from ropelens.models.load import load
    from ropelens.models.rotation import measure_rope
    from ropelens.rope.formulas import Shape
    from ropelens.rope.variants import parse_variant

    console = Console(highlight=False)
    chosen = None if variant is None else parse_variant(variant)
    named = given(run)
    formula = [flag for name, flag in named.items() if name in ("base", "trained_context")]
    if head_dim is None and formula:
        raise typer.BadParameter(f"{formula[0]} is for --head-dim; a model has its own")
    if head_dim is not None:
        if chosen is None:
            raise typer.BadParameter("--head-dim needs a --variant")
        if "model" in named:
            raise typer.BadParameter(f"--head-dim is for no model, and {model!r} is one")
        if head_dim % 2:
            raise typer.BadParameter(f"--head-dim {head_dim} is odd; planes are pairs")
        shape = Shape(head_dim, base, trained_context, context or 0)
        console.print(variant_table(chosen, shape))
        return
    loaded, _ = load(
        model,
        dtype=dtype,
        device=device,
        revision=revision,
        local_files_only=local_files_only,
        trust_remote_code=trust_remote_code,
    )
    with edit_rope(loaded, *([variant] if variant else [])):
        rotation = measure_rope(loaded, context=context)
    for table in rotation_tables(rotation, verbose=verbose):
        console.print(table)


@app.command(short_help="Stop the slowest or fastest planes, and see what that costs.")
def truncate(
    model: Model = "bundled",
    *,
    out: Out,
    text: Text = None,
    keep: Keep = "1,0.875,0.75,0.625,0.5,0.375,0.25,0.125,0",
    end: Ends = None,
    bands: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Also stop one of N bands of wavelengths at a time."
        ),
    ] = 0,
    controls: Annotated[
        int,
        typer.Option(
            metavar="N", min=0, help="Random sets of as many planes beside each step."
        ),
    ] = 3,
    measures: Measures = "loss,induction,retrieval,change,labels",
    context: Context = None,
    sequences: SequenceCount = None,
    rows: Rows = "64",
    seed: Seed = 0,
    device: Device = "auto",
    dtype: Dtype = "float32",
    revision: Revision = None,
    local_files_only: Offline = False,
    trust_remote_code: RemoteCode = False,
) -> None:
    """Stop more and more planes of a model: which does it need, and for what?

    Writes what analyze writes, with truncation.nc (every number, netCDF) and truncation.csv
    (a row an edit) to DIR, and prints the path of the page.

    \b
    Examples:
      ropelens truncate --out out
      ropelens truncate ./my-llama --text book.txt --end slow --bands 8 --out out
      ropelens truncate --measures loss --out out
    """
    from ropelens.commands.truncate import Sweep, run

    job = Sweep(
        model=model,
        out=out,
        text=tuple(text or ()),
        keep=keep,
        ends=tuple(end or ("slow", "fast")),
        bands=bands,
        controls=controls,
        measures=measures,
        context=context,
        sequences=sequences,
        rows=rows,
        seed=seed,
        device=device,
        dtype=dtype,
        revision=revision,
        local_files_only=local_files_only,
        trust_remote_code=trust_remote_code,
    )
    print_path(run(job, command=_command()))


@app.command(short_help="Set trained runs, or analyzed models, side by side.")
def compare(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...",
            help="Runs and studies of ropelens train; or folders that ropelens analyze wrote. "
            "The first is the baseline.",
        ),
    ],
    *,
    out: Out,
    sequences: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=2,
            max=10_000_000,
            help="Sequences of each run's validation text for its loss.",
        ),
    ] = 512,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Set trained runs, or analyzed models, side by side: losses, heads and planes.

    Writes index.html (the page), comparison.nc (every number, netCDF), comparison.csv (a
    row a variant) and run.json to DIR, and prints the path of the page. Every checkpoint
    of a run is measured, on the text that was held out of its training; what was measured
    stays in DIR/measured, so that the same command goes on where it stopped. Of what
    ropelens analyze wrote, nothing is measured again.

    \b
    Examples:
      ropelens compare runs/variants --out out
      ropelens compare analyzed/llama analyzed/qwen --out out
    """
    from ropelens.commands.compare import run

    page = run(
        paths, out=out, sequences=sequences, seed=seed, device=device, command=_command()
    )
    print_path(page)


@app.command(short_help="Make the page again, from saved results.")
def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A folder that ropelens analyze, truncate or compare wrote."
        ),
    ],
) -> None:
    """Make the page of DIR again, from its numbers, and print the path of the page.

    They are in its profile.nc, with truncation.nc where there is one; or comparison.nc.

    \b
    Example:
      ropelens report out
    """
    from ropelens.commands.report import rewrite_page

    print_path(rewrite_page(folder))


app.command(short_help="Train small LLaMA-style models on text.")(train)


def _command() -> str:
    """What a shell would be told to do this again."""
    return shlex.join(["ropelens", *sys.argv[1:]])


def main() -> None:
    """Entry point of `ropelens`; see `run_app` for how it ends."""
    run_app(app)
