"""Entries of a comparison: analyses, or trained runs with the same settings."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropelens.checkpoints.names import by_step, short_names
from ropelens.errors import BadArgument
from ropelens.runtime.folder import RECORD
from ropelens.runtime.keys import differences
from ropelens.runtime.records import read_json, read_json_if_exists
from ropelens.train.run import runs_of
from ropelens.train.run_folder import STUDY
from ropelens.train.settings import Size, size_name

TEXT_SETTINGS = ("valid_sha256", "text_sha256", "tokenizer_sha256")
# Settings that must be equal in all runs, so that their losses can be compared
SHARED_SETTINGS = ("context", "vocabulary", *TEXT_SETTINGS, "steps", "precision")
SHARED_WITHIN_SIZE = ("size", "learning_rate", "warmup_steps")


@dataclass(frozen=True)
class ComparisonEntry:
    """An analysis, or a finished run with `steps`. Only the seed differs within a `group`."""

    name: str
    group: str
    folder: Path
    size: str = ""
    variant: str = ""
    seed: int = 0
    data: Path = Path()
    context: int = 0
    steps: int = 0
    tokens_per_step: int = 0

    def checkpoints(self) -> dict[int, Path]:
        """Folders of the early checkpoints and the finished run, by step."""
        early = sorted((self.folder / "history").glob("step-*"))
        folders = {}
        for folder in early:
            step = folder.name.removeprefix("step-")
            folders[int(step)] = folder
        folders[self.steps] = self.folder
        return folders


@dataclass(frozen=True)
class FoundEntries:
    """The entries of a comparison, and the names of unfinished runs of its studies."""

    entries: list[ComparisonEntry]
    unfinished: list[str]


def find_entries(paths: Sequence[str | Path]) -> FoundEntries:
    """The runs or analyses in `paths`, in order; see `by_step`."""
    records: dict[Path, dict[str, Any]] = {}  # contents of run.json by folder
    unfinished: list[str] = []
    for path in by_step([Path(path) for path in paths]):
        if not (path / STUDY).exists():
            records[path.resolve()] = read_json_if_exists(path / RECORD)
            continue
        for run in runs_of(read_json(path / STUDY)):
            record = read_json_if_exists(path / run / RECORD)
            if "finished" in record:
                records[(path / run).resolve()] = record
            else:
                unfinished.append(str(run))
    if unfinished:  # the warning names the line that called `compare`
        warnings.warn(
            f"unfinished runs are left out: {', '.join(unfinished)}", stacklevel=4
        )
    trained = [folder for folder, record in records.items() if "finished" in record]
    analyses = [folder for folder in records if (folder / "profile.nc").exists()]
    _require_one_kind([*records], trained or analyses)
    if trained:
        return FoundEntries(_runs(records), unfinished)
    names = short_names(list(records))
    entries = []
    for name, folder in zip(names, records, strict=True):
        entries.append(ComparisonEntry(name=name, group=name, folder=folder))
    return FoundEntries(entries, unfinished=[])


def _require_one_kind(folders: list[Path], comparable: list[Path]) -> None:
    """Raise `BadArgument` for folders that are not `comparable`, and for one folder."""
    others = [folder for folder in folders if folder not in comparable]
    if not others and len(folders) >= 2:
        return
    fault = "A comparison needs two or more different folders."
    if others:
        fault = f"{others[0]} cannot be compared with the rest."
    raise BadArgument(
        fault,
        hint="only finished runs of ropelens train, or only folders of ropelens analyze",
    )


def _runs(records: dict[Path, dict[str, Any]]) -> list[ComparisonEntry]:
    """Entries of runs, after checking that they have the same settings and text."""
    settings_of = {folder: record["settings"] for folder, record in records.items()}
    sizes = {
        folder: size_name(Size(**settings["size"]))
        for folder, settings in settings_of.items()
    }
    several_sizes = len({*sizes.values()}) > 1
    first = next(iter(records))
    first_of_size: dict[str, Path] = {}
    runs: dict[str, ComparisonEntry] = {}
    for folder, record in records.items():
        size = sizes[folder]
        run = _run(folder, record, size=size, name_size=several_sizes)
        same_size = first_of_size.setdefault(size, folder)
        _require_same(first, folder, settings_of, SHARED_SETTINGS)
        if run.name in runs:
            raise _incomparable(first, folder, f"both runs are {run.name}")
        _require_same(same_size, folder, settings_of, SHARED_WITHIN_SIZE)
        runs[run.name] = run
    return list(runs.values())


def _run(
    folder: Path, record: dict[str, Any], *, size: str, name_size: bool
) -> ComparisonEntry:
    """The entry of a run. Its name has the size, if the sizes of runs differ."""
    settings = record["settings"]
    variant = settings["variant"]
    group = f"{size} {variant}" if name_size else variant
    return ComparisonEntry(
        name=f"{group} seed {settings['seed']}",
        group=group,
        folder=folder,
        size=size,
        variant=variant,
        seed=settings["seed"],
        data=(folder / record["data"]).resolve(),
        context=settings["context"],
        steps=settings["steps"],
        tokens_per_step=record["tokens"] // settings["steps"],
    )


def _require_same(
    first: Path,
    second: Path,
    settings_of: dict[Path, dict[str, Any]],
    names: Sequence[str],
) -> None:
    """Raise `BadArgument` if two runs differ in one of the settings `names`."""
    differ = differences(
        settings_of[first], settings_of[second], names, between=" and "
    )
    if differ:
        raise _incomparable(first, second, differ)


def _incomparable(first: Path, second: Path, seen: str) -> BadArgument:
    return BadArgument(
        f"The runs in {first} and {second} cannot be compared.",
        seen=seen,
        hint="the folders that ropelens analyze writes for the same text",
    )
