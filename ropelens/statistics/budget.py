"""The attention budget: how much of a head's choice of keys each model of it explains.

What the models of logit.py gain over even attention, on rows that they were not fitted to,
shares out the information in a head's choice. For arrays of any shape; no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

GAINS = {
    "total": "information in the choice of keys",
    "sink_gain": "what sinks explain",
    "position_gain": "what sinks and the offset explain",
    "content_gain": "what sinks and the tokens explain",
    "both_gain": "what sinks, the offset and the tokens explain together",
}
"""What a budget is made of, bits per row over even attention; what models gain may be less than
none on rows that they were not fitted to."""


@dataclass(frozen=True)
class Budget:
    """Where the bits in a head's choice of keys come from, per row; none is negative.

    `sink` + `position` + `content` + `interaction` = `total`. `offset` is what the offset
    explains by itself, the part that the tokens explain as well included.
    """

    total: Float[np.ndarray, "*shape"]
    sink: Float[np.ndarray, "*shape"]
    position: Float[np.ndarray, "*shape"]
    content: Float[np.ndarray, "*shape"]
    interaction: Float[np.ndarray, "*shape"]
    offset: Float[np.ndarray, "*shape"]

    @property
    def bits(self) -> dict[str, Float[np.ndarray, "*shape"]]:
        """The columns of heads.csv."""
        names = ("total", "sink", "position", "content", "interaction")
        return {f"{name}_bits": vars(self)[name] for name in names}


def attention_budget(
    total: Float[np.ndarray, "*shape"],
    sink_gain: Float[np.ndarray, "*shape"],
    position_gain: Float[np.ndarray, "*shape"],
    content_gain: Float[np.ndarray, "*shape"],
    both_gain: Float[np.ndarray, "*shape"],
) -> Budget:
    """The budget that the gains of the models give, all in bits per row.

    A model that says less than one that it contains, which happens out of sample, counts as
    that one: gains over the sink model are at least 0, and what both explain together is at
    least what either does.
    """
    sink = np.maximum(sink_gain, 0)
    position, content = (np.maximum(gain, sink) for gain in (position_gain, content_gain))
    both = np.maximum(both_gain, np.maximum(position, content))
    # A cannot be told better than by itself; float32 may say so by a rounding.
    total = np.maximum(total, both)
    return Budget(
        total=total,
        sink=sink,
        position=both - content,
        content=content - sink,
        interaction=total - both,
        offset=position - sink,
    )
