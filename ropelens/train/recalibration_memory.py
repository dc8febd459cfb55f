"""Memory, disk and time of a recalibration, before it starts."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
from transformers import PreTrainedModel

from ropelens.config_facts import stated_number
from ropelens.errors import BadArgument
from ropelens.runtime.devices import FIXED_BYTES, LIBRARIES, LayerWidths, free_bytes
from ropelens.train.base_model import Base, choose_parameters
from ropelens.train.recalibration_loop import sequence_loss, sequences_in_pass
from ropelens.train.recalibration_settings import SMALL, Recalibration
from ropelens.train.steps import loss_of

FLOAT = 4  # bytes
MOMENTS = 2  # numbers that AdamW keeps for each trained parameter
COPIES_OF_LOGITS = 4  # logits, their softmax, and the gradients of both


@dataclass(frozen=True, kw_only=True)
class TrainingMemory:
    """Bytes that a recalibration takes, estimated from the configuration.

    Without the libraries, the estimate was 0.96 to 0.98 times the measured peak for Llamas
    with 28 and 135 million parameters on a CPU. `buffers` are blocks that torch keeps.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int

    @property
    def total(self) -> int:
        return sum(vars(self).values())

    def in_words(self) -> str:
        parts = []
        for name, value in vars(self).items():
            parts.append(f"{name} {value / 1e9:.2g}")
        return (
            f"{self.total / 1e9:.2g} GB: {', '.join(parts)}; and {LIBRARIES / 1e9:.2g} GB for "
            "libraries"
        )


def training_memory(base: Base, settings: Recalibration) -> TrainingMemory:
    """The memory of a recalibration with resolved `settings`."""
    assert settings.context is not None
    parameters = base.opened.parameters
    trained = parameters
    if settings.train == "attention":
        trained = _attention_parameters(base)
    tokens = settings.context * sequences_in_pass(settings, parameters=parameters)
    config = base.opened.config.get_text_config()
    return TrainingMemory(
        weights=FLOAT * parameters,
        gradients=FLOAT * trained,
        optimizer=FLOAT * MOMENTS * trained,
        activations=tokens
        * _activations_of_token(base, recomputed=parameters >= SMALL),
        logits=FLOAT * COPIES_OF_LOGITS * tokens * config.vocab_size,
        buffers=FIXED_BYTES[base.opened.devices[0].type],
    )


def _attention_parameters(base: Base) -> int:
    """Number of parameters of the projections of attention, without biases."""
    config = base.opened.config.get_text_config()
    widths = LayerWidths.of(config)
    layers = stated_number(config, "num_hidden_layers", 1)
    return layers * widths.hidden * 2 * (widths.query + widths.key)


def _activations_of_token(base: Base, *, recomputed: bool) -> int:
    """Bytes that the backward pass needs for each token, in all layers.

    Layers that are computed again keep only their input; one layer at a time keeps the rest.
    """
    config = base.opened.config.get_text_config()
    layers = stated_number(config, "num_hidden_layers", 1)
    widths = LayerWidths.of(config)
    in_layer = FLOAT * (
        10 * widths.hidden + 4 * widths.query + 6 * widths.key + 5 * widths.inner
    )
    if not recomputed:
        return layers * in_layer
    return layers * FLOAT * widths.hidden + in_layer


def require_memory(base: Base, settings: Recalibration) -> None:
    """Raise `BadArgument` if a recalibration with resolved `settings` does not fit."""
    device = base.opened.devices[0]
    memory = training_memory(base, settings)
    free = free_bytes(device)
    if memory.total <= free:
        return
    raise BadArgument(
        f"The recalibration of {base.name} does not fit into the memory of {device}.",
        seen=f"{memory.in_words()}; {free / 1e9:.1f} GB are free",
        hint="a smaller --context, --train attention, or another device",
    )


def plan_recalibration(base: Base, settings: Recalibration, *, runs: int) -> str:
    """Tokens, memory, disk and time of `runs` with resolved `settings`, as lines of text.

    Reads the base, and measures a pass.
    """
    assert settings.context is not None
    memory = training_memory(base, settings)
    savepoint = memory.weights + memory.optimizer
    file = base.opened.parameters * base.own_dtype.itemsize
    model = base.read()
    choose_parameters(model, settings.train)
    seconds = step_seconds(model, settings)
    in_run = settings.steps * seconds.step + len(settings.evaluated_steps) * (
        settings.evaluated * seconds.evaluated_sequence
    )
    tokens = settings.steps * settings.tokens_per_step
    facts = {
        "runs": f"{runs}, {_clock(runs * in_run)} in all",
        "tokens": f"{tokens:,} in a run: {settings.steps:,} steps of "
        f"{settings.sequences} x {settings.context:,}",
        "rate": f"{settings.learning_rate:g} after {settings.warmup:.0%} of the steps",
        "memory": memory.in_words(),
        "disk": f"{file / 1e9:.2g} GB for the model of each run; {2 * savepoint / 1e9:.2g} "
        "GB for savepoints while a run trains",
        "time": f"{seconds.step:.2g} s for a step on {base.opened.devices[0]}; "
        f"{_clock(in_run)} for a run, with evaluations of {settings.evaluated} sequences "
        f"at {len(settings.evaluated_steps)} steps",
    }
    return "\n".join(_lines(facts))


def _lines(facts: dict[str, str]) -> Iterator[str]:
    for name, value in facts.items():
        yield f"{name:<7} {value}"


def _clock(seconds: float) -> str:
    return str(timedelta(seconds=round(seconds)))


@dataclass(frozen=True)
class MeasuredSeconds:
    """Seconds that a step takes, and that the evaluation of a sequence takes."""

    step: float
    evaluated_sequence: float


def step_seconds(model: PreTrainedModel, settings: Recalibration) -> MeasuredSeconds:
    """Measure a forward and a backward pass of one sequence of arbitrary tokens.

    The update of the weights is not measured; it takes less than a sequence.
    """
    assert settings.context is not None
    tokens = torch.arange(settings.context, device="cpu")
    tokens %= model.config.get_text_config().vocab_size
    model.train()
    bf16 = settings.bf16
    # The first pass is slower
    loss_of(model, tokens[None], predicted=1, bf16=bf16).backward()
    begin = time.perf_counter()
    loss_of(model, tokens[None], predicted=1, bf16=bf16).backward()
    trained = time.perf_counter() - begin
    model.zero_grad()
    model.eval()
    begin = time.perf_counter()
    sequence_loss(model, tokens)
    evaluated = time.perf_counter() - begin
    return MeasuredSeconds(settings.sequences * trained, evaluated)
