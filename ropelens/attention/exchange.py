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

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.attention.block import Block, ByRow, blocks_of
from ropelens.attention.fast_products import HIDDEN, products
from ropelens.attention.formulas import learned_sink_mass
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.visibility import Visibility
from ropelens.rope.planes import unrotate
from ropelens.text.rows import generator_of

FOLLOW = ("position", "content", "chance", "mass", "rows")
"""Sums over rows and draws: the three overlaps weighted by the attention on V, this attention,
and the weight of the rows."""

DRAWS = 4  # permutations of each sequence
EARLY = 1 / 3  # share of a sequence whose rows have too few keys to exchange


def exchange_order(
    length: Int[Tensor, " batch"], *, seed: int, numbers: Sequence[int]
) -> Float[Tensor, "batch draw token"]:
    """Random numbers that permute the tokens of sequences; they do not depend on the batch."""
    order = torch.zeros(len(length), DRAWS, int(length.max()))
    for row, number, count in zip(order, numbers, length.tolist(), strict=True):
        for draw in range(DRAWS):
            row[draw, :count].uniform_(generator=generator_of(seed, number, draw))
    return order


@dataclass(frozen=True)
class ExchangedKeys:
    """The keys of a call under permutations of their contents; the first axis counts draws.

    `inverse` is pi^-1, and `movable` marks the tokens that take part. `kinds` are the keys
    whose scores are compared with A: the exchanged keys, the exchanged keys at pi^-1(j), and
    the unchanged keys at pi^-1(j).
    """

    inverse: Int[Tensor, "draw batch shared key"]
    movable: Bool[Tensor, "draw batch shared key"]
    kinds: tuple[Float[Tensor, "draw batch kv_head key coordinate"], ...]

    @classmethod
    def of(
        cls, sampled: SampledCall, order: Float[Tensor, "batch draw key"]
    ) -> "ExchangedKeys":
        """Permute the real, unhidden tokens that are no sinks, in the random `order`.

        In a layer whose rows see W keys, tokens stay within their block of W/2 keys.
        """
        order = order.transpose(0, 1)[:, :, None].to(sampled.k)
        index = torch.arange(order.shape[-1], device=order.device)
        is_sink = (sampled.sink_kind > 0).any(2)
        movable = ~(is_sink | sampled.padding[:, None]).expand(len(order), -1, -1, -1)
        span = exchange_span(sampled.call.visibility)
        windowed = sampled.rows.length.to(index.device)[:, None, None] > span
        block = torch.where(windowed, index // max(1, span // 2), 0)
        # Both orders list the movable tokens of each block first by block, then the others.
        last = (index + 2 + len(index)).to(order)
        drawn = torch.where(movable, order + block, last).argsort(-1)
        places = torch.where(movable, index, last).argsort(-1)
        inverse = torch.empty_like(drawn).scatter_(-1, drawn, places)
        contents = torch.empty_like(drawn).scatter_(-1, places, drawn)

        def at(keys: Tensor, index: Tensor) -> Tensor:
            index = index[..., None].expand(*index.shape[:2], *keys.shape[-3:])
            return keys.expand(len(index), *keys.shape[-4:]).gather(-2, index)

        planes = sampled.planes.of_keys(sampled.k.shape[1])
        back = replace(planes, inv_freq=-planes.inv_freq)
        exchanged = unrotate(at(sampled.k_still, contents), sampled.key_position, back)
        kinds = exchanged, at(exchanged, inverse), at(sampled.k, inverse)
        return cls(inverse, movable, kinds)


def exchange_span(visibility: Visibility) -> int:
    """Number of keys that rows see under a sliding window; otherwise more than all keys."""
    first, count = visibility.first, visibility.first.shape[1]
    slides = bool((first[:, -1] > first[:, count // 4]).any())
    return visibility.farthest + 1 if slides else visibility.keys.stop + 1


@torch.no_grad()
def follow_sums(
    sampled: SampledCall, sets: Bool[Tensor, "batch set position"]
) -> Float[Tensor, "batch set head follow"]:
    """The sums `FOLLOW` of each sequence and query head over the late rows of each set."""
    order = sampled.rows.order
    late = sampled.rows.position >= sampled.rows.length[:, None] * EARLY
    rows = replace(sampled.rows, weight=sampled.rows.weight * late)
    shape = (len(sampled.k), sets.shape[1], sampled.q.shape[1], len(FOLLOW))
    total = torch.zeros(shape, dtype=torch.float64)
    if order is None:
        return total
    late_call = sampled.with_rows(rows)
    keys = ExchangedKeys.of(late_call, order)
    for block in blocks_of(late_call):
        position = block.position[:, None].expand(*sets.shape[:2], -1).to(sets.device)
        weight = sets.gather(2, position).to(block.weight) * block.weight[:, None]
        by_row = torch.stack(overlaps(block, keys), dim=-1)
        sums = (weight[:, :, None, None, None] @ by_row[:, None])[..., 0, :]
        total[:, :, block.query_heads] += sums.flatten(2, 3).to("cpu", torch.float64)
    return total


def overlaps(block: Block, keys: ExchangedKeys) -> list[ByRow]:
    """The values of `FOLLOW` in each row, the mean over the draws."""
    columns, draws = block.columns, len(keys.inverse)
    of_heads = slice(None) if keys.inverse.shape[2] == 1 else block.heads
    inverse = keys.inverse[:, :, of_heads, columns]
    seen = block.visible[:, None] & keys.movable[:, :, of_heads, None, columns]
    seen = (seen & block.visibility.sees_each(inverse))[:, :, :, None]  # V
    attention = block.attention * seen
    mass = attention.sum(-1)
    before = attention / mass.clamp(min=1e-30)[..., None]
    mass = mass * (1 - learned_sink_mass(block))
    q = block.q.expand(draws, *block.q.shape).flatten(0, 1)
    numbers = []
    for kind in keys.kinds:
        k = kind[:, :, block.heads, columns].flatten(0, 1) * block.call.scale
        scores = products(q, k, out=q.new_empty(*q.shape[:4], k.shape[2]))
        scores = block.call.squash(scores).unflatten(0, (draws, -1))
        after = torch.where(seen, scores, HIDDEN).softmax(-1)
        numbers.append((torch.minimum(before, after).sum(-1) * mass).mean(0))
    return [*numbers, mass.mean(0), torch.ones_like(mass[0])]
