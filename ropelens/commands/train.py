"""The command `ropelens train`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ropelens.analysis.options import path_of, with_options
from ropelens.checkpoints.load_options import option
from ropelens.commands.terminal import print_path
from ropelens.train.settings import Settings

WITH_STUDY = ("study", "text", "valid", "tokens", "out")
"""The options that a study does not state itself."""

OF_STUDIES = {"decay", "history_every", "compile"}
"""Settings that the command has no options for, and a study states."""


@with_options(Settings, only=Settings.__dataclass_fields__.keys() - OF_STUDIES)
def train(
    run: typer.Context,
    *,
    out: Annotated[
        Path,
        option("RUN", "Folder of the run, also the model; or of the study.", parser=path_of),
    ],
    text: Annotated[
        list[Path] | None,
        option("FILE", "Text file or folder; may be repeated.", parser=path_of),
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
    options: Settings,
) -> None:
    """Train small LLaMA-style models on text; the same command goes on where it stopped.

    \b
    Examples:
      ropelens train --text books/ --variant p-rope:0.75 --out runs/books
      ropelens train --study variants.toml --text books/ --out runs/variants
    """
    text, valid = text or [], valid or []
    if study is not None:
        for option in run.command.params:
            source = run.get_parameter_source(str(option.name))
            if option.name not in WITH_STUDY and getattr(source, "name", "") == "COMMANDLINE":
                raise typer.BadParameter(f"{option.opts[0]} stands in the file of --study")
        from ropelens.train.study import run_study

        print_path(run_study(study, out=out, text=text, valid=valid, tokens=tokens))
    elif bool(text) == (tokens is not None):
        raise typer.BadParameter("one of --text, --tokens and --study is needed")
    else:
        from ropelens.train.run import train as train_model

        print_path(train_model(options, out=out, text=text, valid=valid, data=tokens))
