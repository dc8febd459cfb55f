"""Tokens that ask a model for one thing: to repeat, to copy from afar, to find again."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.errors import BadArgument
from ropelens.interventions.variables import NEEDLES
from ropelens.model.live_model import LiveModel
from ropelens.profiles.induction import (
    REPEATS,
    Task,
    forget_length,
    repeated_tokens,
    whole_lengths,
)
from ropelens.profiles.measurement import TOKENS_PER_BATCH, Measurement, chunk_of
from ropelens.profiles.passes import Progress, logits_of, token_losses

NEAREST = 8  # tokens of the least distance of a copy, where none are asked for
KEY = 2  # tokens of a needle's key; its value is one more

DEPTHS, TRIALS = (0.1, 0.5, 0.9), 16
"""Shares of the text that stands before a needle; prompts of a length and depth."""

SHORTEST = 32  # tokens of the shortest prompt: needles, a key again, and what hides them


# copies


def copies(measurement: Measurement, distances: Sequence[int] | None) -> Task:
    """`copy_loss` (nats/token) of random tokens that come again, but for the first of them.

    Nothing announces the first; each of the others follows the same token as before.
    """
    live = measurement.live
    most = max(2, (measurement.prompt_context - 1) // 2)
    by_default = doublings(NEAREST, most) if most >= NEAREST else (most,)
    distances = tuple(dict.fromkeys(map(int, distances or by_default)))
    if min(distances) < 2:
        raise BadArgument("Distances of copies are 2 tokens or more.", seen=str(distances))

    def measure(progress: Progress) -> dict[str, Tensor]:
        by_distance = []
        for distance in distances:
            tokens = repeated_tokens(measurement, distance)
            forget_length(live)
            parts = _together(live, tokens)
            losses = [token_losses(live, part, whole_lengths(part)) for part in parts]
            by_distance.append(torch.cat(losses)[:, distance + 2 :].mean(1))
            progress(tokens.numel())
        return {"copy_loss": torch.stack(by_distance)}

    total = REPEATS * sum(1 + 2 * distance for distance in distances)
    return Task(total, measure, {"copy_distance": np.array(distances)})


def doublings(least: int, most: int) -> tuple[int, ...]:
    """`least`, twice that, and so on, up to `most`."""
    return tuple(least << k for k in range(max(1, (most // least).bit_length())))


# needles


def needles(
    measurement: Measurement, lengths: Sequence[int] | None, prompts: int = TRIALS
) -> Task:
    """Which needles in stretches of the text are found, by length and depth of `prompts`."""
    live, text, within = measurement.live, measurement.text, measurement.prompt_context
    by_default = [max(SHORTEST, within // part) for part in (4, 2, 1)]
    lengths = tuple(dict.fromkeys(map(int, lengths or by_default)))
    stretch = text.ids.cpu()[:, 1:][text.real[:, 1:]]
    given = {"vocabulary": live.vocabulary, "seed": measurement.seed, "trials": prompts}
    given["first_token"] = measurement.first_token
    hidden = [hide_needles(stretch, length=length, **given) for length in lengths]

    def measure(progress: Progress) -> dict[str, Tensor]:
        hits = []
        for texts, values in hidden:
            forget_length(live)
            last = []
            for part in _together(live, texts.flatten(0, 1)):
                last.append(_last_logits(live, part).float().cpu())
                progress(part.numel())
            logits = torch.cat(last).unflatten(0, texts.shape[:2])
            hits.append(found_needles(logits, values).double())
        hit = torch.stack(hits)
        return {"retrieval": hit.mean(-1), "retrieval_hit": hit}

    coordinates = {"retrieval_length": np.array(lengths), "depth": np.array(DEPTHS)}
    return Task(len(DEPTHS) * prompts * sum(lengths), measure, coordinates)


def found_needles(
    logits: Float[Tensor, "depth trial token"], values: Int[Tensor, "trial needle"]
) -> Bool[Tensor, "depth trial"]:
    """Whether the logit of the first value is above those of all others."""
    of_values = logits.gather(-1, values.expand(*logits.shape[:2], -1))
    return of_values[..., 0] > of_values[..., 1:].amax(-1)


def hide_needles(
    text: Int[Tensor, " position"],
    *,
    first_token: int,
    vocabulary: int,
    length: int,
    seed: int,
    trials: int = TRIALS,
) -> tuple[Int[Tensor, "depth trial token"], Int[Tensor, "trial needle"]]:
    """Prompts of `length` tokens with needles in stretches of `text`, and the needles' values.

    A prompt is `first_token`, text with eight needles in it, and the key of one of them
    again, whose value is the first. A needle is a key of two tokens and a value of one, all
    different; they are tokens of `text` that the stretch does not hold, or where there are too
    few of the vocabulary, at last any. But for the depth of that needle the prompts of a trial
    are the same. Where `text` is too short, random tokens stand for it.
    """
    size = NEEDLES * (KEY + 1)
    if length < SHORTEST or vocabulary < size:
        raise BadArgument(
            f"A prompt that hides needles has {SHORTEST} tokens or more, {size} different.",
            seen=f"a prompt of {length} tokens, a vocabulary of {vocabulary}",
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
        needle = random.permutation(pool)[:size].reshape(NEEDLES, KEY + 1)
        anywhere = random.integers(around + 1, size=NEEDLES - 1)
        places = [[round(depth * around), *anywhere] for depth in DEPTHS]
        hidden = [np.insert(hay, np.repeat(at, KEY + 1), needle.flatten()) for at in places]
        prompts.append([[first_token, *body, *needle[0, :KEY]] for body in hidden])
        values.append(needle[:, KEY])
    by_depth = torch.from_numpy(np.array(prompts, dtype=np.int64)).transpose(0, 1)
    return by_depth, torch.from_numpy(np.array(values, dtype=np.int64))


# how they run


def _together(live: LiveModel, tokens: Tensor) -> tuple[Tensor, ...]:
    """Sequences in parts that run together: memory does not matter."""
    return tokens.split(max(1, TOKENS_PER_BATCH[live.device.type] // tokens.shape[1]))


def _last_logits(
    live: LiveModel, tokens: Int[Tensor, "sequence position"]
) -> Float[Tensor, "sequence token"]:
    with torch.no_grad():
        if chunk_of(live, tokens.shape[1]) is None:
            return live.forward(tokens, last=1)[:, -1]
        return deque(logits_of(live, tokens), maxlen=1).pop()[1][:, -1]
