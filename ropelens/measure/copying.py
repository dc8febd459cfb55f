"""How well random tokens are foretold by their copy, so many tokens before them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float

from ropelens.errors import BadArgument
from ropelens.measure.batches import quick_batch, token_losses
from ropelens.measure.chunks import chunk_of
from ropelens.measure.repeats import REPEATS
from ropelens.measure.tasks import LONGEST, repeated_tokens, token_counts
from ropelens.models.subject import Subject

NEAREST = 8
"""Tokens of the least distance, where none are asked for."""


def copy_losses(
    subject: Subject, *, first_token: int, distance: int, seed: int
) -> Float[np.ndarray, " trial"]:
    """Mean loss (nats/token) of `distance` random tokens that come again, without the first.

    The first is announced by nothing; each of the others by what followed the same token
    before (`distance` is 2 or more).
    """
    tokens = repeated_tokens(
        first_token=first_token,
        vocabulary=subject.vocabulary,
        length=distance,
        sequences=REPEATS,
        seed=seed,
    )
    length = tokens.shape[1]
    together, chunk = quick_batch(subject, length), chunk_of(subject, length)
    with torch.no_grad():
        losses = torch.cat(
            [
                token_losses(subject, part, torch.full((len(part),), length), chunk)
                for part in tokens.split(together)
            ]
        )
    return losses[:, distance + 2 :].mean(1).numpy()


def copy_distances(distances: Sequence[int] | None, context: int) -> tuple[int, ...]:
    """The distances asked for; or 8, 16, 32, ..., as long as both copies are in `context`.

    Raises `BadArgument` for what is no distance.
    """
    if distances is None:
        most = max(2, (context - 1) // 2)
        return doublings(NEAREST, most) if most >= NEAREST else (most,)
    if not token_counts(distances, least=2):
        raise BadArgument(
            "Distances of copies are whole numbers of tokens, 2 or more.",
            seen=str(distances),
            attempt=f"distances=[8, 64], each {LONGEST:,} at most",
        )
    return tuple(dict.fromkeys(distances))


def doublings(least: int, most: int) -> tuple[int, ...]:
    """`least`, twice that, and so on, up to `most`."""
    return tuple(least << k for k in range(max(1, (most // least).bit_length())))
