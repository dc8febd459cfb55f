"""Tokens to run a model on: checked, whatever they come as."""

from __future__ import annotations

import torch
from jaxtyping import Int
from numpy.typing import ArrayLike
from torch import Tensor
from transformers import PreTrainedModel

from ropelens.errors import BadArgument


def check_tokens(
    model: PreTrainedModel,
    tokens: ArrayLike,
    lengths: ArrayLike | None,
) -> tuple[Int[Tensor, "sequence position"], Int[Tensor, " sequence"]]:
    """`tokens` and their `lengths`, all of them without, as tensors (lengths on the CPU).

    Raises `BadArgument` for tokens or lengths out of range, saying which.
    """
    tokens = torch.as_tensor(tokens)
    whole = torch.full(tokens.shape[:1], tokens.shape[-1])
    lengths = whole if lengths is None else torch.as_tensor(lengths).cpu()
    vocabulary = model.config.get_text_config().vocab_size
    shaped = tokens.ndim == 2 and tokens.shape[0] >= 1 and tokens.shape[1] >= 3
    if not shaped or tokens.is_floating_point():
        raise BadArgument(
            "tokens must be a table of sequences of at least 3 tokens.",
            seen=f"shape {tuple(tokens.shape)} of {tokens.dtype}",
            attempt="tokens[sequence, position], for one sequence tokens[None]",
        )
    if int(tokens.min()) < 0 or int(tokens.max()) >= vocabulary:
        raise BadArgument(
            "Some tokens are not in the model's vocabulary.",
            seen=f"ids {int(tokens.min())} to {int(tokens.max())}, vocabulary {vocabulary}",
            attempt="use the tokenizer that belongs to the model",
        )
    if len(lengths) != len(tokens) or int(lengths.min()) < 2:
        raise BadArgument(
            "lengths must say, for every sequence, how many tokens count (2 or more).",
            seen=f"{len(lengths)} lengths for {len(tokens)} sequences, "
            f"the shortest {int(lengths.min())}",
        )
    if int(lengths.max()) > tokens.shape[1]:
        raise BadArgument(
            "A sequence cannot be longer than its row of tokens.",
            seen=f"length {int(lengths.max())} of {tokens.shape[1]} positions",
        )
    return tokens, lengths
