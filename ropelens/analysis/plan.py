"""What a measurement would run and take, told before weights are read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedConfig

from ropelens.measure.batches import batch_bytes, sequences_at_once
from ropelens.measure.profile import model_name, short_name
from ropelens.models.device import devices_of
from ropelens.models.load import Opened
from ropelens.models.memory import LIBRARIES, free_bytes, pass_bytes, stated_number
from ropelens.models.subject import as_subject
from ropelens.models.texts import Sequences
from ropelens.statistics.budget.held_out import fitted_sequences
from ropelens.statistics.rows import HowMany, rows_for

TIME = "time is known after the first batch"


@dataclass(frozen=True)
class Source:
    """What is to be measured: a model as it was passed in, or a checkpoint before its weights.

    Its `weights` take so many bytes, on all `devices` together. `read` gives the model; `path`
    and `revision` are those of a checkpoint.
    """

    name: str
    config: PreTrainedConfig
    tokenizer: Any
    parameters: int
    dtype: torch.dtype
    devices: list[torch.device]
    weights: int
    read: Callable[[], nn.Module]
    path: Path | None = None
    revision: str | None = None
    bf16_speed: float | None = None
    quantize: str | None = None

    @classmethod
    def of_model(cls, given: nn.Module, tokenizer: Any) -> Source:
        """A model that is in memory."""
        model = as_subject(given).model
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return cls(
            name=model_name(model),
            config=model.config,
            tokenizer=tokenizer,
            parameters=parameters,
            dtype=model.dtype,
            devices=devices_of(model),
            weights=parameters * model.dtype.itemsize,
            read=lambda: given,
        )

    @classmethod
    def of_checkpoint(cls, opened: Opened, tokenizer: Any) -> Source:
        """A checkpoint, whose own tokenizer `tokenizer` replaces where it is not None."""
        found = opened.checkpoint
        return cls(
            name=short_name(found.name),
            config=opened.config,
            tokenizer=opened.tokenizer if tokenizer is None else tokenizer,
            parameters=opened.parameters,
            dtype=opened.torch_dtype,
            devices=opened.devices,
            weights=opened.weight_bytes,
            read=opened.read,
            path=found.path,
            revision=found.revision,
            bf16_speed=opened.bf16_speed,
            quantize=opened.loading.quantize,
        )


@dataclass(frozen=True)
class Plan:
    """What runs: tokens, rows, sequences at a time, and the memory (bytes) that it takes.

    `tokens` counts those that are no padding, of `sequences` of up to `context`; `rows` of each
    are looked at. `memory` is an estimate of the most in use at a time on `device`, weights
    included (and on a CPU the libraries), of all devices together, `free` what is there for it;
    it `fits` where what is not in use yet (the libraries are) is no more.
    """

    model: str
    layers: int
    heads: int
    parameters: int
    dtype: str
    bf16_speed: float | None
    quantize: str | None
    source: str
    tokens: int
    sequences: int
    context: int
    rows: int | Literal["all"]
    batch_size: int
    memory: int
    free: int
    fits: bool
    device: str

    @property
    def line(self) -> str:
        """All of it on one line."""
        return (
            f"{self.model}: {self.layers} layers x {self.heads} heads in {self._of_dtype}, "
            f"{self._of_tokens}, "
            f"{self._of_rows}, batches of {self.batch_size}, about {_size(self.memory)} of "
            f"memory on {self.device} ({_size(self.free)} free); {TIME}"
        )

    def __str__(self) -> str:
        batches = -(-self.sequences // self.batch_size)
        facts = {
            "model": f"{self.model}, {self.layers} layers x {self.heads} heads, "
            f"{self.parameters:,} parameters in {self._of_dtype}",
            "text": self.source,
            "tokens": self._of_tokens,
            "rows": self._of_rows,
            "batch": f"{self.batch_size:,} sequences at a time, {batches:,} batches",
            "memory": f"about {_size(self.memory)} of {_size(self.free)} free on {self.device}",
            "time": TIME.removeprefix("time is "),
        }
        return "\n".join(f"{name:<7} {value}" for name, value in facts.items())

    @property
    def _of_tokens(self) -> str:
        whole = self.tokens == self.sequences * self.context
        each = "" if whole else "up to "
        return f"{self.tokens:,} tokens ({self.sequences:,} sequences x {each}{self.context:,})"

    @property
    def _of_dtype(self) -> str:
        if self.quantize is not None:
            return f"{self.quantize}, computed in {self.dtype}"
        if self.bf16_speed is None:
            return self.dtype
        return f"{self.dtype} (here bfloat16 is {self.bf16_speed:.2g} times as fast as float32)"

    @property
    def _of_rows(self) -> str:
        return "all rows" if self.rows == "all" else f"{self.rows:,} rows of each sequence"


def plan_analysis(
    source: Source,
    text: Sequences,
    *,
    rows: HowMany,
    batch_size: int | None,
    eager: bool,
) -> Plan:
    """What measuring `source` on `text` takes; `eager`: every score of a layer is held."""
    context, width = int(text.tokens.shape[1]), source.dtype.itemsize
    kind, weights, devices = source.devices[0].type, source.weights, source.devices
    free = sum(map(free_bytes, devices))
    given: dict[str, Any] = {
        "context": context,
        "width": width,
        "device": kind,
        "scores": eager,
    }
    left = free if source.path is None else free - weights
    size = batch_size or sequences_at_once(
        source.config, sequences=len(text.tokens), free=left // len(devices), **given
    )
    fitted = fitted_sequences(len(text.tokens), context)
    passes = (
        batch_bytes(source.config, sequences=min(size, len(text.tokens)), **given),
        pass_bytes(source.config, sequences=fitted, logits=0, **given),
    )
    config = source.config.get_text_config()
    longest = int(text.lengths.max())
    return Plan(
        model=source.name,
        layers=config.num_hidden_layers,
        heads=stated_number(config, "num_attention_heads", 0),
        parameters=source.parameters,
        dtype=str(source.dtype).removeprefix("torch."),
        bf16_speed=source.bf16_speed,
        quantize=source.quantize,
        source=text.source,
        tokens=int(text.lengths.sum()),
        sequences=len(text.tokens),
        context=longest,
        rows=rows_for(rows, longest),
        batch_size=size,
        memory=weights + max(passes) + (LIBRARIES if kind == "cpu" else 0),
        free=free,
        fits=max(passes) <= left,
        device=", ".join(map(str, devices)),
    )


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
