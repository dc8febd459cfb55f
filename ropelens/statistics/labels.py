"""What a head is called, from shares of its bits, its kernel and its selectivity. No torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from jaxtyping import Float, Int

from ropelens.errors import BadArgument

LABELS = ("diffuse", "sink", "positional", "mixed", "semantic")


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

    def __post_init__(self) -> None:
        shares = all(0 <= share <= 1 for share in (self.sink, self.offset))
        if not (shares and 0.5 < self.named <= 1 and self.diffuse >= 0 and self.faint >= 0):
            raise BadArgument(
                "Thresholds are shares (that of a name above one half), and bits.",
                seen=str(asdict(self)),
            )


def label_heads(
    thresholds: Thresholds,
    *,
    total: Float[np.ndarray, "*shape"],
    sink: Float[np.ndarray, "*shape"],
    position: Float[np.ndarray, "*shape"],
    content: Float[np.ndarray, "*shape"],
) -> np.ndarray:
    """The label of each head, from its bits: the first rule that fits, "" of NaN."""
    rest = total - sink
    rules = {
        "": np.isnan(total),
        "diffuse": total < thresholds.diffuse,
        "sink": sink > thresholds.sink * total,
        "positional": (position >= thresholds.named * rest) & (rest > 0),
        "semantic": (content >= thresholds.named * rest) & (rest > 0),
    }
    return np.select(list(rules.values()), list(rules), default="mixed").astype(object)


@dataclass(frozen=True)
class Wavelengths:
    """The wavelengths (tokens) that a head picks keys through, from `selectivity_keys`.

    Planes weigh with the positive part: one that pushes away from the picked keys is not one
    that they are picked through. `top` is the wavelength of the plane with the most of it,
    infinite where that stands still, and `top_share` its share; `holding_half` the number of
    planes that together hold half. `mean` is the geometric mean over planes that rotate. NaN
    (and 0 planes) without any.
    """

    top: Float[np.ndarray, "*head"]
    top_share: Float[np.ndarray, "*head"]
    holding_half: Int[np.ndarray, "*head"]
    mean: Float[np.ndarray, "*head"]


def describe_wavelengths(
    selectivity_keys: Float[np.ndarray, "*head term"],
    wavelength: Float[np.ndarray, "*head_or_1 term"],
) -> Wavelengths:
    """The strongest planes of each head and the mean of their wavelengths."""
    push = np.nan_to_num(selectivity_keys).clip(min=0)
    wavelength = np.broadcast_to(wavelength, push.shape)
    total, top = push.sum(-1), push.argmax(-1, keepdims=True)
    some = total > 0
    share = -np.sort(-push, axis=-1)
    short_of_half = share.cumsum(-1) < total[..., None] / 2
    turning = np.isfinite(wavelength)
    weight = push * turning
    log = np.log(np.where(turning, wavelength, 1.0))
    with np.errstate(invalid="ignore", divide="ignore"):  # NaN where nothing turns or pushes
        mean = np.exp((weight * log).sum(-1) / weight.sum(-1))
        top_share = np.where(some, share[..., 0] / total, np.nan)
    return Wavelengths(
        top=np.where(some, np.take_along_axis(wavelength, top, -1)[..., 0], np.nan),
        top_share=top_share,
        holding_half=np.where(some, short_of_half.sum(-1) + 1, 0),
        mean=mean,
    )
