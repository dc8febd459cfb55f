"""Checkpoints of a run: what it goes on from, each whole or passed over."""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_model
from transformers import PreTrainedModel

from ropelens.errors import BadArgument
from ropelens.models.processes import processes
from ropelens.train.record import read_json, write_json, write_model

CHECKPOINT = "checkpoint-"  # its name, but for the step
STATE = "state.json"  # written last: how far the run is, and the sizes of the other files
KEPT = 2  # the newest ones


@dataclass
class State:
    """How far a run is, beside its weights and the moments of its optimizer.

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
    for old in sorted(_checkpoints(folder), key=step_of)[:-KEPT]:
        shutil.rmtree(old)


def load_checkpoint(
    checkpoint: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> State:
    """Put `model` and `optimizer` where they were when the whole `checkpoint` was written."""
    load_model(model, checkpoint / "model.safetensors")
    optimizer.load_state_dict(torch.load(checkpoint / "optimizer.pt", weights_only=True))
    state = read_json(checkpoint / STATE)
    return State(step=state["step"], loss=state["loss"], rows=state["rows"])


def last_whole_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint in `folder`."""
    whole = [path for path in _checkpoints(folder) if _is_whole(path)]
    return max(whole, key=step_of, default=None)


def remove_broken_checkpoints(folder: Path) -> None:
    """Remove what a kill left half-written in `folder`."""
    for path in _checkpoints(folder):
        if not _is_whole(path):
            shutil.rmtree(path)


def remove_checkpoints(folder: Path) -> None:
    """Remove the folder of checkpoints, if it is there."""
    shutil.rmtree(folder, ignore_errors=True)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix(CHECKPOINT))


def _checkpoints(folder: Path) -> list[Path]:
    found = folder.glob(f"{CHECKPOINT}*")
    return [path for path in found if path.name.removeprefix(CHECKPOINT).isdecimal()]


def _is_whole(checkpoint: Path) -> bool:
    """Whether every file is still as long as it was when the checkpoint was written.

    A kill while an old checkpoint is removed takes some of its files, in any order. A machine
    that loses its power leaves files empty that had not reached the disk.
    """
    files = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    try:
        return files.items() >= read_json(checkpoint / STATE)["sizes"].items()
    except (BadArgument, KeyError):  # no state, or one of another version
        return False
