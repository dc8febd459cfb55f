"""Files of a run: JSON, metrics.csv, models, and the checkpoints that it resumes from."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from ropelens.errors import BadArgument
from ropelens.files.folder import write_whole
from ropelens.models.processes import processes

COLUMNS = ("step", "tokens", "train_loss", "valid_loss", "learning_rate", "tokens_per_second")
SHOWN = 5
"""Differences in a line."""
CHECKPOINT = "checkpoint-"  # its name, before the step
STATE = "state.json"  # written last: the step, and the sizes of the other files
NEWEST = 2  # checkpoints that stay


def say(line: str) -> None:
    """One plain line on stderr, by the first of the processes that train together."""
    if processes().is_main_process:
        print(line, file=sys.stderr, flush=True)


def read_json(path: Path) -> dict[str, Any]:
    """The object that `write_json` wrote; BadArgument for anything else."""
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise BadArgument(f"{path} is damaged.", seen=str(error)) from error
    if not isinstance(value, dict):
        raise BadArgument(f"{path} is damaged.", seen=f"a {type(value).__name__}, no object")
    return value


def write_json(path: Path, value: Any) -> None:
    """`write_whole` for JSON."""
    write_whole(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def differences(
    one: Mapping[str, Any], other: Mapping[str, Any], names: Iterable[str], *, between: str
) -> str:
    """The values of `names` that differ: "steps: 3, now 4", with `between` them ", now ".

    Of objects the values inside that differ, after a dot; at most `SHOWN` of all.
    """
    parts = [f"{name}: {a}{between}{b}" for name, a, b in _differing(one, other, names)]
    more = [f"and {len(parts) - SHOWN} more"] if len(parts) > SHOWN else []
    return "; ".join(parts[:SHOWN] + more)


def _differing(
    one: Mapping[str, Any], other: Mapping[str, Any], names: Iterable[str]
) -> Iterator[tuple[str, str, str]]:
    for name in names:
        a, b = one.get(name, "nothing"), other.get(name, "nothing")
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            for inside, was, now in _differing(a, b, dict.fromkeys([*a, *b])):
                yield f"{name}.{inside}", was, now
        elif a != b:
            yield name, _short(a), _short(b)


def _short(value: object) -> str:
    """A value as text; of a fingerprint the first digits."""
    text = str(value)
    if len(text) == 64:
        return text[:8]
    return text if len(text) <= 60 else f"{text[:28]}...{text[-28:]}"


def require_same(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    *,
    what: str,
    attempt: str = "the same command as before to resume it, or another folder",
) -> None:
    """Raise BadArgument where `now` differs from what was recorded `before`."""
    changed = differences(before, now, now, between=", now ")
    if changed:
        raise BadArgument(
            f"{what} was made with other settings.", seen=changed, attempt=attempt
        )


def write_metrics(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write metrics.csv anew, in the first process: after a resume, lost rows are gone.

    Losses in nats per token; `train_loss` is the mean since the row before.
    """
    if not processes().is_main_process:
        return
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_whole(path, text.getvalue())


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


@dataclass
class State:
    """The progress of a run, beside its weights and the moments of its optimizer.

    `loss` is the sum over the steps since the last row that has one, in float32; `rows` are
    those of metrics.csv.
    """

    step: int = 0
    loss: float = 0.0
    rows: list[dict[str, Any]] = field(default_factory=list)


def save_checkpoint(
    folder: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, state: State
) -> None:
    """Write a checkpoint into `folder`, in the first process, and remove all but two."""
    if not processes().is_main_process:
        return
    checkpoint = folder / f"{CHECKPOINT}{state.step}"
    checkpoint.mkdir(parents=True, exist_ok=True)
    write_model(model, checkpoint)
    torch.save(optimizer.state_dict(), checkpoint / "optimizer.pt")
    sizes = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    write_json(checkpoint / STATE, asdict(state) | {"sizes": sizes})
    for old in _checkpoints(folder)[:-NEWEST]:
        shutil.rmtree(old)


def load_checkpoint(
    checkpoint: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> State:
    """Set `model` and `optimizer` to what they were when `checkpoint` was written."""
    load_model(model, checkpoint / "model.safetensors")
    optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", weights_only=True))
    state = read_json(checkpoint / STATE)
    return State(step=state["step"], loss=state["loss"], rows=state["rows"])


def last_whole_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint in `folder`."""
    return next((path for path in reversed(_checkpoints(folder)) if _is_whole(path)), None)


def remove_broken_checkpoints(folder: Path) -> None:
    """Remove what a kill left half-written in `folder`."""
    for path in _checkpoints(folder):
        if not _is_whole(path):
            shutil.rmtree(path)


def _checkpoints(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, by their step."""
    steps = {path.name[len(CHECKPOINT) :]: path for path in folder.glob(f"{CHECKPOINT}*")}
    return [steps[step] for step in sorted(filter(str.isdecimal, steps), key=int)]


def _is_whole(checkpoint: Path) -> bool:
    """Whether every file still has the size that it had when the checkpoint was written.

    A kill while an old checkpoint is removed takes some of its files. A machine that loses
    power leaves files empty that had not reached the disk.
    """
    files = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    try:
        return files.items() >= read_json(checkpoint / STATE)["sizes"].items()
    except (BadArgument, KeyError):
        return False
