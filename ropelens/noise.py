"""Rounding noise, and the residual that a check accepts.

Another processor, another batch or TF32 adds the same products in another order. Checks
therefore measure the noise of the model that they check, and assume no rounding.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

FLOOR = 1e-3
"""Residual that no check refuses; a scale that is off by 2 % has a residual of 3e-2."""

NOISE_FACTOR = 30
"""A residual of more than this many times the noise of its kind is a fault."""

NOISY = 1e-2
"""Relative noise above which the user is warned."""

NOISE_TOKENS = 64  # length of the sequences on which noise is measured
FEW_TOKENS = 32  # length of the two sequences that suffice for most models


def allowed_residual(noise: float, eps: float) -> float:
    """Largest relative residual that a check accepts, from the noise and the dtype's `eps`."""
    return max(NOISE_FACTOR * noise, FLOOR, 4 * eps)


def noise_tokens(vocabulary: int, context: int) -> Int[Tensor, "4 position"]:
    """Four random sequences that differ only in their last tokens; see `common_tokens`.

    They have 64 tokens or `context`, and no special tokens, which have the first and last ids.
    """
    length = min(NOISE_TOKENS, context)
    low = vocabulary // 8
    high = max(vocabulary // 2, low + 1)
    random = torch.Generator().manual_seed(0)
    ids = torch.randint(low, high, (4, length), generator=random, device="cpu")
    common = common_tokens(length)
    ids[:, :common] = ids[0, :common]
    return ids


def common_tokens(length: int) -> int:
    """Number of tokens with which all sequences of `noise_tokens` begin: three quarters."""
    return length - length // 4


def logit_change(
    one: Float[Tensor, "sequence position token"],
    other: Float[Tensor, "_ position token"],
) -> Float[Tensor, "sequence position"]:
    """Root mean square change of logits, relative to their spread over the vocabulary."""
    one = one.double()
    change = (one - other.double()).square().mean(-1).sqrt()
    return change / one.std(-1).clamp(min=1e-30)


@torch.no_grad()
def run_noise(
    run: Callable[[Tensor], Tensor], ids: Int[Tensor, "sequence position"]
) -> float:
    """Largest change of the logits of the last sequence, by itself, again, and within `ids`."""
    alone = run(ids[-1:])
    again = logit_change(alone, run(ids[-1:]))
    within = logit_change(alone, run(ids)[-1:])
    return max(float(again.max()), float(within.max()))
