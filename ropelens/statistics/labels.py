"""What a head is called, from shares of its bits, its kernel and its selectivity."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

LABELS = ("diffuse", "sink", "positional", "semantic", "mixed")

SEEN_BY = 0.05
"""Share of rows that must see an offset for it to be called a head's offset."""


@dataclass(frozen=True)
class Thresholds:
    """Where one label ends and the next begins; shares, and bits per row.

    A head is "diffuse" below `diffuse` total bits; else "sink" where sink bits exceed `sink`
    of the total; else "positional" or "semantic" where position or content bits are `named`
    or more of the rest; else "mixed". Below `faint` bits it is said to be faint. A positional
    head has an offset where one offset has `offset` of its kernel or more, else a band.
    """

    diffuse: float = 0.1
    sink: float = 0.9
    named: float = 2 / 3
    faint: float = 0.5
    offset: float = 0.3


def label(
    thresholds: Thresholds,
    *,
    total: Float[Tensor, "*shape"],
    sink: Float[Tensor, "*shape"],
    position: Float[Tensor, "*shape"],
    content: Float[Tensor, "*shape"],
) -> Int[Tensor, "*shape"]:
    """The index in `LABELS` of each head, from its bits: the first rule that fits."""
    rest = total - sink
    rules = (
        total < thresholds.diffuse,
        sink > thresholds.sink * total,
        position >= thresholds.named * rest,
        content >= thresholds.named * rest,
    )
    labels = torch.full(total.shape, LABELS.index("mixed"))
    for index, rule in reversed(list(enumerate(rules))):
        labels[rule] = index
    return labels


def faint(thresholds: Thresholds, total: Float[Tensor, "*shape"]) -> Bool[Tensor, "*shape"]:
    """Which heads make so little of a choice that a label says little of them."""
    return total < thresholds.faint


@dataclass(frozen=True)
class Offsets:
    """Where a kernel stands: the offset with the most weight, that weight, and the band.

    From `low` to `high` (tokens, both included) lies the middle half of the kernel. `named`
    says where one offset has enough of it to be the head's offset.
    """

    offset: Int[Tensor, "*head"]
    weight: Float[Tensor, "*head"]
    low: Int[Tensor, "*head"]
    high: Int[Tensor, "*head"]
    named: Bool[Tensor, "*head"]


def describe_kernel(
    thresholds: Thresholds,
    kappa: Float[Tensor, "*head offset"],
    seen_by: Float[Tensor, " offset"],
) -> Offsets:
    """The offset and the band of each head's kernel exp(kappa), of one weight an offset.

    Offsets that fewer than 5 % of the rows see (`seen_by`, a share) are left out.
    """
    kernel = kappa.masked_fill(seen_by < SEEN_BY, -torch.inf).softmax(-1)
    weight, offset = kernel.max(-1)
    below = kernel.cumsum(-1)
    low, high = ((below < quantile).sum(-1) for quantile in (0.25, 0.75))
    last = torch.tensor(kernel.shape[-1] - 1)
    return Offsets(
        offset=offset,
        weight=weight,
        low=low.minimum(last),
        high=high.minimum(last),
        named=weight >= thresholds.offset,
    )


@dataclass(frozen=True)
class Wavelengths:
    """The wavelengths (tokens) that a head picks keys through, from `selectivity_keys`.

    Planes weigh with the positive part: one that pushes away from the picked keys is not one
    that they are picked through. `top` is the wavelength of the plane with the most of it,
    infinite where that stands still, and `top_share` its share; `holding_half` the number of
    planes that together hold half. `mean` is the geometric mean over planes that rotate. NaN
    (and 0 planes) without any.
    """

    top: Float[Tensor, "*head"]
    top_share: Float[Tensor, "*head"]
    holding_half: Int[Tensor, "*head"]
    mean: Float[Tensor, "*head"]


def describe_wavelengths(
    selectivity_keys: Float[Tensor, "*head term"], wavelength: Float[Tensor, " term"]
) -> Wavelengths:
    """The strongest planes of each head and the mean of their wavelengths."""
    push = selectivity_keys.double().clamp(min=0)
    total = push.sum(-1)
    some = total > 0
    share, order = push.sort(-1, descending=True)
    short_of_half = share.cumsum(-1) < total[..., None] / 2
    turning = torch.where(wavelength.isfinite(), wavelength, 1.0)
    weight = push * wavelength.isfinite()
    mean_log = (weight * turning.log()).sum(-1) / weight.sum(-1)  # NaN where nothing turns
    return Wavelengths(
        top=torch.where(some, wavelength.double()[order[..., 0]], torch.nan),
        top_share=torch.where(some, share[..., 0] / total, torch.nan),
        holding_half=torch.where(some, short_of_half.sum(-1) + 1, 0),
        mean=mean_log.exp(),
    )
