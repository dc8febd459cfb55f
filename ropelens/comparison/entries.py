"""Entries of a comparison: trained runs, or folders that `ropelens analyze` wrote."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropelens.checkpoints.names import short_names
from ropelens.errors import BadArgument
from ropelens.runtime.results import RECORD
from ropelens.train.data import differences, read_json
from ropelens.train.run import STUDY, runs_of
from ropelens.train.settings import Size, size_name

SHARED_SETTINGS = (
    *("context", "vocabulary", "valid_sha256", "text_sha256", "tokenizer_sha256"),
    *("steps", "precision"),
)
"""Settings that must be equal in all runs, so that their losses can be compared."""

SHARED_WITHIN_SIZE = ("size", "learning_rate", "warmup_steps")
"""Settings that must also be equal in runs of the same size."""


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
        models = {int(path.name.removeprefix("step-")): path for path in early}
        return models | {self.steps: self.folder}


def find_entries(paths: Sequence[str | Path]) -> tuple[list[ComparisonEntry], list[str]]:
    """Find the runs, finished runs of studies, or analyses in `paths`, in order.

    Also returns the names of unfinished runs of studies ("tiny/nope/seed-2") and warns about
    them. Raises `BadArgument` for other folders, runs together with analyses, runs with
    different text, and fewer than two entries.
    """
    records: dict[Path, dict[str, Any]] = {}
    unfinished: list[str] = []
    for path in map(Path, paths):
        study = read_json(path / STUDY) if (path / STUDY).exists() else None
        for run in [Path()] if study is None else runs_of(study):
            folder = (path / run).resolve()
            record = read_json(folder / RECORD) if (folder / RECORD).exists() else {}
            if study is not None and "finished" not in record:
                unfinished.append(str(run))
            else:
                records[folder] = record
    if unfinished:
        warnings.warn(
            f"unfinished runs are left out: {', '.join(unfinished)}",
            stacklevel=3,  # the line that called `compare`
        )
    trained = [folder for folder, record in records.items() if "finished" in record]
    profiles = [folder for folder in records if (folder / "profile.nc").exists()]
    others = [folder for folder in records if folder not in (trained or profiles)]
    if others or len(records) < 2:
        few = "A comparison needs two or more folders."
        fault = f"{others[0]} cannot be compared with the rest." if others else few
        wanted = "only finished runs of ropelens train, or only folders of ropelens analyze"
        raise BadArgument(fault, hint=wanted)
    if trained:
        return _runs(records), unfinished
    names = short_names(list(records))
    return [ComparisonEntry(n, n, folder) for n, folder in zip(names, records, strict=True)], []


def _runs(records: dict[Path, dict[str, Any]]) -> list[ComparisonEntry]:
    """Entries of runs, after checking that they have the same settings and text."""
    sizes = [size_name(Size(**record["settings"]["size"])) for record in records.values()]
    runs: dict[str, ComparisonEntry] = {}
    first = next(iter(records))
    first_of: dict[str, Path] = {}
    for size, (folder, record) in zip(sizes, records.items(), strict=True):
        settings = record["settings"]
        variant, seed = settings["variant"], settings["seed"]
        group = f"{size} {variant}" if len(set(sizes)) > 1 else variant
        name = f"{group} seed {seed}"
        like = first_of.setdefault(size, folder)
        for other, names in ((first, SHARED_SETTINGS), (like, SHARED_WITHIN_SIZE)):
            differ = differences(records[other]["settings"], settings, names, between=" and ")
            if name in runs or differ:
                raise BadArgument(
                    f"The runs in {other} and {folder} cannot be compared.",
                    seen=differ or f"both runs are {name}",
                    hint="compare the folders that ropelens analyze writes for the same text",
                )
        runs[name] = ComparisonEntry(
            name=name,
            group=group,
            folder=folder,
            size=size,
            variant=variant,
            seed=seed,
            data=(folder / record["data"]).resolve(),
            context=settings["context"],
            steps=settings["steps"],
            tokens_per_step=record["tokens"] // settings["steps"],
        )
    return list(runs.values())
