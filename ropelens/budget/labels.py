"""The label of a head, from the bits of its attention budget. Figures use it without torch."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

DOUBTS = ("uncertain", "opposed")  # columns of heads.csv that mark labels
LABELS = ("untested", "diffuse", "sink", "positional", "mixed", "semantic")


@dataclass(frozen=True)
class Thresholds:
    """Bounds between labels, as shares or in bits per row; see `label_heads`.

    Bits differ by about 1 from row to row, so the error of their mean over 100 rows is as large
    as `diffuse`. A head with less than `faint` bits is faint. A positional head has an offset
    if one offset has at least the share `offset` of its kernel; otherwise it has a band.

    Shared bits count as content if position and content exceed chance by less than `overlap`
    together, chance is above 1 - `uneven`, or the exchanged keys have less attention than
    `mass`.
    """

    diffuse: float = 0.1
    sink: float = 0.9
    named: float = 2 / 3
    faint: float = 0.5
    offset: float = 0.3
    rows: int = 100
    overlap: float = 0.02
    uneven: float = 0.05
    mass: float = 0.01


def follow_numbers(
    *sums: Float[np.ndarray, "*shape"],
) -> dict[str, Float[np.ndarray, "*shape"]]:
    """Overlaps of attention after keys exchanged their contents, from the `FOLLOW` sums.

    `follow_score` is near 1 for a head that follows positions and near -1 for a head that
    follows contents. `weight` is the share of shared bits that counts for position.
    """
    *overlaps, mass, rows = sums
    with np.errstate(invalid="ignore", divide="ignore"):
        position, content, chance = (overlap / mass for overlap in overlaps)
        gain, other = (np.maximum(x - chance, 0) for x in (position, content))
        clear = (gain + other >= Thresholds.overlap) & (1 - chance >= Thresholds.uneven)
        clear &= mass >= Thresholds.mass * rows
        return {
            "follows_position": position,
            "follows_content": content,
            "follows_chance": chance,
            "follow_score": np.where(
                clear, (position - content) / (1 - chance), np.nan
            ),
            "weight": np.where(clear, gain / (gain + other), 0.0),
        }


def assign_shared(
    bits: Mapping[str, Float[np.ndarray, "*shape"]], weight: Float[np.ndarray, "*shape"]
) -> dict[str, Float[np.ndarray, "*shape"]]:
    """`bits` in which the share `weight` of the shared bits counts for position."""
    moved = np.nan_to_num(weight * bits["shared"])
    position, content = bits["position"] + moved, bits["content"] - moved
    return {**bits, "position": position, "content": content}


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
