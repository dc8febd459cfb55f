"""The label of a head, from the bits of its attention budget. Figures use it without torch."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

LABELS = ("untested", "diffuse", "sink", "positional", "mixed", "semantic")


@dataclass(frozen=True)
class Thresholds:
    """Bounds between labels, as shares or in bits per row; see `label_heads`.

    Bits differ by about 1 from row to row, so the error of their mean over 100 rows is as large
    as `diffuse`. A head with less than `faint` bits is faint. A positional head has an offset
    if one offset has at least the share `offset` of its kernel; otherwise it has a band.
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
    """The first label whose rule the `bits` of a head on `rows` rows meet; "" for NaN."""
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
