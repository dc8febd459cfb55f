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

from ropelens.attention.block import Block, blocks_of
from ropelens.attention.fast_products import products
from ropelens.attention.formulas import FOLLOW, learned_sink_mass
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.visibility import Visibility
from ropelens.rope.planes import unrotate
from ropelens.text.rows import generator_of

DRAWS = 4  # permutations of each sequence
EARLY = 1 / 3  # share of a sequence whose rows have too few keys to exchange
COPIES = {"cpu": 1 + DRAWS, "cuda": 2}  # parts of a usual block that a block may have


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
    """The keys of a call under permutations of their contents.

    `pi` has pi^-1 and pi; it is -1 for tokens that keep their place. `k` has the unchanged keys
    first, followed by the exchanged keys of each draw.
    """

    pi: Int[Tensor, "2 batch shared draw key"]
    k: Float[Tensor, "batch kv_head version key coordinate"]

    @classmethod
    def of(
        cls, sampled: SampledCall, order: Float[Tensor, "batch draw key"]
    ) -> "ExchangedKeys":
        """Permute the real, unhidden tokens except sinks, in the random `order`.

        In a layer whose rows see W keys, tokens stay within their block of W/2 keys.
        """
        index = torch.arange(order.shape[-1])
        is_sink = (sampled.sink_kind > 0).any(2).cpu()
        movable = ~(is_sink | sampled.rows.padding(index)[:, None])[:, :, None]
        span = exchange_span(sampled.call.visibility)
        windowed = sampled.rows.length[:, None] > span
        block = torch.where(windowed, index // max(1, span // 2), 0)[:, None, None]
        # Both orders list the movable tokens of each block first, and then all other tokens.
        last = index + 2.0 + len(index)
        drawn = torch.where(movable, order[:, None].double() + block, last).argsort(-1)
        places = torch.where(movable, index, last).argsort(-1).expand_as(drawn)
        inverse = torch.empty_like(drawn).scatter_(-1, drawn, places)
        contents = torch.empty_like(drawn).scatter_(-1, places, drawn)
        pi = torch.stack([inverse, contents]).masked_fill(~movable, -1).to(sampled.k.device)
        planes = sampled.planes.of_keys(sampled.k.shape[1])
        back = replace(planes, inv_freq=-planes.inv_freq[..., None, :])
        still = sampled.k_still[:, :, None].expand(-1, -1, order.shape[1], -1, -1)
        moved = still.gather(-2, contents.to(still.device)[..., None].expand_as(still))
        keys = sampled.k[:, :, None], unrotate(moved, sampled.key_position, back)
        return cls(pi, torch.cat(keys, dim=2))


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
    shape = (len(sampled.k), sets.shape[1], sampled.q.shape[1], len(FOLLOW))
    total = torch.zeros(shape, dtype=torch.float64)
    late = sampled.rows.from_share(EARLY)
    if late.order is None or not late.weight.any():
        return total
    late_call = sampled.with_rows(late)
    keys = ExchangedKeys.of(late_call, late.order)
    for block in blocks_of(late_call, parts=COPIES[sampled.k.device.type]):
        total[:, :, block.query_heads] += block.sum_over_sets(overlaps(block, keys), sets)
    return total


def overlaps(
    block: Block, keys: ExchangedKeys
) -> Float[Tensor, "batch kv_head group row follow"]:
    """The values of `FOLLOW` in each row, the mean over the draws."""
    columns = block.columns
    pi = (
        keys.pi[..., columns]
        if keys.pi.shape[2] == 1
        else keys.pi[:, :, block.heads, ..., columns]
    )
    # V has the keys whose contents stay visible, and W the places where these contents are.
    seen = block.visible[:, None, None, :, None] & block.visibility.sees_each(pi)[:, :, :, None]
    v, w = seen.to(block.k)
    k = keys.k[:, block.heads, :, columns]
    scores = block.q.new_empty(*block.q.shape[:4], k.shape[2] * k.shape[3])
    products(block.q, k.flatten(2, 3), out=scores, scale=block.call.scale)
    scores = block.call.squash(scores).unflatten(-1, k.shape[2:4])
    block.hide(scores.movedim(-2, 0))
    attention, after = scores.softmax(-1).tensor_split([1], dim=-2)
    before = attention * v
    index = (pi[1] - block.keys.start).clamp(0, len(block.keys) - 1)[:, :, None, None]
    moved = attention.expand_as(after).gather(-1, index.expand_as(after)) * w
    others = before.new_empty(3, *before.shape)
    torch.mul(after, v, out=others[0])
    torch.mul(after, w, out=others[1])
    torch.mul(attention, w, out=others[2])
    mass = before.sum(-1)
    others *= (mass / others.sum(-1).clamp(min=1e-30))[..., None]
    torch.minimum(before, others[0], out=others[0])
    torch.minimum(moved, others[1:], out=others[1:])
    numbers = torch.cat([others.sum(-1), mass[None]]).mean(-1)
    if block.call.sink_logits is not None:
        numbers *= 1 - learned_sink_mass(block)
    return torch.cat([numbers, torch.ones_like(numbers[:1])]).movedim(0, -1)
