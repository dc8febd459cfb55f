"""Does a head find a token's copy when it really stands that far back?

Random tokens come twice, with text between them. On the second copy a head that acts on a match
looks for the key after the same token's first place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.errors import BadArgument
from ropelens.measure.capture import look
from ropelens.measure.measurement import Measurement
from ropelens.measure.tasks import doublings, forget_length
from ropelens.rope.planes import Planes, plane_products
from ropelens.rope.turn import moved_scores
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.intervals import paired_interval
from ropelens.statistics.rows import generator_of

COPIED = 48
"""Random tokens that come twice, where the context holds so many."""


def tokens_copied(context: int) -> int:
    """How many random tokens come twice in a context."""
    return max(2, min(COPIED, (context - 1) // 3))


def run_distances(context: int, given: Sequence[int] | None) -> tuple[int, ...]:
    """The distances of copies: by default doublings, as far as the context holds.

    Raises `BadArgument` for copies that overlap, or reach out of the context.
    """
    copied = tokens_copied(context)
    if given is None:
        return doublings(copied, context - 1 - copied)
    if not all(copied <= distance < context - copied for distance in given):
        raise BadArgument(
            "Copies must lie in the context that the model was trained for.",
            seen=f"distances {list(given)}; {copied} to {context - 1 - copied} fit",
        )
    return tuple(sorted(given))


def find_copies(
    measurement: Measurement,
    chosen: Sequence[Int[Tensor, " _"]],
    planes: Sequence[Planes],
    *,
    distances: Sequence[int],
    beyond: Float[Tensor, " distance"],
    draws: int,
    progress: Callable[[int], None],
) -> dict[str, np.ndarray]:
    """How often the heads find the copy, as the model rotates now, in `planes`.

    `found_share` [layer, head, run_distance], with its interval over draws, is the share of
    rows in which the right key scores above all others but the first and the row's own.
    `foretold_share` is what the run at the distance before says of it: the same scores, the
    right key turned to this distance. `extrapolated_share` [layer, head, distance] is what the
    farthest run says of distances `beyond` it. NaN where no row sees the right key.
    """
    subject = measurement.subject
    copied = tokens_copied(subject.context)
    layers = [(layer, heads.numpy()) for layer, heads in enumerate(chosen) if len(heads)]
    shape = (subject.layers, subject.heads, len(distances))
    share, foretold = np.full((draws, *shape), np.nan), np.full((draws, *shape), np.nan)
    extrapolated = np.full((draws, *shape[:2], len(beyond)), np.nan)
    for at, distance in enumerate(distances):
        last = at + 1 == len(distances)
        further = beyond if last else torch.tensor([float(distances[at + 1])])
        for draw in range(draws):
            tokens = copies(measurement, distance, copied, draw)

            def see(call: AttentionCall, there: int = distance, to: Tensor = further) -> Tensor:
                of_heads, turning = call.of_heads(chosen[call.layer]), planes[call.layer]
                return won(of_heads, turning, copied=copied, distance=there, further=to)

            forget_length(subject)
            shares = look(subject, tokens, see)
            for layer, heads in layers:
                real, *moved = shares[layer].mT.numpy()
                share[draw, layer, heads, at] = real
                if last:
                    extrapolated[draw, layer, heads] = np.transpose(moved)
                else:
                    foretold[draw, layer, heads, at + 1] = moved[0]
            progress(tokens.numel())
    intervals = np.full((3, *shape), np.nan)
    for place in np.argwhere(np.isfinite(share[0])):
        intervals[:, *place] = paired_interval(share[:, *place])
    beyond_last = beyond.numpy() > max(distances, default=np.inf)
    return {
        "found_share": intervals[0],
        "found_low": intervals[1].clip(0, 1),
        "found_high": intervals[2].clip(0, 1),
        "foretold_share": foretold.mean(0),
        "extrapolated_share": np.where(beyond_last, extrapolated.mean(0), np.nan),
    }


def copies(
    measurement: Measurement, distance: int, copied: int, draw: int
) -> Int[Tensor, "1 position"]:
    """The text's first token, random tokens, text, the random tokens `distance` later."""
    text, generator = measurement.text, generator_of(measurement.seed, distance, draw)
    once = torch.randperm(measurement.subject.vocabulary, generator=generator)
    once = once[torch.arange(copied) % len(once)]
    body = torch.arange(text.tokens.shape[1]) < text.lengths[:, None]
    body[:, 0] = False
    stream, between = text.tokens.cpu()[body], distance - copied
    begin = int(torch.randint(max(1, len(stream) - between), (), generator=generator))
    filler = stream[(begin + torch.arange(between)) % len(stream)]
    first = torch.tensor([measurement.first_token])
    return torch.cat([first, once, filler, once])[None]


def won(
    call: AttentionCall,
    planes: Planes,
    *,
    copied: int,
    distance: int,
    further: Float[Tensor, " further"],
) -> Float[Tensor, "head rotation"]:
    """Share of the second copy's rows in which the right key wins, as it stands and turned."""
    length = call.query.shape[2]
    row = torch.arange(length - copied, length - 1)
    right = (row - distance + 1).to(call.key.device)
    query, key = call.query[0][:, row].float() * call.scale, call.key[0].float()
    seen = call.seen_by(row)[0].to(key.device).clone()
    visible = seen.gather(1, right[:, None])[:, 0]
    seen[:, 0] = False
    seen[torch.arange(len(row)), row] = False
    scores = query @ key.mT
    own = right.expand(len(query), -1)[..., None]
    best = scores.masked_fill(~seen, -torch.inf).scatter(2, own, -torch.inf).amax(-1)
    terms, inv_freq = plane_products(query, key[:, right], planes), planes.term_inv_freq
    moved = moved_scores(terms, inv_freq.to(key.device), further.to(key.device) - distance)
    wins = torch.cat([scores.gather(2, own), moved], dim=-1) > best[..., None]
    return wins[:, visible].double().mean(1).cpu()
