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
from ropelens.rope.variants import parse_variant
from ropelens.train.data import require_same
from ropelens.train.record import read_json, say, write_json
from ropelens.train.run import Busy, train
from ropelens.train.sizes import get_size

STUDY = "study.json"
"""The file of a study's folder that says which study it is."""


@dataclass(frozen=True)
class Study:
    """What a study file says; its first variant is the baseline of comparisons.

    `text` and `valid`: files or folders, from the place of the study file.
    """

    variants: tuple[str, ...]
    seeds: tuple[int, ...] = (0,)
    sizes: tuple[str, ...] = ("tiny",)
    text: tuple[str, ...] = ()
    valid: tuple[str, ...] = ()
    context: int = 512
    vocabulary: int = 2048
    steps: int = 2500


@dataclass(frozen=True)
class Run:
    """One run of a study, and its folder within the study's."""

    variant: str
    size: str
    seed: int

    @property
    def folder(self) -> Path:
        """Such as tiny/p-rope-0.75/seed-0."""
        return Path(self.size, self.variant.replace(":", "-"), f"seed-{self.seed}")


def read_study(path: Path) -> Study:
    """The study that the TOML file `path` describes.

    Raises:
        BadArgument: no such file, no TOML, a name or a value that a study does not have.
    """
    try:
        facts = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeError, tomllib.TOMLDecodeError) as error:
        raise BadArgument(f"{path} cannot be read as a study.", seen=str(error)) from error
    fields = {field.name: field for field in dataclasses.fields(Study)}
    for name, value in facts.items():
        if name not in fields:
            raise BadArgument(
                f"{path}: a study has no {name!r}.", attempt=f"one of: {', '.join(fields)}"
            )
        _check_type(path, name, value)
    if not facts.get("variants"):
        raise BadArgument(f"{path} names no variants.", attempt='variants = ["rope", "nope"]')
    study = _study_of(facts)
    for name in ("variants", "seeds", "sizes"):
        values = getattr(study, name)
        if len(set(values)) < max(1, len(values)):
            raise BadArgument(
                f"{path}: {name} must name one or more, each once.", seen=str(list(values))
            )
    for variant in study.variants:
        parse_variant(variant)
    for size in study.sizes:
        get_size(size)
    return study


def saved_study(folder: Path) -> Study:
    """The study whose runs stand in `folder`, without the names of its text."""
    return _study_of(read_json(folder / STUDY))


def _study_of(facts: Mapping[str, Any]) -> Study:
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in facts.items()
    }
    return Study(**values)


def _check_type(path: Path, name: str, value: object) -> None:
    kind = {"variants": str, "sizes": str, "text": str, "valid": str}.get(name, int)
    one = name in ("context", "vocabulary", "steps")
    values = [value] if one else value
    if not isinstance(values, list) or not all(type(v) is kind for v in values):
        wanted = "a whole number" if one else f"a list of {kind.__name__}"
        raise BadArgument(f"{path}: {name} must be {wanted}.", seen=repr(value))


def runs_of(study: Study) -> Iterator[Run]:
    """Every run, all variants of one seed before the next: a stopped study compares most."""
    for seed in study.seeds:
        for size in study.sizes:
            for variant in study.variants:
                yield Run(variant, size, seed)


def run_study(
    path: Path, *, out: Path, text: Sequence[Path] = (), valid: Sequence[Path] = ()
) -> Path:
    """Train what the study file `path` names in the folder `out`, and return that folder.

    Runs that are finished are passed over, a stopped one is resumed, and one that another
    process is at work on is left to it: the same command, given several times at once, shares
    the runs out (one for each GPU, say). `text` and `valid` take the place of the file's.

    Raises:
        BadArgument: as `read_study`, or `out` holds another study; else as `train`.
    """
    study = read_study(path)
    sources = {
        "text": tuple(text) or tuple(path.parent / name for name in study.text),
        "valid": tuple(valid) or tuple(path.parent / name for name in study.valid),
    }
    if not sources["text"]:
        raise BadArgument(
            f"{path} names no text to train on.", attempt='--text FILE, or text = ["FILE"]'
        )
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadArgument(f"cannot make the folder {out}: {error.strerror}.") from error
    _claim(out, study)
    runs = list(runs_of(study))
    for number, run in enumerate(runs, start=1):
        say(f"run {number} of {len(runs)}: {run.folder}")
        try:
            train(
                sources["text"],
                valid=sources["valid"],
                out=out / run.folder,
                data=out / "data",
                variant=run.variant,
                size=run.size,
                seed=run.seed,
                context=study.context,
                vocabulary=study.vocabulary,
                steps=study.steps,
            )
        except Busy:
            say(f"another process is at work on {run.folder}")
    return out


def _claim(out: Path, study: Study) -> None:
    """Write the study into `out`, or see that it is the one that stands there."""
    path = out / STUDY
    # As JSON has them; where the text lies may change, what it says may not (data.json).
    now: Mapping[str, Any] = json.loads(json.dumps(dataclasses.asdict(study)))
    now = {name: value for name, value in now.items() if name not in ("text", "valid")}
    if path.exists():
        require_same(read_json(path), now, what=f"the study in {out}")
    else:
        write_json(path, now)
