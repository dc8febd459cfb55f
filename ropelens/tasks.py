"""Token sequences that ask a model for one thing: to repeat, or to find again."""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor


def repeated_tokens(
    *, first_token: int, vocabulary: int, length: int, sequences: int, seed: int
) -> Int[Tensor, "sequence position"]:
    """`first_token`, then `length` random tokens, then the same again: 1 + 2 `length` each.

    Tokens of one sequence differ where the vocabulary allows, so that each has one earlier
    occurrence (Olsson et al. 2022, arXiv 2209.11895).
    """
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randperm(vocabulary, generator=generator) for _ in range(sequences)]
    once = torch.stack([draw[torch.arange(length) % len(draw)] for draw in draws])
    start = torch.full((sequences, 1), first_token)
    return torch.cat([start, once, once], dim=1)
