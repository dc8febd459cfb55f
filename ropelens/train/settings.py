"""What decides the numbers of a run, and the Trainer's arguments that follow from it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import torch
from accelerate import PartialState
from transformers import TrainingArguments

from ropelens.errors import BadArgument
from ropelens.train.sizes import Size, get_size, model_config
from ropelens.train.tokens import SMALLEST_VOCABULARY

Precision = Literal["bf16", "fp32"]


@dataclass(frozen=True)
class Settings:
    """Everything that decides the numbers of a run, beside its text. Part of run.json."""

    size: Size
    context: int
    vocabulary: int
    steps: int
    learning_rate: float
    warmup_steps: int
    variant: str
    seed: int
    precision: Precision
    log_every: int
    eval_every: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one optimizer step sees, BOS included."""
        return self.size.batch * self.context


def make_settings(
    *,
    size: str | Size,
    context: int,
    vocabulary: int,
    steps: int,
    learning_rate: float | None,
    variant: str,
    seed: int,
    precision: Precision = "bf16",
    log_every: int = 10,
    eval_every: int = 250,
) -> Settings:
    """The settings of a run; a peak rate that is not given is that of the size.

    Raises:
        BadArgument: naming the value and its limits, or the sizes or variants that there are.
        UnsupportedModel: a variant that LLaMA's configuration cannot express.
    """
    shape = get_size(size)
    settings = Settings(
        size=shape,
        context=context,
        vocabulary=vocabulary,
        steps=steps,
        learning_rate=shape.learning_rate if learning_rate is None else learning_rate,
        warmup_steps=max(1, steps // 25),
        variant=variant,
        seed=seed,
        precision=precision,
        log_every=log_every,
        eval_every=eval_every,
    )
    _check(settings)
    return settings


def _check(settings: Settings) -> None:
    for name, low, high in (
        # Of two tokens the second has one key beside itself: nothing to measure afterwards.
        ("context", 3, None),
        ("vocabulary", SMALLEST_VOCABULARY, 1 << 16),
        ("steps", 1, 10**9),
        ("seed", 0, (1 << 32) - 1),
        ("log_every", 1, None),
        ("eval_every", 1, None),
    ):
        value = getattr(settings, name)
        if value < low or (high is not None and value > high):
            limits = f"at least {low}" if high is None else f"between {low} and {high}"
            raise BadArgument(f"{name} is {value}; it must be {limits}.")
    if not 0 < settings.learning_rate < math.inf:
        raise BadArgument(
            f"learning_rate is {settings.learning_rate}; it must be a number above 0."
        )
    if settings.precision not in get_args(Precision):
        raise BadArgument(
            f"no precision is called {settings.precision!r}.",
            attempt=f"one of: {', '.join(get_args(Precision))}",
        )
    model_config(
        settings.size,
        vocabulary=settings.vocabulary,
        context=settings.context,
        variant=settings.variant,
    )


def processes() -> PartialState:
    """The processes that train together: one, or as many as torchrun or accelerate started."""
    return PartialState(cpu=not torch.cuda.is_available())


def shared_batch(size: Size, *, among: int) -> tuple[int, int]:
    """Sequences that each of `among` processes takes through the model at once, and how often.

    Raises:
        BadArgument: the batch cannot be shared evenly.
    """
    if size.batch % among:
        raise BadArgument(
            f"{among} processes cannot share a batch of {size.batch} sequences evenly.",
            attempt="as many processes as divide it",
        )
    own = size.batch // among
    micro = math.gcd(own, size.micro_batch)
    return micro, own // micro


def training_arguments(settings: Settings, *, folder: Path) -> TrainingArguments:
    """transformers' arguments for `settings`; the recipe of every model trained here."""
    on_gpu = torch.cuda.is_available()
    micro_batch, repeats = shared_batch(settings.size, among=processes().num_processes)
    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=settings.steps,
        per_device_train_batch_size=micro_batch,
        per_device_eval_batch_size=micro_batch,
        gradient_accumulation_steps=repeats,
        learning_rate=settings.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=settings.warmup_steps,
        adam_beta1=0.9,
        adam_beta2=0.95,
        weight_decay=0.1,
        max_grad_norm=1.0,
        optim="adamw_torch_fused",
        bf16=settings.precision == "bf16",
        use_cpu=not on_gpu,
        dataloader_pin_memory=on_gpu,
        seed=settings.seed,
        logging_steps=settings.log_every,
        # The filter would hide the NaN that has to stop the run.
        logging_nan_inf_filter=False,
        eval_strategy="steps",
        eval_steps=settings.eval_every,
        prediction_loss_only=True,
        # `Checkpoints` decides when to save.
        save_strategy="no",
        save_total_limit=2,
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
        report_to="none",
        log_level_replica="error",  # as quiet as the first process
    )
    # One process, one device: with more in sight the Trainer would multiply the batch.
    arguments._n_gpu = min(arguments.n_gpu, 1)
    return arguments
