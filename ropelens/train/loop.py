"""The training loop.

The settings and the text determine all numbers, also of a resumed run, bit for bit.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int64
from torch import Tensor
from transformers import PreTrainedModel

from ropelens.runtime.devices import device_named
from ropelens.runtime.folder import write_whole
from ropelens.runtime.progress import Stage, show_progress
from ropelens.runtime.records import log_line
from ropelens.runtime.savepoint import SaveTimer
from ropelens.train.checkpoint import (
    CHECKPOINT,
    TrainingProgress,
    load_checkpoint,
    save_checkpoint,
    write_history,
)
from ropelens.train.data import held_out_sequences, spread, training_stages
from ropelens.train.metrics import METRICS, Speed
from ropelens.train.settings import Settings
from ropelens.train.steps import (
    batches,
    choose_attention,
    learn,
    learning_rate,
    make_optimizer,
    require_finite,
    sequences_in_pass,
    validation_loss,
)

if TYPE_CHECKING:
    from ropelens.train.watch import RopeCallback

LOG_EVERY = 10  # steps between rows of metrics.csv
EVAL_EVERY = 250  # steps between validations
WATCHED_SEQUENCES = 8  # of which heads and planes are measured


def fit_model(
    model: PreTrainedModel,
    settings: Settings,
    *,
    out: Path,
    data: Path,
    watch: bool = False,
) -> None:
    """Train `model` on the tokens in `data`, from the checkpoint in `out` if there is one.

    Writes metrics.csv, history/ with models of earlier steps, and a checkpoint every minute and
    at the end, but no weights that are NaN or infinite: raises `TrainingFailed`. With `watch`,
    measures some validation sequences at each validation, and adds the numbers to metrics.csv.
    """
    training = Training(model, settings, out=out, data=data)
    training.resume()
    if watch:
        training.watch()
    training.run()


class Training:
    """The training of `model` in the folder `out`, and its progress."""

    def __init__(
        self, model: PreTrainedModel, settings: Settings, *, out: Path, data: Path
    ) -> None:
        if settings.compile:
            model.compile(dynamic=False)  # few shapes occur
        self.model = model
        self.settings = settings
        self.out = out
        self.data = data
        self.stages = training_stages(
            data, batch=settings.shape.batch, context=settings.context
        )
        self.held_out = held_out_sequences(data)
        device = device_named("auto")
        self.optimizer = make_optimizer(model.train().to(device))
        no_loss = torch.zeros((), dtype=torch.float32, device=device)
        self.progress = TrainingProgress(step=0, rows=[], loss=no_loss)
        self.columns = [*METRICS]
        self.watching: RopeCallback | None = None
        self.notes: dict[str, str] = {}  # losses for the display of the progress
        self.saving = SaveTimer()
        self.speed = Speed()

    def resume(self) -> None:
        """Continue from the checkpoint, if there is one."""
        path = self.out / CHECKPOINT
        if path.exists():
            self.progress = load_checkpoint(path, self.model, self.optimizer)
            log_line(f"resuming from step {self.progress.step}")

    def watch(self) -> None:
        """Measure heads and planes now and at each validation."""
        from ropelens.train.watch import RopeCallback  # slow: imports Trainer

        rows = spread(self.held_out, WATCHED_SEQUENCES)
        tokens = torch.from_numpy(rows.astype(np.int64))
        self.watching = RopeCallback(tokens, out=self.out / "watch")
        numbers = self.watching.begin(self.model, self.progress.step)
        self.columns += numbers

    def run(self) -> None:
        """Take all steps that are left."""
        step = self.progress.step
        per_step = self.settings.tokens_per_step
        stage = Stage("training", self.settings.steps * per_step, done=step * per_step)
        with show_progress(stage) as advance:
            self.saving.restart()
            self.speed.restart(step)
            remaining = batches(
                self.stages,
                steps=self.settings.steps,
                tokens_per_step=per_step,
                seed=self.settings.seed,
                after=step,
            )
            for tokens in remaining:
                self.take_step(tokens)
                self.write_metrics()
                advance(per_step, note=", ".join(self.notes.values()))
                self.save()

    def take_step(self, tokens: Int64[Tensor, "sequence position"]) -> None:
        rate = learning_rate(self.settings, self.progress.step)
        self.progress.step += 1
        length = tokens.shape[1]
        choose_attention(self.model, length, bf16=self.settings.bf16)
        losses = learn(
            self.model,
            self.optimizer,
            tokens,
            in_pass=sequences_in_pass(self.settings, length),
            rate=rate,
            step=self.progress.step,
            bf16=self.settings.bf16,
        )
        for loss in losses:
            self.progress.loss += loss

    @property
    def is_last(self) -> bool:
        return self.progress.step == self.settings.steps

    def write_metrics(self) -> None:
        """Add a row to metrics.csv, if the numbers of this step are wanted."""
        step = self.progress.step
        numbers: dict[str, float] = {}
        if step % LOG_EVERY == 0:
            numbers.update(self.training_numbers())
        if self.is_last or step % EVAL_EVERY == 0:
            numbers.update(self.validation_numbers())
        if not numbers:
            return
        tokens = step * self.settings.tokens_per_step
        row = {"step": step, "tokens": tokens, **numbers}
        self.progress.rows.append(row)
        # Write all rows: a resumed run must not keep rows after its checkpoint.
        table = pd.DataFrame(self.progress.rows, columns=self.columns)
        write_whole(self.out / "metrics.csv", table.to_csv(index=False))

    def training_numbers(self) -> dict[str, float]:
        """Loss, rate and speed of the last `LOG_EVERY` steps. Begins a new sum of losses."""
        step = self.progress.step
        loss = float(self.progress.loss.double() / LOG_EVERY)
        self.progress.loss = torch.zeros_like(self.progress.loss)
        self.notes["loss"] = f"loss {loss:.4f}"
        steps_per_second = self.speed.read(step)
        return {
            "train_loss": loss,
            "learning_rate": learning_rate(self.settings, step - 1),
            "tokens_per_second": round(
                steps_per_second * self.settings.tokens_per_step
            ),
        }

    def validation_numbers(self) -> dict[str, float]:
        """Validation loss, and numbers of heads and planes if the training is watched."""
        loss = validation_loss(self.model, self.held_out, self.settings)
        self.notes["valid"] = f"validation loss {loss:.4f}"
        numbers = {"valid_loss": loss}
        if self.watching is not None:
            numbers.update(self.watching.measure(self.progress.step))
        return numbers

    def save(self) -> None:
        """Write the model to history/ and the checkpoint, if they are due."""
        step = self.progress.step
        is_kept = self.settings.in_history(step)
        is_due = self.is_last or self.saving.is_due
        if is_kept or is_due:
            rate = learning_rate(self.settings, step - 1)
            require_finite(self.model.parameters(), "a weight", step=step, rate=rate)
        if is_kept:
            write_history(self.model, self.out, step=step, tokenizer=self.data)
        if is_due:
            path = self.out / CHECKPOINT
            save_checkpoint(path, self.model, self.optimizer, self.progress)
            self.saving.restart()
