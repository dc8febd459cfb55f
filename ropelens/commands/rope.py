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
    head_dim: Annotated[
        int | None,
        option("N", "With --variant: of heads of N coordinates, no model.", min=2, max=65536),
    ] = None,
    base: Annotated[
        float | None,
        option("B", "With --head-dim: the base. [default: 10,000]", min=2, max=1e15),
    ] = None,
    trained_context: Annotated[
        int | None,
        option("N", "With --head-dim: tokens trained for. [default: 2,048]", min=1),
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
    that the model states. With --variant, the rotation that an edit makes of it; with
    --head-dim too, the variant's formula alone.

    With --against, each plane's angle at each position in both, and a verdict.

    \b
    Examples:
      ropelens rope ./my-llama
      ropelens rope ./my-llama --against transformer-lens
      ropelens rope --variant p-rope:0.75 --head-dim 128
    """
    from ropelens.commands.tables import agreement_tables, rotation_tables, variant_table
    from ropelens.rope.formulas import Shape
    from ropelens.rope.variants import parse_variant

    chosen = None if variant is None else parse_variant(variant)
    if against is not None and (chosen is not None or head_dim is not None):
        raise typer.BadParameter("--against is for a model as it is, without --variant")
    if head_dim is None and (base, trained_context) != (None, None):
        raise typer.BadParameter("--base and --trained-context are for --head-dim")
    if head_dim is not None:
        if chosen is None:
            raise typer.BadParameter("--head-dim needs a --variant")
        if model != "bundled":
            raise typer.BadParameter(f"--head-dim is for no model, and {model!r} is one")
        if head_dim % 2:
            raise typer.BadParameter(f"--head-dim {head_dim} is odd; planes are pairs")
        shape = Shape(head_dim, base or 1e4, trained_context or 2048, context or 0)
        print(variant_table(chosen, shape))
        return
    loaded, tokenizer = rl.load(model, **asdict(options))
    if against is not None:
        from ropelens.models.bridge import bridge
        from ropelens.models.rope import compare_turns, read_turns
        from ropelens.models.subject import as_subject

        own = read_turns(as_subject(loaded), context=context)  # before a bridge changes it
        length = int(own.positions[-1]) + 1
        bridged = as_subject(bridge(loaded, tokenizer))
        found = compare_turns(own, read_turns(bridged, context=length))
        for text in agreement_tables(found, ("transformers", against), verbose=verbose):
            print(text)
        typer.echo(f"{found.attrs['verdict'].upper()}. {found.attrs['why']}")
        raise typer.Exit(found.attrs["verdict"] != "same")
    with rl.edit_rope(loaded, *([variant] if variant else [])):
        rotation = rl.measure_rope(loaded, context=context)
    for text in rotation_tables(rotation, verbose=verbose):
        print(text)
