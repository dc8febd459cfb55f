"""What every statistic reads: one attention call, as the model made it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class AttentionCall:
    """The inputs of one layer's attention, and what its own implementation gave back.

    `query` and `key` carry their rotation. Row i sees the keys from `start[i]` to i,
    so `start` is 0 for full causal attention and i - window + 1 under a sliding window. It has
    a row for each sequence only where padding on the left makes them differ. A call that
    continues a key-value cache has `past` keys before those of its rows; row r is then i =
    past + r, and sees the keys from `start[r]` to i.
    Of a sequence that was run in chunks the call has the rows `at` these positions, ascending;
    row r is then i = at[r], and sees the keys from `start[i]` to i.
    The scores are `scale` q . k, squashed to `softcap` tanh(score / softcap) where the
    model does so; `sink_logits` (gpt-oss) take part in the softmax without a key.
    """

    layer: int
    query: Float[Tensor, "batch head row coordinate"]
    key: Float[Tensor, "batch kv_head key coordinate"]
    value: Float[Tensor, "batch kv_head key feature"]
    output: Float[Tensor, "batch row head feature"]
    scale: float
    softcap: float | None
    sink_logits: Float[Tensor, " head"] | None
    start: Int[Tensor, "*sequence position"]
    past: int = 0
    at: Int[Tensor, " row"] | None = None

    def row_at(self, position: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """The row of `query` that stands at each position, of which all are there."""
        if self.at is None:
            return position
        return torch.searchsorted(self.at.to(position.device), position.contiguous())
