"""Token sequences that ask a model for one thing: to repeat, or to find again."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.errors import BadArgument, check_count
from ropelens.measure.terms import NEEDLES
from ropelens.statistics.generator import generator_of

KEY = 2
"""Tokens of a needle's key; its value is one more."""

SHORTEST = 32
"""Tokens of the shortest prompt: the needles, a key again, and something to hide them in."""

LONGEST = 2**20
"""Tokens of the longest prompt or distance, as long as the longest contexts of models."""


def repeated_tokens(
    *, first_token: int, vocabulary: int, length: int, sequences: int, seed: int
) -> Int[Tensor, "sequence position"]:
    """`first_token`, then `length` random tokens, then the same again: 1 + 2 `length` each.

    Tokens of one sequence differ where the vocabulary allows, so that each has one earlier
    occurrence (Olsson et al. 2022, arXiv 2209.11895).
    """
    generator = generator_of(seed)
    draws = [torch.randperm(vocabulary, generator=generator) for _ in range(sequences)]
    once = torch.stack([draw[torch.arange(length) % len(draw)] for draw in draws])
    start = torch.full((sequences, 1), first_token)
    return torch.cat([start, once, once], dim=1)


def token_counts(counts: object, *, least: int) -> bool:
    """Whether `counts` lists numbers of tokens, from `least` to `LONGEST`."""
    if not isinstance(counts, Collection) or not len(counts):
        return False
    return all(isinstance(n, (int, np.integer)) and least <= n <= LONGEST for n in counts)


@dataclass(frozen=True)
class Retrieval:
    """Needles to look for: prompts of so many tokens, at these depths, so often.

    `lengths` are in tokens, None for a quarter, a half and all of the context (the trained
    one, or that of the text where it is shorter); `depths` are shares of the text that stands
    before the needle, 0 the start; `trials` is the number of prompts of a length and depth.
    """

    lengths: tuple[int, ...] | None = None
    depths: tuple[float, ...] = (0.1, 0.5, 0.9)
    trials: int = 16

    def __post_init__(self) -> None:
        if self.lengths is not None and not token_counts(self.lengths, least=SHORTEST):
            raise BadArgument(
                f"A prompt that hides needles has {SHORTEST} tokens or more.",
                seen=f"lengths {self.lengths}",
                attempt=f"lengths=(64, 256), each {LONGEST:,} at most",
            )
        if not len(self.depths) or not all(0 <= depth <= 1 for depth in self.depths):
            raise BadArgument(
                "The depth of a needle is a share of its prompt, 0 to 1.",
                seen=f"depths {self.depths}",
            )
        check_count("trials", self.trials, least=1)

    def lengths_within(self, context: int) -> tuple[int, ...]:
        """The lengths of the prompts, by default in `context` tokens."""
        if self.lengths is not None:
            return self.lengths
        return tuple(dict.fromkeys(max(SHORTEST, context // part) for part in (4, 2, 1)))


@dataclass(frozen=True)
class Haystack:
    """Prompts that end in a needle's key, and the values in them: the first is right."""

    prompts: Int[Tensor, "depth trial position"]
    values: Int[Tensor, "trial needle"]

    def found(self, logits: Float[Tensor, "depth trial token"]) -> Bool[Tensor, "depth trial"]:
        """Whether the logit of the right value is above those of all others."""
        at = self.values.to(logits.device).expand(*logits.shape[:2], -1)
        own = logits.gather(-1, at)
        return own[..., 0] > own[..., 1:].amax(-1)


def hide_needles(
    text: Int[Tensor, " position"],
    *,
    first_token: int,
    vocabulary: int,
    length: int,
    depths: Sequence[float],
    trials: int,
    seed: int,
) -> Haystack:
    """Needles hidden in stretches of `text`, in prompts of `length` tokens.

    A prompt is `first_token`, text with eight needles in it, and the key of one of them
    again. A needle is a key of two tokens and a value of one, all different; they are tokens
    of `text` that the stretch does not hold, or where there are too few of the vocabulary, at
    last any. Who copies what followed the same tokens before answers right, no instruction
    needed; who answers with any value that was there, in 1 of 8 prompts. The needle
    asked for lies at a depth, the others anywhere; but for that depth the prompts of a trial
    are the same. Where `text` is too short, random tokens stand for it.
    """
    size = NEEDLES * (KEY + 1)
    if vocabulary < size:
        raise BadArgument(
            "The vocabulary is too small to hide needles.",
            seen=f"{vocabulary} tokens; {size} are needed",
        )
    random = np.random.default_rng([seed % 2**64, length])
    around = length - 1 - size - KEY
    known, every = text.unique().numpy(), np.arange(vocabulary)
    prompts, values = [], []
    for _ in range(trials):
        if len(text) >= around:
            begin = int(random.integers(len(text) - around + 1))
            hay = text[begin : begin + around].numpy()
        else:
            hay = random.integers(vocabulary, size=around)
        pools = (np.setdiff1d(known, hay), np.setdiff1d(every, hay), every)
        pool = next(p for p in pools if len(p) >= size)
        needles = random.permutation(pool)[:size].reshape(NEEDLES, KEY + 1)
        anywhere = random.integers(around + 1, size=NEEDLES - 1)
        places = [[round(depth * around), *anywhere] for depth in depths]
        hidden = [np.insert(hay, np.repeat(at, KEY + 1), needles.flatten()) for at in places]
        prompts.append([[first_token, *body, *needles[0, :KEY]] for body in hidden])
        values.append(needles[:, KEY])
    return Haystack(
        torch.from_numpy(np.array(prompts, dtype=np.int64)).transpose(0, 1),
        torch.from_numpy(np.array(values, dtype=np.int64)),
    )
