"""Studies: the same training for several variants of RoPE, sizes and seeds.

Runs with one seed see the same text in the same order, with the same tokenizer, and start
from the same weights, so that variants are compared in pairs.
"""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ropelens.errors import BadArgument, Count, public
from ropelens.files.folder import file_name
from ropelens.files.results import RECORD
from ropelens.models.processes import processes
from ropelens.train.data import Source, read_texts
from ropelens.train.loop import TrainingFailed
from ropelens.train.record import read_json, require_same, say, write_json
from ropelens.train.run import Busy, train
from ropelens.train.settings import Settings, get_size

STUDY = "study.json"
"""The file of a study's folder that says which study it is."""

OF_A_RUN = ("variant", "seed", "size")
"""Settings in which the runs of a study differ."""

SHARED = [f.name for f in dataclasses.fields(Settings) if f.name not in OF_A_RUN]


@dataclass(frozen=True)
class Study:
    """What a study file says; its first variant is the baseline of comparisons.

    `text` and `valid` are files or folders, from the place of the study file. `settings` are
    those of all runs, written in the file by their names.
    """

    variants: tuple[str, ...]
    seeds: tuple[Count, ...] = (0,)
    sizes: tuple[str, ...] = ("tiny",)
    text: tuple[str, ...] = ()
    valid: tuple[str, ...] = ()
    settings: Settings = dataclasses.field(default_factory=Settings)

    def runs(self) -> Iterator[Run]:
        """Every run, all variants of a seed before the next: a stopped study compares most."""
        for seed in self.seeds:
            for size in self.sizes:
                for variant in self.variants:
                    yield Run(variant, seed, size)

    def settings_of(self, run: Run) -> Settings:
        """What decides the numbers of `run`."""
        size = get_size(run.size)
        return dataclasses.replace(self.settings, variant=run.variant, seed=run.seed, size=size)

    def facts(self) -> dict[str, Any]:
        """The study as study.json has it, without its text, which data.json knows."""
        lists = {name: list(getattr(self, name)) for name in ("variants", "seeds", "sizes")}
        return lists | {name: getattr(self.settings, name) for name in SHARED}


class Run(NamedTuple):
    """One run of a study."""

    variant: str
    seed: int
    size: str

    @property
    def folder(self) -> Path:
        """Its folder within the study's, such as tiny/p-rope-0.75/seed-0."""
        return Path(self.size, file_name(self.variant), f"seed-{self.seed}")


def read_study(path: Path) -> Study:
    """The study that the TOML file `path` describes; BadArgument for any other file."""
    try:
        facts = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadArgument(f"{path} cannot be read as a study.", seen=str(error)) from error
    study = _study_of(facts)
    runs = list(study.runs())
    if not runs or len({run.folder for run in runs}) < len(runs):
        raise BadArgument(
            f"{path}: variants, seeds and sizes must each name one or more, each once."
        )
    for run in runs:
        study.settings_of(run)
    return study


def saved_study(folder: Path) -> Study:
    """The study whose runs are in `folder`, without the names of its text."""
    return _study_of(read_json(folder / STUDY))


def _study_of(facts: Mapping[str, Any]) -> Study:
    """The study of these keys, whose types are checked."""
    lists = [f.name for f in dataclasses.fields(Study) if f.name != "settings"]
    for name in facts:
        if name not in (*lists, *SHARED):
            known = ", ".join([*lists, *SHARED])
            raise BadArgument(f"A study has no {name!r}.", attempt=f"one of: {known}")
    build: Callable[..., Study] = public(Study)
    settings: Callable[..., Settings] = public(Settings)
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in {"variants": (), **facts}.items()
        if name in lists
    }
    shared = {name: value for name, value in facts.items() if name in SHARED}
    return build(**values, settings=settings(**shared))


@public
def run_study(
    path: str | Path,
    *,
    out: str | Path,
    text: Sequence[str | Path] = (),
    valid: Sequence[str | Path] = (),
    tokens: str | Path | None = None,
) -> Path:
    """Train what the study file `path` names in the folder `out`, and return that folder.

    Finished runs are passed over, a stopped one is resumed, and one that another process is at
    work on is left to it: the same command, given several times at once, shares the runs out
    (one for each GPU, say). If a run diverges, the others are still trained. `text` and `valid`
    take the place of the file's; `tokens` is a folder of tokens that were made before, in place
    of text.

    Raises:
        BadArgument: `path` is no study, or `out` holds another one; the disk is full.
        BadText: no such text, not UTF-8, or too little of it.
        TrainingFailed: at the end, naming the runs that diverged.
    """
    path, out = Path(path), Path(out)
    study = read_study(path)
    source = Source(
        tuple(map(Path, text)) or tuple(path.parent / name for name in study.text),
        tuple(map(Path, valid)) or tuple(path.parent / name for name in study.valid),
        None if tokens is None else Path(tokens),
    )
    if not source.text and tokens is None:
        raise BadArgument(
            f"{path} names no text to train on.", attempt='--text FILE, or text = ["FILE"]'
        )
    _begin(out, study, source)
    runs = list(study.runs())
    diverged: list[str] = []
    busy: list[str] = []
    for number, run in enumerate(runs, start=1):
        say(f"run {number} of {len(runs)}: {run.folder}")
        try:
            train(study.settings_of(run), source, out=out / run.folder, data=out / "data")
        except Busy:
            busy.append(str(run.folder))
        except TrainingFailed as error:
            say(error.line)
            diverged.append(str(run.folder))
    if busy:
        say(f"another process is at work on {', '.join(busy)}")
    if diverged:
        raise TrainingFailed(
            f"{len(diverged)} of {len(runs)} runs of the study diverged.",
            seen=", ".join(diverged),
            attempt="a lower learning_rate in the study file, in a new folder",
        )
    return out


def _begin(out: Path, study: Study, source: Source) -> None:
    """Write the study into `out`, or check that it is the one that is there."""
    path = out / STUDY
    if not path.exists() and any((out / name).exists() for name in (RECORD, "config.json")):
        raise BadArgument(
            f"{out} holds a model, a run or other results; a study would mix with them.",
            attempt="another --out",
        )
    if processes().is_main_process and not path.exists():
        read_texts(source)  # before there is a folder to leave behind
        write_json(path, study.facts())
    processes().wait_for_everyone()
    require_same(read_json(path), study.facts(), what=f"the study in {out}")
