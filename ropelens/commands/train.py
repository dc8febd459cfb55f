"""The command `ropelens train`."""

from pathlib import Path
from typing import Annotated

import typer

from ropelens.analysis.options import path_of, with_options
from ropelens.checkpoints.load_options import option
from ropelens.commands.terminal import print_path
from ropelens.train.settings import Settings

WITH_STUDY = ("study", "text", "valid", "tokens", "out")
"""Options that can be used together with --study."""

ONLY_IN_STUDIES = {"decay", "history_every", "compile"}
"""Settings that only a study file can set."""


@with_options(Settings, only=Settings.__dataclass_fields__.keys() - ONLY_IN_STUDIES)
def train_command(
    run: typer.Context,
    *,
    out: Annotated[
        Path,
        option("RUN", "Folder for the run, with its model, or for the study.", parser=path_of),
    ],
    text: Annotated[
        list[Path] | None,
        option("FILE", "Text file or folder. Can be repeated.", parser=path_of),
    ] = None,
    valid: Annotated[
        list[Path] | None,
        option(
            "FILE",
            "Validation text. Can be repeated. [default: 2% of the sequences]",
            parser=path_of,
        ),
    ] = None,
    tokens: Annotated[
        Path | None, option("FOLDER", "Instead of --text: a folder with prepared tokens.")
    ] = None,
    study: Annotated[
        Path | None,
        option(
            "FILE.toml",
            "Train all variants, sizes and seeds of a study. Can be used only with --text, "
            "--valid, --tokens and --out.",
        ),
    ] = None,
    options: Settings,
) -> None:
    """Train small LLaMA-style models on text. The same command continues a stopped run.

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
                raise typer.BadParameter(
                    f"{option.opts[0]} cannot be used together with --study. Set it in the file"
                )
        from ropelens.train.run import run_study

        print_path(run_study(study, out=out, text=text, valid=valid, tokens=tokens))
    elif bool(text) == (tokens is not None):
        raise typer.BadParameter("one of --text, --tokens and --study is needed")
    else:
        from ropelens.train.run import train

        print_path(train(options, out=out, text=text, valid=valid, data=tokens))
