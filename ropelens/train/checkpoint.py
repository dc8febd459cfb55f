"""Files of a training run: the checkpoint from which it continues, and its models."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from ropelens.checkpoints.quiet import quiet_transformers
from ropelens.errors import BadArgument, explained
from ropelens.runtime.folder import whole_file
from ropelens.runtime.keys import Key
from ropelens.train.data import copy_tokenizer

CHECKPOINT = "checkpoint.pt"  # the file from which a run is resumed
CHECKPOINT_FORMAT = 1


@dataclass
class TrainingProgress:
    """What a run has done. It is saved with the weights, and the loop changes it.

    `rows` are the rows of metrics.csv, and `loss` is the sum of the losses of the steps since
    the last row with a loss, in nats per token.
    """

    step: int
    rows: list[dict[str, float]]
    loss: Float[Tensor, ""]


def save_checkpoint(
    path: Path,
    model: PreTrainedModel,
    optimizer: torch.optim.Optimizer,
    progress: TrainingProgress,
) -> None:
    """Replace the checkpoint at `path`; a killed process leaves the earlier file."""
    parts = {
        "format": CHECKPOINT_FORMAT,
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "progress": (progress.step, progress.rows, progress.loss),
    }
    write_savepoint(path, parts)


def load_checkpoint(
    path: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer
) -> TrainingProgress:
    """Restore the states of `model` and `optimizer` from a checkpoint."""
    parts = read_savepoint(path, device=model.device, saved_format=CHECKPOINT_FORMAT)
    model.load_state_dict(parts["model"])
    optimizer.load_state_dict(parts["optimizer"])
    step, rows, loss = parts["progress"]
    return TrainingProgress(step=step, rows=rows, loss=loss)


def write_savepoint(path: Path, parts: dict[str, Any]) -> None:
    """Replace the file `path`. The tensors are streamed to the disk, without a copy of them.

    Raises `BadArgument` if the file cannot be written; the earlier file stays.
    """
    with (
        explained(
            f"The savepoint {path} cannot be written.",
            "more space on the disk; the same command then continues the run",
            error=BadArgument,
        ),
        whole_file(path) as aside,
    ):
        torch.save(parts, aside)


def read_savepoint(
    path: Path, *, device: torch.device, saved_format: int
) -> dict[str, Any]:
    """Read a file of `write_savepoint`; raises `BadArgument` for any other file."""
    with explained(
        f"The savepoint {path} cannot be read.",
        "remove it to begin the run again",
        error=BadArgument,
    ):
        parts = dict(torch.load(path, map_location=device, weights_only=True))
    Key({}, format=saved_format).require(parts, what=f"the savepoint {path}")
    return parts


def write_history(
    model: PreTrainedModel, out: Path, *, step: int, tokenizer: Path
) -> None:
    """Save the model of `step`, with its tokenizer, in history/."""
    folder = out / "history" / f"step-{step:06}"
    folder.mkdir(parents=True, exist_ok=True)
    copy_tokenizer(tokenizer, folder)
    write_model(model, folder)


def write_model(model: PreTrainedModel, folder: Path) -> None:
    """Save the configuration of `model`, and last its weights: then the folder is complete."""
    aside = folder / "model.partial"
    what = f"The model cannot be written to {folder}."
    with quiet_transformers(bars=False), explained(what, error=BadArgument):
        model.save_pretrained(aside)
    # Otherwise only the owner could read the weights
    mode = (aside / "config.json").stat().st_mode
    for file in sorted(aside.iterdir(), key=_is_weights):
        file.chmod(mode)
        file.replace(folder / file.name)
    aside.rmdir()


def _is_weights(file: Path) -> bool:
    return file.suffix == ".safetensors"
