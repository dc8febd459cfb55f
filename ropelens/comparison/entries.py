"""What is compared: trained runs, or folders that `ropelens analyze` wrote."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropelens.errors import BadArgument
from ropelens.files.results import RECORD
from ropelens.models.paths import short_names
from ropelens.rope.variants import parse_variant
from ropelens.train.data import DATA
from ropelens.train.record import differences, read_json
from ropelens.train.settings import Size, size_name
from ropelens.train.study import STUDY, runs_of, saved_study

SAME = (
    *("context", "vocabulary", "valid_sha256", "text_sha256", "tokenizer_sha256"),
    *("steps", "precision"),
)
"""Settings that runs share whose losses are losses of the same thing, learnt alike."""

SAME_OF_A_SIZE = ("size", "learning_rate", "warmup_steps")
"""Settings that also runs of one size share."""

NOTHING = "pass runs or studies that ropelens train wrote, or what ropelens analyze wrote"


@dataclass(frozen=True)
class Entry:
    """One side of a comparison; entries of one `group` differ in their seed alone."""

    name: str
    group: str
    folder: Path
    size: str = ""
    variant: str = ""
    seed: int = 0


@dataclass(frozen=True)
class Run(Entry):
    """A finished run; `data` is the folder of the tokens it learnt from."""

    data: Path = Path()
    context: int = 0
    steps: int = 0
    tokens_per_step: int = 0

    def checkpoints(self) -> dict[int, Path]:
        """The models that its history kept, and the finished one, by their step."""
        early = sorted((self.folder / "history").glob("step-*"))
        steps = [folder.name.removeprefix("step-") for folder in early]
        kept = {int(n): f for n, f in zip(steps, early, strict=True) if n.isdecimal()}
        return kept | {self.steps: self.folder}


def find_entries(paths: Sequence[str | Path]) -> tuple[list[Entry], list[str]]:
    """The runs, finished runs of studies, or analyses in `paths`, in order.

    And the runs of studies that are not finished ("tiny/nope/seed-2"); a warning names them.

    Raises:
        BadArgument: a folder that is none of these, a mixture of runs and analyses, runs
            that saw different text, or fewer than two entries.
    """
    found: list[tuple[Path, dict[str, Any] | None]] = []
    unfinished: list[str] = []
    for path in map(Path, paths):
        if not (path / STUDY).exists():
            found.append((path, _record(path)))
            continue
        runs = _runs_of_study(path)
        found += [(folder, record) for folder, record in runs if "finished" in record]
        missing = [str(at.relative_to(path)) for at, record in runs if "finished" not in record]
        if missing:
            warnings.warn(
                f"runs of {path} that are not finished are left out: {', '.join(missing)}",
                stacklevel=3,  # the line that called `compare`
            )
        unfinished += missing
    records = [record for _, record in found if record is not None]
    if records and len(records) < len(found):
        raise BadArgument(
            "Runs and analyses cannot be compared with each other.",
            means="runs are measured on their own validation text, analyses have been "
            "measured already, on theirs",
            attempt="ropelens analyze of the runs' folders, on the same text",
        )
    folders = [folder.resolve() for folder, _ in found]
    if len(set(folders)) < max(2, len(folders)):
        raise BadArgument(
            "A comparison needs two or more folders, each named once.",
            seen=", ".join(map(str, paths)),
            attempt=NOTHING,
        )
    if records:
        return _runs(found), unfinished
    names = short_names(folders)
    return [Entry(n, n, folder) for n, (folder, _) in zip(names, found, strict=True)], []


def _record(path: Path) -> dict[str, Any] | None:
    """The run.json of the finished run in `path`; None for an analysis."""
    if not path.is_dir():
        raise BadArgument(f"There is no folder {path}.", attempt=NOTHING)
    record = read_json(path / RECORD) if (path / RECORD).exists() else {}
    if record.get("kind") == "training":
        if "finished" not in record:
            raise BadArgument(
                f"The run in {path} is not finished.", attempt="the command that began it"
            )
        return record
    if (path / "profile.nc").exists():
        return None
    raise BadArgument(f"{path} holds nothing to compare.", attempt=NOTHING)


def _runs_of_study(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The folders of all runs of a study, in its order, with their run.json (or {})."""
    try:
        folders = [path / run.folder for run in runs_of(saved_study(path))]
    except (TypeError, ValueError) as error:
        raise BadArgument(f"{path / STUDY} is damaged.", seen=str(error)) from error
    records = [at / RECORD for at in folders]
    return [
        (at, read_json(record) if record.exists() else {})
        for at, record in zip(folders, records, strict=True)
    ]


def _runs(found: Iterable[tuple[Path, dict[str, Any] | None]]) -> list[Entry]:
    """Entries of runs that learnt from the same text, in the same way."""
    records = [(folder, record) for folder, record in found if record is not None]
    runs = [_run(folder, record) for folder, record in records]
    settings = [record["settings"] for _, record in records]
    first_of: dict[str, int] = {}
    for number, run in enumerate(runs):
        like = first_of.setdefault(run.size, number)
        for other, names in ((0, SAME), (like, SAME_OF_A_SIZE)):
            differ = differences(settings[other], settings[number], names, between=" and ")
            if differ:
                raise BadArgument(
                    f"The runs in {runs[other].folder} and {run.folder} cannot be compared.",
                    seen=differ,
                    means="a difference in loss would be of these too",
                    attempt="ropelens analyze of both models, on the same text",
                )
        _check_data(run, settings[number])
    entries: dict[str, Entry] = {}
    for run in runs:
        group = run.variant if len(first_of) == 1 else f"{run.size} {run.variant}"
        name = f"{group} seed {run.seed}"
        if name in entries:
            raise BadArgument(
                f"Two runs are both {name}.",
                seen=f"{entries[name].folder}, {run.folder}",
                means="a comparison holds one run of a variant, size and seed",
                attempt="leave one of them out",
            )
        entries[name] = dataclasses.replace(run, name=name, group=group)
    return list(entries.values())


def _run(folder: Path, record: dict[str, Any]) -> Run:
    """The run in `folder`, by what its run.json says; its name and group are still open."""
    try:
        settings = record["settings"]
        parse_variant(settings["variant"])
        return Run(
            name="",
            group="",
            folder=folder,
            size=size_name(Size(**settings["size"])),
            variant=settings["variant"],
            seed=int(settings["seed"]),
            data=(folder / record["data"]).resolve(),
            context=int(settings["context"]),
            steps=int(settings["steps"]),
            tokens_per_step=int(record["tokens"]) // int(settings["steps"]),
        )
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BadArgument(
            f"{folder / RECORD} is damaged.", seen=f"{type(error).__name__}: {error}"
        ) from error


def _check_data(run: Run, settings: dict[str, Any]) -> None:
    """Refuse a run whose `data` folder is gone, or holds other text than it learnt from."""
    path = run.data / DATA
    if not path.exists():
        raise BadArgument(
            f"The data that the run in {run.folder} learnt from is not in {run.data}.",
            means="its validation text is needed; runs of a study share the study's folder",
            attempt="the run where it was trained, or its study",
        )
    data = read_json(path)
    names = data.keys() - {"seed"}  # the text's own, where it was made: a run has another
    differ = differences(settings, data, sorted(names), between=" and ")
    if differ:
        raise BadArgument(
            f"The run in {run.folder} did not learn from what is in {run.data}.",
            seen=differ,
            attempt="make its data again, by the same recipe, in that folder",
        )
