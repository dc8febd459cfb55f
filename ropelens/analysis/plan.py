"""What a measurement will run and the memory it takes, known before weights are read."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedConfig

from ropelens.analysis.options import Options
from ropelens.errors import BadArgument
from ropelens.measure.excerpt import check_excerpts
from ropelens.measure.measurement import batch_bytes, sequences_at_once
from ropelens.measure.token_sets import attention_on
from ropelens.models.checkpoint import load_tokenizer
from ropelens.models.device import LIBRARIES, devices_of, free_bytes, pass_bytes, stated_number
from ropelens.models.load import open_checkpoint
from ropelens.models.paths import (
    check_document,
    check_text,
    sample_path,
    short_name,
)
from ropelens.models.subject import Model, Subject, as_subject, stated_context
from ropelens.models.texts import (
    Sequences,
    check_tokens,
    prompt_tokens,
    read_documents,
    tokenize,
    warn_beyond,
)
from ropelens.statistics.budget.held_out import fitted_sequences
from ropelens.statistics.rows import rows_for
from ropelens.statistics.variables import Statistic

LONGEST_DEFAULT_CONTEXT = 2048
DEFAULT_SEQUENCES = 64

Text = Path | str | Sequence[Path | str] | Sequences | Tensor | np.ndarray


@dataclass(frozen=True)
class Source:
    """The model that is measured: in memory, or a checkpoint whose weights `read` will read.

    `weights` are bytes, on all `devices` together. A checkpoint has a `path`.
    """

    name: str
    config: PreTrainedConfig
    tokenizer: Any
    parameters: int
    dtype: torch.dtype
    devices: list[torch.device]
    weights: int
    read: Callable[[], Subject]
    path: Path | None = None
    revision: str | None = None
    quantize: str | None = None

    @classmethod
    def of(cls, model: str | Path | Model, tokenizer: Any, options: Options) -> Source:
        """A model as it was passed in; `tokenizer` (or its name) replaces a checkpoint's."""
        if isinstance(tokenizer, (str, Path)):
            tokenizer = load_tokenizer(tokenizer, options)
        if not isinstance(model, (str, Path)):
            subject = as_subject(model, tokenizer)
            inner, parameters = subject.model, subject.model.num_parameters()
            return cls(
                name=short_name(str(inner.config.name_or_path)) or subject.kind,
                config=inner.config,
                tokenizer=subject.tokenizer,
                parameters=parameters,
                dtype=inner.dtype,
                devices=devices_of(inner),
                weights=parameters * inner.dtype.itemsize,
                read=lambda: subject,
            )
        opened = open_checkpoint(model, options)
        tokenizer = opened.tokenizer if tokenizer is None else tokenizer
        return cls(
            name=short_name(opened.checkpoint.name),
            config=opened.config,
            tokenizer=tokenizer,
            parameters=opened.parameters,
            dtype=opened.torch_dtype,
            devices=opened.devices,
            weights=opened.weight_bytes,
            read=lambda: as_subject(opened.read(), tokenizer),
            path=opened.checkpoint.path,
            revision=opened.checkpoint.revision,
            quantize=options.quantize,
        )


@dataclass(frozen=True)
class Plan:
    """What will be measured: `source` on `text`, at `rows` rows of each sequence.

    `memory` (bytes) estimates the most in use at a time, weights included, on all devices
    together; `free` is what is there. `fits`: what is not in use yet is no more than that.
    `excerpts` are the prompts as tokens, `statistics` those that `attention_on` asks for.
    """

    source: Source
    text: Sequences
    excerpts: list[Int[Tensor, " position"]]
    statistics: list[Statistic]
    rows: int | Literal["all"]
    batch_size: int
    memory: int
    free: int
    fits: bool

    @property
    def facts(self) -> dict[str, str]:
        """The plan by its parts, each in words."""
        source, count = self.source, len(self.text.tokens)
        config, lengths = source.config.get_text_config(), self.text.lengths
        heads, dtype = stated_number(config, "num_attention_heads", 0), _short(source.dtype)
        if source.quantize is not None:
            dtype = f"{source.quantize}, computed in {dtype}"
        longest, tokens = int(lengths.max()), int(lengths.sum())
        upto = "" if tokens == count * longest else "up to "
        return {
            "model": f"{source.name}, {config.num_hidden_layers} layers x {heads} heads, "
            f"{source.parameters:,} parameters in {dtype}",
            "tokens": f"{tokens:,} tokens ({count:,} sequences x {upto}{longest:,})",
            "rows": "all rows"
            if self.rows == "all"
            else f"{self.rows:,} rows of each sequence",
            "batch": f"{self.batch_size:,} sequences at a time, "
            f"{-(-count // self.batch_size):,} batches",
            "memory": f"about {_size(self.memory)} of {_size(self.free)} free on "
            + ", ".join(map(str, source.devices)),
        }

    def __str__(self) -> str:
        return "\n".join(f"{name:<7} {value}" for name, value in self.facts.items())


def plan_analysis(
    model: str | Path | Model,
    text: Text | None,
    options: Options,
    *,
    tokenizer: Any = None,
    lengths: Int[Tensor, " sequence"] | None = None,
) -> Plan:
    """What `analyze` with the same arguments will run; raises what it raises before that."""
    documents = _documents(text, model)
    source = Source.of(model, tokenizer, options)
    read = _sequences(documents, lengths, source, options)
    excerpts = [prompt_tokens(prompt, source.tokenizer) for prompt in options.prompts or ()]
    check_excerpts(source.config, excerpts)
    context = int(read.tokens.shape[1])
    free = sum(map(free_bytes, source.devices))
    left = free if source.path is None else free - source.weights
    on_cpu = source.devices[0].type == "cpu"
    batch: dict[str, Any] = {
        "context": context,
        "width": source.dtype.itemsize,
        "device": source.devices[0].type,
        "scores": options.backend == "transformer-lens",  # it makes all scores of a layer
    }
    size = options.batch_size or sequences_at_once(
        source.config, sequences=len(read.tokens), free=left // len(source.devices), **batch
    )
    fitted = fitted_sequences(len(read.tokens), context)
    largest = max(
        batch_bytes(source.config, sequences=min(size, len(read.tokens)), **batch),
        pass_bytes(source.config, sequences=fitted, logits=0, **batch),
    )
    return Plan(
        source,
        read,
        excerpts,
        [
            statistic
            for what in options.attention_on or ()
            for statistic in attention_on(read.tokens, what, source.tokenizer)
        ],
        rows=rows_for(options.rows, int(read.lengths.max())),
        batch_size=size,
        memory=source.weights + largest + (LIBRARIES if on_cpu else 0),
        free=free,
        fits=largest <= left,
    )


def _documents(text: Text | None, model: str | Path | Model) -> list[str] | Sequences | Tensor:
    """Documents, or the tokens that are passed instead."""
    name, whole = name_of(model), (Path, str, Sequences, Tensor, np.ndarray)
    parts: list[Any] = [text] if isinstance(text, whole) else list(text or ())
    check_text(name, parts)
    if isinstance(text, np.ndarray):
        return torch.from_numpy(text)
    if isinstance(text, (Sequences, Tensor)):
        return text
    if not parts:
        return read_documents([sample_path(name.partition(":")[2] or "rope")])
    documents: list[str] = []
    for part in parts:
        if isinstance(part, str):
            check_document(part)
        documents += [part] if isinstance(part, str) else read_documents([part])
    return documents


def _sequences(
    documents: list[str] | Sequences | Tensor,
    lengths: Int[Tensor, " sequence"] | None,
    source: Source,
    options: Options,
) -> Sequences:
    """Documents as tokens of the model, cut to the context; tokens as they are."""
    if lengths is not None and not isinstance(documents, Tensor):
        raise BadArgument("lengths are those of tokens; text has its own.")
    if isinstance(documents, Sequences):
        return documents
    vocabulary = source.config.get_text_config().vocab_size
    if isinstance(documents, Tensor):
        tokens, lengths = check_tokens(documents, lengths, vocabulary=vocabulary)
        return Sequences(tokens, lengths, "", f"{len(tokens):,} sequences of tokens")
    maximum = stated_context(source.config)
    context = options.context
    if context is None:
        context = min(maximum or LONGEST_DEFAULT_CONTEXT, LONGEST_DEFAULT_CONTEXT)
    warn_beyond(context, maximum)
    sample: dict[str, Any] = {
        "context": context,
        "sequences": DEFAULT_SEQUENCES if options.sequences is None else options.sequences,
        "seed": options.seed,
    }
    with warnings.catch_warnings():
        if options.sequences is None:  # then fewer than the default are no surprise
            warnings.filterwarnings("ignore", message=".*were asked for")
        read = tokenize(documents, source.tokenizer, **sample)
    tokens, lengths = check_tokens(read.tokens, read.lengths, vocabulary=vocabulary)
    return replace(read, tokens=tokens, lengths=lengths)


def name_of(model: str | Path | Model) -> str:
    """The name that a model was asked for by; one in memory by its class."""
    return str(model) if isinstance(model, (str, Path)) else type(model).__name__


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
