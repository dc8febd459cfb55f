"""Tokens that ask a model for one thing: to repeat, to copy from afar, to find again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.errors import BadArgument, Whole
from ropelens.measure.batches import (
    LOGITS_AT_ONCE,
    Progress,
    chunk_of,
    quick_batch,
    token_losses,
)
from ropelens.measure.terms import NEEDLES
from ropelens.models.subject import Subject
from ropelens.rope.planes import Planes
from ropelens.statistics.attention import sum_attention
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.rows import Rows, generator_of
from ropelens.statistics.variables import named, stack

REPEATED_TOKENS = 64
"""Random tokens before they are repeated, where the context holds twice as many."""

REPEATS = 8
"""Sequences of repeated random tokens that scores are means of."""

NEAREST = 8
"""Tokens of the least distance of a copy, where none are asked for."""

KEY = 2
"""Tokens of a needle's key; its value is one more."""

SHORTEST = 32
"""Tokens of the shortest prompt: the needles, a key again, and something to hide them in."""


# repeats and copies


def repeated_tokens(
    subject: Subject, *, first_token: int, length: int, sequences: int = REPEATS, seed: int
) -> Int[Tensor, "sequence position"]:
    """`first_token`, then `length` random tokens, then the same again: 1 + 2 `length` each.

    Tokens of one sequence differ where the vocabulary allows, so that each has one earlier
    occurrence (Olsson et al. 2022, arXiv 2209.11895).
    """
    generator = generator_of(seed)
    draws = [torch.randperm(subject.vocabulary, generator=generator) for _ in range(sequences)]
    once = torch.stack([draw[torch.arange(length) % len(draw)] for draw in draws])
    start = torch.full((sequences, 1), first_token)
    return torch.cat([start, once, once], dim=1)


def repeat_length(subject: Subject) -> int:
    """Random tokens before they are repeated: `REPEATED_TOKENS`, or what the context holds."""
    return max(2, min(REPEATED_TOKENS, (subject.context - 1) // 2))


def repeat_scores(
    subject: Subject,
    *,
    first_token: int,
    planes: Sequence[Planes],
    length: int | None = None,
    sequences: int = REPEATS,
    seed: int = 0,
) -> tuple[dict[str, np.ndarray], Float[Tensor, "sequence position"]]:
    """Attention on repeated random tokens, mean over rows of the repetition, and the losses.

    `induction` (layer, head): on the token after the earlier occurrence (Olsson et al. 2022,
    arXiv 2209.11895, the prefix-matching score); `trial_induction` (trial, layer, head): the
    same of each sequence; `duplicate_token`: on that occurrence itself. NaN where a sliding
    window hides it. Losses are those of the token at each position, in nats.
    """
    length = length or repeat_length(subject)
    tokens = repeated_tokens(
        subject, first_token=first_token, length=length, sequences=sequences, seed=seed
    )
    second = torch.arange(length + 1, 2 * length + 1).expand(sequences, -1)
    weight = torch.full(second.shape, 1 / length)
    whole = torch.full((sequences,), tokens.shape[1])
    by_offset, rows = named("offset_mass"), Rows(second, weight, whole, dense=False)
    mass: dict[int, Tensor] = {}

    def observe(call: AttentionCall) -> None:
        turning = planes[call.layer]
        sums = sum_attention(call, rows, turning, tokens=tokens, statistics=by_offset)
        hidden = bool((call.start[second[0]] > second[0] - length).any())
        by_distance = sums["offset_mass"]
        mass[call.layer] = torch.full_like(by_distance, torch.nan) if hidden else by_distance

    with torch.no_grad(), subject.observe(observe):
        losses = token_losses(subject, tokens, whole)
    after, same = (
        [mass[layer][..., offset] for layer in sorted(mass)] for offset in (length - 1, length)
    )
    scores = {
        "induction": stack(scores.mean(0) for scores in after),
        "trial_induction": np.moveaxis(stack(after), 1, 0),
        "duplicate_token": stack(scores.mean(0) for scores in same),
    }
    return scores, losses


def copy_losses(
    subject: Subject, *, first_token: int, distance: int, seed: int
) -> Float[Tensor, " trial"]:
    """Mean loss (nats/token) of `distance` random tokens that come again, without the first.

    Nothing announces the first; each of the others follows the same token as before.
    """
    tokens = repeated_tokens(subject, first_token=first_token, length=distance, seed=seed)
    length = tokens.shape[1]
    together, chunk = quick_batch(subject, length), chunk_of(subject, length)
    with torch.no_grad():
        losses = [
            token_losses(subject, part, torch.full((len(part),), length), chunk)
            for part in tokens.split(together)
        ]
    return torch.cat(losses)[:, distance + 2 :].mean(1)


def copy_distances(distances: Sequence[int] | None, context: int) -> tuple[int, ...]:
    """The `distances`; by default 8, 16, 32, ..., as long as both copies are in `context`."""
    if distances is None:
        most = max(2, (context - 1) // 2)
        return doublings(NEAREST, most) if most >= NEAREST else (most,)
    if not len(distances) or min(distances) < 2:
        raise BadArgument(
            "Distances of copies are 2 tokens or more.",
            seen=str(distances),
            attempt="distances=[8, 64]",
        )
    return tuple(dict.fromkeys(map(int, distances)))


def doublings(least: int, most: int) -> tuple[int, ...]:
    """`least`, twice that, and so on, up to `most`."""
    return tuple(least << k for k in range(max(1, (most // least).bit_length())))


# needles


@dataclass(frozen=True)
class Retrieval:
    """Needles to look for: prompts of so many tokens, at these depths, so often.

    `lengths` are in tokens, None for a quarter, a half and all of the context (the trained
    one, or that of the text where it is shorter); `depths` are shares of the text that stands
    before the needle, 0 the start; `trials` is the number of prompts of a length and depth.
    """

    lengths: Sequence[Whole] | None = None
    depths: Sequence[float] = (0.1, 0.5, 0.9)
    trials: int = 16

    def __post_init__(self) -> None:
        if self.lengths is not None and (not len(self.lengths) or min(self.lengths) < SHORTEST):
            raise BadArgument(
                f"A prompt that hides needles has {SHORTEST} tokens or more.",
                seen=f"lengths {self.lengths}",
                attempt="lengths=(64, 256)",
            )
        if not len(self.depths) or not all(0 <= depth <= 1 for depth in self.depths):
            raise BadArgument(
                "The depth of a needle is a share of its prompt, 0 to 1.",
                seen=f"depths {self.depths}",
            )

    def lengths_within(self, context: int) -> tuple[int, ...]:
        """The lengths of the prompts, by default in `context` tokens."""
        if self.lengths is not None:
            return tuple(map(int, self.lengths))
        return tuple(dict.fromkeys(max(SHORTEST, context // part) for part in (4, 2, 1)))


@dataclass(frozen=True)
class Haystack:
    """Prompts that end in a needle's key, and the values in them: the first is right."""

    prompts: Int[Tensor, "depth trial position"]
    values: Int[Tensor, "trial needle"]

    def found(self, logits: Float[Tensor, "depth trial token"]) -> Bool[Tensor, "depth trial"]:
        """Whether the logit of the right value is above those of all others."""
        at = self.values.to(logits.device).expand(*logits.shape[:2], -1)
        of_values = logits.gather(-1, at)
        return of_values[..., 0] > of_values[..., 1:].amax(-1)

    def found_by(self, subject: Subject, progress: Progress) -> Bool[Tensor, "depth trial"]:
        """Whether the model finds each needle."""
        depths, trials, length = self.prompts.shape
        last = []
        for prompts in self.prompts.flatten(0, 1).split(quick_batch(subject, length)):
            with torch.no_grad():
                last.append(_last_logits(subject, prompts).float().cpu())
            progress(prompts.numel())
        return self.found(torch.cat(last).unflatten(0, (depths, trials)))


def _last_logits(
    subject: Subject, tokens: Int[Tensor, "sequence position"]
) -> Float[Tensor, "sequence token"]:
    """The logits at the last position."""
    chunk = chunk_of(subject, tokens.shape[1])
    if chunk is None:
        return subject.forward(tokens, last=1)[:, -1]
    at_once = LOGITS_AT_ONCE[subject.device.type]
    pieces = subject.logits(tokens, at_once=at_once, chunk=chunk)
    return deque(pieces, maxlen=1).pop()[1][:, -1]


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
    last any. A model that copies what followed the same tokens before is right, without
    instruction; one that answers with any value in the prompt is right in 1 of 8. The needle
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
