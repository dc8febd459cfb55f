"""Tokens to run a model on: checked, whatever they come as."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Int
from numpy.typing import ArrayLike
from torch import Tensor

from ropelens.errors import BadArgument


def check_tokens(
    tokens: ArrayLike,
    lengths: ArrayLike | None,
    *,
    vocabulary: int,
) -> tuple[Int[Tensor, "sequence position"], Int[Tensor, " sequence"]]:
    """`tokens` and their `lengths`, all of them without, as tensors (lengths on the CPU).

    `vocabulary` is the number of ids that the model knows.

    Raises `BadArgument` for tokens or lengths out of range, saying which.
    """
    if isinstance(tokens, str):
        raise BadArgument(
            "tokens are ids, and this is a text.",
            seen=repr(tokens)[:80],
            attempt="ropelens.tokenize(text, tokenizer, context=512).tokens",
        )
    tokens = integers(tokens, "tokens")
    whole = torch.full(tokens.shape[:1], tokens.shape[-1] if tokens.ndim else 0)
    lengths = whole if lengths is None else integers(lengths, "lengths").cpu()
    shaped = tokens.ndim == 2 and tokens.shape[0] >= 1 and tokens.shape[1] >= 3
    if not shaped:
        raise BadArgument(
            "tokens must be a table of sequences of at least 3 tokens.",
            seen=f"shape {tuple(tokens.shape)}",
            attempt="tokens[sequence, position], for one sequence tokens[None]",
        )
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise BadArgument(
            "Some tokens are not in the model's vocabulary.",
            seen=f"ids {int(tokens.min())} to {int(tokens.max())}, vocabulary {vocabulary}",
            attempt="use the tokenizer that belongs to the model",
        )
    if lengths.shape != tokens.shape[:1] or int(lengths.min()) < 2:
        raise BadArgument(
            "lengths must say, for every sequence, how many tokens count (2 or more).",
            seen=f"{lengths.numel()} lengths for {len(tokens)} sequences, "
            f"the shortest {int(lengths.min()) if lengths.numel() else 'none'}",
        )
    if int(lengths.max()) > tokens.shape[1]:
        raise BadArgument(
            "A sequence cannot be longer than its row of tokens.",
            seen=f"length {int(lengths.max())} of {tokens.shape[1]} positions",
        )
    return tokens, lengths


def integers(values: object, what: str) -> Int[Tensor, "*shape"]:
    """`values` as whole numbers, or `BadArgument`."""
    try:
        given = values if isinstance(values, Tensor) else np.asarray(values, order="C")
        found = torch.as_tensor(given)
        dense = found.layout is torch.strided and not found.is_nested
        dense = dense and not (found.is_meta or found.is_quantized)
        whole = dense and (torch.iinfo(found.dtype).bits > 0 or not found.numel())
    except (TypeError, ValueError, RuntimeError):
        whole = isinstance(values, list) and not values
        found = torch.zeros(0)
    if not whole:
        raise BadArgument(f"{what} must be whole numbers.", seen=repr(values)[:80])
    return found.long()
