"""Studies: the same training for several variants of RoPE, sizes and seeds.

Runs with one seed see the same text in the same order, with the same tokenizer, and start
from the same weights, so that variants are compared in pairs.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropelens.errors import BadArgument, public
from ropelens.files.folder import explain_full_disk, file_name
from ropelens.models.processes import processes
from ropelens.rope.formulas import Shape
from ropelens.rope.variants import parse_variant
from ropelens.train.data import Source, prepare_data, read_texts
from ropelens.train.loop import TrainingFailed
from ropelens.train.record import read_json, require_same, say, write_json
from ropelens.train.run import Busy, check_free, train
from ropelens.train.settings import (
    ROPE_BASE,
    Precision,
    Settings,
    chosen_precision,
    get_size,
    passes_of,
)

STUDY = "study.json"
"""The file of a study's folder that says which study it is."""


@dataclass(frozen=True)
class Study:
    """What a study file says; its first variant is the baseline of comparisons.

    `text` and `valid` are files or folders, from the place of the study file. Fields with the
    names of `Settings` are settings of all runs; `precision` "auto" is settled when the study
    begins.
    """

    variants: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    sizes: tuple[str, ...] = ("tiny",)
    text: tuple[str, ...] = ()
    valid: tuple[str, ...] = ()
    context: int = 512
    vocabulary: int = 2048
    steps: int = 2500
    learning_rate: float | int | None = None
    precision: Precision = "auto"
    history_every: int = 0
    decay: float | int = 1.0
    compile: bool = False


FIELDS = [field.name for field in dataclasses.fields(Study)]


@dataclass(frozen=True)
class Run:
    """One run of a study, and its folder within the study's."""

    variant: str
    size: str
    seed: int

    @property
    def folder(self) -> Path:
        """Such as tiny/p-rope-0.75/seed-0."""
        return Path(self.size, file_name(self.variant), f"seed-{self.seed}")


def read_study(path: Path) -> Study:
    """The study that the TOML file `path` describes; BadArgument for any other file."""
    if not path.is_file():
        raise BadArgument(f"There is no study file {path}.")
    try:
        facts = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, tomllib.TOMLDecodeError) as error:
        raise BadArgument(f"{path} cannot be read as a study.", seen=str(error)) from error
    unknown = [name for name in facts if name not in FIELDS]
    if unknown:
        raise BadArgument(
            f"{path}: a study has no {unknown[0]!r}.", attempt=f"one of: {', '.join(FIELDS)}"
        )
    facts.setdefault("variants", [])
    study = _study_of(facts)
    variants = [_identity(text, study.context) for text in study.variants]
    for name, values in (
        ("variants", variants),
        ("seeds", study.seeds),
        ("sizes", study.sizes),
    ):
        if len(set(values)) < max(1, len(values)):
            raise BadArgument(
                f"{path}: {name} must name one or more, each once.",
                seen=str(list(getattr(study, name))),
            )
    for run in runs_of(study):
        settings_of(study, run)
    return study


def _identity(text: str, context: int) -> str:
    """What tells a variant from others: rope:10000 is rope, and p-rope:0.50 is p-rope:0.5."""
    variant = parse_variant(text)
    if not variant.row.parameters:
        return f"{variant.name}:{variant.value}"
    return str(variant.rope_parameters(Shape(head_dim=64, base=ROPE_BASE, context=context)))


def saved_study(folder: Path) -> Study:
    """The study whose runs are in `folder`, without the names of its text."""
    facts = read_json(folder / STUDY)
    return _study_of({name: value for name, value in facts.items() if name in FIELDS})


def _study_of(facts: Mapping[str, Any]) -> Study:
    """The study with these fields, whose types are checked."""
    lists = {name: tuple(v) if isinstance(v, list) else v for name, v in facts.items()}
    checked: Callable[..., Study] = public(Study)
    return checked(**lists)


def runs_of(study: Study) -> Iterator[Run]:
    """Every run, all variants of one seed before the next: a stopped study compares most."""
    for seed in study.seeds:
        for size in study.sizes:
            for variant in study.variants:
                yield Run(variant, size, seed)


def settings_of(study: Study, run: Run) -> Settings:
    """What decides the numbers of `run`."""
    shared = {f.name for f in dataclasses.fields(Settings)} & set(FIELDS)
    return Settings(
        size=get_size(run.size),
        variant=run.variant,
        seed=run.seed,
        **{name: getattr(study, name) for name in shared},
    )


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

    Runs that are finished are passed over, a stopped one is resumed, and one that another
    process is at work on is left to it: the same command, given several times at once, shares
    the runs out (one for each GPU, say). If a run diverges, the others are still trained.
    `text` and `valid` take the place of the file's; `tokens` is a folder of tokens that were
    made before, in place of text.

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
    study = _begin(out, study, source)
    runs = list(runs_of(study))
    diverged: list[str] = []
    busy: list[str] = []
    for number, run in enumerate(runs, start=1):
        say(f"run {number} of {len(runs)}: {run.folder}")
        try:
            train(settings_of(study, run), source, out=out / run.folder, data=out / "data")
        except Busy:
            busy.append(str(run.folder))
            say(f"another process is at work on {run.folder}")
        except TrainingFailed as error:
            say(error.line)
            diverged.append(str(run.folder))
    if diverged:
        raise TrainingFailed(
            f"{len(diverged)} of {len(runs)} runs of the study diverged.",
            seen=", ".join(diverged),
            means="every other run is trained, or another process is at work on it",
            attempt="a lower learning_rate in the study file, in a new folder",
        )
    if busy:
        say(f"done, except what other processes are at work on: {', '.join(busy)}")
    return out


def _begin(out: Path, study: Study, source: Source) -> Study:
    """Write the study into `out`, or check that it is the one that is there.

    Returns `study` with the precision of its runs. The data come first: if nothing can be
    trained on them, `out` stays free for a better study.
    """
    path = out / STUDY
    before = read_json(path) if path.exists() else None
    sizes = [get_size(size) for size in study.sizes]
    for size in sizes:
        passes_of(size, among=processes().num_processes)
    if before is None:
        check_free(out, of=("run.json", "config.json", "model.safetensors"))
    known = before["precision"] if before else None
    precision = chosen_precision(study.precision, before=known)
    study = dataclasses.replace(study, precision=precision)
    # As JSON; data.json knows the text, wherever it lies.
    now: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(study)))
    del now["text"], now["valid"]
    if processes().is_main_process and before is None:
        texts = read_texts(source)
        with explain_full_disk(
            f"the study in {out} cannot be begun",
            means=lambda: "no run had been begun",
            attempt="free some space; the same command begins it",
        ):
            prepare_data(
                source.tokens or out / "data",
                source,
                texts,
                vocabulary=study.vocabulary,
                context=study.context,
                batch=max(size.batch for size in sizes),
            )
            write_json(path, now)
    processes().wait_for_everyone()
    require_same(
        before or read_json(path),
        now,
        what=f"the study in {out}",
        attempt="the study file as it was, to resume; or another folder: ropelens compare "
        "takes several studies of one text, and pairs all of their seeds",
    )
    return study
