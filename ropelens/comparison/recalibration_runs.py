"""Finished runs that start from one checkpoint, and the losses that they recorded."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from ropelens.errors import BadArgument, BadText, explained
from ropelens.intervals import ENOUGH_DOCUMENTS
from ropelens.runtime.folder import RECORD
from ropelens.runtime.keys import differences
from ropelens.runtime.records import read_json_if_exists
from ropelens.train.recalibration import KIND
from ropelens.train.recalibration_settings import CONTROL, recorded_settings
from ropelens.train.recalibration_study import recalibrations_of
from ropelens.train.run_folder import STUDY

LOSSES = "losses.csv"
METRICS = "metrics.csv"
PAGE = "index.html"

OPTIONS = (
    "context",
    "steps",
    "sequences",
    "learning_rate",
    "warmup",
    "train",
    "precision",
    "evaluated",
)
"""Options of the command that are equal in all runs."""

# Settings that must be equal in all runs, so that only the rotation differs from the control
SHARED = (*OPTIONS, "text_sha256", "valid_sha256")


@dataclass(frozen=True)
class RecalibratedRun:
    """A finished run: the folder, and the contents of run.json."""

    folder: Path
    record: dict[str, Any]

    @property
    def settings(self) -> dict[str, Any]:
        return recorded_settings(self.record)

    @property
    def variant(self) -> str:
        return str(self.settings["variant"])

    @property
    def seed(self) -> int:
        return int(self.settings["seed"])

    @property
    def learning_rate(self) -> float:
        """The peak learning rate."""
        return float(self.settings["learning_rate"])

    @property
    def rate_factor(self) -> float:
        """The learning rate, divided by the rate of the study."""
        return float(self.record.get("rate_factor", 1))

    @property
    def name(self) -> str:
        name = f"{self.variant} seed {self.seed}"
        if self.rate_factor == 1:
            return name
        return f"{name} with {self.rate_factor:.2g} times the learning rate"

    @property
    def shared_settings(self) -> dict[str, Any]:
        """The settings, in which runs of a study are equal: the base, and the study's rate."""
        rate = self.learning_rate / self.rate_factor
        return self.settings | {
            "base": self.record["base"]["fingerprint"],
            "learning_rate": float(f"{rate:.9g}"),  # without rounding errors
        }

    @property
    def data(self) -> Path:
        return (self.folder / self.record["data"]).resolve()

    @property
    def page(self) -> str:
        """The path of the page in the folder of the run; "" if there is none."""
        page = self.folder / PAGE
        return page.as_posix() if page.is_file() else ""


@dataclass(frozen=True)
class FoundRecalibrations:
    """The runs of a comparison, with the control first, and the names of other runs.

    `unfinished` runs have not ended, and `unpaired` runs have no control with their seed.
    `at_other_rates` has the runs that a study repeats with other learning rates.
    """

    runs: list[RecalibratedRun]
    unfinished: list[str]
    unpaired: list[str]
    at_other_rates: list[RecalibratedRun]

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(run.variant for run in self.runs))

    @property
    def seeds(self) -> list[int]:
        return sorted({run.seed for run in self.runs})


def find_recalibrations(
    paths: Sequence[str | Path],
) -> FoundRecalibrations | None:
    """The recalibrated runs in `paths`; None if there are only other results.

    Raises `BadArgument` for runs that cannot be compared, and for runs without a control.
    """
    finished: dict[Path, dict[str, Any]] = {}
    unfinished: list[str] = []
    others: list[Path] = []
    for path in map(Path, paths):
        folders = _folders(path)
        if not folders:
            others.append(path)
        for folder in folders:
            record = read_json_if_exists(folder / RECORD)
            if "finished" in record:
                finished.setdefault(folder.resolve(), record)
            else:
                unfinished.append(str(folder))
    if not finished and not unfinished:
        return None
    if others:
        raise BadArgument(
            f"{others[0]} cannot be compared with recalibrations.",
            hint="only runs and studies of ropelens train --from, of one checkpoint",
        )
    if unfinished:  # the warning names the line that called `compare`
        named = ", ".join(unfinished)
        warnings.warn(f"unfinished runs are left out: {named}", stacklevel=4)
    runs = [RecalibratedRun(folder, record) for folder, record in finished.items()]
    hint = "the folder of a finished run of ropelens train --from"
    with explained("A run.json lacks facts about its run.", hint, error=BadArgument):
        _require_comparable(runs)
    main = _factor_of_study(runs)
    found = _paired([run for run in runs if run.rate_factor == main], unfinished)
    repeated = [run for run in runs if run.rate_factor != main]
    paired = _with_control(repeated)
    unpaired = [run.name for run in repeated if run not in paired]
    return replace(found, at_other_rates=paired, unpaired=[*found.unpaired, *unpaired])


def _factor_of_study(runs: Sequence[RecalibratedRun]) -> float:
    """The factor of the runs that are compared first: 1, or the only factor of all runs.

    Raises `BadArgument` for runs with several other rates and without the study's rate.
    """
    factors = {run.rate_factor for run in runs}
    if not factors or 1.0 in factors:
        return 1.0
    if len(factors) > 1:
        names = ", ".join(run.name for run in runs)
        raise BadArgument(
            "Runs at several learning rates need the runs at the rate of their study.",
            seen=names,
            hint="the folder of the study, or only runs with one learning rate",
        )
    return factors.pop()


def _folders(path: Path) -> list[Path]:
    """The folders of all runs of a study, or a single run; [] for other results."""
    study = read_json_if_exists(path / STUDY)
    if study.get("kind") == KIND:
        what = f"{path / STUDY} is not a study."
        with explained(what, "the folder of a study", error=BadArgument):
            return [path / run.folder for run in recalibrations_of(study)]
    if read_json_if_exists(path / RECORD).get("kind") == KIND:
        return [path]
    return []


def _require_comparable(runs: Sequence[RecalibratedRun]) -> None:
    """Raise `BadArgument` if two runs differ in more than the variant and the seed."""
    names: dict[str, RecalibratedRun] = {}
    for run in runs:
        first = runs[0]
        differ = differences(
            first.shared_settings,
            run.shared_settings,
            ("base", *SHARED),
            between=" and ",
        )
        if run.name in names:
            first = names[run.name]
            differ = f"both runs are {run.name}"
        if differ:
            raise BadArgument(
                f"The runs in {first.folder} and {run.folder} cannot be compared.",
                seen=differ,
                hint="runs that start from one checkpoint, with the same text and the same "
                "settings; only the variant and the seed may differ",
            )
        names[run.name] = run


def _paired(
    runs: Sequence[RecalibratedRun], unfinished: list[str]
) -> FoundRecalibrations:
    """The runs that have a control with their seed, the controls first."""
    controls = [run for run in runs if run.variant == CONTROL]
    others = [run for run in runs if run.variant != CONTROL]
    if not controls:
        raise _without_control(others, unfinished)
    seeds = {run.seed for run in controls}
    paired = [run for run in others if run.seed in seeds]
    unpaired = [run for run in others if run.seed not in seeds]
    alone = {run.variant for run in unpaired} - {run.variant for run in paired}
    if alone:
        raise _without_control(unpaired, unfinished)
    if not paired:
        base = controls[0].record["base"]["name"]
        raise BadArgument(
            "A comparison of recalibrations needs a variant next to the control.",
            hint=f"ropelens train --from {base} --variant p-rope:0.5 ...",
        )
    if unpaired:
        named = ", ".join(run.name for run in unpaired)
        warnings.warn(f"runs without a control are left out: {named}", stacklevel=5)
    of_variants = [run.seed for run in paired]
    used = [run for run in controls if run.seed in of_variants]
    names = [run.name for run in unpaired]
    return FoundRecalibrations([*used, *paired], unfinished, names, at_other_rates=[])


def _with_control(runs: Sequence[RecalibratedRun]) -> list[RecalibratedRun]:
    """The runs at other rates whose control has the same rate and the same seed."""
    controls = {(run.rate_factor, run.seed) for run in runs if run.variant == CONTROL}
    return [run for run in runs if (run.rate_factor, run.seed) in controls]


def _without_control(
    runs: Sequence[RecalibratedRun], unfinished: Sequence[str]
) -> BadArgument:
    if not runs:
        return BadArgument(
            "No run is finished.",
            seen=", ".join(unfinished),
            hint="the same command of ropelens train as before, which continues them",
        )
    run = runs[0]
    if run.rate_factor != 1:
        return BadArgument(
            f"{run.name} has no control.",
            seen=str(run.folder),
            hint="the folder of its study, which has the control with the same rate",
        )
    parts = [f"ropelens train --from {run.record['base']['name']} --variant {CONTROL}"]
    for name in ("seed", *OPTIONS):
        parts.append(f"--{name.replace('_', '-')} {run.settings[name]}")
    hint = (
        f"{' '.join(parts)} --out FOLDER, with the same --text and --valid, and then compare "
        "both folders"
    )
    return BadArgument(
        f"{run.name} has no control: a run that keeps the rotation, with the same seed. "
        "Without it, a lower loss only shows that the model learned the text.",
        seen=", ".join(str(run.folder) for run in runs),
        hint=hint,
    )


@dataclass(frozen=True)
class RecordedLosses:
    """Losses of held-out sequences at the evaluated steps, in nats per token."""

    steps: Int[np.ndarray, " step"]
    documents: Int[np.ndarray, " sequence"]
    losses: Float[np.ndarray, "step sequence"]
    train_loss: Float[np.ndarray, " step"]


def read_losses(runs: Sequence[RecalibratedRun]) -> list[RecordedLosses]:
    """The losses of the runs, which are on the same sequences and at the same steps."""
    recorded = [_read_losses(run) for run in runs]
    first = recorded[0]
    for run, losses in zip(runs, recorded, strict=True):
        same_steps = np.array_equal(losses.steps, first.steps)
        same_text = np.array_equal(losses.documents, first.documents)
        if not (same_steps and same_text):
            raise BadArgument(
                f"{run.folder / LOSSES} has other steps or other sequences than "
                f"{runs[0].folder / LOSSES}.",
                hint="runs of one study, or single runs with the same text and settings",
            )
    documents = len(np.unique(first.documents))
    if documents < ENOUGH_DOCUMENTS:
        raise BadText(
            f"Intervals need {ENOUGH_DOCUMENTS} held-out documents or parts.",
            seen=f"{documents} in {runs[0].folder / LOSSES}",
            hint="runs with a larger --valid, or with more documents in --text",
        )
    return recorded


def _read_losses(run: RecalibratedRun) -> RecordedLosses:
    file = run.folder / LOSSES
    hint = "the folder of a finished run of ropelens train --from"
    with explained(f"{file} cannot be read.", hint, error=BadArgument):
        rows = _read_table(file)
        table = rows.pivot(index="step", columns="sequence", values="loss")
        documents = rows.drop_duplicates("sequence").set_index("sequence")["document"]
        train_loss = _read_table(run.folder / METRICS).set_index("step")["train_loss"]
    if not np.isfinite(table.to_numpy()).all() or 0 not in table.index:
        raise BadArgument(
            f"{file} lacks losses, or has losses that are not finite.", hint=hint
        )
    return RecordedLosses(
        steps=table.index.to_numpy(int),
        documents=documents.loc[table.columns].to_numpy(int),
        losses=table.to_numpy(),
        train_loss=train_loss.reindex(table.index).to_numpy(),
    )


def _read_table(file: Path) -> pd.DataFrame:
    """The numbers of a CSV file, with every bit: pandas itself may round them."""
    texts = pd.read_csv(file, dtype=str)
    return texts.astype(float)
