"""What is compared: trained runs, or folders that `ropelens analyze` wrote."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropelens.checkpoints.names import short_names
from ropelens.errors import BadArgument
from ropelens.runtime.results import RECORD
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
    """One side of a comparison: an analysis, or a finished run, which has `steps`.

    Entries of one `group` differ in their seed alone. `data` has the tokens that a run learnt
    from.
    """

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
        """The models in its history, and the finished one, by their step."""
        early = sorted((self.folder / "history").glob("step-*"))
        models = {int(at.name.removeprefix("step-")): at for at in early}
        return models | {self.steps: self.folder}


def find_entries(paths: Sequence[str | Path]) -> tuple[list[Entry], list[str]]:
    """The runs, finished runs of studies, or analyses in `paths`, in order.

    And the runs of studies that are not finished ("tiny/nope/seed-2"); a warning names them.
    Raises `BadArgument` for a folder that is none of these, runs beside analyses, runs that saw
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
            f"runs that are not finished are left out: {', '.join(unfinished)}",
            stacklevel=3,  # the line that called `compare`
        )
    trained = [folder for folder, record in records.items() if "finished" in record]
    profiles = [folder for folder in records if (folder / "profile.nc").exists()]
    alone = [folder for folder in records if folder not in (trained or profiles)]
    if alone or len(records) < 2:
        few = "A comparison needs two or more folders."
        what = f"{alone[0]} holds nothing to compare with the others." if alone else few
        wanted = "finished runs of ropelens train alone, or what ropelens analyze wrote"
        raise BadArgument(what, hint=wanted)
    if trained:
        return _runs(records), unfinished
    names = short_names(list(records))
    return [Entry(n, n, folder) for n, folder in zip(names, records, strict=True)], []


def _runs(records: dict[Path, dict[str, Any]]) -> list[Entry]:
    """Entries of runs that learnt from the same text, in the same way."""
    sizes = [size_name(Size(**record["settings"]["size"])) for record in records.values()]
    runs: dict[str, Entry] = {}
    first_of: dict[str, Path] = {}
    for size, (folder, record) in zip(sizes, records.items(), strict=True):
        settings = record["settings"]
        variant, seed = settings["variant"], settings["seed"]
        group = f"{size} {variant}" if len(set(sizes)) > 1 else variant
        name = f"{group} seed {seed}"
        like = first_of.setdefault(size, folder)
        for other, names in ((next(iter(records)), SAME), (like, SAME_OF_A_SIZE)):
            differ = differences(records[other]["settings"], settings, names, between=" and ")
            if name in runs or differ:
                raise BadArgument(
                    f"The runs in {other} and {folder} cannot be compared.",
                    seen=differ or f"two runs are both {name}",
                    hint="ropelens analyze of both models, on the same text",
                )
        runs[name] = Entry(
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
