"""Keys that take attention whatever stands there, and what selectivity is left without them.

A sink is position 0; every place where the token that all sequences begin with stands again
(documents packed into one sequence); a token that the caller names; and a key that is found
to take most rows' attention (Gu et al. 2025, arXiv 2410.10781).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.rope.planes import Planes
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.cells import SINKS, Block, blocks
from ropelens.statistics.rows import Rows

LEAST_SHARE = 0.3
"""Mean attention of the rows behind a key above which it is found to be a sink."""

LEAST_ROWS = 16
"""Rows that such a mean is over, at least."""


def known_sinks(
    tokens: Int[Tensor, "sequence position"], *, named: Iterable[int] = ()
) -> Int[Tensor, "sequence 1 position"]:
    """The kind of sink that each key is by its place and token (see `SINKS`), or 0.

    Where sequences begin with different tokens none of them marks a beginning, and of the
    first kind is position 0 alone.
    """
    named = torch.tensor(list(named), dtype=tokens.dtype)
    kinds = torch.isin(tokens.cpu(), named) * (1 + SINKS.index("named"))
    first = 1 + SINKS.index("first")
    if (tokens[:, 0] == tokens[0, 0]).all():
        kinds[(tokens == tokens[0, 0]).cpu()] = first
    kinds[:, 0] = first
    return kinds[:, None]


@torch.no_grad()
def find_sinks(
    call: AttentionCall, rows: Rows, planes: Planes, sinks: Int[Tensor, "batch shared position"]
) -> Bool[Tensor, "head position"]:
    """The keys, beside the `sinks` known, that most sequences' rows attend to.

    Such a key takes more than 0.3 of the attention of the rows behind it, in the mean over 16
    of `rows` or more, in more than half of the sequences that have so many. Keys are told by
    their position: a token that is a sink wherever it stands is for the caller to name.
    """
    batch, heads, context = len(call.query), call.query.shape[1], call.key.shape[2]
    mass = torch.zeros(batch, heads, context, dtype=torch.float64)
    for block in blocks(call, rows, planes, sinks):
        attention = block.attention()[0] * block.weight[:, None, None, :, None]
        key = torch.arange(block.low, block.low + attention.shape[-1]).to(attention.device)
        behind = attention * (key < block.position[..., None])[:, None, None]
        own = mass[..., block.low : block.low + attention.shape[-1]]
        own += behind.sum(-2).flatten(1, 2).to("cpu", torch.float64)
    seen = (rows.position[..., None] > torch.arange(context)) & (rows.weight > 0)[..., None]
    seen &= call.start.cpu()[rows.position][..., None] <= torch.arange(context)
    enough = seen.sum(1) >= LEAST_ROWS
    weight = (seen * rows.weight[..., None].double()).sum(1).clamp(min=1e-300)
    takes = (mass / weight[:, None] > LEAST_SHARE) & enough[:, None] & (sinks == 0)
    return takes.sum(0) > enough.sum(0) / 2


def with_found(
    sinks: Int[Tensor, "batch 1 position"], found: Bool[Tensor, "head position"]
) -> Int[Tensor, "batch shared position"]:
    """The table of sinks with the found ones, a row for each head where there are any."""
    if not found.any():
        return sinks
    own = found[:, : sinks.shape[-1]] * (1 + SINKS.index("found"))
    return torch.where(sinks > 0, sinks, own)


def mean_others(
    k: Float[Tensor, "batch kv_head position coordinate"],
    rows: Rows,
    start: Int[Tensor, " position"],
    sinks: Int[Tensor, "batch shared position"],
) -> Float[Tensor, "batch shared_head row coordinate"]:
    """Mean of the keys that are no sinks among those that each row sees; 0 without any.

    A row for each kv head, or for each head where heads have sinks of their own.
    """
    group = sinks.shape[1] // k.shape[1] if sinks.shape[1] > 1 else 1
    other = (sinks == 0).to(k.device, k.dtype)[..., None]
    total = (k.repeat_interleave(group, dim=1) * other).cumsum(2)
    count = other.cumsum(2)
    position = rows.position.to(k.device)
    before = start.to(k.device)[position] - 1

    def seen(x: Tensor) -> Tensor:
        def at(place: Tensor) -> Tensor:
            index = place.clamp(min=0)[:, None, :, None]
            return x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3]))

        return at(position) - at(before) * (before >= 0)[:, None, :, None]

    return seen(total) / seen(count).clamp(min=1)


def push_of_others(
    block: Block,
    attention: Float[Tensor, "batch kv_head group row key"],
    read: Float[Tensor, "batch kv_head group row coordinate"],
    others: Float[Tensor, "batch kv_head group_shared row coordinate"],
) -> Float[Tensor, "batch kv_head group row coordinate"]:
    """q times what is read beyond an even look, of the keys that are no sinks, by row.

    With A0 a row's attention on sinks and E_u the mean over the other keys that it sees
    (`others`), sum_j over these of A_ij c_ij - (1 - A0) E_u c. `read` is sum_j A_ij k_j.
    Scores, and so this, are in nats; planes add up their coordinates'.
    """
    at_sinks = attention[..., block.columns] * (block.kind > 0)
    mass = at_sinks.sum(-1)
    on_sinks = (at_sinks.flatten(2, 3) @ block.k[:, :, block.columns]).view_as(read)
    return block.q * (read - on_sinks - (1 - mass)[..., None] * others)


@torch.no_grad()
def sum_selectivity(
    call: AttentionCall, rows: Rows, planes: Planes, sinks: Int[Tensor, "batch shared position"]
) -> tuple[Float[Tensor, "batch head term"], Float[Tensor, "batch head term"]]:
    """Sums over `rows` of the two parts of selectivity, nats: on sinks, and on other keys.

    With c the score of a plane, A0 and U0 a row's mass on sinks in A and when it looks evenly,
    E_a, E_e means over sinks under A and evenly, E_b, E_u alike over the other keys:

        selectivity_keys = (1 - A0) (E_b c - E_u c)
        selectivity_sink = A0 (E_a c - E_u c) - U0 (E_e c - E_u c)

    Together they are sum_j (A - U) c; for one sink the second is (A0 - U0) (c_sink - E_u c).
    """
    batch, heads = call.query.shape[:2]
    dtype = torch.promote_types(call.key.dtype, torch.float32)
    k = call.key.to(dtype)
    none = torch.zeros_like(sinks[:, :1])
    means = {"all": mean_others(k, rows, call.start, none)}
    means["others"] = mean_others(k, rows, call.start, sinks)
    total = torch.zeros(2, batch, heads, planes.terms, dtype=torch.float64)
    begin = 0
    for block in blocks(call, rows, planes, sinks):
        end = begin + block.position.shape[1]
        everything, others = (
            mean[:, :, begin:end].unflatten(1, (k.shape[1], -1)) for mean in means.values()
        )
        begin = end
        attention, _ = block.attention()
        read = (attention.flatten(2, 3) @ block.k).view_as(block.q)
        on_keys = push_of_others(block, attention, read, others)
        on_sinks = block.q * (read - everything) - on_keys
        for part, push in zip(total, (on_sinks, on_keys), strict=True):
            by_coordinate = (push * block.weight[:, None, None, :, None]).sum(-2).flatten(1, 2)
            part += planes.sum_coordinates(by_coordinate).to("cpu", torch.float64)
    return total[0], total[1]
