"""A measurement: a model, the sequences that it reads, and the rows that are looked at."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cache, cached_property
from importlib.metadata import version
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Int, Integer
from torch import Tensor
from transformers import PreTrainedConfig

from ropelens.attention.call import AttentionCall, attention_map
from ropelens.budget.held_out import Sample, scored_rows
from ropelens.checkpoints.paths import short_name
from ropelens.errors import IN_WORDS, BadArgument
from ropelens.model.live_model import LiveModel, Model, as_live_model
from ropelens.rotation.probe import count_length_mismatches
from ropelens.runtime.devices import devices_of, free_bytes, pass_bytes
from ropelens.text.batches import split_batch
from ropelens.text.corpus import Corpus, Documents, count_documents
from ropelens.text.documents import check_tokens, padding_ids
from ropelens.text.rows import HowMany, Rows, all_rows, rows_for, sample_rows

Tokens = (
    Integer[Tensor, "sequence position"]
    | Integer[np.ndarray, "sequence position"]
    | Mapping[str, Any]
)
"""Ids, padded on the right; or a BatchEncoding: see `split_batch`."""
IN_WORDS[Tokens] = (
    "token ids [sequence, position], such as rl.tokenize(documents, tokenizer).tokens or "
    "tokens[None], or a BatchEncoding"
)

Lengths = Integer[Tensor, " sequence"] | Integer[np.ndarray, " sequence"] | Sequence[int]

ROWS_ACROSS = 128  # rows of a packed row whose attention across documents is measured
ONE_PASS = 2**16  # tokens of the longest sequences that run in one pass

MASK_ELEMENTS = 2**25
"""Keys times rows of a chunk: a model makes a mask of both, which takes about 40 bytes each."""

TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 16384}

_version = cache(version)  # which parses a file


@dataclass(frozen=True)
class Batch:
    """Sequences that run together, the rows looked at, and those that budgets are scored on.

    Budgets are `fitted` to other rows, in the batch of a sample.
    """

    text: Corpus
    rows: Rows
    scored: Rows
    fitted: tuple[Rows, ...] = ()


@dataclass(frozen=True)
class Measurement:
    """`live` reads `text`; `rows` of each sequence, drawn with `seed`, are looked at.

    `batch_size` sequences run together; None: as many as memory takes. `documents` counts
    those that the sequences were cut from, 0 where it is not known; `across` is what
    `attention_across` found in packed rows.
    """

    live: LiveModel
    text: Corpus
    rows: int | Literal["all"] = "all"
    seed: int = 0
    batch_size: int | None = None
    documents: int = 0
    across: float = 0.0

    @classmethod
    def of(
        cls,
        model: Model,
        tokens: Tokens,
        lengths: Lengths | None = None,
        *,
        documents: Documents | None = None,
        sinks: Sequence[int] = (),
        rows: HowMany = "all",
        seed: int = 0,
        batch_size: int | None = None,
    ) -> Measurement:
        """What a public function was given; `sinks` are ids of tokens that are sinks.

        Raises `BadArgument` for tokens, lengths or documents out of range.
        """
        live = as_live_model(model)
        packed, across = documents is not None and torch.as_tensor(documents).ndim == 2, 0.0
        hidden = None
        if isinstance(tokens, Mapping) or packed:
            if lengths is not None:
                raise BadArgument("lengths are of sequences, not of padded or packed rows.")
            held = tokens if isinstance(tokens, Mapping) else {"input_ids": tokens}
            tokens, lengths, hidden, documents, number = split_batch(
                held, documents, live.config
            )
            across = attention_across(live, held, number)
        padding, vocabulary = padding_ids(live.model), live.vocabulary
        tokens, lengths = check_tokens(tokens, lengths, vocabulary=vocabulary, padding=padding)
        if documents is not None:
            documents = torch.as_tensor(documents).long()
        text = Corpus.of(
            tokens, lengths, bos=live.bos, documents=documents, named=sinks, hidden=hidden
        )
        if apart := count_length_mismatches(live, text.lengths):
            warnings.warn(
                f"{apart:,} of {len(text):,} sequences are measured with the RoPE of the "
                f"longest ({text.context:,} tokens): alone they rotate otherwise",
                stacklevel=3,
            )
        count = count_documents(documents)
        rows = rows_for(rows, text.context)
        return cls(live, text, rows, int(seed), batch_size, count, across)

    def check_observation_is_exact(self) -> None:
        """Try on the longest sequence that looking changes nothing; see `LiveModel`."""
        if chunk_of(self.live, self.text.context) is None:
            longest = self.text.part([int(self.text.lengths.argmax())])
            self.live.check_observation_is_exact(longest.tokens, longest.hidden)

    def batches(self, chosen: Sequence[int] | None = None) -> Iterator[Batch]:
        """The `chosen` sequences, by default all, batch by batch."""
        live, text = self.live, self.text
        size = self.batch_size or sequences_at_once(
            live.model.config,
            sequences=len(text),
            context=text.tokens.shape[1],
            width=live.model.dtype.itemsize,
            device=live.device.type,
            free=min(map(free_bytes, devices_of(live.model))),
        )
        # RoPE that changes with the length must meet the length that planes were measured at.
        width = text.context if live.depends_on_length else None
        chosen = range(len(text)) if chosen is None else chosen
        for begin in range(0, len(chosen), size):
            yield self.batch(chosen[begin : begin + size], width=width)

    def batch(
        self, chosen: Sequence[int], *, width: int | None = None, fitted: tuple[Rows, ...] = ()
    ) -> Batch:
        """The `chosen` sequences together: as wide as their longest, or of `width` positions.

        The rows of a sequence do not depend on its batch.
        """
        part = self.text.part(list(chosen), width=width)
        lengths = part.lengths
        drawn: dict[str, Any] = {"seed": self.seed, "numbers": chosen}
        if self.rows == "all" or self.rows >= int(lengths.max()) - 1:
            rows = all_rows(lengths)
        else:
            rows = sample_rows(lengths, count=self.rows, **drawn)
        scored = sample_rows(lengths, count=scored_rows(self.text), **drawn)
        return Batch(
            part, rows.zero_hidden(part.hidden), scored.zero_hidden(part.hidden), fitted
        )

    @cached_property
    def sample(self) -> Sample:
        """What the budget's models are fitted to."""
        return Sample.draw(self.text, seed=self.seed)

    @property
    def first_token(self) -> int:
        """The token that the first sequence begins with, and prompts too."""
        return int(self.text.tokens[0, 0])

    @property
    def prompt_context(self) -> int:
        """Tokens of a prompt: the trained context, or that of the text where it is shorter."""
        return min(self.live.context, self.text.context)

    @property
    def facts(self) -> dict[str, str | int | float]:
        """The attributes of results: model, tokens, options and versions."""
        live, text = self.live, self.text
        config = live.model.config
        return {
            "model": short_name(str(config.name_or_path)) or live.class_name,
            "revision": str(config.to_dict().get("_commit_hash") or ""),
            "dtype": str(live.model.dtype).removeprefix("torch."),
            "seed": self.seed,
            "context": text.context,
            "trained_context": live.context,
            "rows": self.rows,
            "sequences": len(text),
            "documents": self.documents,
            "tokens": int(text.real.sum()),
            "tokens_sha256": fingerprint(text),
            "versions": json.dumps(versions()),
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            **({"attention_across_documents": self.across} if self.across else {}),
        }


def chunk_of(live: LiveModel, context: int) -> int | None:
    """Tokens that run at a time of sequences of `context` tokens; None: all in one pass.

    RoPE that changes with the length runs in one pass: a cache keeps keys as they were
    rotated when the sequence was shorter.
    """
    if context <= ONE_PASS or live.depends_on_length or not live.in_chunks:
        return None
    return max(1, min(ONE_PASS, MASK_ELEMENTS // context))


def attention_across(
    live: LiveModel, encoding: Mapping[str, Any], number: Int[Tensor, "row position"]
) -> float:
    """Share of its attention that a packed row gives to other documents, and a warning of it.

    The model reads the first packed row of `encoding` as it is: it may keep documents apart.
    `number` counts the documents of each row. The share is a mean over heads, layers and up to
    128 rows of attention; 0 where no row is packed.
    """
    packed = (number.amax(1) > 1).nonzero().flatten()[:1]
    if not len(packed):
        return 0.0
    of, shares = number[packed[0]].to(live.device), []
    at = torch.linspace(1, len(of) - 1, min(len(of) - 1, ROWS_ACROSS)).long()

    def see(call: AttentionCall) -> None:
        others = (attention_map(call.of_rows(at)) * (of[at, None] != of)).sum(-1)
        shares.append(float(others[..., of[at] > 0].mean()))

    names = encoding.keys() & {"input_ids", "attention_mask", "position_ids"}
    given = {name: torch.atleast_2d(torch.as_tensor(encoding[name])) for name in names}
    with torch.no_grad(), live.observe(see):
        given = {name: x[..., packed, :].to(live.device) for name, x in given.items()}
        live.model(**given, use_cache=False)
    if share := sum(shares) / max(1, len(shares)):
        warnings.warn(
            f"in packed rows this model gives {share:.0%} of its attention to other documents; "
            "here each document is measured alone",
            stacklevel=4,
        )
    return share


def fingerprint(text: Corpus) -> str:
    """sha256, in hex, of the tokens without padding: equal where two models read the same."""
    digest, tokens = hashlib.sha256(), text.tokens.cpu().where(text.real, -1).numpy()
    for row, length in zip(tokens, text.lengths.tolist(), strict=True):
        digest.update(np.int64(length).tobytes() + row[:length].astype("<i8").tobytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of ropelens and of the libraries that the numbers depend on."""
    names = ("ropelens", "torch", "transformers", "transformer-lens", "numpy", "xarray")
    return {name: _version(name) for name in names}


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
    """Sequences that run together: `TOKENS_PER_BATCH`, or fewer where memory is short.

    A batch takes at most half of the `free` bytes; see `pass_bytes`.
    """
    size = max(1, min(sequences, TOKENS_PER_BATCH[device] // context))
    kind: Any = {"context": context, "width": width, "device": device, "scores": scores}
    while size > 1 and free < 2 * pass_bytes(config, sequences=size, **kind):
        size = (size + 1) // 2
    return size
