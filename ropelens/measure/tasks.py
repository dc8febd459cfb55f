"""Tokens that ask a model for one thing: to repeat, to copy from afar, to find again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.errors import BadArgument
from ropelens.measure.measurement import TOKENS_PER_BATCH, Measurement, chunk_of
from ropelens.measure.passes import Progress, logits_of, observing, token_losses
from ropelens.models.subject import Subject
from ropelens.rope.planes import Planes
from ropelens.statistics.block import CallRows
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.rows import Rows, generator_of
from ropelens.statistics.sums import by_layer, sum_attention
from ropelens.statistics.variables import NEEDLES, STATISTICS

REPEATED_TOKENS = 64  # random tokens before they are repeated, if the context holds them twice
REPEATS = 8  # sequences of repeated random tokens that scores are means of
NEAREST = 8  # tokens of the least distance of a copy, where none are asked for
KEY = 2  # tokens of a needle's key; its value is one more

DEPTHS, TRIALS = (0.1, 0.5, 0.9), 16
"""Shares of the text that stands before a needle; prompts of a length and depth."""

SHORTEST = 32  # tokens of the shortest prompt: needles, a key again, and what hides them


@dataclass(frozen=True)
class Task:
    """So many `tokens` to run; `measure` runs them and gives numbers by their names.

    `coordinates` label the numbers.
    """

    tokens: int
    measure: Callable[[Progress], dict[str, Tensor]]
    coordinates: dict[str, np.ndarray] = field(default_factory=dict)


# repeats and copies


def repeated_tokens(measurement: Measurement, length: int) -> Int[Tensor, "trial position"]:
    """The text's first token, then `length` random tokens, then the same again.

    Tokens of one sequence differ where the vocabulary allows, so that each has one earlier
    occurrence (Olsson et al. 2022, arXiv 2209.11895).
    """
    generator, vocabulary = generator_of(measurement.seed), measurement.subject.vocabulary
    draws = [torch.randperm(vocabulary, generator=generator) for _ in range(REPEATS)]
    once = torch.stack([draw[torch.arange(length) % len(draw)] for draw in draws])
    first = torch.full((REPEATS, 1), measurement.first_token)
    return torch.cat([first, once, once], dim=1)


def repeats(measurement: Measurement, planes: Sequence[Planes]) -> Task:
    """Attention on repeated random tokens, mean over rows of the repetition, and their losses.

    `induction` is the prefix-matching score of Olsson et al. 2022 (arXiv 2209.11895); NaN where
    the mask hides the earlier occurrence. `first_loss` and `repeat_loss` (nats/token) leave out
    the first token of each time, which nothing announces. As many tokens are repeated as the
    context holds.
    """
    subject = measurement.subject
    length = max(2, min(REPEATED_TOKENS, (subject.context - 1) // 2))
    tokens = repeated_tokens(measurement, length)
    second = torch.arange(length + 1, 2 * length + 1).expand(len(tokens), -1)
    weight, whole = torch.full(second.shape, 1 / length), _whole(tokens)
    by_offset = [row for row in STATISTICS if row.name == "offset_mass"]
    rows = Rows(second, weight, whole, dense=False)

    def measure(progress: Progress) -> dict[str, Tensor]:
        mass: dict[int, Tensor] = {}

        def see(call: AttentionCall) -> None:
            sums = sum_attention(CallRows(call, rows, planes[call.layer]), by_offset)
            seen = call.seen_by(second[0]).cpu()[:, torch.arange(length), second[0] - length]
            mass[call.layer] = sums["offset_mass"].masked_fill(~seen.any(), torch.nan)

        forget_length(subject)
        with observing(subject, tokens, (rows,), see):
            losses = token_losses(subject, tokens, whole)
        progress(tokens.numel())
        of_layers = by_layer(mass, subject.layers)
        after, same = of_layers[..., length - 1], of_layers[..., length]
        return {
            "induction": after.mean(1),
            "trial_induction": after.transpose(0, 1),
            "duplicate_token": same.mean(1),
            "first_loss": losses[:, 2 : length + 1].mean(1),
            "repeat_loss": losses[:, length + 2 :].mean(1),
        }

    return Task(tokens.numel(), measure)


def copies(measurement: Measurement, distances: Sequence[int] | None) -> Task:
    """`copy_loss` (nats/token) of random tokens that come again, but for the first of them.

    Nothing announces the first; each of the others follows the same token as before.
    """
    subject = measurement.subject
    most = max(2, (measurement.within - 1) // 2)
    by_default = doublings(NEAREST, most) if most >= NEAREST else (most,)
    distances = tuple(dict.fromkeys(map(int, distances or by_default)))
    if min(distances) < 2:
        raise BadArgument("Distances of copies are 2 tokens or more.", seen=str(distances))

    def measure(progress: Progress) -> dict[str, Tensor]:
        by_distance = []
        for distance in distances:
            tokens = repeated_tokens(measurement, distance)
            forget_length(subject)
            parts = _together(subject, tokens)
            losses = [token_losses(subject, part, _whole(part)) for part in parts]
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
    subject, text, within = measurement.subject, measurement.text, measurement.within
    by_default = [max(SHORTEST, within // part) for part in (4, 2, 1)]
    lengths = tuple(dict.fromkeys(map(int, lengths or by_default)))
    stretch = text.tokens.cpu()[:, 1:][text.real[:, 1:]]
    given = {"vocabulary": subject.vocabulary, "seed": measurement.seed, "trials": prompts}
    given["first_token"] = measurement.first_token
    hidden = [hide_needles(stretch, length=length, **given) for length in lengths]

    def measure(progress: Progress) -> dict[str, Tensor]:
        hits = []
        for texts, values in hidden:
            forget_length(subject)
            last = []
            for part in _together(subject, texts.flatten(0, 1)):
                last.append(_last_logits(subject, part).float().cpu())
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


def _together(subject: Subject, tokens: Tensor) -> tuple[Tensor, ...]:
    """Sequences in parts that run together: memory does not matter."""
    return tokens.split(max(1, TOKENS_PER_BATCH[subject.device.type] // tokens.shape[1]))


def _whole(tokens: Int[Tensor, "sequence position"]) -> Int[Tensor, " sequence"]:
    return torch.full(tokens.shape[:1], tokens.shape[1])


def _last_logits(
    subject: Subject, tokens: Int[Tensor, "sequence position"]
) -> Float[Tensor, "sequence token"]:
    with torch.no_grad():
        if chunk_of(subject, tokens.shape[1]) is None:
            return subject.forward(tokens, last=1)[:, -1]
        return deque(logits_of(subject, tokens), maxlen=1).pop()[1][:, -1]


def forget_length(subject: Subject) -> None:
    """Dynamic RoPE turns as its longest sequence so far made it; a short one undoes that."""
    if subject.depends_on_length:
        with subject.by_itself(), torch.no_grad():  # one token cannot be resampled
            subject.forward(torch.zeros(1, 1, dtype=torch.long), last=1)
