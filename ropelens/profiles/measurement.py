"""A measurement: a live model, the text that it reads, and the rows that are measured."""

import json
import warnings
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cache, partial
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ropelens.arguments import IN_WORDS
from ropelens.attention.call import AttentionCall, attention_map
from ropelens.attention.exchange import exchange_order
from ropelens.budget.held_out import scored_rows
from ropelens.checkpoints.names import short_name
from ropelens.config_facts import count_length_mismatches
from ropelens.errors import BadArgument
from ropelens.measured_rotation.probe import RotationProbe
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.model.live_model import LiveModel
from ropelens.noise import NOISY
from ropelens.runtime.devices import devices_of, free_bytes, pass_bytes
from ropelens.text.batches import PackedRow
from ropelens.text.rows import (
    HowMany,
    Ids,
    Lengths,
    Rows,
    all_rows,
    rows_for,
    sample_rows,
)
from ropelens.text.text import Text
from ropelens.text.tokenize import TextInput, read_text

TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 16384}
ROWS_ACROSS = (
    128  # positions of a packed row whose attention across documents is measured
)


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
    across: float = 0.0

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
        """Read and check the arguments of a public function; a measurement stays as it is."""
        if isinstance(model, Measurement):
            return model
        live = as_live_model(model, tokenizer)
        text = model_text(live, text, tokenizer=tokenizer, sinks=sinks)
        across = 0.0 if text.packed is None else attention_across(live, text.packed)
        if different := count_length_mismatches(live.config, text.lengths):
            words = f"{different:,} of {len(text):,} sequences are measured with the RoPE of "
            words += (
                f"the longest one ({text.context:,} tokens); by themselves they rotate "
            )
            warnings.warn(f"{words}differently", stacklevel=3)
        rows = rows_for(rows, text.context)
        return cls(live, text, RotationProbe(live), rows, int(seed), batch_size, across)

    def batches(self, chosen: Sequence[int] | None = None) -> Iterator[Batch]:
        """Yield the `chosen` sequences (default: all) in batches."""
        live, text = self.live, self.text
        model, free = live.model, min(map(free_bytes, devices_of(live.model)))
        kind: Any = {
            "context": text.ids.shape[1],
            "width": model.dtype.itemsize,
            "free": free,
        }
        kind |= {"device": live.device.type, "sequences": len(text)}
        size = self.batch_size or sequences_at_once(model.config, **kind)
        # RoPE that changes with the length needs the length at which planes were measured.
        width = text.context if live.depends_on_length else None
        chosen = range(len(text)) if chosen is None else chosen
        for begin in range(0, len(chosen), size):
            yield self.batch(chosen[begin : begin + size], width=width)

    def batch(self, chosen: Sequence[int], *, width: int | None = None) -> Batch:
        """The `chosen` sequences as one batch, as wide as the longest or `width` positions."""
        part = self.text.part(list(chosen), width=width)
        sample = partial(sample_rows, part.lengths, seed=self.seed, numbers=chosen)
        if self.rows == "all" or self.rows >= part.context - 1:
            rows = all_rows(part.lengths)
        else:
            rows = sample(count=self.rows)
        scored = sample(count=scored_rows(self.text)).zero_hidden(part.hidden)
        keys: Any = {"width": part.ids.shape[1], "seed": self.seed, "numbers": chosen}
        order = exchange_order(part.lengths, **keys)
        rows = replace(rows.zero_hidden(part.hidden), order=order)
        return Batch(part, rows, replace(scored, order=order))

    @property
    def attributes(self) -> dict[str, str | int | float]:
        """The attributes of results: model, noise, options, versions. Warns of large noise."""
        live, text, config = self.live, self.text, self.live.model.config
        layers = self.rotation.layers(text.context)
        noise = {
            "noise_run": live.noise.run,
            "noise_call": max(live.noise.call.values(), default=0.0),
            "noise_rotation": float(
                np.nanmax([layer.measured.noise for layer in layers])
            ),
        }
        if (largest := max(noise.values())) > NOISY:
            words = (
                f"{live.class_name} has a rounding noise of {largest:.1%}: sound runs "
            )
            warnings.warn(f"{words}differ by up to this share", stacklevel=3)
        return {
            "model": short_name(str(config.name_or_path)) or live.class_name,
            "revision": str(config.to_dict().get("_commit_hash") or ""),
            "dtype": str(live.model.dtype).removeprefix("torch."),
            **noise,
            "seed": self.seed,
            "context": text.context,
            "trained_context": live.context,
            "rows": self.rows,
            "sequences": len(text),
            "documents": 0 if text.documents is None else len(text.documents.unique()),
            "tokens": int(text.real.sum()),
            "tokens_sha256": text.fingerprint,
            "versions": json.dumps(versions()),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            **({"attention_across_documents": self.across} if self.across else {}),
        }


Measured = Model | Measurement
"""Argument of public functions, which pass a measurement on to each other."""
IN_WORDS[Measured] = IN_WORDS[Model]


@cache
def versions() -> dict[str, str]:
    """Versions of ropelens and the libraries on which the numbers depend."""
    names = ("ropelens", "torch", "transformers", "transformer-lens", "numpy", "xarray")
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
    kind: Any = {"context": context, "width": width, "device": device, "scores": scores}
    while size > 1 and free < 2 * pass_bytes(config, sequences=size, **kind):
        size = (size + 1) // 2
    return size


def model_text(
    live: LiveModel,
    text: TextInput,
    *,
    tokenizer: Any = None,
    sinks: Collection[int] = (),
) -> Text:
    """Return `text` as a `Text` that the model can read; tokens in `sinks` are sinks."""
    tokenizer = live.tokenizer if tokenizer is None else tokenizer
    text = read_text(
        text, tokenizer=tokenizer, config=live.config, context=live.context
    )
    if text.ids.shape[1] < 3 or not text.real.any():
        seen = f"{min(text.ids.shape[1], int(text.real.sum()))} tokens"
        raise BadArgument("A text must have 3 tokens or more.", seen=seen)
    for ids in (text.ids, torch.tensor([*sinks] or [0])):
        check_ids(ids, vocabulary=live.vocabulary)
    check_padding(live.model, text.ids.cpu(), text.lengths)
    return replace(text, bos=live.bos, sink_ids=tuple(sinks))


def check_ids(ids: Int[Tensor, "*shape"], *, vocabulary: int) -> None:
    """Raise `BadArgument` for tokens outside the vocabulary."""
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        seen = f"ids {int(ids.min())} to {int(ids.max())}, vocabulary {vocabulary}"
        raise BadArgument(
            "Some tokens are not in the vocabulary of the model.", seen=seen
        )


def check_padding(model: PreTrainedModel, ids: Ids, lengths: Lengths) -> None:
    """Raise `BadArgument` if lengths count padding on the left of a sequence."""
    beyond = torch.arange(ids.shape[1]) >= lengths[:, None]
    if not beyond.any():
        return
    generation = getattr(model, "generation_config", None)  # older classes have none
    parts = (model.config.get_text_config(), generation)
    facts = [x.to_dict() for x in parts if x is not None]
    pads, ends = ([x.get(f"{name}_token_id") for x in facts] for name in ("pad", "eos"))
    ends = [id for end in ends for id in (end if isinstance(end, list) else [end])]
    for id in dict.fromkeys([*pads, *ends]):
        if id is None:
            continue
        # A text may begin with one end-of-text token.
        other, copies = ids != id, 1 if id == pads[0] else 2
        wrong = ~other[:, :copies].any(1) & (beyond & other).any(1)
        wrong |= ~(other & ~beyond).any(1)
        if wrong.any():
            what = "Token ids must be padded on the right, because lengths count from the left."
            seen = f"sequence {int(wrong.nonzero()[0])} begins with padding (id {id})"
            raise BadArgument(
                what, seen=seen, hint="a BatchEncoding with its attention_mask"
            )


def attention_across(live: LiveModel, row: PackedRow) -> float:
    """Mean share of the attention of a packed row on other documents; warns if it is not 0."""
    sequence, shares = row.sequence.to(live.device), []
    count = len(sequence) - 1
    position = torch.linspace(1, count, min(count, ROWS_ACROSS)).long()

    def add_share(call: AttentionCall) -> None:
        attention = attention_map(call.of_rows(position))
        others = (attention * (sequence[position, None] != sequence)).sum(-1)
        shares.append(float(others[..., sequence[position] > 0].mean()))

    with torch.no_grad(), live.observe(add_share):
        inputs = {name: x.to(live.device) for name, x in row.inputs.items()}
        live.model(**inputs, use_cache=False)
    if share := sum(shares) / max(1, len(shares)):
        words = (
            f"in packed rows this model gives {share:.0%} of its attention to other "
        )
        words += "documents; here each document is measured by itself"
        warnings.warn(words, stacklevel=5)
    return share
