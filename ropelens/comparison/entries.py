"""What is compared: trained runs, or folders that `ropelens analyze` wrote."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropelens.errors import BadArgument
from ropelens.files.results import RECORD
from ropelens.models.paths import short_names
from ropelens.train.data import differences, read_json
from ropelens.train.run import STUDY
from ropelens.train.settings import Size, size_name
from ropelens.train.study import runs_of

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
        return {int(at.name.removeprefix("step-")): at for at in early} | {
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
        for run in runs_of(read_json(path / STUDY)):
            if "finished" in _record(path / run):
                folders.append(path / run)
            else:
                unfinished.append(str(run))
    if unfinished:
        warnings.warn(
            f"runs that are not finished are left out: {', '.join(unfinished)}",
            stacklevel=3,  # the line that called `compare`
        )
    records = {folder: _record(folder) for folder in folders}
    trained = [folder for folder, record in records.items() if "finished" in record]
    for folder in folders:
        if folder not in trained and not (folder / "profile.nc").exists():
            raise BadArgument(
                f"{folder} holds nothing to compare.",
                attempt="a finished run of ropelens train, or what ropelens analyze wrote",
            )
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
    settings = {folder: record["settings"] for folder, record in records.items()}
    sizes = [size_name(Size(**of["size"])) for of in settings.values()]
    runs: dict[str, Entry] = {}
    first_of: dict[str, Path] = {}
    for size, (folder, of) in zip(sizes, settings.items(), strict=True):
        group = f"{size} {of['variant']}" if len(set(sizes)) > 1 else of["variant"]
        run = Run(
            name=f"{group} seed {of['seed']}",
            group=group,
            folder=folder,
            size=size,
            variant=of["variant"],
            seed=of["seed"],
            data=(folder / records[folder]["data"]).resolve(),
            context=of["context"],
            steps=of["steps"],
            tokens_per_step=records[folder]["tokens"] // of["steps"],
        )
        like = first_of.setdefault(run.size, folder)
        for other, names in ((next(iter(settings)), SAME), (like, SAME_OF_A_SIZE)):
            differ = differences(settings[other], of, names, between=" and ")
            if run.name in runs or differ:
                raise BadArgument(
                    f"The runs in {other} and {folder} cannot be compared.",
                    seen=differ or f"two runs are both {run.name}",
                    attempt="ropelens analyze of both models, on the same text",
                )
        runs[run.name] = run
    return list(runs.values())
