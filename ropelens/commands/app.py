"""The command line: what `ropelens --help` lists, and the commands that are a few lines."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from ropelens.analysis.options import Options, Out, with_options
from ropelens.checkpoints.load_options import option
from ropelens.commands.analyze import analyze, truncate
from ropelens.commands.claims import claims
from ropelens.commands.rope import rope
from ropelens.commands.terminal import finish, print_path, run_app
from ropelens.commands.train import train

app = typer.Typer(
    name="ropelens", add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
)


@app.callback(invoke_without_command=True)
def ropelens(
    context: typer.Context,
    show_version: Annotated[
        bool, option(None, "Show the version and exit.", name="--version")
    ] = False,
) -> None:
    """See how a language model uses the frequencies of its rotary position embedding."""
    if show_version:
        typer.echo(version("ropelens"))
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        context.exit(2)


def list_bundled() -> None:
    """Name the checkpoints that come with ropelens, which other commands take as MODEL.

    \b
    Example:
      ropelens list
    """
    from ropelens.checkpoints.bundled import BUNDLED, bundled_facts

    typer.echo(f"{'name':<30}{'tokens seen':>12}{'loss*':>8}")
    for name in BUNDLED:
        facts = bundled_facts(name)
        loss = f"{facts['validation_loss']:.3f}"
        typer.echo(f"{'bundled:' + name:<30}{facts['tokens']:>12,}{loss:>8}  {facts['what']}")
    typer.echo("* validation loss, nats/token")


@with_options(Options, only=("seed", "device"))
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
    out: Out = Path("compared"),
    sequences: Annotated[
        int,
        option(
            "N", "Sequences of each run's validation text for its loss.", min=2, max=10000000
        ),
    ] = 512,
    options: Options,
) -> None:
    """Set trained runs, or analyzed models, side by side: losses, heads and planes.

    Writes index.html (the page), comparison.nc (every number, netCDF), comparison.csv (a
    row a variant) and run.json to DIR, and prints the path of the page. Every checkpoint
    of a run is measured, on the text that was held out of its training; what was measured
    stays in DIR/measured, so that the same command goes on where it stopped. Folders
    that ropelens analyze wrote are read, and not measured again.

    \b
    Examples:
      ropelens compare runs/variants --out out
      ropelens compare analyzed/llama analyzed/qwen --out out
    """
    from ropelens.runtime.progress import show_progress
    from ropelens.runtime.results import check_out

    check_out(out, "comparison", parts=["measured"])
    from ropelens.analysis.analysis import Answer
    from ropelens.comparison.compare import compare
    from ropelens.runtime.processes import processes, shared

    with shared():
        comparison = compare(
            paths,
            cache=out / "measured",
            sequences=sequences,
            seed=options.seed,
            device=options.device,
            progress=show_progress,
        )
    if processes().is_main_process:
        Answer().save(out, comparison)
        finish(out)


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DIR", help="A folder that ropelens analyze, truncate or compare wrote."
        ),
    ],
    *,
    beside: Annotated[
        Path | None,
        option(
            "DIR",
            "A folder of another model or checkpoint, whose heads the page then shows "
            "beside those of DIR.",
        ),
    ] = None,
) -> None:
    """Make the page of DIR again, from its numbers, and print the path of the page.

    The numbers are those of profile.nc and truncation.nc, or of comparison.nc.

    \b
    Examples:
      ropelens report out
      ropelens report out/step-1024 --beside out/step-64
    """
    from ropelens.analysis.analysis import rewrite_page

    print_path(rewrite_page(folder, beside=beside))


for name, short_help, command in (
    ("analyze", "Measure a model on text, and make a page of it.", analyze),
    ("list", "Name the checkpoints that come with ropelens.", list_bundled),
    ("rope", "Measure how each layer of a model rotates.", rope),
    ("truncate", "Stop the slowest or fastest planes, and see what that costs.", truncate),
    ("claims", "Test published claims about RoPE on a model.", claims),
    ("compare", "Set trained runs, or analyzed models, side by side.", compare),
    ("report", "Make the page again, from saved results.", report),
    ("train", "Train small LLaMA-style models on text.", train),
):
    app.command(name, short_help=short_help)(command)


def main() -> None:
    """Entry point of `ropelens`; see `run_app` for how it ends."""
    run_app(app)
