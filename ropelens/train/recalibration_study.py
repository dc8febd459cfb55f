"""Files that describe a study of recalibrations, and the runs of the study."""

import itertools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ropelens.errors import BadArgument, explained
from ropelens.rope.variants import parse_variant
from ropelens.runtime.folder import file_name
from ropelens.train.recalibration_settings import CONTROL, Recalibration

OF_RECORD = ("kind", "base")
"""Keys of study.json that a study file does not have."""

OTHER_RATES = {"third-rate": 1 / 3, "triple-rate": 3.0}
"""Learning rates of repeated runs, as multiples of the study's rate, by names of folders."""


@dataclass(frozen=True)
class StudyRun:
    """A run of a study, whose learning rate is the study's rate times `rate_factor`."""

    settings: Recalibration
    folder: Path
    control: Path
    rate_factor: float = 1.0

    def with_rate(self, resolved: Recalibration) -> Recalibration:
        """The settings with the learning rate of the run; `resolved` has the study's rate."""
        assert resolved.learning_rate is not None
        return replace(
            resolved, learning_rate=resolved.learning_rate * self.rate_factor
        )


def read_recalibration_study(path: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Read the TOML file `path`; `given` are values for settings that it does not state.

    Raises `BadArgument` if a key or a value is wrong, or differs from a given value.
    """
    with explained(f"{path} cannot be read.", error=BadArgument):
        content = path.read_text(encoding="utf-8")
    with explained(f"{path} is not a study.", error=BadArgument):
        stated = tomllib.loads(content)
    study = dict(stated)
    for name, value in given.items():
        key, of_study = _in_study(name, value)
        if study.setdefault(key, of_study) != of_study:
            raise BadArgument(
                f"{path} and the command state different values of {name}.",
                seen=f"{key} {stated[key]} in the file, {value} in the command",
                hint="the value in the file or in the command, not in both",
            )
    with explained(f"{path} is not a study.", error=BadArgument):
        variants = [CONTROL]
        study.setdefault("seeds", [0])
        _check_lists(study)
        for variant in study["variants"]:
            check_variant(variant)
            if variant not in variants:
                variants.append(variant)
        study["variants"] = variants
        trains = study.get("learning_rate") != 0
        study.setdefault("other_rates", variants[1:2] if trains else [])
        _check_other_rates(study)
        recalibrations_of(study)
    return study


def check_variant(variant: str) -> None:
    """Raise `BadArgument` for a variant that does not exist."""
    if variant != CONTROL:
        parse_variant(variant)


def _check_lists(study: Mapping[str, Any]) -> None:
    """Raise ValueError unless `variants` and `seeds` are lists and all keys are known."""
    for name in ("variants", "seeds"):
        if not isinstance(study[name], list):
            raise ValueError(f"{name} must be a list, not {study[name]!r}")
    if not study["seeds"]:
        raise ValueError("seeds is empty")
    known = ["variants", "seeds", "other_rates", *Recalibration.__dataclass_fields__]
    for name in ("variant", "seed"):
        known.remove(name)
    for name in study:
        if name not in known:
            raise ValueError(
                f"{name} is not a setting; settings are {', '.join(known)}"
            )


def _check_other_rates(study: Mapping[str, Any]) -> None:
    """Raise ValueError if `other_rates` does not list variants of the study."""
    repeated = study["other_rates"]
    if not isinstance(repeated, list):
        raise ValueError(f"other_rates must be a list, not {repeated!r}")
    if repeated and study.get("learning_rate") == 0:
        raise ValueError("other_rates needs a learning_rate above 0")
    for variant in repeated:
        if variant not in study["variants"]:
            raise ValueError(
                f"other_rates has {variant!r}, which is not in variants; the control is "
                "always repeated"
            )


def _in_study(name: str, value: Any) -> tuple[str, Any]:
    """The key and the value in a study file for an option of the command."""
    if name in ("variant", "seed"):
        return f"{name}s", [value]
    return name, value


def recalibrations_of(study: Mapping[str, Any]) -> list[StudyRun]:
    """The runs of a study, with all variants of a seed before the next seed.

    Runs at other learning rates follow at the end, and have the first seed.
    """
    shared = dict(study)
    for name in OF_RECORD:
        shared.pop(name, None)
    variants = shared.pop("variants")
    seeds = shared.pop("seeds")
    repeated = shared.pop("other_rates", [])
    runs = []
    for seed, variant in itertools.product(seeds, variants):
        settings = Recalibration(variant=variant, seed=seed, **shared)
        runs.append(
            StudyRun(settings, _folder(variant, seed), control=_folder(CONTROL, seed))
        )
    seed = seeds[0]
    for (rate, factor), variant in itertools.product(OTHER_RATES.items(), variants):
        if variant in repeated or (repeated and variant == CONTROL):
            settings = Recalibration(variant=variant, seed=seed, **shared)
            folder = _folder(variant, seed, rate)
            control = _folder(CONTROL, seed, rate)
            runs.append(StudyRun(settings, folder, control, rate_factor=factor))
    return runs


def _folder(variant: str, seed: int, rate: str = "") -> Path:
    """The folder of a run in its study."""
    name = f"seed-{seed}-{rate}" if rate else f"seed-{seed}"
    return Path(file_name(variant), name)
