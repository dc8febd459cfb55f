"""Files of a run: JSON, which must stay the same, and models."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from ropelens.errors import BadArgument
from ropelens.files.folder import write_whole
from ropelens.models.processes import processes


def say(line: str) -> None:
    """One plain line on stderr, by the first of the processes that train together."""
    if processes().is_main_process:
        print(line, file=sys.stderr, flush=True)


def read_json(path: Path) -> dict[str, Any]:
    """The object that `write_json` wrote; BadArgument for anything else."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError, ValueError) as error:
        raise BadArgument(f"{path} cannot be read.", seen=str(error)) from error


def write_json(path: Path, value: Any) -> None:
    """`write_whole` for JSON."""
    write_whole(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], names: Iterable[str], *, between: str
) -> str:
    """The values of `names` that differ: "steps: 3, now 4", with `between` them ", now "."""
    parts = [
        f"{name}: {str(one.get(name))[:100]}{between}{str(other.get(name))[:100]}"
        for name in names
        if one.get(name) != other.get(name)
    ]
    return "; ".join(parts)


def require_same(before: Mapping[str, Any], now: Mapping[str, Any], *, what: str) -> None:
    """Raise BadArgument where `now` differs from what was recorded `before`."""
    changed = differences(before, now, now, between=", now ")
    if changed:
        raise BadArgument(
            f"{what} was made with other settings.",
            seen=changed,
            attempt="the same command as before to resume it, or another folder",
        )


def write_model(model: PreTrainedModel, folder: Path) -> None:
    """Save `model` as safetensors with its config, written aside first.

    The weights come last: a folder that has them is complete.
    """
    aside = folder / "model.partial"
    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()  # there would be one for each model
    try:
        model.save_pretrained(aside)
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
    readers = (aside / "config.json").stat().st_mode  # safetensors lets only its owner read
    for file in sorted(aside.iterdir(), key=lambda f: f.suffix == ".safetensors"):
        file.chmod(readers)
        file.replace(folder / file.name)
    aside.rmdir()
