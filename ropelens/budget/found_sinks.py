"""Keys that turn out to be sinks, because most rows attend to them."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.attention.block import Block, blocks_of
from ropelens.attention.sampled_call import SampledCall
from ropelens.text.text import SINKS

SINK_SHARE = 0.3  # a key is a sink above this mean attention of all later rows
SINK_ROWS = 16  # least number of rows in this mean


@torch.no_grad()
def find_sinks(sampled: SampledCall) -> Bool[Tensor, "head position"]:
    """Keys that are not known as sinks and take more than 0.3 of the attention of later rows.

    They do so in more than half of the sequences that have later rows, and in at least 16 rows.
    Of a single sequence, the earlier and the later rows must each show this, in 16 rows each.
    """
    rows = sampled.rows
    is_single = len(sampled.q) == 1
    rank = torch.arange(rows.position.shape[1], device="cpu")
    tested_rows = [rank >= 0]
    if is_single:
        is_early = rank < len(rank) // 2
        tested_rows = [is_early, ~is_early]
    tests = []
    for is_tested in tested_rows:
        tested = replace(rows, weight=rows.weight * is_tested)
        tests.append(mark_keys(sampled.with_rows(tested)))
    exceeds = torch.cat([test.exceeds for test in tests])
    count = torch.cat([test.later_rows for test in tests])
    often = 2 * exceeds.sum(0) > (count > 0).sum(0)
    enough = count.amin(0) if is_single else count.sum(0)
    return often & (enough >= SINK_ROWS)


@dataclass(frozen=True)
class KeyMarks:
    """Whether a key takes the attention of a sink, and the number of its later rows."""

    exceeds: Bool[Tensor, "batch head position"]
    later_rows: Float[Tensor, "batch position"]


def mark_keys(sampled: SampledCall) -> KeyMarks:
    """Test all keys that are not known as sinks."""
    batch, heads = sampled.q.shape[:2]
    context = sampled.k.shape[2]
    # One array is moved to the host once: the attention on each key by head, then the weight
    # and the number of the rows after the key.
    sums = sampled.k.new_zeros(batch, heads + 2, context, dtype=torch.float64)
    for block in blocks_of(sampled):
        own_key = block.self_column[..., None]
        if block.heads.start == 0:
            sums[:, heads:, block.columns] += _count_later_rows(block, own_key)
        own_key = own_key[:, None, None].expand(*block.q.shape[:4], 1)
        on_others = block.attention.scatter_(-1, own_key, 0.0)
        weight = block.weight[:, None, None, None]
        on_keys = (weight @ on_others)[..., 0, :].flatten(1, 2)
        sums[:, block.query_heads, block.columns] += on_keys
    mass, weight, later_rows = sums.cpu().split((heads, 1, 1), dim=1)
    exceeds = (mass > SINK_SHARE * weight) & (sampled.sinks == 0)
    return KeyMarks(exceeds, later_rows=later_rows[:, 0])


def _count_later_rows(
    block: Block, own_key: Int[Tensor, "shared row 1"]
) -> Float[Tensor, "batch 2 key"]:
    """Weight and number of the rows after each key that see it."""
    sees = block.device_visibility.sees().to(block.weight.dtype)
    sees_behind = sees.scatter(-1, own_key, 0.0)
    weight = block.weight[:, None]
    return torch.cat([weight, (weight > 0).to(sees_behind)], dim=1) @ sees_behind


def add_found_sinks(
    sinks: Int[Tensor, "batch 1 position"], found_sinks: Bool[Tensor, "head longest"]
) -> Int[Tensor, "batch shared position"]:
    """The table of sinks with the `found_sinks`, by head if there are any."""
    if not found_sinks.any():
        return sinks
    kind = found_sinks[:, : sinks.shape[-1]] * (1 + SINKS.index("found"))
    return torch.where(sinks > 0, sinks, kind)
