"""Prompts that hide needles in a text, and the share of needles that a model retrieves."""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.arguments import check_count
from ropelens.errors import BadArgument
from ropelens.profiles.measurement import Measurement
from ropelens.profiles.measures import NEEDLES
from ropelens.profiles.passes import Progress
from ropelens.profiles.tasks import MOST_TOKENS, split_by_memory
from ropelens.text.rows import Ids

KEY = 2  # tokens of the key of a needle; the value has one token
NEEDLE = KEY + 1
DEPTHS = (0.1, 0.5, 0.9)  # shares of the text before a needle
TRIALS = 16  # prompts per length and depth
SHORTEST_PROMPT = 32  # tokens of the shortest prompt that hides needles


class HiddenNeedles(NamedTuple):
    """Prompts with needles, and the values of the needles; the first value is asked for."""

    tokens: Int[Tensor, "depth trial token"]
    values: Int[Tensor, "trial needle"]


class Needles:
    """Retrieval of needles from the text, with `prompts` prompts per length and depth."""

    def __init__(
        self,
        measurement: Measurement,
        lengths: Sequence[int] | None,
        prompts: int = TRIALS,
    ) -> None:
        live = measurement.live
        text = measurement.text
        if not lengths:
            lengths = near_lengths(min(live.context, text.context))
        lengths = tuple(dict.fromkeys(map(int, lengths)))
        self.tokens = len(DEPTHS) * prompts * sum(lengths)
        check_count(self.tokens, "tokens in prompts", most=MOST_TOKENS)
        self.live = live
        stream = text.ids.cpu()[:, 1:][text.real[:, 1:]]
        self.prompts_by_length = [
            hide_needles(
                stream,
                first_token=text.first_token,
                vocabulary=live.vocabulary,
                length=length,
                seed=measurement.seed,
                trials=prompts,
            )
            for length in lengths
        ]
        self.coordinates = {
            "retrieval_length": np.array(lengths),
            "depth": np.array(DEPTHS),
        }

    @torch.no_grad()
    def measure(self, progress: Progress) -> dict[str, Tensor]:
        """`retrieval_hit` [length, depth, trial], and `retrieval`, its mean over trials."""
        hits = []
        for prompts, values in self.prompts_by_length:
            self.live.forget_length()  # or dynamic RoPE keeps the rotation of a longer prompt
            last_logits = self.last_logits(prompts.flatten(0, 1), progress)
            by_depth = last_logits.unflatten(0, prompts.shape[:2])
            hits.append(found_needles(by_depth, values).double())
        hit = torch.stack(hits)
        return {"retrieval": hit.mean(-1), "retrieval_hit": hit}

    def last_logits(
        self, prompts: Ids, progress: Progress
    ) -> Float[Tensor, "prompt token"]:
        """Logits after the last token of each prompt."""
        last = []
        for batch in split_by_memory(prompts, self.live.device):
            if self.live.chunk_length(batch.shape[1]) is None:
                logits = self.live.forward(batch, last=1)
            else:
                _, logits = deque(self.live.logits(batch), maxlen=1).pop()
            last.append(logits[:, -1].float().cpu())
            progress(batch.numel())
        return torch.cat(last)


def near_lengths(context: int) -> list[int]:
    """Lengths of prompts within a context, if no others are asked for."""
    lengths = [max(SHORTEST_PROMPT, context // part) for part in (4, 2, 1)]
    return list(dict.fromkeys(lengths))


def found_needles(
    logits: Float[Tensor, "depth trial token"], values: Int[Tensor, "trial needle"]
) -> Bool[Tensor, "depth trial"]:
    """Trials in which the logit of the first value exceeds the logits of all other values."""
    candidates = logits.gather(-1, values.expand(*logits.shape[:2], -1))
    return candidates[..., 0] > candidates[..., 1:].amax(-1)


def hide_needles(
    text: Int[Tensor, " position"],
    *,
    first_token: int,
    vocabulary: int,
    length: int,
    seed: int,
    trials: int = TRIALS,
) -> HiddenNeedles:
    """Prompts of `length` tokens with needles in stretches of `text`, and the needles' values.

    A prompt consists of `first_token`, a stretch of text with eight needles in it, and the key
    of one needle again, whose value comes first. A needle is a key of two tokens and a value,
    which are not in the stretch if possible. Prompts of a trial differ only in the depth.
    """
    tokens_of_needles = NEEDLES * NEEDLE
    if length < SHORTEST_PROMPT or vocabulary < tokens_of_needles:
        raise BadArgument(
            f"A prompt that hides needles has {SHORTEST_PROMPT} tokens or more, with "
            f"{tokens_of_needles} different tokens.",
            seen=f"a prompt of {length} tokens, a vocabulary of {vocabulary}",
        )
    random = np.random.default_rng([seed % 2**64, length])
    around = length - 1 - tokens_of_needles - KEY
    known = text.unique().numpy()
    prompts = []
    values = []
    for _ in range(trials):
        hay = draw_hay(text, around, vocabulary, random)
        unused = tokens_beside(hay, known, vocabulary)
        drawn = random.permutation(unused)[:tokens_of_needles]
        needles = drawn.reshape(NEEDLES, NEEDLE)
        others = random.integers(around + 1, size=NEEDLES - 1)
        of_depths = []
        for depth in DEPTHS:
            places = np.array([round(depth * around), *others])
            body = np.insert(hay, places.repeat(NEEDLE), needles.flatten())
            of_depths.append([first_token, *body, *needles[0, :KEY]])
        prompts.append(of_depths)
        values.append(needles[:, KEY])
    by_trial = torch.from_numpy(np.array(prompts, dtype=np.int64))
    return HiddenNeedles(
        tokens=by_trial.transpose(0, 1),
        values=torch.from_numpy(np.array(values, dtype=np.int64)),
    )


def draw_hay(
    text: Int[Tensor, " position"],
    size: int,
    vocabulary: int,
    random: np.random.Generator,
) -> Int[np.ndarray, " size"]:
    """A random stretch of the text; random tokens if the text is shorter."""
    if len(text) < size:
        return random.integers(vocabulary, size=size)
    begin = int(random.integers(len(text) - size + 1))
    return text[begin : begin + size].numpy()


def tokens_beside(
    hay: Int[np.ndarray, " _"], known: Int[np.ndarray, " _"], vocabulary: int
) -> Int[np.ndarray, " _"]:
    """Tokens for needles: `known` tokens outside the hay, other tokens outside, or all."""
    enough = NEEDLES * NEEDLE
    all_tokens = np.arange(vocabulary)
    for tokens in (np.setdiff1d(known, hay), np.setdiff1d(all_tokens, hay)):
        if len(tokens) >= enough:
            return tokens
    return all_tokens
