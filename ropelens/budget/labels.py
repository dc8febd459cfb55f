"""What a head is called: from the gains of its models to bits, and from bits to a label.

For arrays of any shape; no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Shaped

GAINS = {
    "total": "information in the choice of keys",
    "sink_gain": "what sinks explain",
    "position_gain": "what sinks and the offset explain",
    "content_gain": "what sinks and the tokens explain",
    "both_gain": "what sinks, the offset and the tokens explain together",
}
"""What a budget is made of: bits per row over uniform attention. On rows that a model is not
fitted to, a gain may be negative."""

LABELS = ("untested", "diffuse", "sink", "positional", "mixed", "semantic")


def attention_budget(
    *gains: Float[np.ndarray, "*shape"],
) -> dict[str, Float[np.ndarray, "*shape"]]:
    """Where the bits in a head's choice of keys come from, by the `GAINS` of its models.

    "sink", "position", "content" and "interaction" sum to "total"; none is negative. A model
    that gains less than one that it contains, which happens on other rows, counts as that one.
    """
    total, sink_gain, position_gain, content_gain, both_gain = gains
    sink = np.maximum(sink_gain, 0)
    position, content = (np.maximum(gain, sink) for gain in (position_gain, content_gain))
    both = np.maximum(both_gain, np.maximum(position, content))
    total = np.maximum(total, both)  # no model can gain more, but for rounding
    return {
        "total": total,
        "sink": sink,
        "position": both - content,
        "content": content - sink,
        "interaction": total - both,
    }


@dataclass(frozen=True)
class Thresholds:
    """Where one label ends and the next begins; shares, and bits per row: see `label_heads`.

    Bits differ by about 1 from row to row, so that the error of their mean is `diffuse` at 100
    rows. Below `faint` bits a head is said to be faint. A positional head has an offset where
    one offset has `offset` of its kernel or more, else a band.
    """

    diffuse: float = 0.1
    sink: float = 0.9
    named: float = 2 / 3
    faint: float = 0.5
    offset: float = 0.3
    rows: int = 100


def label_heads(
    bits: Mapping[str, Float[np.ndarray, "*shape"]],
    *,
    rows: float | Float[np.ndarray, "*shape"],
) -> np.ndarray:
    """The label of each head, from its bits on `rows` rows: the first rule, "" of NaN."""
    total, rest = bits["total"], bits["total"] - bits["sink"]
    rules = {
        "": np.isnan(total),
        "untested": np.broadcast_to(rows < Thresholds.rows, total.shape),
        "diffuse": total < Thresholds.diffuse,
        "sink": bits["sink"] > Thresholds.sink * total,
        "positional": (bits["position"] >= Thresholds.named * rest) & (rest > 0),
        "semantic": (bits["content"] >= Thresholds.named * rest) & (rest > 0),
    }
    return np.select(list(rules.values()), list(rules), default="mixed").astype(object)


def describe_wavelengths(
    selectivity_keys: Float[np.ndarray, "*head term"],
    wavelength: Float[np.ndarray, "*head_or_1 term"],
) -> dict[str, Shaped[np.ndarray, "*head"]]:
    """The wavelengths (tokens) that a head picks keys through, by the columns of heads.csv.

    Planes weigh with the positive part of `selectivity_keys`: keys are not picked through a
    plane that pushes away from them. See `classify_heads`; NaN (and 0 planes) without any.
    """
    push = np.nan_to_num(selectivity_keys).clip(min=0)
    wavelength = np.broadcast_to(wavelength, push.shape)
    total, top = push.sum(-1), push.argmax(-1, keepdims=True)
    some = total > 0
    share = -np.sort(-push, axis=-1)
    short_of_half = share.cumsum(-1) < total[..., None] / 2
    strongest = np.take_along_axis(wavelength, top, -1)
    rotates = np.isfinite(wavelength)
    weight = push * rotates
    log = np.log(np.where(rotates, wavelength, 1.0))
    with np.errstate(invalid="ignore", divide="ignore"):  # NaN where nothing rotates or pushes
        mean = np.exp((weight * log).sum(-1) / weight.sum(-1))
        top_share = np.where(some, share[..., 0] / total, np.nan)
    return {
        "top_wavelength": np.where(some, strongest[..., 0], np.nan),
        "top_share": top_share,
        "planes_to_half": np.where(some, short_of_half.sum(-1) + 1, 0),
        "mean_wavelength": mean,
    }
