"""A measurement: a live model, the text that it reads, and the rows that are measured."""

import json
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ropelens.arguments import IN_WORDS
from ropelens.attention.exchange import exchange_order
from ropelens.budget.held_out import scored_rows
from ropelens.checkpoints.names import short_name
from ropelens.config_facts import count_length_mismatches
from ropelens.errors import BadArgument
from ropelens.measured_rotation.probe import RotationProbe
from ropelens.measured_rotation.read import LayerRotation
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.model.bridge import BridgeModel
from ropelens.model.live_model import LiveModel
from ropelens.model.model_noise import Noise
from ropelens.noise import NOISY
from ropelens.profiles.checked_text import attention_across, model_text
from ropelens.runtime.devices import devices_of, free_bytes, pass_bytes
from ropelens.text.documents import check_document
from ropelens.text.prompts import Prompt, TokenNames
from ropelens.text.rows import HowMany, Rows, all_rows, rows_for, sample_rows
from ropelens.text.text import Text
from ropelens.text.tokenize import (
    TextInput,
    find_beginning,
    prompt_tokens,
    warn_beyond,
)

TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 16384}


@dataclass(frozen=True)
class Batch:
    """Sequences that run together, and the rows that are measured and scored."""

    text: Text
    rows: Rows
    scored: Rows


@dataclass(frozen=True)
class Measurement:
    """The live model reads the text; `rows` rows of each sequence are drawn with `seed`."""

    live: LiveModel
    text: Text
    rotation: RotationProbe
    rows: int | Literal["all"] = "all"
    seed: int = 0
    batch_size: int | None = None  # None: the number that fits into memory
    across: float = 0.0  # share of attention on other documents in packed rows

    @classmethod
    def of(
        cls,
        model: "Measured",
        text: TextInput,
        *,
        tokenizer: Any = None,
        sinks: Collection[int] = (),
        rows: HowMany = "all",
        seed: int = 0,
        batch_size: int | None = None,
    ) -> "Measurement":
        """Read and check the arguments of a public function; keep a measurement unchanged."""
        if isinstance(model, Measurement):
            return model
        live = as_live_model(model, tokenizer)
        text = model_text(live, text, tokenizer=tokenizer, sinks=sinks)
        across = 0.0
        if text.packed is not None:
            across = attention_across(live, text.packed)
        different = count_length_mismatches(live.config, text.lengths)
        if different:
            warnings.warn(
                f"{different:,} of {len(text):,} sequences are measured with the RoPE of "
                f"the longest one ({text.context:,} tokens); by themselves they rotate "
                "differently",
                stacklevel=3,
            )
        return cls(
            live,
            text,
            RotationProbe(live),
            rows=rows_for(rows, text.context),
            seed=int(seed),
            batch_size=batch_size,
            across=across,
        )

    def batches(self, chosen: Sequence[int] | None = None) -> Iterator[Batch]:
        """Yield the `chosen` sequences (default: all) in batches."""
        if chosen is None:
            chosen = range(len(self.text))
        model = self.live.model
        size = self.batch_size or sequences_at_once(
            model.config,
            sequences=len(self.text),
            context=self.text.ids.shape[1],
            width=model.dtype.itemsize,
            device=self.live.device.type,
            free=min(free_bytes(device) for device in devices_of(model)),
        )
        # RoPE that changes with the length needs the length at which planes were measured.
        width = self.text.context if self.live.depends_on_length else None
        for begin in range(0, len(chosen), size):
            yield self.batch(chosen[begin : begin + size], width=width)

    def batch(self, chosen: Sequence[int], *, width: int | None = None) -> Batch:
        """The `chosen` sequences as one batch, as wide as the longest or `width` positions."""
        text = self.text.part(list(chosen), width=width)
        sample = partial(sample_rows, text.lengths, seed=self.seed, numbers=chosen)
        if self.rows == "all" or self.rows >= text.context - 1:
            rows = all_rows(text.lengths)
        else:
            rows = sample(count=self.rows)
        scored = sample(count=scored_rows(self.text))
        order = exchange_order(
            text.lengths, width=text.ids.shape[1], seed=self.seed, numbers=chosen
        )
        return Batch(
            text,
            rows=replace(rows.zero_hidden(text.hidden), order=order),
            scored=replace(scored.zero_hidden(text.hidden), order=order),
        )

    def runs(self) -> Iterator[Callable[[], Tensor]]:
        """A pass over each sequence, as a function."""
        for index in range(len(self.text)):
            sequence = self.text[[index]]
            yield partial(self.live.forward, sequence.ids, hidden=sequence.hidden)

    def result_attributes(self) -> dict[str, str | int | float]:
        """Attributes of a result made now: model, noise, options, text, versions and time.

        Warns if rounding noise is large.
        """
        live = self.live
        text = self.text
        config = live.model.config
        noise = noise_attributes(live.noise, self.rotation.layers(text.context))
        largest = max(noise.values())
        if largest > NOISY:
            warnings.warn(
                f"{live.class_name} has a rounding noise of {largest:.1%}: sound runs "
                "differ by up to this share",
                stacklevel=3,
            )
        documents = 0 if text.documents is None else len(text.documents.unique())
        bridged = isinstance(live, BridgeModel)
        attributes = {
            "model": short_name(str(config.name_or_path)) or live.class_name,
            "revision": str(config.to_dict().get("_commit_hash") or ""),
            "dtype": name_dtypes(live.model.dtype, live.noise.dtype),
            **noise,
            "seed": self.seed,
            "context": text.context,
            "trained_context": live.context,
            "rows": self.rows,
            "sequences": len(text),
            "documents": documents,
            "tokens": int(text.real.sum()),
            "beginning": find_beginning(text, live.tokenizer),
            "tokens_sha256": text.fingerprint,
            "versions": json.dumps(versions(bridged=bridged)),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        if self.across:
            attributes["attention_across_documents"] = self.across
        return attributes


def name_dtypes(weights: torch.dtype, attention: torch.dtype) -> str:
    """The dtype of the weights, and the dtype of attention if autocast makes it another one."""
    name = str(weights).removeprefix("torch.")
    if attention == weights:
        return name
    computed = str(attention).removeprefix("torch.")
    return f"{name}, computed in {computed}"


def noise_attributes(
    noise: Noise, rotations: Sequence[LayerRotation]
) -> dict[str, float]:
    """Rounding noise of whole passes, attention calls and the measured rotation."""
    by_layer = [rotation.measured.noise for rotation in rotations]
    return {
        "noise_run": noise.run,
        "noise_call": max(noise.call.values(), default=0.0),
        "noise_rotation": float(np.nanmax(by_layer)),
    }


Measured = Model | Measurement
"""Argument of public functions, which pass a measurement on to each other."""
IN_WORDS[Measured] = IN_WORDS[Model]


def one_sequence(
    live: LiveModel, given: Prompt, tokenizer: TokenNames | None
) -> Measurement:
    """Return a measurement of one sequence; raise `BadArgument` for several."""
    if isinstance(given, str):
        check_document(given)
        given = prompt_tokens(given, tokenizer)
        warn_beyond(len(given), live.trained)
    if isinstance(given, Tensor):
        given = torch.atleast_2d(given)
    measurement = Measurement.of(live, given)
    count = len(measurement.text)
    if count > 1:
        raise BadArgument("A capture takes one sequence.", seen=f"{count} sequences")
    return measurement


@cache
def versions(*, bridged: bool = False) -> dict[str, str]:
    """Versions of ropelens and the libraries on which the numbers depend.

    Only a model that is `bridged` depends on TransformerLens, which may be missing.
    """
    names = ["ropelens", "torch", "transformers", "numpy", "xarray"]
    if bridged:
        names.append("transformer-lens")
    return {name: version(name) for name in names}


def sequences_at_once(
    config: PreTrainedConfig,
    *,
    sequences: int,
    context: int,
    width: int,
    device: str,
    free: int,
    scores: bool = False,
) -> int:
    """Sequences per batch: `TOKENS_PER_BATCH` tokens, or fewer to fit half of `free` bytes."""
    size = max(1, min(sequences, TOKENS_PER_BATCH[device] // context))
    while size > 1:
        needed = pass_bytes(
            config,
            sequences=size,
            context=context,
            width=width,
            device=device,
            scores=scores,
        )
        if free >= 2 * needed:
            break
        size = (size + 1) // 2
    return size
