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
from dataclasses import dataclass, replace
from functools import reduce

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.attention.block import Block, blocks_of
from ropelens.attention.formulas import FOLLOW, learned_sink_mass
from ropelens.attention.sampled_call import SampledCall, by_kv_head
from ropelens.attention.visibility import Visibility
from ropelens.caches import kept, on_device
from ropelens.rope.planes import unrotate
from ropelens.text.rows import Rows, generator_of

DRAWS = 4  # permutations of each sequence, which the rows use in turn
AT_ONCE = {
    "cpu": 1,
    "cuda": DRAWS,
}  # draws of a batch: a GPU has room, a CPU has small caches
SHARE = 1.5  # size of a block, compared with blocks of other statistics
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


@dataclass(frozen=True, eq=False)
class Exchange:
    """Permutations of the keys of a batch, one for each draw, which layers can share.

    `contents` has pi for keys that exchange their contents, and the own place of other keys.
    `pi` stacks pi^-1 and pi, and is -1 for other keys. `rows` and `visibility` belong to the
    sequences of all draws before the exchange, followed by the same sequences after it.
    `row_index` has the indices of the rows in the call.
    """

    rows: Rows
    visibility: Visibility
    row_index: Int[Tensor, "_ row"]
    contents: Int[Tensor, "draw batch shared key"]
    pi: Int[Tensor, "2 sequence shared key"]

    def of_call(self, sampled: SampledCall) -> SampledCall:
        """The call of all draws, before and after its keys exchanged their contents."""
        k, still = sampled.k, sampled.k_still
        shape, index = (len(self.contents), *k.shape), self.contents[..., None]
        keys = k.new_empty(2, *shape)
        keys[0] = k
        contents = still.expand(shape).gather(-2, index.expand(shape))
        planes = sampled.planes.of_keys(k.shape[1])
        unrotate(contents, sampled.key_position, planes, sign=1, out=keys[1])
        pair = sampled.with_rows(self.rows)
        pair.call = replace(sampled.call, visibility=self.visibility)
        pair.k = keys.flatten(0, 2)
        index = self.row_index.unflatten(0, (-1, len(k)))[:, :, None, :, None]
        shape = (len(index), *sampled.q.shape[:2], index.shape[3], sampled.q.shape[3])
        q = sampled.q.expand(len(index), -1, -1, -1, -1).gather(-2, index.expand(shape))
        pair.row_q = q.flatten(0, 1).unflatten(1, (k.shape[1], -1))
        return pair

    @kept(most=2 * DRAWS)
    def weights(
        self, sets: Bool[Tensor, "batch set position"], share: float
    ) -> tuple[Float[Tensor, "sequence set row"], Float[Tensor, "sequence set 1"]]:
        """The `share` of the weights of the rows of each set, in each draw, and their sum."""
        number = self.pi.shape[1]
        position, weight = (
            x[:number, None] for x in (self.rows.position, self.rows.weight)
        )
        sets = sets.repeat(number // len(sets), 1, 1)
        in_sets = sets.gather(2, position.expand(-1, sets.shape[1], -1))
        weight = in_sets * (weight * share)
        return weight, weight.sum(-1, keepdim=True)


@kept(most=2 * DRAWS)
def permute_keys(
    rows: Rows,
    visibility: Visibility,
    sinks: Int[Tensor, "batch shared key"],
    kv_heads: int,
    draws: range,
    step: int,
    device: torch.device,
) -> Exchange:
    """Permute tokens that are not sinks; if rows see W keys, within blocks of W/2 keys."""
    assert rows.order is not None
    index, order = (
        torch.arange(rows.order.shape[-1]),
        rows.order[:, draws.start : draws.stop],
    )
    is_sink = (by_kv_head(sinks, kv_heads) > 0).any(2)
    real = ~rows.padding(index)
    movable, block = ~is_sink & real[:, None], index // block_size(visibility, real)
    # Both orders list the movable tokens of each block first, and then all other tokens.
    last = index + 2.0 + len(index)
    order = order.transpose(0, 1)[:, :, None].double()
    drawn = torch.where(movable, order + block, last).argsort(-1)
    places = torch.where(movable, index, last).argsort(-1).expand_as(drawn)
    inverse = torch.empty_like(drawn).scatter_(-1, drawn, places)
    contents = torch.empty_like(drawn).scatter_(-1, places, drawn)
    pi = torch.stack([inverse, contents]).masked_fill(~movable, -1).flatten(1, 2)
    rows = rows.in_turn([*draws, *draws], step).from_share(EARLY)
    visibility = visibility.of_sequences(torch.arange(len(real)).repeat(2 * len(draws)))
    row_index = visibility.index_of(rows.position).to(device)
    return Exchange(rows, visibility, row_index, contents.to(device), pi.to(device))


def block_size(
    visibility: Visibility, real: Bool[Tensor, "batch key"]
) -> Int[Tensor, "batch 1 1"]:
    """Half of the keys that the `real` rows of a sequence see, or all keys without a window.

    A window is an interval whose start moves, or a mask that shows less than 2/3 of the keys.
    """
    rows = real[:, visibility.position[0] - visibility.keys.start]
    widest, end = (visibility.count.cpu() * rows).amax(1), visibility.keys.stop
    if visibility.mask is None:
        slides = (visibility.first * rows).amax(1) > visibility.first.where(
            rows, end
        ).amin(1)
    else:
        slides = 3 * widest < 2 * real.sum(1)
    return torch.where(slides, (widest // 2).clamp(min=1), end + 1)[:, None, None]


@torch.no_grad()
def follow_sums(
    sampled: SampledCall, sets: Bool[Tensor, "batch set position"], *, single: bool
) -> Float[Tensor, "batch set head follow"]:
    """The sums `FOLLOW` of each sequence and query head over the late rows of each set.

    The rows of a sequence use its permutations in turn. Every row of a `single` long sequence
    uses all permutations.
    """
    rows, device, parts = sampled.rows, sampled.k.device, []
    at_once, step = AT_ONCE[device.type], 1 if single else DRAWS
    if rows.order is None:  # rows that are scored without exchanged keys
        shape = (len(sampled.k), sets.shape[1], sampled.q.shape[1], len(FOLLOW))
        return torch.zeros(shape, dtype=torch.float64)
    for draws in (range(first, first + at_once) for first in range(0, DRAWS, at_once)):
        tables = sampled.call.visibility, sampled.sinks, sampled.k.shape[1]
        exchange = permute_keys(rows, *tables, draws, step, device)
        weight, number = exchange.weights(sets, step / DRAWS)
        pair = exchange.of_call(sampled)
        by_row = pair.k.new_empty(4, len(weight), *pair.row_q.shape[1:4])
        for block in blocks_of(pair, share=SHARE):
            overlaps(block, exchange.pi, out=by_row[:, :, block.heads, :, block.rows])
        by_row = by_row.transpose(0, 1).flatten(1, 3)
        sums = (on_device(weight, device).to(by_row) @ by_row.mT).to(
            "cpu", torch.float64
        )
        mass, position, chance, content = sums.unflatten(-1, (4, -1)).unbind(2)
        number = number.expand_as(mass)
        part = torch.stack([position, content, chance, mass, number], dim=-1)
        parts.append(part.unflatten(0, (at_once, -1)).sum(0))
    return reduce(torch.add, parts)


def overlaps(
    block: Block,
    pi: Int[Tensor, "2 sequence shared key"],
    *,
    out: Float[Tensor, "4 sequence kv_head group row"],
) -> None:
    """Mass, and overlaps of position, chance and content, before and after the exchange."""
    learned, visible = block.call.sink_logits is not None, block.device_visibility
    if pi.shape[2] == 1:
        v_and_w, index = _shared_tables(visible, pi, block.k.dtype)
    else:
        v_and_w, index = _tables(visible, pi[:, :, block.heads], block.k.dtype)
    scores = block.scores
    attention = block.attention if learned else torch.softmax(scores, -1, out=scores)
    before_and_after = attention.unflatten(0, (2, -1))
    parts = block.buffer("parts", 2).unflatten(1, (2, -1))
    parts = torch.mul(before_and_after, v_and_w, out=parts).flatten(0, 1)
    mass = torch.sum(parts, -1, out=out)[0]
    parts[1:].mul_((mass / out[1:].clamp(min=1e-30))[..., None])
    # Outside of W, the contents that moved count for nothing, because the other part is 0.
    moved = before_and_after[0]
    torch.gather(parts[0], -1, index.expand_as(moved), out=moved)
    torch.minimum(parts[0], parts[1], out=parts[1])
    torch.minimum(moved, parts[2:], out=parts[2:])
    torch.sum(parts[1:], -1, out=out[1:])
    if learned:
        out *= 1 - learned_sink_mass(block)[: out.shape[1]]


def _tables(
    visible: Visibility, pi: Int[Tensor, "2 sequence shared key"], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """V and W as numbers [2, 1, sequence, shared, 1, row, key], and pi as indices of keys.

    V has the keys whose contents stay visible, and W the places where these contents are.
    """
    first, last = visible.keys.start, visible.keys.stop
    before, own = visible.of_sequences(slice(pi.shape[1])), pi[..., first:last]
    seen = before.sees()[:, None] & before.sees_each(own)
    index = (own[1] - first).clamp(0, last - first - 1)
    return seen[:, None, :, :, None].to(dtype), index[:, :, None, None]


_shared_tables = kept(most=1)(_tables)
