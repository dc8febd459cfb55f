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

AT_ONCE = {"cpu": 1, "cuda": DRAWS}
"""Draws of a batch: a GPU has room, a CPU has small caches."""

SHARE = 1.5  # size of a block, compared with blocks of other statistics
EARLY = 1 / 3  # share of a sequence whose rows have too few keys to exchange


def exchange_order(
    length: Int[Tensor, " batch"], *, width: int, seed: int, numbers: Sequence[int]
) -> Float[Tensor, "batch draw token"]:
    """Random numbers that permute the tokens of sequences; they do not depend on the batch."""
    order = torch.zeros(len(length), DRAWS, width, dtype=torch.float32, device="cpu")
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
        pair = sampled.with_rows(self.rows)
        pair.call = replace(sampled.call, visibility=self.visibility)
        pair.k = self._keys_of(sampled)
        pair.row_q = self._queries_of(sampled)
        return pair

    def _keys_of(
        self, sampled: SampledCall
    ) -> Float[Tensor, "sequence kv_head key coordinate"]:
        k = sampled.k
        still = sampled.k_still
        shape = (len(self.contents), *k.shape)
        keys = k.new_empty(2, *shape)
        keys[0] = k
        index = self.contents[..., None].expand(shape)
        contents = still.expand(shape).gather(-2, index)
        planes = sampled.planes.of_keys(k.shape[1])
        unrotate(contents, sampled.key_position, planes, sign=1, out=keys[1])
        return keys.flatten(0, 2)

    def _queries_of(
        self, sampled: SampledCall
    ) -> Float[Tensor, "sequence kv_head group row coordinate"]:
        batch, heads, _, coordinates = sampled.q.shape
        index = self.row_index.unflatten(0, (-1, batch))[:, :, None, :, None]
        turns = len(index)
        rows = index.expand(turns, batch, heads, index.shape[3], coordinates)
        q = sampled.q.expand(turns, -1, -1, -1, -1).gather(-2, rows)
        return q.flatten(0, 1).unflatten(1, (sampled.k.shape[1], -1))

    @kept(most=2 * DRAWS)
    def weights(
        self, sets: Bool[Tensor, "batch set position"], share: float
    ) -> "SetWeights":
        """The `share` of the weights of the rows of each set, in each draw."""
        number = self.pi.shape[1]
        position = self.rows.position[:number, None]
        weight = self.rows.weight[:number, None]
        sets = sets.repeat(number // len(sets), 1, 1)
        in_sets = sets.gather(2, position.expand(-1, sets.shape[1], -1))
        of_rows = in_sets * (weight * share)
        return SetWeights(of_rows, total=of_rows.sum(-1, keepdim=True))


@dataclass(frozen=True)
class SetWeights:
    """The weights of the rows of each set, and their sum."""

    of_rows: Float[Tensor, "sequence set row"]
    total: Float[Tensor, "sequence set 1"]


@dataclass(frozen=True)
class Turns:
    """Draws that are computed together. A draw has every `step`-th row, or all rows."""

    draws: range
    step: int

    @property
    def share(self) -> float:
        """Share of the weight of a row that counts in one of its draws."""
        return self.step / DRAWS


@kept(most=2 * DRAWS)
def permute_keys(
    rows: Rows,
    visibility: Visibility,
    sinks: Int[Tensor, "batch shared key"],
    kv_heads: int,
    turns: Turns,
    device: torch.device,
) -> Exchange:
    """Permute tokens that are not sinks; if rows see W keys, within blocks of W/2 keys."""
    assert rows.order is not None
    index = torch.arange(rows.order.shape[-1], device="cpu")
    is_sink = (by_kv_head(sinks, kv_heads) > 0).any(2)
    real = ~rows.padding(index)
    movable = ~is_sink & real[:, None]
    block = index // block_size(visibility, real)
    random = rows.order[:, turns.draws.start : turns.draws.stop]
    random = random.transpose(0, 1)[:, :, None]
    permuted = _permute(random.double() + block, movable)
    pi = torch.stack([permuted.inverse, permuted.contents])
    pi = pi.masked_fill(~movable, -1).flatten(1, 2)
    twice = [*turns.draws, *turns.draws]
    rows_in_turn = rows.in_turn(twice, turns.step).from_share(EARLY)
    sequences = torch.arange(len(real), device="cpu").repeat(len(twice))
    of_sequences = visibility.of_sequences(sequences)
    return Exchange(
        rows=rows_in_turn,
        visibility=of_sequences,
        row_index=of_sequences.index_of(rows_in_turn.position).to(device),
        contents=permuted.contents.to(device),
        pi=pi.to(device),
    )


@dataclass(frozen=True)
class Permutation:
    """The token whose content each token gets, and the inverse; other tokens stay."""

    contents: Int[Tensor, "draw batch shared key"]
    inverse: Int[Tensor, "draw batch shared key"]


def _permute(
    number: Float[Tensor, "draw batch 1 key"],
    movable: Bool[Tensor, "batch shared key"],
) -> Permutation:
    """Order the movable tokens by their `number`, whose integer part is their block."""
    index = torch.arange(movable.shape[-1], device="cpu")
    # Both orders list the movable tokens of each block first, and then all other tokens.
    last = index.float() + 2.0 + len(index)
    drawn = torch.where(movable, number, last).argsort(-1)
    places = torch.where(movable, index, last).argsort(-1).expand_as(drawn)
    return Permutation(
        contents=torch.empty_like(drawn).scatter_(-1, places, drawn),
        inverse=torch.empty_like(drawn).scatter_(-1, drawn, places),
    )


def block_size(
    visibility: Visibility, real: Bool[Tensor, "batch key"]
) -> Int[Tensor, "batch 1 1"]:
    """Half of the keys that the `real` rows of a sequence see, or all keys without a window.

    A window is an interval whose start moves, or a mask that shows less than 2/3 of the keys.
    """
    real_rows = real[:, visibility.position[0] - visibility.keys.start]
    widest = (visibility.count.cpu() * real_rows).amax(1)
    end = visibility.keys.stop
    if visibility.mask is None:
        latest_start = (visibility.first * real_rows).amax(1)
        slides = latest_start > visibility.first.where(real_rows, end).amin(1)
    else:
        slides = 3 * widest < 2 * real.sum(1)
    size = torch.where(slides, (widest // 2).clamp(min=1), end + 1)
    return size[:, None, None]


@torch.no_grad()
def follow_sums(
    sampled: SampledCall, sets: Bool[Tensor, "batch set position"], *, single: bool
) -> Float[Tensor, "batch set head follow"]:
    """The sums `FOLLOW` of each sequence and query head over the late rows of each set.

    The rows of a sequence use its permutations in turn. Every row of a `single` long sequence
    uses all permutations.
    """
    if sampled.rows.order is None:  # rows that are scored without exchanged keys
        shape = (len(sampled.k), sets.shape[1], sampled.q.shape[1], len(FOLLOW))
        return torch.zeros(shape, dtype=torch.float64, device="cpu")
    at_once = AT_ONCE[sampled.k.device.type]
    parts = []
    for first in range(0, DRAWS, at_once):
        draws = range(first, first + at_once)
        turns = Turns(draws, step=1 if single else DRAWS)
        parts.append(_sums_of_draws(sampled, sets, turns))
    return reduce(torch.add, parts)


def _sums_of_draws(
    sampled: SampledCall, sets: Bool[Tensor, "batch set position"], turns: Turns
) -> Float[Tensor, "batch set head follow"]:
    """`follow_sums` over some draws."""
    kv_heads = sampled.k.shape[1]
    device = sampled.k.device
    exchange = permute_keys(
        sampled.rows, sampled.call.visibility, sampled.sinks, kv_heads, turns, device
    )
    weights = exchange.weights(sets, turns.share)
    pair = exchange.of_call(sampled)
    by_row = pair.k.new_empty(4, len(weights.of_rows), *pair.row_q.shape[1:4])
    for block in blocks_of(pair, share=SHARE):
        of_block = by_row[:, :, block.heads, :, block.rows]
        write_overlaps(block, exchange.pi, out=of_block)
    by_row = by_row.transpose(0, 1).flatten(1, 3)
    weight = on_device(weights.of_rows, device).to(by_row)
    sums = (weight @ by_row.mT).to("cpu", torch.float64)
    mass, position, chance, content = sums.unflatten(-1, (4, -1)).unbind(2)
    total = weights.total.expand_as(mass)
    by_draw = torch.stack([position, content, chance, mass, total], dim=-1)
    return by_draw.unflatten(0, (len(turns.draws), -1)).sum(0)


def write_overlaps(
    block: Block,
    pi: Int[Tensor, "2 sequence shared key"],
    *,
    out: Float[Tensor, "4 sequence kv_head group row"],
) -> None:
    """Mass, and overlaps of position, chance and content, before and after the exchange."""
    has_learned_sink = block.call.sink_logits is not None
    tables = _tables_of(block, pi)
    if has_learned_sink:
        attention = block.attention
    else:
        attention = torch.softmax(block.scores, -1, out=block.scores)
    before_and_after = attention.unflatten(0, (2, -1))
    # Attention on V before and after, and then on W before and after.
    parts = block.buffer("parts", 2).unflatten(1, (2, -1))
    parts = torch.mul(before_and_after, tables.v_and_w, out=parts).flatten(0, 1)
    mass = torch.sum(parts, -1, out=out)[0]
    parts[1:].mul_((mass / out[1:].clamp(min=1e-30))[..., None])
    # Outside of W, the contents that moved count for nothing, because the other part is 0.
    moved = before_and_after[0]
    torch.gather(parts[0], -1, tables.pi.expand_as(moved), out=moved)
    torch.minimum(parts[0], parts[1], out=parts[1])
    torch.minimum(moved, parts[2:], out=parts[2:])
    torch.sum(parts[1:], -1, out=out[1:])
    if has_learned_sink:
        out *= 1 - learned_sink_mass(block)[: out.shape[1]]


@dataclass(frozen=True)
class Tables:
    """V and W of the rows of a block as numbers, and pi as indices of its keys.

    V has the keys whose contents stay visible, and W the places where these contents are.
    """

    v_and_w: Float[Tensor, "2 1 sequence shared 1 row key"]
    pi: Int[Tensor, "sequence shared 1 1 key"]


def _tables_of(block: Block, pi: Int[Tensor, "2 sequence shared key"]) -> Tables:
    if pi.shape[2] == 1:
        return _shared_tables(block.device_visibility, pi, block.k.dtype)
    return _tables(block.device_visibility, pi[:, :, block.heads], block.k.dtype)


def _tables(
    visible: Visibility, pi: Int[Tensor, "2 sequence shared key"], dtype: torch.dtype
) -> Tables:
    first = visible.keys.start
    last = visible.keys.stop
    before = visible.of_sequences(slice(pi.shape[1]))
    own = pi[..., first:last]
    seen = before.sees()[:, None] & before.sees_each(own)
    index = (own[1] - first).clamp(0, last - first - 1)
    return Tables(
        v_and_w=seen[:, None, :, :, None].to(dtype), pi=index[:, :, None, None]
    )


_shared_tables = kept(most=1)(_tables)
