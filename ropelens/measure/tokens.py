"""Tokens as users pass them become a `Corpus`; results record the run that they come from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from typing import Literal

import numpy as np
import torch
from jaxtyping import Integer
from torch import Tensor

from ropelens.errors import BadArgument
from ropelens.models.paths import short_name
from ropelens.models.subject import Subject
from ropelens.models.texts import check_tokens
from ropelens.statistics.corpus import Corpus, Documents, count_documents

Tokens = Integer[Tensor, "sequence position"] | Integer[np.ndarray, "sequence position"]
Lengths = Integer[Tensor, " sequence"] | Integer[np.ndarray, " sequence"] | Sequence[int]


def as_corpus(
    subject: Subject,
    tokens: Tokens,
    lengths: Lengths | None,
    *,
    documents: Documents | None = None,
    sinks: Sequence[int] = (),
) -> Corpus:
    """The sequences that the model is to run; `sinks` are ids of tokens that are sinks.

    Raises `BadArgument` for what is out of range.
    """
    tokens, lengths = check_tokens(tokens, lengths, vocabulary=subject.vocabulary)
    if not all(0 <= token < subject.vocabulary for token in sinks):
        raise BadArgument(
            "sinks are ids of tokens.", seen=repr(sinks), means=f"0 to {subject.vocabulary - 1}"
        )
    if documents is not None:
        documents = torch.as_tensor(documents).long()
    bos = subject.config.bos_token_id
    return Corpus.of(tokens, lengths, bos=bos, documents=documents, named=sinks)


def describe_run(
    subject: Subject,
    text: Corpus,
    documents: Documents | None,
    *,
    rows: int | Literal["all"],
    seed: int,
) -> dict[str, str | int]:
    """The attributes of results: model, tokens, options and versions."""
    config = subject.model.config
    return {
        "model": short_name(str(config.name_or_path)) or subject.kind,
        "revision": str(config.to_dict().get("_commit_hash") or ""),
        "dtype": str(subject.model.dtype).removeprefix("torch."),
        "seed": seed,
        "context": text.context,
        "trained_context": subject.context,
        "rows": rows,
        "sequences": len(text),
        "documents": count_documents(documents),  # 0 where it is not known
        "tokens": int(text.lengths.sum()),
        "tokens_sha256": fingerprint(text),
        "versions": json.dumps(versions()),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def fingerprint(text: Corpus) -> str:
    """sha256, in hex, of the tokens without padding: equal where two models read the same."""
    digest = hashlib.sha256()
    for row, length in zip(text.tokens.cpu().numpy(), text.lengths.tolist(), strict=True):
        digest.update(np.int64(length).tobytes() + row[:length].astype("<i8").tobytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Versions of ropelens and of the libraries that the numbers depend on."""
    names = ("ropelens", "torch", "transformers", "transformer-lens", "numpy", "xarray")
    return {name: version(name) for name in names}
