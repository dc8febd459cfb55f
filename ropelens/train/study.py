"""Studies: the same training for several variants of RoPE, sizes and seeds.

Runs with one seed see the same text in the same order, with the same tokenizer, and start
from the same weights, so that variants are compared in pairs.
"""

from __future__ import annotations

import dataclasses
import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ropelens.errors import BadArgument
from ropelens.files.folder import explain_full_disk, file_name
from ropelens.models.processes import processes
from ropelens.rope.formulas import Shape
from ropelens.rope.variants import parse_variant
from ropelens.train.data import Source, prepare_data, read_texts, require_same
from ropelens.train.folder import UNSAID, Busy, check_free
from ropelens.train.loop import TrainingFailed
from ropelens.train.machine import Precision, chosen_precision, say
from ropelens.train.record import read_json, write_json
from ropelens.train.run import train_in
from ropelens.train.settings import Settings, passes_of
from ropelens.train.sizes import ROPE_BASE, get_size

STUDY = "study.json"
"""The file of a study's folder that says which study it is."""

KINDS: Mapping[str, tuple[bool, set[type], str]] = {
    "tuple[str, ...]": (True, {str}, 'a list of texts, such as ["rope"]'),
    "tuple[int, ...]": (True, {int}, "a list of whole numbers, such as [0, 1]"),
    "float": (False, {int, float}, "a number"),
    "int": (False, {int}, "a whole number"),
    "float | None": (False, {int, float}, "a number"),
    "Precision": (False, {str}, "a text"),
    "bool": (False, {bool}, "true or false"),
}
"""What may stand for each type of a study: a list or not, of what, and that in words."""

OF_ALL = (
    "context",
    "vocabulary",
    "steps",
    "learning_rate",
    "precision",
    "history_every",
    "decay",
    "compile",
)
"""Settings that all runs of a study share."""

DATA_FOLDER = "data"
"""The folder in a study's of what its runs learn from."""


@dataclass(frozen=True)
class Study:
    """What a study file says; its first variant is the baseline of comparisons.

    `text` and `valid`: files or folders, from the place of the study file. `learning_rate`:
    the peak of the schedule; None: that of each size. `precision`: "auto" is settled when the
    study begins, so that all of its runs have the same. `history_every`, `decay`,
    `compile`: as for `train`.
    """

    variants: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    sizes: tuple[str, ...] = ("tiny",)
    text: tuple[str, ...] = ()
    valid: tuple[str, ...] = ()
    context: int = 512
    vocabulary: int = 2048
    steps: int = 2500
    learning_rate: float | None = None
    precision: Precision = "auto"
    history_every: int = 0
    decay: float = 1.0
    compile: bool = False


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
    """The study that the TOML file `path` describes.

    Raises:
        BadArgument: no such file, no TOML, a name or a value that a study does not have.
    """
    if not path.is_file():
        raise BadArgument(f"There is no study file {path}.")
    try:
        facts = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, tomllib.TOMLDecodeError) as error:
        raise BadArgument(f"{path} cannot be read as a study.", seen=str(error)) from error
    fields = {field.name: field.type for field in dataclasses.fields(Study)}
    for name, value in facts.items():
        if name not in fields:
            raise BadArgument(
                f"{path}: a study has no {name!r}.", attempt=f"one of: {', '.join(fields)}"
            )
        listed, kinds, wanted = KINDS[str(fields[name])]
        values = value if listed and isinstance(value, list) else [value]
        if isinstance(value, list) is not listed or not all(type(v) in kinds for v in values):
            raise BadArgument(f"{path}: {name} must be {wanted}.", seen=repr(value))
    if not facts.get("variants"):
        raise BadArgument(f"{path} names no variants.", attempt='variants = ["rope", "nope"]')
    study = _study_of(facts)
    for name in ("variants", "seeds", "sizes"):
        values = getattr(study, name)
        if name == "variants":
            values = [_identity(text, study.context) for text in values]
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
    """The study whose runs stand in `folder`, without the names of its text."""
    return _study_of(read_json(folder / STUDY))


def _study_of(facts: Mapping[str, Any]) -> Study:
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in facts.items()
    }
    return Study(**values)


def runs_of(study: Study) -> Iterator[Run]:
    """Every run, all variants of one seed before the next: a stopped study compares most."""
    for seed in study.seeds:
        for size in study.sizes:
            for variant in study.variants:
                yield Run(variant, size, seed)


def settings_of(study: Study, run: Run) -> Settings:
    """What decides the numbers of `run`.

    Raises:
        BadArgument: a value out of range, no such size or variant.
        UnsupportedModel: a variant that LLaMA's configuration cannot express.
    """
    return Settings(
        size=get_size(run.size),
        variant=run.variant,
        seed=run.seed,
        **{name: getattr(study, name) for name in OF_ALL},
    )


def run_study(
    path: Path,
    *,
    out: Path,
    text: Sequence[Path] = (),
    valid: Sequence[Path] = (),
    tokens: Path | None = None,
) -> Path:
    """Train what the study file `path` names in the folder `out`, and return that folder.

    Runs that are finished are passed over, a stopped one is resumed, and one that another
    process is at work on is left to it: the same command, given several times at once, shares
    the runs out (one for each GPU, say). A run that diverges does not keep the others from
    theirs. `text` and `valid` take the place of the file's; `tokens` are as for `train`.

    Raises:
        BadArgument: as `read_study`, or `out` holds another study; else as `train`.
        TrainingFailed: when all that can be is trained, naming the runs that diverged.
    """
    study = read_study(path)
    source = Source(
        tuple(text) or tuple(path.parent / name for name in study.text),
        tuple(valid) or tuple(path.parent / name for name in study.valid),
        study.vocabulary,
        study.context,
        tokens=tokens,
    )
    if not source.text and tokens is None:
        raise BadArgument(
            f"{path} names no text to train on.", attempt='--text FILE, or text = ["FILE"]'
        )
    data = tokens or out / DATA_FOLDER
    study = _begin(out, study, source, data=data)
    runs = list(runs_of(study))
    diverged: list[str] = []
    busy: list[str] = []
    for number, run in enumerate(runs, start=1):
        say(f"run {number} of {len(runs)}: {run.folder}")
        try:
            settings = settings_of(study, run)
            train_in(out / run.folder, settings, source, data=data)
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
        say(f"done but for what others are at work on: {', '.join(busy)}")
    return out


def _begin(out: Path, study: Study, source: Source, *, data: Path) -> Study:
    """Write the study into `out`, or see that it is the one that stands there.

    Gives `study` with the precision of its runs. Its data come first: a study that nothing can
    be trained of leaves `out` to a better one.
    """
    path = out / STUDY
    # What studies had that do not say it.
    unsaid = UNSAID | {"precision": "bf16"}
    before = unsaid | read_json(path) if path.exists() else None
    sizes = [get_size(size) for size in study.sizes]
    for size in sizes:
        passes_of(size, among=processes().num_processes)
    if before is None:
        check_free(out, of=("run.json", "config.json", "model.safetensors"))
    precision = chosen_precision(study.precision, kept=before["precision"] if before else None)
    study = dataclasses.replace(study, precision=precision)
    # As JSON has them; where the text lies may change, what it says may not (data.json).
    now: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(study)))
    del now["text"], now["valid"]
    if processes().is_main_process and before is None:
        texts = read_texts(source)
        with explain_full_disk(
            f"the study in {out} cannot be begun",
            means=lambda: "no run had been begun",
            attempt="free some space; the same command begins it",
        ):
            batch = max(size.batch for size in sizes)
            prepare_data(data, source, texts, batch=batch)
            write_json(path, now)
    processes().wait_for_everyone()
    require_same(
        before or read_json(path),
        now,
        what=f"the study in {out}",
        attempt="the study file as it was, to go on; or another folder: ropelens compare takes "
        "several studies of one text, and pairs all of their seeds",
    )
    return study
