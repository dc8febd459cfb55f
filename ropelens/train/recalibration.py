"""Recalibrations: a pretrained model trains on with a variant of RoPE, next to a control.

The control keeps the unmodified configuration. Control and variants start from the same
weights and read the same tokens in the same order (docs/measures.md, Recalibration).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from ropelens.arguments import public
from ropelens.checkpoints.load_options import Loading
from ropelens.errors import BadText
from ropelens.intervals import ENOUGH_DOCUMENTS
from ropelens.runtime.devices import explain_full_memory
from ropelens.runtime.folder import RECORD
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
from ropelens.train.recalibration_settings import (
    WORSE,
    Recalibration,
    recorded_settings,
)
from ropelens.train.recalibration_study import (
    StudyRun,
    check_variant,
    read_recalibration_study,
    recalibrations_of,
)
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
    """The settings with the context, the learning rate and the precision of the base."""
    trained = base.trained_context
    device = base.opened.devices[0]
    settings = settings.for_model(
        parameters=base.opened.parameters,
        trained=trained,
        bf16=device.type == "cuda" and torch.cuda.is_bf16_supported(False),
    )
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
    rate_factor: float = 1.0,
) -> Path:
    """Train one run. `StudyRun` describes the other arguments."""
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
        Key(key).require(recorded_settings(begun), what=f"the run in {out}")
    if "finished" in begun:
        data_record = prepare_base_data(data, texts, base, settings)
        recorded = recorded_settings(begun)
        Key(data_record | key).require(recorded, what=f"the run in {out}")
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
        more = {"base": base.recorded(), "rate_factor": rate_factor}
        record = begin_record(out, data, data_record | key, kind=KIND, more=more)
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
    The control is always trained. It is also trained with a third and with three times of the
    learning rate, and so are the variants that `other_rates` in the file lists (by default
    the first variant; [] leaves these runs out). If such a run diverges, the study is
    complete without it. Several processes can share a study.

    Raises the errors of `recalibrate`, and `BadArgument` if `path` is not a study, if it
    contradicts `given`, or if `out` contains another study. `TrainingFailed` comes at the
    end, with the names of the runs that diverged.
    """
    out = Path(out)
    opened = _opened(base)
    study = read_recalibration_study(Path(path), given or {})
    texts = read_base_texts(text, valid)
    runs_of_study = recalibrations_of(study)
    first = resolved(opened, runs_of_study[0].settings)
    require_memory(opened, first)
    if not read_settings(out, STUDY, key="variants"):
        opened.check_variants(study["variants"])
    make_folder(out)
    with FileLock(out / LOCK):  # other processes begin the same study
        begun = read_settings(out, STUDY, key="variants")
        recorded = study | {"kind": KIND, "base": opened.fingerprint}
        if begun:
            equal = dict(recorded)
            del equal["other_rates"]
            Key(equal).require(begun, what=f"the study in {out}")
            # Runs at other rates can be added to a study, and those that exist stay.
            repeated = [*begun.get("other_rates", []), *study["other_rates"]]
            recorded["other_rates"] = list(dict.fromkeys(repeated))
        write_json(out / STUDY, recorded)
    runs = {}
    for run in runs_of_study:
        runs[run.folder] = partial(
            _recalibrate,
            opened,
            run.with_rate(resolved(opened, run.settings)),
            out=out / run.folder,
            data=out / "data",
            texts=texts,
            control=out / run.control,
            rate_factor=run.rate_factor,
        )
    at_other_rates = [run.folder for run in runs_of_study if run.rate_factor != 1]
    try:
        run_each(runs, may_diverge=at_other_rates)
    finally:
        for run in runs_of_study:
            if run.settings.is_control and run.rate_factor == 1:
                _log_damage(out / run.folder, rate=first.learning_rate)
        _complete_cards(opened, runs_of_study, out)
    return out


def _complete_cards(base: Base, runs: Sequence[StudyRun], out: Path) -> None:
    """Write the cards of the finished runs again, with the losses of their controls.

    A control that another process trained may have finished after the run of a variant.
    """
    for run in runs:
        folder = out / run.folder
        record = read_settings(folder, RECORD, key="settings")
        if "finished" in record:
            write_card(folder, base, record, control=out / run.control)


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
