"""What a run says about itself: metrics.csv, run.json, and its model."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from ropelens.errors import BadArgument
from ropelens.files.folder import write_whole
from ropelens.models.processes import processes

COLUMNS = ("step", "tokens", "train_loss", "valid_loss", "learning_rate", "tokens_per_second")
MISSING = "nothing"
"""What is told of a value that one of two records lacks."""
SHOWN = 5
"""How many differences a line tells."""


def write_metrics(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write metrics.csv anew: after a resume it holds no row of what was lost.

    Losses in nats per token; `train_loss` is the mean since the row before. One of the
    processes that train together writes it.
    """
    if not processes().is_main_process:
        return
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_whole(path, text.getvalue())


def read_json(path: Path) -> dict[str, Any]:
    """What `write_json` wrote; BadArgument for anything else."""
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadArgument(f"{path} is damaged.", seen=str(error)) from error
    if not isinstance(value, dict):
        raise BadArgument(f"{path} is damaged.", seen=f"a {type(value).__name__}, no object")
    return value


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], names: Iterable[str], *, between: str
) -> str:
    """The values of `names` that differ: "steps: 3, now 4", by what stands `between` them.

    Of objects the values inside that differ, after a dot; of many the first `SHOWN`.
    """
    told = [f"{name}: {a}{between}{b}" for name, a, b in _differing(one, other, names)]
    more = [f"and {len(told) - SHOWN} more"] if len(told) > SHOWN else []
    return "; ".join(told[:SHOWN] + more)


def _differing(
    one: Mapping[str, Any], other: Mapping[str, Any], names: Iterable[str]
) -> Iterator[tuple[str, str, str]]:
    for name in names:
        a, b = one.get(name, MISSING), other.get(name, MISSING)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            for inside, was, now in _differing(a, b, dict.fromkeys([*a, *b])):
                yield f"{name}.{inside}", was, now
        elif a != b:
            yield name, _short(a), _short(b)


def _short(value: object) -> str:
    """A value as text; of a fingerprint the first digits tell enough."""
    text = str(value)
    if len(text) == 64:
        return text[:8]
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"


def write_json(path: Path, value: Any) -> None:
    """`write_whole` for JSON."""
    write_whole(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def write_model(model: PreTrainedModel, folder: Path) -> None:
    """Save `model` as safetensors with its config, written aside first.

    The weights take their name last: a folder that has them is complete.
    """
    aside = folder / "model.partial"
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # one a model, terminal or not
    try:
        model.save_pretrained(aside)
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
    readers = (aside / "config.json").stat().st_mode  # safetensors lets in its owner alone
    for file in sorted(aside.iterdir(), key=lambda f: f.suffix == ".safetensors"):
        file.chmod(readers)
        file.replace(folder / file.name)
    aside.rmdir()
