"""The loop of a recalibration: steps of training, and evaluations on held-out text.

The settings, the base, the text and the number of threads determine all numbers, also of a
resumed run, bit for bit (CPU, float32).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from ropelens.compatibility import recompute_layers
from ropelens.runtime.folder import write_whole
from ropelens.runtime.progress import Stage, show_progress
from ropelens.runtime.records import log_line
from ropelens.runtime.savepoint import SaveTimer
from ropelens.train.base_data import HeldOut, held_out
from ropelens.train.base_model import choose_parameters, trained_parameters
from ropelens.train.checkpoint import CHECKPOINT, read_savepoint, write_savepoint
from ropelens.train.data import training_stages
from ropelens.train.metrics import METRICS, Speed
from ropelens.train.recalibration_settings import SMALL, Recalibration
from ropelens.train.steps import batches, learn, loss_of, require_finite

LOSSES = ("step", "sequence", "document", "loss")
TOKENS_IN_PASS = 2048  # if the model is small; a larger model reads one sequence
SAVED_FORMAT = 1


@dataclass
class RecalibrationProgress:
    """The work that a run has done. It is saved with the weights, and the loop changes it.

    `step_losses` has the loss of each step since the last evaluation, in nats per token, and
    `evaluated` the losses of the sequences that the present evaluation has read.
    """

    step: int = 0
    metrics: list[dict[str, float]] = field(default_factory=list)
    losses: list[dict[str, float]] = field(default_factory=list)
    step_losses: list[float] = field(default_factory=list)
    evaluated: list[float] = field(default_factory=list)


def recalibrate_model(
    model: PreTrainedModel,
    settings: Recalibration,
    *,
    out: Path,
    data: Path,
    dtype: torch.dtype = torch.float32,
) -> RecalibrationProgress:
    """Train `model` on the tokens in `data`, from the savepoint in `out` if there is one.

    After the last step, the weights are rounded to `dtype`, in which they are saved. Writes
    metrics.csv and losses.csv at each evaluated step, and a savepoint every minute.
    Raises `TrainingFailed` if a loss or a weight becomes NaN or infinite.
    """
    loop = RecalibrationLoop(model, settings, out=out, data=data, dtype=dtype)
    loop.resume()
    with torch.random.fork_rng():  # each step sets the seed of dropout
        loop.run()
    return loop.progress


def recomputes(model: PreTrainedModel) -> bool:
    """Whether the backward pass computes layers again, which saves most of the memory."""
    is_large = model.num_parameters() >= SMALL
    return is_large and model.supports_gradient_checkpointing


def sequences_in_pass(settings: Recalibration, *, parameters: int) -> int:
    """Sequences that one pass of a model with this number of parameters reads."""
    assert settings.context is not None
    if parameters >= SMALL:
        return 1
    return min(settings.sequences, max(1, TOKENS_IN_PASS // settings.context))


def make_optimizer(model: PreTrainedModel) -> torch.optim.AdamW:
    """AdamW without weight decay, which changes no weights in steps with learning rate 0."""
    return torch.optim.AdamW(
        trained_parameters(model),
        betas=(0.9, 0.95),
        eps=1e-8,
        weight_decay=0.0,
        fused=True,
    )


class RecalibrationLoop:
    """The recalibration of `model` in the folder `out`, and its progress."""

    def __init__(
        self,
        model: PreTrainedModel,
        settings: Recalibration,
        *,
        out: Path,
        data: Path,
        dtype: torch.dtype,
    ) -> None:
        assert settings.context is not None
        self.dtype = dtype
        self.model = model
        self.settings = settings
        self.out = out
        self.stages = training_stages(
            data, batch=settings.sequences, context=settings.context
        )
        self.held_out: HeldOut = held_out(data, sequences=settings.evaluated)
        found = len(self.held_out.rows)
        if found < settings.evaluated:
            log_line(
                f"evaluating on all {found} held-out sequences: {settings.evaluated} were "
                "asked for"
            )
        choose_parameters(model, settings.train)
        if recomputes(model):
            recompute_layers(model)
        parameters = model.num_parameters()
        self.in_pass = sequences_in_pass(settings, parameters=parameters)
        self.optimizer = make_optimizer(model)
        self.progress = RecalibrationProgress()
        self.saving = SaveTimer()
        self.speed = Speed()
        self.note = ""  # shows the latest evaluation

    def resume(self) -> None:
        """Continue from the savepoint, if there is one."""
        path = self.out / CHECKPOINT
        if not path.exists():
            return
        on_cpu = torch.device("cpu")
        parts = read_savepoint(path, device=on_cpu, saved_format=SAVED_FORMAT)
        self.model.load_state_dict(parts["model"])
        self.optimizer.load_state_dict(parts["optimizer"])
        self.progress = RecalibrationProgress(**parts["progress"])
        log_line(f"resuming from step {self.progress.step}")

    def run(self) -> None:
        """Evaluate, and take all steps that are left."""
        settings = self.settings
        per_step = settings.tokens_per_step
        done = self.progress.step * per_step
        stage = Stage("training", settings.steps * per_step, done=done)
        with show_progress(stage) as advance:
            self.saving.restart()
            self.speed.restart(self.progress.step)
            self.evaluate_if_due()
            for tokens in self.remaining_batches():
                self.take_step(tokens)
                self.save_if_due()
                self.evaluate_if_due()
                advance(per_step, note=self.note)

    def remaining_batches(self) -> Iterator[Int[Tensor, "sequence position"]]:
        return batches(
            self.stages,
            steps=self.settings.steps,
            tokens_per_step=self.settings.tokens_per_step,
            seed=self.settings.seed,
            after=self.progress.step,
        )

    def take_step(self, tokens: Int[Tensor, "sequence position"]) -> None:
        step = self.progress.step + 1
        rate = self.settings.rate_of(step - 1)
        # Dropout draws the same numbers in a resumed run
        torch.manual_seed(step)
        self.model.train()
        by_pass = learn(
            self.model,
            self.optimizer,
            tokens,
            in_pass=self.in_pass,
            rate=rate,
            step=step,
            bf16=self.settings.bf16,
        )
        if step == self.settings.steps:  # evaluate the weights that are saved
            round_weights(self.model, self.dtype)
        self.progress.step = step
        self.progress.step_losses.append(float(by_pass.double().sum()))

    def evaluate_if_due(self) -> None:
        """Evaluate the model after a step of `evaluated_steps`, unless it is done already."""
        step = self.progress.step
        known = {row["step"] for row in self.progress.metrics}
        if step in known or step not in self.settings.evaluated_steps:
            return
        self.require_finite(trained_parameters(self.model), "a weight")
        steps_per_second = self.speed.read(step)
        self.evaluate()
        self.add_rows(steps_per_second)
        self.save_if_due()
        self.speed.restart(step)

    def evaluate(self) -> None:
        """Add the losses of the held-out sequences that this evaluation has not read yet."""
        self.model.eval()
        rows = self.held_out.rows
        evaluated = self.progress.evaluated
        while len(evaluated) < len(rows):
            tokens = torch.from_numpy(rows[len(evaluated)].astype(np.int64))
            evaluated.append(sequence_loss(self.model, tokens))
            self.save_if_due()

    @property
    def latest_rate(self) -> float:
        """Learning rate of the latest step, or of the first one before the training."""
        return self.settings.rate_of(max(0, self.progress.step - 1))

    def require_finite(self, tensors: Sequence[Tensor], what: str) -> None:
        """Raise `TrainingFailed` if `what` is NaN or infinite after the latest step."""
        step = self.progress.step
        require_finite(tensors, what, step=step, rate=self.latest_rate)

    def add_rows(self, steps_per_second: float) -> None:
        """Add the numbers of an evaluation to metrics.csv and losses.csv."""
        progress = self.progress
        step = progress.step
        losses = progress.evaluated
        valid_loss = float(np.mean(losses))
        by_sequence = torch.tensor(losses, dtype=torch.float64, device="cpu")
        self.require_finite([by_sequence], "a validation loss")
        self.note = f"validation loss {valid_loss:.4f}"
        per_step = self.settings.tokens_per_step
        row: dict[str, float] = {
            "step": step,
            "tokens": step * per_step,
            "valid_loss": valid_loss,
        }
        if step:
            row["train_loss"] = float(np.mean(progress.step_losses))
            row["learning_rate"] = self.latest_rate
            row["tokens_per_second"] = round(steps_per_second * per_step)
        progress.metrics.append(row)
        for number, loss in enumerate(losses):
            document = int(self.held_out.documents[number])
            progress.losses.append(
                {"step": step, "sequence": number, "document": document, "loss": loss}
            )
        progress.step_losses = []
        progress.evaluated = []
        self.write_tables()

    def write_tables(self) -> None:
        """Write all rows: a resumed run must not keep rows after its savepoint."""
        metrics = pd.DataFrame(self.progress.metrics, columns=METRICS)
        losses = pd.DataFrame(self.progress.losses, columns=LOSSES)
        write_whole(self.out / "metrics.csv", metrics.to_csv(index=False))
        write_whole(self.out / "losses.csv", losses.to_csv(index=False))

    def save_if_due(self) -> None:
        """Write a savepoint if the last one is a minute old."""
        if not self.saving.is_due:
            return
        self.require_finite(trained_parameters(self.model), "a weight")
        parts = {
            "format": SAVED_FORMAT,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "progress": vars(self.progress),
        }
        write_savepoint(self.out / CHECKPOINT, parts)
        self.saving.restart()


@torch.no_grad()
def round_weights(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Round all weights to the numbers of `dtype`, which they keep in float32."""
    for weight in model.parameters():
        weight.copy_(weight.to(dtype))


@torch.no_grad()
def sequence_loss(model: PreTrainedModel, tokens: Int[Tensor, " position"]) -> float:
    """Mean loss of the predicted tokens of a sequence, in nats per token."""
    loss = loss_of(model, tokens[None], predicted=len(tokens) - 1)
    return float(loss.double())
