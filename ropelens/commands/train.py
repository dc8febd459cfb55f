"""The command `ropelens train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ropelens.commands.options import path_of
from ropelens.commands.terminal import print_path
from ropelens.models.loading import option

WITH_STUDY = ("study", "text", "valid", "tokens", "out")
"""The options that a study does not state itself."""


def train(
    run: typer.Context,
    *,
    out: Annotated[
        Path,
        option(
            "RUN",
            "Folder of the run, which is also the model; or of the study.",
            parser=path_of,
        ),
    ],
    text: Annotated[
        list[Path] | None,
        option(
            "FILE",
            "Text file or folder; may be repeated. [default: what the study names]",
            parser=path_of,
        ),
    ] = None,
    valid: Annotated[
        list[Path] | None,
        option(
            "FILE",
            "Validation text; may be repeated. [default: 2% of the sequences]",
            parser=path_of,
        ),
    ] = None,
    tokens: Annotated[
        Path | None, option("FOLDER", "Instead of --text: arrays of tokens made before.")
    ] = None,
    study: Annotated[
        Path | None,
        option(
            "FILE.toml",
            "Train all that a study names: variants, sizes and seeds. It goes with --text, "
            "--valid, --tokens and --out only.",
        ),
    ] = None,
    variant: Annotated[
        str,
        option(
            "NAME[:VALUE]",
            "The model's RoPE: p-rope:0.75, nope, ...; all but nope-every, which LLaMA's "
            "configuration lacks.",
        ),
    ] = "rope",
    size: Annotated[
        str,
        option(
            "NAME",
            "Size of the model: mini, tiny, small, base, or layers x width x heads x "
            "kv_heads, such as 8x384x6x2.",
        ),
    ] = "tiny",
    context: Annotated[int, option("N", "Tokens a sequence.")] = 512,
    vocabulary: Annotated[
        int, option("N", "Tokens of the BPE tokenizer, 258 to 65,536.")
    ] = 2048,
    steps: Annotated[int, option("N", "Optimizer steps.")] = 2500,
    learning_rate: Annotated[
        float | None, option("RATE", "Peak rate. [default: the size's]")
    ] = None,
    precision: Annotated[
        Literal["auto", "bf16", "fp32"],
        option(
            "P",
            "bf16, autocast over float32 weights; fp32; auto is bf16 on a GPU that has it.",
        ),
    ] = "auto",
    seed: Annotated[int, option("N", "Of every random choice.", min=0, max=2**32 - 1)] = 0,
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
