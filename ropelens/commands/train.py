"""The command `ropelens train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ropelens.commands.options import path_of
from ropelens.commands.terminal import print_path

WITH_STUDY = ("study", "text", "valid", "tokens", "out")
"""The options that a study does not state itself."""


def train(
    run: typer.Context,
    *,
    out: Annotated[
        Path,
        typer.Option(
            parser=path_of,
            metavar="RUN",
            help="Folder of the run, which is also the model; or of the study.",
        ),
    ],
    text: Annotated[
        list[Path] | None,
        typer.Option(
            parser=path_of,
            metavar="FILE",
            help="Text file or folder; may be repeated. [default: what the study names]",
            show_default=False,
        ),
    ] = None,
    valid: Annotated[
        list[Path] | None,
        typer.Option(
            parser=path_of,
            metavar="FILE",
            help="Validation text; may be repeated. [default: 2% of the sequences]",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Instead of --text: arrays of tokens, learnt one after another.",
            show_default=False,
        ),
    ] = None,
    study: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="Train all that a study names: variants, sizes and seeds. It goes with "
            "--text, --valid, --tokens and --out only.",
            show_default=False,
        ),
    ] = None,
    variant: Annotated[
        str,
        typer.Option(
            metavar="NAME[:VALUE]",
            help="The model's RoPE: p-rope:0.75, nope, ...; all but "
            "nope-every, which LLaMA's configuration lacks.",
        ),
    ] = "rope",
    size: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Size of the model: mini, tiny, small, base, or layers x width x heads x "
            "kv_heads, such as 8x384x6x2.",
        ),
    ] = "tiny",
    context: Annotated[int, typer.Option(metavar="N", help="Tokens a sequence.")] = 512,
    vocabulary: Annotated[
        int, typer.Option(metavar="N", help="Tokens of the BPE tokenizer, 258 to 65,536.")
    ] = 2048,
    steps: Annotated[int, typer.Option(metavar="N", help="Optimizer steps.")] = 2500,
    learning_rate: Annotated[
        float | None,
        typer.Option(
            metavar="RATE", help="Peak rate. [default: the size's]", show_default=False
        ),
    ] = None,
    precision: Annotated[
        Literal["auto", "bf16", "fp32"],
        typer.Option(
            metavar="P",
            help="bf16, autocast over float32 weights; fp32; or auto: bf16 if it is faster.",
        ),
    ] = "auto",
    seed: Annotated[
        int, typer.Option(metavar="N", min=0, max=2**32 - 1, help="Of every random choice.")
    ] = 0,
) -> None:
    """Train small LLaMA-style models on text; the same command goes on where it stopped.

    \b
    Examples:
      ropelens train --text books/ --variant p-rope:0.75 --out runs/books
      ropelens train --study variants.toml --text books/ --out runs/variants
    """
    if study is not None:
        for option in run.command.params:
            given = run.get_parameter_source(str(option.name))
            if option.name not in WITH_STUDY and getattr(given, "name", "") == "COMMANDLINE":
                raise typer.BadParameter(f"{option.opts[0]} stands in the file of --study")
        from ropelens.train.study import run_study

        folder = run_study(study, out=out, text=text or (), valid=valid or (), tokens=tokens)
    elif bool(text) == (tokens is not None):
        raise typer.BadParameter("one of --text, --tokens and --study is needed")
    else:
        from ropelens.train.data import Source
        from ropelens.train.run import train as train_model
        from ropelens.train.settings import Settings, get_size

        settings = Settings(
            size=get_size(size),
            context=context,
            vocabulary=vocabulary,
            steps=steps,
            learning_rate=learning_rate,
            variant=variant,
            seed=seed,
            precision=precision,
        )
        source = Source(tuple(text or ()), tuple(valid or ()), tokens)
        folder = train_model(settings, source, out=out)
    from ropelens.models.processes import processes

    if processes().is_main_process:
        print_path(folder)
