"""Tasks for a model on random tokens and hidden needles: repeat, copy from afar, retrieve."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.arguments import check_count
from ropelens.attention.call import AttentionCall
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.sums import by_layer, sum_attention
from ropelens.errors import BadArgument
from ropelens.profiles.chunks import observer_of_chunks
from ropelens.profiles.measurement import TOKENS_PER_BATCH, Measurement
from ropelens.profiles.measures import NEEDLES, STATISTICS
from ropelens.profiles.passes import Progress
from ropelens.rope.planes import Planes
from ropelens.text.rows import Ids, Lengths, Rows, generator_of

REPEATED_TOKENS = (
    64  # random tokens that are repeated, if both copies fit in the context
)
REPEATS = 8  # sequences of repeated random tokens that are averaged
NEAREST = 8  # default of the shortest distance between copies, in tokens
KEY = 2  # tokens of the key of a needle; the value has one token
DEPTHS = (0.1, 0.5, 0.9)  # shares of the text before a needle
TRIALS = 16  # prompts per length and depth
MOST_TOKENS = 10**8
SHORTEST_PROMPT = 32  # tokens of the shortest prompt that hides needles


@dataclass(frozen=True)
class Task:
    """A task: `measure` runs `tokens` tokens and returns numbers that `coordinates` label."""

    tokens: int
    measure: Callable[[Progress], dict[str, Tensor]]
    coordinates: dict[str, np.ndarray] = field(default_factory=dict)


def repeated_tokens(
    first: int, length: int, *, vocabulary: int, seed: int
) -> Int[Tensor, "trial position"]:
    """The token `first`, then `length` random tokens and the same again (arXiv 2209.11895)."""
    generator = generator_of(seed)
    draws = [torch.randperm(vocabulary, generator=generator) for _ in range(REPEATS)]
    once = torch.stack([draw[torch.arange(length) % len(draw)] for draw in draws])
    return torch.cat([torch.full((REPEATS, 1), first), once, once], dim=1)


def repeats(measurement: Measurement, planes: Sequence[Planes]) -> Task:
    """Task: attention on repeated random tokens, mean over the repeated rows, and their losses.

    `induction`, the prefix-matching score of Olsson et al. 2022, is NaN if the mask hides the
    earlier occurrence. `first_loss` and `repeat_loss` (nats/token) exclude the first token of
    either copy.
    """
    live, text, seed = measurement.live, measurement.text, measurement.seed
    length = max(2, min(REPEATED_TOKENS, (live.context - 1) // 2))
    tokens = repeated_tokens(
        text.first_token, length, vocabulary=live.vocabulary, seed=seed
    )
    second = torch.arange(length + 1, 2 * length + 1).expand(len(tokens), -1)
    weight, whole = torch.full(second.shape, 1 / length), whole_lengths(tokens)
    by_offset = [row for row in STATISTICS if row.name == "offset_mass"]
    rows = Rows(second, weight, whole, dense=False)

    def measure(progress: Progress) -> dict[str, Tensor]:
        mass: dict[int, Tensor] = {}

        def see(call: AttentionCall) -> None:
            sums = sum_attention(SampledCall(call, rows, planes[call.layer]), by_offset)
            seen = call.visibility.at(second[:1]).sees().cpu()
            seen = seen[:, torch.arange(length), second[0] - length]
            mass[call.layer] = sums["offset_mass"].masked_fill(~seen.any(), torch.nan)

        live.forget_length()
        context = tokens.shape[1]
        chunk = live.chunk_length(context)
        with live.observe(observer_of_chunks(chunk, (rows,), context, see)):
            losses = live.losses(tokens, whole)
        progress(tokens.numel())
        of_layers = by_layer(mass, live.layers)
        after, same = of_layers[..., length - 1], of_layers[..., length]
        return {
            "induction": after.mean(1),
            "trial_induction": after.transpose(0, 1),
            "duplicate_token": same.mean(1),
            "first_loss": losses[:, 2 : length + 1].mean(1),
            "repeat_loss": losses[:, length + 2 :].mean(1),
        }

    return Task(tokens.numel(), measure)


def whole_lengths(tokens: Ids) -> Lengths:
    return torch.full(tokens.shape[:1], tokens.shape[1])


def copies(measurement: Measurement, distances: Sequence[int] | None) -> Task:
    """Task: `copy_loss` (nats/token) of repeated random tokens, except the first one."""
    live, text = measurement.live, measurement.text
    options = {"vocabulary": live.vocabulary, "seed": measurement.seed}
    longest = max(2, (min(live.context, text.context) - 1) // 2)
    by_default = doublings(NEAREST, longest) if longest >= NEAREST else (longest,)
    distances = tuple(dict.fromkeys(map(int, distances or by_default)))
    if min(distances) < 2:
        raise BadArgument(
            "Distances of copies must be 2 tokens or more.", seen=str(distances)
        )
    total = REPEATS * sum(1 + 2 * distance for distance in distances)
    check_count(total, "tokens of copies", most=MOST_TOKENS)

    def measure(progress: Progress) -> dict[str, Tensor]:
        by_distance = []
        for distance in distances:
            tokens = repeated_tokens(text.first_token, distance, **options)
            live.forget_length()
            parts = _split_by_memory(tokens, live.device)
            losses = [live.losses(part, whole_lengths(part)) for part in parts]
            by_distance.append(torch.cat(losses)[:, distance + 2 :].mean(1))
            progress(tokens.numel())
        return {"copy_loss": torch.stack(by_distance)}

    return Task(total, measure, {"copy_distance": np.array(distances)})


def doublings(least: int, most: int) -> tuple[int, ...]:
    """Return `least`, 2 `least`, 4 `least`, ..., up to `most`."""
    return tuple(least << k for k in range(max(1, (most // least).bit_length())))


def needles(
    measurement: Measurement, lengths: Sequence[int] | None, prompts: int = TRIALS
) -> Task:
    """Task that retrieves needles from the text, with `prompts` per length and depth."""
    live, text = measurement.live, measurement.text
    context = min(live.context, text.context)
    by_default = [max(SHORTEST_PROMPT, context // part) for part in (4, 2, 1)]
    lengths = tuple(dict.fromkeys(map(int, lengths or by_default)))
    total = len(DEPTHS) * prompts * sum(lengths)
    check_count(total, "tokens in prompts", most=MOST_TOKENS)
    stream = text.ids.cpu()[:, 1:][text.real[:, 1:]]
    options = {
        "vocabulary": live.vocabulary,
        "seed": measurement.seed,
        "trials": prompts,
    }
    options["first_token"] = text.first_token
    hidden = [hide_needles(stream, length=length, **options) for length in lengths]

    @torch.no_grad()
    def measure(progress: Progress) -> dict[str, Tensor]:
        hits = []
        for tokens, values in hidden:
            live.forget_length()
            last = []
            for part in _split_by_memory(tokens.flatten(0, 1), live.device):
                if live.chunk_length(part.shape[1]) is None:
                    logits = live.forward(part, last=1)
                else:
                    logits = deque(live.logits(part), maxlen=1).pop()[1]
                last.append(logits[:, -1].float().cpu())
                progress(part.numel())
            logits = torch.cat(last).unflatten(0, tokens.shape[:2])
            hits.append(found_needles(logits, values).double())
        hit = torch.stack(hits)
        return {"retrieval": hit.mean(-1), "retrieval_hit": hit}

    coordinates = {"retrieval_length": np.array(lengths), "depth": np.array(DEPTHS)}
    return Task(total, measure, coordinates)


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
) -> tuple[Int[Tensor, "depth trial token"], Int[Tensor, "trial needle"]]:
    """Prompts of `length` tokens with needles in stretches of `text`, and the needles' values.

    A prompt consists of `first_token`, a stretch of text with eight needles in it, and the key
    of one needle again, whose value comes first. A needle is a key of two tokens and a value,
    which are not in the stretch if possible. Prompts of a trial differ only in the depth.
    """
    size = NEEDLES * (KEY + 1)
    if length < SHORTEST_PROMPT or vocabulary < size:
        least = f"{SHORTEST_PROMPT} tokens or more, with {size} different tokens"
        seen = f"a prompt of {length} tokens, a vocabulary of {vocabulary}"
        raise BadArgument(f"A prompt that hides needles has {least}.", seen=seen)
    random = np.random.default_rng([seed % 2**64, length])
    around = length - 1 - size - KEY
    known, all_ids = text.unique().numpy(), np.arange(vocabulary)
    prompts, values = [], []
    for _ in range(trials):
        if len(text) >= around:
            begin = int(random.integers(len(text) - around + 1))
            hay = text[begin : begin + around].numpy()
        else:
            hay = random.integers(vocabulary, size=around)
        pools = (np.setdiff1d(known, hay), np.setdiff1d(all_ids, hay), all_ids)
        pool = next(p for p in pools if len(p) >= size)
        needle = random.permutation(pool)[:size].reshape(NEEDLES, KEY + 1)
        others = random.integers(around + 1, size=NEEDLES - 1)
        for_depth = [np.array([round(depth * around), *others]) for depth in DEPTHS]
        bodies = [
            np.insert(hay, x.repeat(KEY + 1), needle.flatten()) for x in for_depth
        ]
        prompts.append([[first_token, *body, *needle[0, :KEY]] for body in bodies])
        values.append(needle[:, KEY])
    by_depth = torch.from_numpy(np.array(prompts, dtype=np.int64)).transpose(0, 1)
    return by_depth, torch.from_numpy(np.array(values, dtype=np.int64))


def _split_by_memory(tokens: Tensor, device: torch.device) -> tuple[Tensor, ...]:
    return tokens.split(max(1, TOKENS_PER_BATCH[device.type] // tokens.shape[1]))
