"""The command line: what `ropelens --help` lists, a file for each command."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from ropelens.commands.analyze import analyze
from ropelens.commands.compare import compare
from ropelens.commands.list import list_bundled
from ropelens.commands.report import report
from ropelens.commands.rope import rope
from ropelens.commands.terminal import run_app, stopped_in_its_words
from ropelens.commands.train import train
from ropelens.commands.truncate import truncate
from ropelens.models.loading import option

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
        bool, option(None, "Show the version and exit.", name="--version")
    ] = False,
) -> None:
    """See how a language model uses the frequencies of its rotary position embedding."""
    if show_version:
        typer.echo(version("ropelens"))
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(2)


for name, short_help, command in (
    ("analyze", "Measure a model on text, and make a page of it.", analyze),
    ("list", "Name the checkpoints that come with ropelens.", list_bundled),
    ("rope", "Measure how each layer of a model rotates.", rope),
    ("truncate", "Stop the slowest or fastest planes, and see what that costs.", truncate),
    ("compare", "Set trained runs, or analyzed models, side by side.", compare),
    ("report", "Make the page again, from saved results.", report),
    ("train", "Train small LLaMA-style models on text.", train),
):
    app.command(name, short_help=short_help)(stopped_in_its_words()(command))


def main() -> None:
    """Entry point of `ropelens`; see `run_app` for how it ends."""
    run_app(app)
