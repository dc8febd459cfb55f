"""Attention after keys exchanged their contents: does a head follow positions or contents?

Position j gets the unrotated key k~ of position pi(j) and rotates it as position j does, so the
content of key j is then at pi^-1(j). Nothing else changes. With A the attention of a row before
and B after, all normalized over the keys V that the row sees, that are not sinks, and whose
content the row still sees, and with TV the total variation distance:

    position  1 - TV(B(j), A(j))         attention stays at the same positions
    content   1 - TV(B(pi^-1(j)), A(j))  attention moves with the contents
    chance    1 - TV(A(pi^-1(j)), A(j))  overlap of A with itself after the permutation

docs/measures.md defines pi, the rows, and the numbers of a head. It is a direct effect at one
attention call: the rest of the model does not run again.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.attention.block import Block, blocks_of
from ropelens.attention.formulas import FOLLOW, learned_sink_mass
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.visibility import Visibility
from ropelens.rope.planes import unrotate
from ropelens.text.rows import generator_of

DRAWS = 4  # permutations of each sequence; its rows use them in turn
AT_ONCE = {"cpu": 1, "cuda": DRAWS}  # draws of a batch: a GPU has room, a CPU has small caches
EARLY = 1 / 3  # share of a sequence whose rows have too few keys to exchange


def exchange_order(
    length: Int[Tensor, " batch"], *, width: int, seed: int, numbers: Sequence[int]
) -> Float[Tensor, "batch draw token"]:
    """Random numbers that permute the tokens of sequences; they do not depend on the batch."""
    order = torch.zeros(len(length), DRAWS, width)
    for row, number, count in zip(order, numbers, length.tolist(), strict=True):
        for draw in range(DRAWS):
            row[draw, :count].uniform_(generator=generator_of(seed, number, draw))
    return order


def exchanged(
    sampled: SampledCall,
    still: Float[Tensor, "batch kv_head key coordinate"],
    order: Float[Tensor, "batch key"],
) -> tuple[SampledCall, Int[Tensor, "2 batch shared key"]]:
    """The call after its keys exchanged their contents (`still` is k~), with pi^-1 and pi.

    Real, unhidden tokens that are not sinks are permuted in the random `order`; pi is -1 for
    all others. In a layer whose rows see W keys, tokens stay within their block of W/2 keys.
    """
    index, call = torch.arange(order.shape[-1]), sampled.call
    is_sink = (sampled.sinks > 0).unflatten(1, sampled.sink_kind.shape[1:3]).any(2)
    real = ~sampled.rows.padding(index)
    movable, block = ~is_sink & real[:, None], index // block_size(call.visibility, real)
    # Both orders list the movable tokens of each block first, and then all other tokens.
    last = index + 2.0 + len(index)
    drawn = torch.where(movable, order[:, None].double() + block, last).argsort(-1)
    places = torch.where(movable, index, last).argsort(-1)
    inverse = torch.empty_like(drawn).scatter_(-1, drawn, places)
    contents = torch.empty_like(drawn).scatter_(-1, places, drawn)
    pi = torch.stack([inverse, contents]).masked_fill(~movable, -1).to(sampled.k.device)
    planes = sampled.planes.of_keys(sampled.k.shape[1])
    key = still.gather(-2, contents.to(still.device)[..., None].expand_as(still))
    back = replace(planes, inv_freq=-planes.inv_freq)
    key = unrotate(key, sampled.key_position, back)
    call = replace(call, key=key)
    return SampledCall(call, sampled.rows, sampled.planes, sinks=sampled.sinks), pi


def block_size(
    visibility: Visibility, real: Bool[Tensor, "batch key"]
) -> Int[Tensor, "batch 1 1"]:
    """Half of the keys that the `real` rows of a sequence see, or all keys without a window.

    A window is an interval whose start moves, or a mask that shows less than 2/3 of the keys.
    """
    rows = real[:, visibility.position[0] - visibility.keys.start]
    widest, end = (visibility.count.cpu() * rows).amax(1), visibility.keys.stop
    if visibility.mask is None:
        slides = (visibility.first * rows).amax(1) > visibility.first.where(rows, end).amin(1)
    else:
        slides = 3 * widest < 2 * real.sum(1)
    return torch.where(slides, (widest // 2).clamp(min=1), end + 1)[:, None, None]


@torch.no_grad()
def follow_sums(
    sampled: SampledCall, sets: Bool[Tensor, "batch set position"], *, single: bool
) -> Float[Tensor, "batch set head follow"]:
    """The sums `FOLLOW` of each sequence and query head over the late rows of each set.

    The rows of a sequence use its permutations in turn. Every row of a `single` long sequence
    uses all of them.
    """
    shape = (len(sampled.k), sets.shape[1], sampled.q.shape[1], len(FOLLOW))
    order, device = sampled.rows.order, sampled.k.device
    total = torch.zeros(shape, dtype=torch.float64, device=device)
    if order is None:  # rows that are scored without exchanged keys
        return total.cpu()
    at_once, step = AT_ONCE[sampled.k.device.type], 1 if single else DRAWS
    sequences = torch.arange(len(sets)).repeat(at_once)
    repeated = sampled if at_once == 1 else sampled.of_sequences(sequences)
    still = sampled.k_still if at_once == 1 else sampled.k_still[sequences]
    for first in range(0, DRAWS, at_once):
        draws = range(first, first + at_once)
        before = repeated.with_rows(sampled.rows.in_turn(draws, step).from_share(EARLY))
        after, pi = exchanged(before, still, torch.cat([order[:, draw] for draw in draws]))
        for block, exchanged_block in zip(blocks_of(before), blocks_of(after), strict=True):
            by_row = overlaps(block, exchanged_block, pi) * (step / DRAWS)
            sums = block.sum_over_sets(by_row, sets[sequences]).unflatten(0, (at_once, -1))
            total[:, :, block.query_heads] += sums.sum(0)
    return total.cpu()


def overlaps(
    block: Block, after: Block, pi: Int[Tensor, "2 batch shared key"]
) -> Float[Tensor, "batch kv_head group row follow"]:
    """The values of `FOLLOW` in each row; `after` is the block with exchanged keys."""
    pi = pi[..., block.columns] if pi.shape[2] == 1 else pi[:, :, block.heads, block.columns]
    # V has the keys whose contents stay visible, and W the places where these contents are.
    seen = block.visible[:, None] & block.device_visibility.sees_each(pi)
    v, w = seen[:, :, :, None].to(block.k)
    attention, index = block.attention, (pi[1] - block.keys.start).clamp(0, len(block.keys) - 1)
    moved = attention.gather(-1, index[:, :, None, None].expand_as(attention)) * w
    mass, others = moved.sum(-1), moved.new_empty(3, *moved.shape)
    exchanged_attention = torch.softmax(after.scores, -1, out=after.scores)
    torch.mul(exchanged_attention, v, out=others[0])
    torch.mul(exchanged_attention, w, out=others[1])
    torch.mul(attention, w, out=others[2])
    others *= (mass / others.sum(-1).clamp(min=1e-30))[..., None]
    torch.minimum(attention, others[0], out=others[0])
    torch.minimum(moved, others[1:], out=others[1:])
    numbers = torch.cat([others.sum(-1), mass[None]])
    if block.call.sink_logits is not None:
        numbers *= 1 - learned_sink_mass(block)
    return torch.cat([numbers, torch.ones_like(numbers[:1])]).movedim(0, -1)
