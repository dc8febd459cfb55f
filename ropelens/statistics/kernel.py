"""Where the kernel of a head stands: the offset with the most weight, or a band of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

SEEN_BY = 0.05
"""Share of rows that must see an offset for it to be called a head's offset."""


@dataclass(frozen=True)
class Kernel:
    """A kernel over offsets, which sums to one: where it peaks, and its middle half.

    `low` and `high` (tokens, both included) bound the band that holds it.
    """

    kernel: Float[Tensor, "*head offset"]
    offset: Int[Tensor, "*head"]
    weight: Float[Tensor, "*head"]
    low: Int[Tensor, "*head"]
    high: Int[Tensor, "*head"]


def describe_kernel(
    kappa: Float[Tensor, "*head offset"], seen_by: Float[Tensor, " offset"]
) -> Kernel:
    """The kernel exp(kappa) of each head, of one weight an offset.

    Offsets that fewer than 5 % of the rows see (`seen_by`, a share) are left out.
    """
    kernel = kappa.masked_fill(seen_by < SEEN_BY, -torch.inf).softmax(-1)
    weight, offset = kernel.max(-1)
    below = kernel.cumsum(-1)
    low, high = ((below < quantile).sum(-1) for quantile in (0.25, 0.75))
    last = torch.tensor(kernel.shape[-1] - 1)
    return Kernel(kernel, offset, weight, low.minimum(last), high.minimum(last))
