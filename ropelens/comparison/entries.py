"""What is compared: trained runs, or folders that `ropelens analyze` wrote."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropelens.errors import BadArgument
from ropelens.files.results import RECORD
from ropelens.models.paths import short_names
from ropelens.train.data import DATA
from ropelens.train.record import differences, read_json
from ropelens.train.settings import Size, size_name
from ropelens.train.study import STUDY, saved_study

SAME = (
    *("context", "vocabulary", "valid_sha256", "text_sha256", "tokenizer_sha256"),
    *("steps", "precision"),
)
"""Settings that runs share whose losses are losses of the same thing, learnt alike."""

SAME_OF_A_SIZE = ("size", "learning_rate", "warmup_steps")
"""Settings that also runs of one size share."""


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
        """The models in its history, and the finished one, by their step."""
        early = sorted((self.folder / "history").glob("step-*"))
        steps = {at.name.removeprefix("step-"): at for at in early}
        return {int(n): at for n, at in steps.items() if n.isdecimal()} | {
            self.steps: self.folder
        }


def find_entries(paths: Sequence[str | Path]) -> tuple[list[Entry], list[str]]:
    """The runs, finished runs of studies, or analyses in `paths`, in order.

    And the runs of studies that are not finished ("tiny/nope/seed-2"); a warning names them.

    Raises:
        BadArgument: a folder that is none of these, a mixture of runs and analyses, runs
            that saw different text, or fewer than two entries.
    """
    folders: list[Path] = []
    unfinished: list[str] = []
    for path in map(Path, paths):
        if not (path / STUDY).exists():
            folders.append(path)
            continue
        for run in saved_study(path).runs():
            if "finished" in _record(path / run.folder):
                folders.append(path / run.folder)
            else:
                unfinished.append(str(run.folder))
    if unfinished:
        warnings.warn(
            f"runs that are not finished are left out: {', '.join(unfinished)}",
            stacklevel=3,  # the line that called `compare`
        )
    records = {folder: _record(folder) for folder in folders}
    trained = [folder for folder, record in records.items() if record.get("kind") == "training"]
    for folder, record in records.items():
        if folder not in trained and not (folder / "profile.nc").exists():
            raise BadArgument(
                f"{folder} holds nothing to compare.",
                attempt="what ropelens train or ropelens analyze wrote",
            )
        if folder in trained and "finished" not in record:
            raise BadArgument(f"The run in {folder} is not finished.")
    if len({folder.resolve() for folder in folders}) < max(2, len(folders)):
        raise BadArgument(
            "A comparison needs two or more folders, each named once.",
            seen=", ".join(map(str, paths)),
        )
    if not trained:
        names = short_names([folder.resolve() for folder in folders])
        return [Entry(n, n, folder) for n, folder in zip(names, folders, strict=True)], []
    if len(trained) < len(folders):
        raise BadArgument(
            "Runs and analyses cannot be compared with each other.",
            attempt="ropelens analyze of the runs' folders, on the same text",
        )
    return _runs(records), unfinished


def _record(folder: Path) -> dict[str, Any]:
    """The run.json in `folder`, {} where there is none."""
    return read_json(folder / RECORD) if (folder / RECORD).exists() else {}


def _runs(records: dict[Path, dict[str, Any]]) -> list[Entry]:
    """Entries of runs that learnt from the same text, in the same way."""
    try:
        settings = {folder: record["settings"] for folder, record in records.items()}
        sizes = {folder: size_name(Size(**of["size"])) for folder, of in settings.items()}
        runs = [_run(folder, records[folder], sizes) for folder in records]
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BadArgument("A run.json is damaged.", seen=repr(error)) from error
    first_of: dict[str, Path] = {}
    for run in runs:
        like = first_of.setdefault(run.size, run.folder)
        for other, names in ((runs[0].folder, SAME), (like, SAME_OF_A_SIZE)):
            differ = differences(settings[other], settings[run.folder], names, between=" and ")
            if differ:
                raise BadArgument(
                    f"The runs in {other} and {run.folder} cannot be compared.",
                    seen=differ,
                    attempt="ropelens analyze of both models, on the same text",
                )
        data = read_json(run.data / DATA)
        of_data = sorted(data.keys() - {"seed"})  # of the text: a run has another
        differ = differences(settings[run.folder], data, of_data, between=" and ")
        if differ:
            raise BadArgument(
                f"The run in {run.folder} did not learn from what is in {run.data}.",
                seen=differ,
            )
    for name, count in Counter(run.name for run in runs).items():
        if count > 1:
            raise BadArgument(f"Two runs are both {name}.", attempt="leave one of them out")
    return list(runs)


def _run(folder: Path, record: dict[str, Any], sizes: dict[Path, str]) -> Run:
    """The run in `folder`, by its `record`; groups name the size where there are several."""
    settings = record["settings"]
    several = len(set(sizes.values())) > 1
    group = f"{sizes[folder]} {settings['variant']}" if several else str(settings["variant"])
    return Run(
        name=f"{group} seed {settings['seed']}",
        group=group,
        folder=folder,
        size=sizes[folder],
        variant=str(settings["variant"]),
        seed=int(settings["seed"]),
        data=(folder / record["data"]).resolve(),
        context=int(settings["context"]),
        steps=int(settings["steps"]),
        tokens_per_step=int(record["tokens"]) // int(settings["steps"]),
    )
