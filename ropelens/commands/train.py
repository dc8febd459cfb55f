"""The command `ropelens train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from ropelens.commands.options import Seed, given, path_of
from ropelens.commands.terminal import print_path, stopped_in_its_words
from ropelens.errors import BadArgument

OF_STUDIES = ("study", "text", "valid", "tokens", "out")


@stopped_in_its_words()
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
    dataset: Annotated[
        str | None,
        typer.Option(
            metavar="NAME[:CONFIG]",
            help="In place of --text: the train split of a dataset of the Hub, streamed.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="In place of --text: arrays of tokens that were made before, learnt one after "
            "another.",
            show_default=False,
        ),
    ] = None,
    study: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.toml",
            help="Train all that a study names: variants, sizes and seeds. Beside it stand "
            "--text, --valid, --tokens and --out alone.",
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
            help="bf16, autocast over float32 weights; fp32; or auto: bf16 where it is faster.",
        ),
    ] = "auto",
    seed: Seed = 0,
) -> None:
    """Train small LLaMA-style models on text; the same command goes on where it stopped.

    \b
    Examples:
      ropelens train --text books/ --variant p-rope:0.75 --out runs/books
      ropelens train --study variants.toml --text books/ --out runs/variants
    """
    if study is not None:
        other = [flag for name, flag in given(run).items() if name not in OF_STUDIES]
        if other:
            raise typer.BadParameter(f"{other[0]} stands in the file of --study")
        if not study.is_file():  # before all that takes seconds to import
            raise BadArgument(f"There is no study file {study}.")
        from ropelens.train import run_study

        _print_once(
            run_study(study, out=out, text=text or (), valid=valid or (), tokens=tokens)
        )
        return
    if [bool(text), dataset is not None, tokens is not None].count(True) != 1:
        raise typer.BadParameter("one of --text, --dataset, --tokens and --study is needed")
    from ropelens.train import train as train_model

    _print_once(
        train_model(
            text or (),
            out=out,
            valid=valid or (),
            dataset=dataset,
            tokens=tokens,
            variant=variant,
            size=size,
            context=context,
            vocabulary=vocabulary,
            steps=steps,
            learning_rate=learning_rate,
            precision=precision,
            seed=seed,
        )
    )


def _print_once(path: Path) -> None:
    """`print_path`, by one of the processes that train together."""
    from ropelens.models.processes import processes

    if processes().is_main_process:
        print_path(path)
