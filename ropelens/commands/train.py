"""The command `ropelens train`: a training from the start, or from a pretrained model."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ropelens.analysis.options import check_names, path_of, with_options
from ropelens.checkpoints.load_options import Checked, Loading, option, setting
from ropelens.commands.terminal import print_lines, print_path
from ropelens.runtime.progress import opening, show_progress
from ropelens.train.recalibration_settings import Recalibration
from ropelens.train.settings import Settings

if TYPE_CHECKING:
    from ropelens.train.base_model import Base

LOADING = ("device", "revision", "trust_remote_code")
"""Options for reading the model of --from."""


def only_in(settings: type, name: str) -> Any:
    """An option of one kind of training, which is None if it is not given."""
    described = settings.__dataclass_fields__[name].metadata["option"]  # type: ignore[attr-defined]
    default = getattr(settings, name)
    words = _with_default(described.help, "" if default is None else f"{default}")
    return _not_given(described, words)


def either(name: str) -> Any:
    """An option of both kinds of training, which may have different defaults."""
    described = Settings.__dataclass_fields__[name].metadata["option"]
    of_start = getattr(Settings, name)
    of_model = getattr(Recalibration, name)
    default = f"{of_start}"
    if of_model != of_start:
        default = f"{of_start}; with --from {of_model}"
    return _not_given(described, _with_default(described.help, default))


def of_loading(name: str) -> Any:
    """An option for reading the model of --from, which is None if it is not given."""
    described = Loading.__dataclass_fields__[name].metadata["option"]
    return _not_given(described, described.help)


def _with_default(words: str, default: str) -> str:
    return f"{words} [default: {default}]" if default else words


def _not_given(described: Any, words: str) -> Any:
    """An option whose value None means that it is not given."""
    return setting(None, described.metavar, words, min=described.min, max=described.max)


@dataclass(frozen=True, kw_only=True)
class TrainOptions(Checked):
    """Options of `train`. None stands for the default of `Settings` or `Recalibration`."""

    variant: str | None = setting(
        None,
        "NAME[:VALUE]",
        "RoPE variant: p-rope:0.75, ... [default: rope; with --from control]",
    )
    context: int | None = setting(
        None,
        "N",
        "Tokens in a sequence. [default: 512; with --from the trained context, at most 512]",
        min=3,
    )
    steps: int | None = either("steps")
    learning_rate: float | None = setting(
        None,
        "RATE",
        "Peak learning rate. [default: set by the size; with --from 1e-4, or 5e-4 below 10 "
        "million parameters]",
        min=0,
    )
    seed: int | None = setting(
        None,
        "N",
        "Seed of initial weights and text order. [default: 0]",
        min=0,
        max=2**32 - 1,
    )
    size: str | None = only_in(Settings, "size")
    vocabulary: int | None = only_in(Settings, "vocabulary")
    precision: Literal["auto", "bf16", "fp32"] | None = either("precision")
    sequences: int | None = only_in(Recalibration, "sequences")
    warmup: float | None = only_in(Recalibration, "warmup")
    train: Literal["all", "attention"] | None = only_in(Recalibration, "train")
    evaluated: int | None = only_in(Recalibration, "evaluated")
    device: str | None = of_loading("device")
    revision: str | None = of_loading("revision")
    trust_remote_code: bool = setting(
        False, None, "Run the code in the model's folder.", name="--trust-remote-code"
    )

    def given(self) -> dict[str, Any]:
        """The options that are given."""
        given = {}
        for name, value in asdict(self).items():
            is_default = value is None or value is False  # 0 equals False
            if not is_default:
                given[name] = value
        return given


FilesOption = list[Path] | None


@with_options(TrainOptions)
def train_command(
    *,
    out: Annotated[
        Path, option("RUN", "Folder for the run or the study.", parser=path_of)
    ],
    base: Annotated[
        str | None,
        option(
            "MODEL",
            "Start from this pretrained model: a folder, a GGUF file, a Hub id or bundled.",
            name="--from",
            callback=check_names,
        ),
    ] = None,
    text: Annotated[
        FilesOption,
        option("FILE", "Text file or folder. Can be repeated.", parser=path_of),
    ] = None,
    valid: Annotated[
        FilesOption,
        option(
            "FILE",
            "Validation text. [default: 2% of --text, whole documents or parts of all; "
            "with --from up to half]",
            parser=path_of,
        ),
    ] = None,
    tokens: Annotated[
        Path | None,
        option(
            "FOLDER",
            "Instead of --text: a folder with prepared tokens.",
        ),
    ] = None,
    study: Annotated[
        Path | None,
        option(
            "FILE.toml",
            "Train a study. The file has all settings; with --from, options are defaults.",
        ),
    ] = None,
    watch: Annotated[
        bool,
        option(
            None,
            "Also measure heads at each validation, in RUN/watch.",
            name="--watch",
        ),
    ] = False,
    plan: Annotated[
        bool,
        option(
            None,
            "Print tokens, memory, disk and time; do not train.",
            name="--plan",
        ),
    ] = False,
    options: TrainOptions,
) -> None:
    """Train small LLaMA-style models on text, or train a pretrained model on (--from).

    With --from, the model trains on with a variant of RoPE: a recalibration. The control
    keeps the rotation of the model, and is part of each study. Only with --from: --plan,
    --sequences, --warmup, --train, --evaluated, --device, --revision, --trust-remote-code.
    Not with --from: --tokens, --watch, --size, --vocabulary.

    The same command continues a stopped run.

    \b
    Examples:
      ropelens train --text books/ --variant p-rope:0.75 --out runs/books
      ropelens train --study variants.toml --text books/ --out runs/variants
      ropelens train --from bundled --variant p-rope:0.25 --text books/ --out out
    """
    if base is None:
        if plan:
            raise typer.BadParameter("--plan needs --from")
        folder = _train_from_start(
            options,
            out=out,
            text=text or [],
            valid=valid or [],
            tokens=tokens,
            study=study,
            watch=watch,
        )
        print_path(folder)
        return
    if watch or tokens is not None:
        refused = "--watch" if watch else "--tokens"
        raise typer.BadParameter(f"{refused} cannot be used together with --from")
    if not text:
        raise typer.BadParameter("--text is needed")
    given = options.given()
    loading = Loading(**{name: given.pop(name) for name in LOADING if name in given})
    _refuse_others(given, Recalibration, "cannot be used together with --from")
    with opening(show_progress, "loading"):
        from ropelens.train.base_model import open_base

        opened = open_base(base, loading)
    if plan:
        print_lines(_plan(opened, given, study, text=text, valid=valid or []))
        return
    print_path(
        _train_from_model(
            opened, given, out=out, text=text, valid=valid or [], study=study
        )
    )


def _refuse_others(given: dict[str, Any], settings: type, why: str) -> None:
    """Raise `BadParameter` for options that the `settings` do not have."""
    for name in given:
        if name not in settings.__dataclass_fields__:  # type: ignore[attr-defined]
            raise typer.BadParameter(f"--{name.replace('_', '-')} {why}")


def _train_from_start(
    options: TrainOptions,
    *,
    out: Path,
    text: list[Path],
    valid: list[Path],
    tokens: Path | None,
    study: Path | None,
    watch: bool,
) -> Path:
    given = options.given()
    _refuse_others(given, Settings, "needs --from")
    if study is not None and (given or watch):
        name = "watch" if watch else next(iter(given)).replace("_", "-")
        fault = f"--{name} cannot be used together with --study"
        raise typer.BadParameter(f"{fault}. Set it in the file")
    if study is None and bool(text) == (tokens is not None):
        raise typer.BadParameter("one of --text, --tokens and --study is needed")
    settings = Settings(**given)
    from ropelens.train.run import run_study, train

    if study is not None:
        return run_study(study, tokens=tokens, out=out, text=text, valid=valid)
    return train(settings, data=tokens, watch=watch, out=out, text=text, valid=valid)


def _train_from_model(
    base: Base,
    given: dict[str, Any],
    *,
    out: Path,
    text: list[Path],
    valid: list[Path],
    study: Path | None,
) -> Path:
    from ropelens.train.recalibration import recalibrate, recalibrate_study

    if study is not None:
        return recalibrate_study(
            base, study, given=given, out=out, text=text, valid=valid
        )
    settings = Recalibration(**given)
    return recalibrate(base, settings, out=out, text=text, valid=valid)


def _plan(
    base: Base,
    given: dict[str, Any],
    study: Path | None,
    *,
    text: list[Path],
    valid: list[Path],
) -> str:
    """The planned runs in words."""
    from ropelens.train.recalibration import read_base_texts, resolved
    from ropelens.train.recalibration_memory import plan_recalibration
    from ropelens.train.recalibration_study import (
        check_variant,
        read_recalibration_study,
        recalibrations_of,
    )

    if study is None:
        runs = [Recalibration(**given)]
    else:
        of_study = recalibrations_of(read_recalibration_study(study, given))
        runs = [run.settings for run in of_study]
    read_base_texts(text, valid)  # raises the errors of a run
    variants = {settings.variant for settings in runs}
    for variant in variants:
        check_variant(variant)
    base.check_variants(variants)
    return plan_recalibration(base, resolved(base, runs[0]), runs=len(runs))
