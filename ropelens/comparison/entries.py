"""What is compared: trained runs, or folders that `ropelens analyze` wrote."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropelens.errors import BadArgument
from ropelens.train.record import read_json
from ropelens.train.sizes import SIZES, Size
from ropelens.train.study import STUDY, runs_of, saved_study

SAME = ("context", "vocabulary", "valid_sha256", "text_sha256", "dataset", "tokenizer_sha256")
"""Settings that runs share whose losses are losses of the same thing."""

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
        kept = {int(folder.name.removeprefix("step-")): folder for folder in early}
        return kept | {self.steps: self.folder}


def find_entries(paths: Sequence[str | Path]) -> list[Entry]:
    """What stands in `paths`: runs, the finished runs of studies, or analyses; in order.

    Warns of runs of a study that are not finished, and leaves them out.

    Raises:
        BadArgument: a folder that is none of these, a mixture of runs and analyses, runs
            that saw different text, or fewer than two entries.
    """
    found: list[tuple[Path, dict[str, Any] | None]] = []
    for path in map(Path, paths):
        found += _look(path)
    records = [record for _, record in found if record is not None]
    if records and len(records) < len(found):
        raise BadArgument(
            "Runs and analyses cannot be compared with each other.",
            means="runs are measured on their own validation text, analyses have been "
            "measured already, on theirs",
            attempt="ropelens analyze of the runs' folders, on the same text",
        )
    if len(found) < 2:
        raise BadArgument(
            "A comparison needs two or more.", seen=str(len(found)), attempt=NOTHING
        )
    if len({folder.resolve() for folder, _ in found}) < len(found):
        raise BadArgument("A folder is named twice.", attempt="each run or analysis once")
    if records:
        return _runs(found)
    names = _names([folder.resolve() for folder, _ in found])
    return [Entry(name, name, folder) for name, (folder, _) in zip(names, found, strict=True)]


def _look(path: Path) -> list[tuple[Path, dict[str, Any] | None]]:
    """The folders that `path` stands for, each with what a run's run.json says."""
    if (path / STUDY).exists():
        return _study(path)
    record = _record(path)
    if "settings" in record:
        if "finished" not in record:
            raise BadArgument(
                f"The run in {path} is not finished.", attempt="the command that began it"
            )
        return [(path, record)]
    if (path / "profile.nc").exists():
        return [(path, None)]
    raise BadArgument(f"{path} holds nothing to compare.", attempt=NOTHING)


def _record(folder: Path) -> dict[str, Any]:
    """What a run's run.json says; nothing where there is none."""
    path = folder / "run.json"
    if not path.exists():
        return {}
    try:
        return read_json(path)
    except ValueError as error:
        raise BadArgument(f"{path} is damaged.", seen=str(error)) from error


def _study(path: Path) -> list[tuple[Path, dict[str, Any] | None]]:
    """The finished runs of a study, in its order."""
    done: list[tuple[Path, dict[str, Any] | None]] = []
    missing = []
    for run in runs_of(saved_study(path)):
        record = _record(path / run.folder)
        if "finished" in record:
            done.append((path / run.folder, record))
        else:
            missing.append(str(run.folder))
    if missing:
        warnings.warn(
            f"runs of {path} that are not finished are left out: {', '.join(missing)}",
            stacklevel=4,
        )
    return done


def _runs(found: Iterable[tuple[Path, dict[str, Any] | None]]) -> list[Entry]:
    records = [(folder, record) for folder, record in found if record is not None]
    first_folder, first = records[0]
    for folder, record in records[1:]:
        differ = [n for n in SAME if record["settings"].get(n) != first["settings"].get(n)]
        if differ:
            raise BadArgument(
                f"The runs in {first_folder} and {folder} cannot be compared.",
                seen="; ".join(
                    f"{n}: {first['settings'].get(n)} and {record['settings'].get(n)}"
                    for n in differ
                ),
                means="losses per token are of the same thing only on the same tokens",
                attempt="ropelens analyze of both models, on the same text",
            )
    sizes = [size_name(Size(**record["settings"]["size"])) for _, record in records]
    entries: list[Entry] = []
    for (folder, record), size in zip(records, sizes, strict=True):
        settings = record["settings"]
        variant, seed = settings["variant"], settings["seed"]
        group = variant if len(set(sizes)) == 1 else f"{size} {variant}"
        entries.append(
            Run(
                name=f"{group} seed {seed}",
                group=group,
                folder=folder,
                size=size,
                variant=variant,
                seed=seed,
                data=folder / record["data"],
                context=settings["context"],
                steps=settings["steps"],
                tokens_per_step=record["tokens"] // settings["steps"],
            )
        )
    twice = [name for name, count in Counter(e.name for e in entries).items() if count > 1]
    if twice:
        raise BadArgument(
            f"Two runs are both {twice[0]}.",
            means="they differ in settings that a comparison does not tell apart",
            attempt="one of them",
        )
    return entries


def size_name(size: Size) -> str:
    """The name that `size` has in `ropelens.train.SIZES`, or its numbers: "8x384x6x2"."""
    named = [name for name, known in SIZES.items() if known == size]
    if named:
        return named[0]
    shape = dataclasses.astuple(size)[:4]
    return "x".join(str(number) for number in shape)


def _names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that tell them apart."""
    parts = 1
    names = [folder.name for folder in folders]
    while len(set(names)) < len(names):
        parts += 1
        names = ["/".join(folder.parts[-parts:]) for folder in folders]
    return names
