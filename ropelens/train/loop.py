"""transformers' Trainer, held to what a run folder promises.

It stops at the first loss that is not a number, saves only weights that are finite, and
marks a checkpoint as whole once every file of it is written.
"""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers import PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_callback import PrinterCallback, TrainerControl, TrainerState

from ropelens.errors import BadArgument, RopelensError
from ropelens.train.data import copy_tokenizer
from ropelens.train.record import read_json, write_json, write_model

CHECKPOINT = "checkpoint-"  # the Trainer's name of a checkpoint, but for its step
WHOLE = "whole"  # written last into a checkpoint: the other files and their sizes (bytes)


class TrainingFailed(RopelensError):
    """The loss or the weights stopped being numbers."""


def failed(what: str, *, step: int) -> TrainingFailed:
    """The error for `what` being no number any more at `step`."""
    return TrainingFailed(
        f"training stopped at step {step}: {what} is not a finite number.",
        means="the run diverged; checkpoints that were written before are kept",
        attempt="a lower learning rate, in a new run folder",
    )


def check_weights(model: PreTrainedModel, *, step: int) -> None:
    """See that there is something to save.

    Raises:
        TrainingFailed: a weight is NaN or infinite.
    """
    if not all(torch.isfinite(p).all() for p in model.parameters()):
        raise failed("a weight", step=step)


class Sequences(torch.utils.data.Dataset):
    """Rows of a memory-mapped array, as the labelled examples that the Trainer reads."""

    def __init__(self, rows: np.ndarray) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.from_numpy(self.rows[index].astype(np.int64))
        return {"input_ids": tokens, "labels": tokens}


class CheckedTrainer(Trainer):
    """A Trainer that stops when the loss is not finite, and times the tokens it sees."""

    def __init__(self, *, running: RunningLoss, tokens_per_step: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.running = running
        self.tokens_per_step = tokens_per_step
        self._timed_from: tuple[int, float] | None = None
        self.remove_callback(PrinterCallback)

    def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """One forward and backward pass.

        Raises:
            TrainingFailed: the loss is NaN or infinite.
        """
        if self._timed_from is None:
            self._timed_from = self.state.global_step, time.perf_counter()
        loss = super().training_step(*args, **kwargs)
        # Of all processes: were one of them to stop alone, the others would wait for it.
        if not torch.isfinite(self.accelerator.reduce(loss)):
            raise failed("the loss", step=self.state.global_step + 1)
        self.running.add(loss)
        return loss

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log mean loss and rate since the last training line, resumed or not."""
        if "loss" in logs and self._timed_from is not None:
            logs["loss"] = self.accelerator.gather(self.running.take()).mean().item()
            step, since = self._timed_from
            now = time.perf_counter()
            tokens = (self.state.global_step - step) * self.tokens_per_step
            logs["tokens_per_second"] = tokens / (now - since)
            self._timed_from = self.state.global_step, now
        super().log(logs, start_time)


class RunningLoss(TrainerCallback):
    """The loss summed over the steps since the last row of metrics.csv; checkpoints keep it.

    The Trainer forgets it where it resumes. `resumed`: the checkpoint that it goes on from;
    a process that left no sum in it begins a new one.
    """

    def __init__(self, resumed: Path | None) -> None:
        self.name = f"running_loss-{PartialState().process_index}.json"
        kept = resumed and resumed / self.name
        found = read_json(kept) if kept and kept.exists() else {"sum": 0.0, "steps": 0}
        self.sum, self.steps = torch.tensor(found["sum"]), int(found["steps"])

    def add(self, loss: torch.Tensor) -> None:
        """Count the loss of a pass, which is its part of the step's."""
        self.sum = self.sum.to(loss.device) + loss

    def take(self) -> torch.Tensor:
        """The mean over the steps, of shape [1]; the sum begins anew."""
        mean = (self.sum.double() / self.steps)[None]
        self.sum, self.steps = torch.zeros_like(self.sum), 0
        return mean

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Count the step."""
        self.steps += 1

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Write the sum of this process into the checkpoint."""
        found = {"sum": self.sum.item(), "steps": self.steps}
        write_json(checkpoint_folder(args, state) / self.name, found)


class History(TrainerCallback):
    """Keeps the model of steps 1, 2, 4, 8, ... in `folder`, each a checkpoint that loads alone.

    For looking at how what a model does came about. A resumed run writes the same again.
    """

    def __init__(self, folder: Path, *, tokenizer: Path) -> None:
        self.folder = folder
        self.tokenizer = tokenizer

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **event: Any,
    ) -> None:
        """Save the model on a step that is a power of two.

        Raises:
            TrainingFailed: as `check_weights`.
        """
        step = state.global_step
        if step & (step - 1):
            return
        check_weights(event["model"], step=step)  # in every process, so that all of them stop
        if not state.is_world_process_zero:
            return
        folder = self.folder / f"step-{step:06}"
        folder.mkdir(parents=True, exist_ok=True)
        copy_tokenizer(self.tokenizer, folder)
        write_model(event["model"], folder)


class Checkpoints(TrainerCallback):
    """Asks for a checkpoint every `seconds`, and at the end."""

    def __init__(self, *, seconds: float) -> None:
        self.seconds = seconds
        self.saved_at = time.monotonic()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **event: Any,
    ) -> None:
        """Set `should_save` where a checkpoint is due.

        Raises:
            TrainingFailed: as `check_weights`.
        """
        last = state.global_step >= state.max_steps
        # By the first process's clock: what one of them saves, all of them must.
        due = [time.monotonic() - self.saved_at >= self.seconds]
        if not (last or broadcast_object_list(due)[0]):
            return
        check_weights(event["model"], step=state.global_step)
        control.should_save = True

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Mark the checkpoint whole: every other file of it is written by now."""
        self.saved_at = time.monotonic()
        PartialState().wait_for_everyone()
        if not state.is_world_process_zero:
            return
        folder = checkpoint_folder(args, state)
        # A pickle that nothing here reads; run.json says the same in the open.
        (folder / "training_args.bin").unlink(missing_ok=True)
        sizes = {path.name: path.stat().st_size for path in folder.iterdir()}
        write_json(folder / WHOLE, sizes)


def checkpoint_folder(args: TrainingArguments, state: TrainerState) -> Path:
    """Where the Trainer saves the checkpoint of the step that it is at."""
    return Path(str(args.output_dir)) / f"{CHECKPOINT}{state.global_step}"


def last_whole_checkpoint(folder: Path) -> Path | None:
    """The newest whole checkpoint in `folder`."""
    whole = [path for path in _checkpoints(folder) if _is_whole(path)]
    return max(whole, key=step_of, default=None)


def remove_broken_checkpoints(folder: Path) -> None:
    """Remove what a kill left half-written in `folder`."""
    for path in _checkpoints(folder):
        if not _is_whole(path):
            shutil.rmtree(path)


def step_of(checkpoint: Path) -> int:
    """The step after which a checkpoint was written."""
    return int(checkpoint.name.removeprefix(CHECKPOINT))


def _checkpoints(folder: Path) -> list[Path]:
    found = folder.glob(f"{CHECKPOINT}*")
    return [path for path in found if path.name.removeprefix(CHECKPOINT).isdecimal()]


def _is_whole(checkpoint: Path) -> bool:
    """Whether every file that was there when the checkpoint was written is as long still.

    A kill while an old checkpoint is removed takes some of them, in any order; one of the
    machine leaves files that had not reached the disk empty.
    """
    files = {path.name: path.stat().st_size for path in checkpoint.iterdir()}
    files.pop(WHOLE, None)
    try:
        return files.items() >= read_json(checkpoint / WHOLE).items()
    except BadArgument:  # no marker, or one that did not reach the disk
        return False


def remove_checkpoints(folder: Path) -> None:
    """Remove the folder of checkpoints, if it is there."""
    shutil.rmtree(folder, ignore_errors=True)
