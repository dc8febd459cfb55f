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
    names = short_names([folder.resolve() for folder, _ in found])
    return [Entry(name, name, folder) for name, (folder, _) in zip(names, found, strict=True)]


def _look(path: Path) -> list[tuple[Path, dict[str, Any] | None]]:
    """The folders that `path` stands for, each with what a run's run.json says."""
    if not path.is_dir():
        raise BadArgument(f"There is no folder {path}.", attempt=NOTHING)
    if (path / STUDY).exists():
        return _study(path)
    record = _record(path)
    if record.get("kind") == "training":
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
    return read_json(path) if path.exists() else {}


def unfinished_runs(paths: Sequence[str | Path]) -> list[str]:
    """The runs of the studies in `paths` that are not finished: "tiny/nope/seed-2"."""
    return [
        name
        for path in map(Path, paths)
        if (path / STUDY).exists()
        for name in _unfinished(path, _runs_of_study(path))
    ]


def _unfinished(path: Path, runs: Sequence[tuple[Path, dict[str, Any]]]) -> list[str]:
    return [str(at.relative_to(path)) for at, record in runs if "finished" not in record]


def _study(path: Path) -> list[tuple[Path, dict[str, Any] | None]]:
    """The finished runs of a study, in its order."""
    runs = _runs_of_study(path)
    if missing := _unfinished(path, runs):
        warnings.warn(
            f"runs of {path} that are not finished are left out: {', '.join(missing)}",
            stacklevel=5,  # the line that called `compare`
        )
    return [(at, record) for at, record in runs if "finished" in record]


def _runs_of_study(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The folders of all runs of a study, in its order, with what their run.json say."""
    try:
        runs = list(runs_of(saved_study(path)))
    except (TypeError, ValueError, AttributeError) as error:
        raise BadArgument(f"{path / STUDY} is damaged.", seen=str(error)) from error
    return [(path / run.folder, _record(path / run.folder)) for run in runs]


def _runs(found: Iterable[tuple[Path, dict[str, Any] | None]]) -> list[Entry]:
    runs = [_run(folder, record) for folder, record in found if record is not None]
    settings = [record["settings"] for _, record in found if record is not None]
    of_size: dict[str, int] = {}
    for number, run in enumerate(runs):
        like = of_size.setdefault(run.size, number)
        _check_alike(runs, settings, (0, number), SAME)
        _check_alike(runs, settings, (like, number), SAME_OF_A_SIZE)
    for run, learnt_with in zip(runs, settings, strict=True):
        _check_data(run, learnt_with)
    entries: list[Entry] = []
    for run in runs:
        group = run.variant if len(of_size) == 1 else f"{run.size} {run.variant}"
        name = f"{group} seed {run.seed}"
        entries.append(dataclasses.replace(run, name=name, group=group))
    twice = [name for name, count in Counter(e.name for e in entries).items() if count > 1]
    if twice:
        raise BadArgument(
            f"Two runs are both {twice[0]}.",
            seen=", ".join(str(e.folder) for e in entries if e.name == twice[0]),
            means="a comparison holds one run of a variant, size and seed",
            attempt="leave one of them out",
        )
    return entries


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
            f"{folder / 'run.json'} is damaged.", seen=f"{type(error).__name__}: {error}"
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


def _check_alike(
    runs: Sequence[Run],
    settings: Sequence[dict[str, Any]],
    pair: tuple[int, int],
    names: Sequence[str],
) -> None:
    """Raise BadArgument where the settings `names` of a pair of runs differ."""
    first, second = (settings[number] for number in pair)
    differ = differences(first, second, names, between=" and ")
    if differ:
        raise BadArgument(
            "The runs in {} and {} cannot be compared.".format(
                *(runs[number].folder for number in pair)
            ),
            seen=differ,
            means="a difference in loss would be of these too",
            attempt="ropelens analyze of both models, on the same text",
        )
