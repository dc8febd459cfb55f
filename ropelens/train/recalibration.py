"""Recalibrations: a pretrained model trains on with a variant of RoPE, next to a control.

The control keeps the unmodified configuration. Control and variants start from the same
weights and read the same tokens in the same order (docs/measures.md, Recalibration).
"""

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from ropelens.arguments import public
from ropelens.checkpoints.load_options import Loading
from ropelens.errors import BadArgument, BadText, explained
from ropelens.intervals import ENOUGH_DOCUMENTS
from ropelens.rope.variants import parse_variant
from ropelens.runtime.devices import explain_full_memory
from ropelens.runtime.folder import RECORD, file_name
from ropelens.runtime.keys import Key
from ropelens.runtime.records import log_line, read_json_if_exists, write_json
from ropelens.text.tokenize import warn_beyond
from ropelens.train.base_data import prepare_base_data
from ropelens.train.base_model import Base, convert_weights, open_base
from ropelens.train.checkpoint import CHECKPOINT, write_model
from ropelens.train.data import Documents, read_texts
from ropelens.train.recalibration_card import write_card
from ropelens.train.recalibration_loop import RecalibrationProgress, recalibrate_model
from ropelens.train.recalibration_memory import require_memory
from ropelens.train.recalibration_settings import CONTROL, WORSE, Recalibration
from ropelens.train.run_folder import (
    LOCK,
    STUDY,
    begin_record,
    lock_run,
    make_folder,
    now,
    read_settings,
)
from ropelens.train.study_runs import run_each

KIND = "recalibration"
OF_RECORD = ("kind", "base")
"""Keys of study.json next to those of the study file."""


@public
def recalibrate(
    base: str | Path | Base,
    settings: Recalibration,
    *,
    out: str | Path,
    text: Sequence[str | Path],
    valid: Sequence[str | Path] = (),
) -> Path:
    """Train the checkpoint `base` on with a variant of RoPE; return the folder `out`.

    `base` is a name that `load` takes, or a `Base`. `text` and `valid` are files or
    folders. Without `valid`, whole documents of `text` are held out, or the end of each
    document if they are few. The same call continues a stopped run, bit for bit on a CPU with
    the same number of threads. A finished run is a checkpoint that transformers loads, with
    its tokenizer, a card (README.md), metrics.csv, losses.csv (the loss of each held-out
    sequence at each evaluated step) and run.json.

    Raises:
        BadArgument: `out` contains something else, or the training does not fit into memory.
        BadText: the text is missing or too short, or has fewer than 8 held-out documents.
        UnsupportedModel: the base cannot train, or no configuration stores the variant.
        TrainingFailed: a loss or a weight became NaN or infinite.
    """
    opened = _opened(base)
    texts = read_base_texts(text, valid)
    out = Path(out)
    return _recalibrate(opened, settings, out=out, data=out / "data", texts=texts)


def _opened(base: str | Path | Base) -> Base:
    return base if isinstance(base, Base) else open_base(base, Loading())


def read_base_texts(
    text: Sequence[str | Path], valid: Sequence[str | Path]
) -> Documents:
    training = [Path(file) for file in text]
    validation = [Path(file) for file in valid]
    texts = read_texts(training, validation, data=Path())
    held_out = texts.validation or texts.training
    if len(held_out) < ENOUGH_DOCUMENTS:
        option = "--valid" if texts.validation else "--text"
        raise BadText(
            f"Intervals need {ENOUGH_DOCUMENTS} held-out documents or parts of documents.",
            seen=f"documents of {option}: {len(held_out)}",
            hint=f"a file for each chapter of long documents, or more files of {option}",
        )
    return texts


def resolved(base: Base, settings: Recalibration) -> Recalibration:
    """The settings with the context and the learning rate of the base."""
    trained = base.trained_context
    settings = settings.for_model(parameters=base.opened.parameters, trained=trained)
    assert settings.context is not None
    warn_beyond(settings.context, trained)
    return settings


def _recalibrate(
    base: Base,
    settings: Recalibration,
    *,
    out: Path,
    data: Path,
    texts: Documents,
    control: Path | None = None,
) -> Path:
    """Train one run. `control` is the folder of the control of a study."""
    settings = resolved(base, settings)
    check_variant(settings.variant)
    device = base.opened.devices[0]
    tokenizer: Any = base.opened.tokenizer
    key = settings.recorded() | {
        "base": base.fingerprint,
        "device": device.type,
        "threads": torch.get_num_threads(),
    }
    begun = read_settings(out, RECORD, key="settings")
    if begun:
        Key(key).require(begun["settings"], what=f"the run in {out}")
    if "finished" in begun:
        data_record = prepare_base_data(data, texts, base, settings)
        Key(data_record | key).require(begun["settings"], what=f"the run in {out}")
        (out / CHECKPOINT).unlink(missing_ok=True)
        log_line(f"{out} is finished already")
        return out
    require_memory(base, settings)
    full_memory = explain_full_memory(
        "The training",
        seen=f"{base.name}, context {settings.context:,}",
        hint="a smaller context",
    )
    with full_memory, lock_run(out):
        model = base.read(settings.variant)
        data_record = prepare_base_data(data, texts, base, settings)
        record = begin_record(
            out, data, data_record | key, kind=KIND, more={"base": base.recorded()}
        )
        if "finished" in record:  # by another process, a moment ago
            return out
        progress = recalibrate_model(
            model, settings, out=out, data=data, dtype=base.own_dtype
        )
        record["losses"] = _first_and_last(progress)
        record["evaluated_sequences"] = sum(row["step"] == 0 for row in progress.losses)
        record["parameters"] = model.num_parameters()
        record["tokens_per_step"] = settings.tokens_per_step
        record["tokens"] = settings.steps * settings.tokens_per_step
        convert_weights(model, base.own_dtype)
        write_model(model, out)
        tokenizer.save_pretrained(out)
        write_card(out, base, record, control=control)
        record["finished"] = now()
        write_json(out / RECORD, record)
        (out / CHECKPOINT).unlink(missing_ok=True)
    return out


def check_variant(variant: str) -> None:
    """Raise `BadArgument` for a variant that does not exist."""
    if variant != CONTROL:
        parse_variant(variant)


def _first_and_last(progress: RecalibrationProgress) -> dict[str, float]:
    """The validation loss before the training and after it, in nats per token."""
    return {
        "before": progress.metrics[0]["valid_loss"],
        "after": progress.metrics[-1]["valid_loss"],
    }


@public
def recalibrate_study(
    base: str | Path | Base,
    path: str | Path,
    *,
    out: str | Path,
    text: Sequence[str | Path],
    valid: Sequence[str | Path] = (),
    given: Mapping[str, Any] | None = None,
) -> Path:
    """Recalibrate `base` with all variants of the study file `path`; return the folder `out`.

    The file lists `variants` and `seeds`, and the settings that all runs share; see
    `read_recalibration_study`. `given` are defaults for settings that the file does not state.
    The control is always trained. Several processes can share a study. If a run diverges, the
    others are trained.

    Raises the errors of `recalibrate`, and `BadArgument` if `path` is not a study, if it
    contradicts `given`, or if `out` contains another study.
    """
    out = Path(out)
    opened = _opened(base)
    study = read_recalibration_study(Path(path), given or {})
    texts = read_base_texts(text, valid)
    runs_of_study = recalibrations_of(study)
    first = resolved(opened, next(iter(runs_of_study.values())))
    require_memory(opened, first)
    if not read_settings(out, STUDY, key="variants"):
        opened.check_variants(study["variants"])
    make_folder(out)
    with FileLock(out / LOCK):  # other processes begin the same study
        begun = read_settings(out, STUDY, key="variants")
        recorded = study | {"kind": KIND, "base": opened.fingerprint}
        if begun:
            Key(recorded).require(begun, what=f"the study in {out}")
        else:
            write_json(out / STUDY, recorded)
    runs = {}
    for folder, settings in runs_of_study.items():
        runs[folder] = partial(
            _recalibrate,
            opened,
            settings,
            out=out / folder,
            data=out / "data",
            texts=texts,
            control=out / folder_of(CONTROL, settings.seed),
        )
    run_each(runs)
    for seed in study["seeds"]:
        _log_damage(out / folder_of(CONTROL, seed), rate=first.learning_rate)
    _complete_cards(opened, runs_of_study, out)
    return out


def _complete_cards(base: Base, runs: Mapping[Path, Recalibration], out: Path) -> None:
    """Write the cards of the finished runs again, with the losses of their controls.

    A control that another process trained may have finished after the run of a variant.
    """
    for folder, settings in runs.items():
        record = read_settings(out / folder, RECORD, key="settings")
        if "finished" in record:
            control = out / folder_of(CONTROL, settings.seed)
            write_card(out / folder, base, record, control=control)


def _log_damage(control: Path, *, rate: float | None) -> None:
    """Log that the training damaged the control, if it did."""
    record = read_json_if_exists(control / RECORD)
    losses = record.get("losses")
    if losses is None:  # another process trains it
        return
    change = losses["after"] - losses["before"]
    if change > WORSE:
        log_line(
            f"{control}: the loss is {change:.2f} nats/token higher than before, so a "
            f"learning rate of {rate:g} is too high for this model"
        )


def read_recalibration_study(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Read the TOML file `path`; `given` are values for settings that it does not state.

    Raises `BadArgument` if a key or a value is wrong, or differs from a given value.
    """
    with explained(f"{path} cannot be read.", error=BadArgument):
        content = path.read_text(encoding="utf-8")
    with explained(f"{path} is not a study.", error=BadArgument):
        stated = tomllib.loads(content)
    study = dict(stated)
    for name, value in given.items():
        key, of_study = _in_study(name, value)
        if study.setdefault(key, of_study) != of_study:
            raise BadArgument(
                f"{path} and the command state different values of {name}.",
                seen=f"{key} {stated[key]} in the file, {value} in the command",
                hint="the value in only one of them",
            )
    with explained(f"{path} is not a study.", error=BadArgument):
        variants = [CONTROL]
        study.setdefault("seeds", [0])
        _check_lists(study)
        for variant in study["variants"]:
            check_variant(variant)
            if variant not in variants:
                variants.append(variant)
        study["variants"] = variants
        recalibrations_of(study)
    return study


def _check_lists(study: Mapping[str, Any]) -> None:
    """Raise ValueError if `variants` or `seeds` is no list, or if a key is unknown."""
    for name in ("variants", "seeds"):
        if not isinstance(study[name], list):
            raise ValueError(f"{name} must be a list, not {study[name]!r}")
    if not study["seeds"]:
        raise ValueError("seeds is empty")
    known = ["variants", "seeds", *Recalibration.__dataclass_fields__]
    for name in ("variant", "seed"):
        known.remove(name)
    for name in study:
        if name not in known:
            raise ValueError(
                f"{name} is not a setting; settings are {', '.join(known)}"
            )


def _in_study(name: str, value: Any) -> tuple[str, Any]:
    """The key and the value in a study file for an option of the command."""
    if name in ("variant", "seed"):
        return f"{name}s", [value]
    return name, value


def recalibrations_of(study: Mapping[str, Any]) -> dict[Path, Recalibration]:
    """The runs of a study, by folder, with all variants of a seed before the next seed."""
    shared = dict(study)
    for name in OF_RECORD:
        shared.pop(name, None)
    variants = shared.pop("variants")
    seeds = shared.pop("seeds")
    runs = {}
    for seed, variant in itertools.product(seeds, variants):
        settings = Recalibration(variant=variant, seed=seed, **shared)
        runs[folder_of(variant, seed)] = settings
    return runs


def folder_of(variant: str, seed: int) -> Path:
    """The folder of a run in its study."""
    return Path(file_name(variant), f"seed-{seed}")
