"""The command `ropelens rope`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Literal

import typer

import ropelens as rl
from ropelens.commands.options import Model, with_options
from ropelens.models.loading import Loading, option


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
    from ropelens.commands.tables import agreement_tables, rotation_tables
    from ropelens.models.row_order import row_order_losses, words_of_row_order

    if against is not None and variant is not None:
        raise typer.BadParameter("--against is for a model as it is, without --variant")
    loaded, tokenizer = rl.load(model, **asdict(options))
    if against is not None:
        from ropelens.models.bridge import bridge

        other, _ = rl.load(model, **asdict(options))  # a bridge changes its model
        compared = rl.compare_rope(loaded, bridge(other, tokenizer), context=context)
        for text in agreement_tables(compared, ("transformers", against), verbose=verbose):
            print(text)
        typer.echo(f"{compared.attrs['verdict'].upper()}. {compared.attrs['why']}")
        raise typer.Exit(compared.attrs["verdict"] != "same")
    with rl.edit_rope(loaded, *([variant] if variant else [])):
        rotation = rl.measure_rope(loaded, context=context)
    for text in rotation_tables(rotation, verbose=verbose):
        print(text)
    losses = None if tokenizer is None or variant else row_order_losses(loaded, tokenizer)
    if losses is not None:
        typer.echo(words_of_row_order(*losses))
