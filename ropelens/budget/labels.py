"""From the scores of a head's models to its label. Figures use the labels without torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float

from ropelens.attention.formulas import FOLLOW, GAINS, attention_budget

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


@dataclass(frozen=True)
class HeadBudget:
    """The attention budget of heads, from the gains of its models and what the heads follow.

    `gains` are in bits per row, by the names of `GAINS`. `follow` are the sums `FOLLOW` per
    weight of all rows. All arrays have the same shape, and NaN for heads without rows.
    """

    gains: Mapping[str, Float[np.ndarray, "*shape"]]
    follow: Mapping[str, Float[np.ndarray, "*shape"]]

    @cached_property
    def bits(self) -> dict[str, Float[np.ndarray, "*shape"]]:
        """Bits by their source; see `attention_budget`."""
        return attention_budget(*(self.gains[name] for name in GAINS))

    @cached_property
    def numbers(self) -> "FollowNumbers":
        """What the heads follow."""
        return follow_numbers(*(self.follow[name] for name in FOLLOW))

    @cached_property
    def assigned_bits(self) -> dict[str, Float[np.ndarray, "*shape"]]:
        """`bits`, in which shared bits count for what the head follows."""
        return assign_shared(self.bits, self.numbers.position_share)

    def labels(self, *, rows: float | Float[np.ndarray, "*shape"]) -> np.ndarray:
        """The label of each head, whose scores are from this number of rows."""
        return label_heads(self.assigned_bits, rows=rows)


@dataclass(frozen=True)
class FollowNumbers:
    """What heads follow after their keys exchanged their contents.

    `position`, `content` and `chance` are overlaps of attention. `score` is near 1 for a head
    that follows positions, near -1 for a head that follows contents, and NaN if neither is
    clear. `position_share` is the share of shared bits that counts for position.
    """

    position: Float[np.ndarray, "*shape"]
    content: Float[np.ndarray, "*shape"]
    chance: Float[np.ndarray, "*shape"]
    score: Float[np.ndarray, "*shape"]
    position_share: Float[np.ndarray, "*shape"]

    def variables(self) -> dict[str, Float[np.ndarray, "*shape"]]:
        """The numbers by the names of a profile's variables."""
        return {
            "follows_position": self.position,
            "follows_content": self.content,
            "follows_chance": self.chance,
            "follow_score": self.score,
        }


def follow_numbers(*sums: Float[np.ndarray, "*shape"]) -> FollowNumbers:
    """What heads follow, from the `FOLLOW` sums."""
    *overlaps, mass, rows = sums
    with np.errstate(invalid="ignore", divide="ignore"):  # NaN without such keys
        position, content, chance = [overlap / mass for overlap in overlaps]
        by_position = np.maximum(position - chance, 0)
        by_content = np.maximum(content - chance, 0)
        exceeds = by_position + by_content >= Thresholds.overlap
        is_uneven = 1 - chance >= Thresholds.uneven
        clear = exceeds & is_uneven & (mass >= Thresholds.mass * rows)
        score = (position - content) / (1 - chance)
        share = by_position / (by_position + by_content)
    return FollowNumbers(
        position=position,
        content=content,
        chance=chance,
        score=np.where(clear, score, np.nan),
        position_share=np.where(clear, share, 0.0),
    )


def assign_shared(
    bits: Mapping[str, Float[np.ndarray, "*shape"]],
    position_share: Float[np.ndarray, "*shape"],
) -> dict[str, Float[np.ndarray, "*shape"]]:
    """`bits` in which this share of the shared bits counts for position."""
    moved = np.nan_to_num(position_share * bits["shared"])
    assigned = dict(bits)
    assigned["position"] = bits["position"] + moved
    assigned["content"] = bits["content"] - moved
    return assigned


def label_heads(
    bits: Mapping[str, Float[np.ndarray, "*shape"]],
    *,
    rows: float | Float[np.ndarray, "*shape"],
) -> np.ndarray:
    """The first label whose rule the `bits` of a head on `rows` rows meet; "" for NaN."""
    total = bits["total"]
    rest = total - bits["sink"]
    named = Thresholds.named * rest
    rules = {
        "": np.isnan(total),
        "untested": np.broadcast_to(rows < Thresholds.rows, total.shape),
        "diffuse": total < Thresholds.diffuse,
        "sink": bits["sink"] > Thresholds.sink * total,
        "positional": (bits["position"] >= named) & (rest > 0),
        "semantic": (bits["content"] >= named) & (rest > 0),
    }
    labels = np.select(list(rules.values()), list(rules), default="mixed")
    return labels.astype(object)
