"""Keys that take attention whatever stands there.

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
from ropelens.statistics.budget.cells import SINKS, blocks
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.rows import Rows

LEAST_SHARE = 0.3
"""Mean attention of the rows behind a key above which it is found to be a sink."""

LEAST_ROWS = 16
"""Rows that such a mean is over, at least."""


def beginning_of(tokens: Int[Tensor, "sequence position"], bos: int | None) -> int | None:
    """The token that marks a beginning: `bos`, or what all of several sequences begin with."""
    first = tokens[:, 0]
    alike = bool((first == first[0]).all())
    return int(first[0]) if alike and (len(first) > 1 or int(first[0]) == bos) else None


def known_sinks(
    tokens: Int[Tensor, "sequence position"],
    *,
    beginning: int | None,
    named: Iterable[int] = (),
) -> Int[Tensor, "sequence 1 position"]:
    """The kind of sink that each key is by its place and token (see `SINKS`), or 0.

    Of the first kind are position 0 and every place of the `beginning` token.
    """
    tokens = tokens.cpu()
    named = torch.tensor(list(named), dtype=tokens.dtype)
    kinds = torch.isin(tokens, named) * (1 + SINKS.index("named"))
    first = 1 + SINKS.index("first")
    if beginning is not None:
        kinds[tokens == beginning] = first
    kinds[:, 0] = first
    return kinds[:, None]


@torch.no_grad()
def find_sinks(
    call: AttentionCall, rows: Rows, planes: Planes, sinks: Int[Tensor, "batch shared position"]
) -> Bool[Tensor, "head position"]:
    """The keys, beside the `sinks` known, that most sequences' rows attend to.

    Such a key takes more than 0.3 of the attention of the rows behind it, in more than half of
    the sequences that have such rows, of which there are 16 or more in all. Keys are told by
    their position: a token that is a sink wherever it stands is for the caller to name, and in
    a single sequence none is found, where place and token are one.
    """
    batch, heads, context = len(call.query), call.query.shape[1], call.key.shape[2]
    mass = torch.zeros(batch, heads, context, dtype=torch.float64)
    for block in blocks(call, rows, planes, sinks):
        attention = block.attention()[0] * block.weight[:, None, None, :, None]
        key = torch.arange(block.low, block.low + attention.shape[-1]).to(attention.device)
        behind = attention * (key < block.position[..., None])[:, None, None]
        own = mass[..., block.low : block.low + attention.shape[-1]]
        own += behind.sum(-2).flatten(1, 2).to("cpu", torch.float64)
    count, weight = _rows_behind(rows, call.start.cpu())
    takes = (mass > LEAST_SHARE * weight[:, None]) & (sinks == 0)
    often = takes.sum(0) > (count > 0).sum(0) / 2
    return often & (count.sum(0) >= LEAST_ROWS) & (batch > 1)


def _rows_behind(
    rows: Rows, start: Int[Tensor, " position"]
) -> Float[Tensor, "2 batch position"]:
    """Number and weight of the rows behind each key that see it."""
    position = rows.position.expand(2, *rows.weight.shape)
    each = torch.stack([rows.weight > 0, rows.weight]).double()
    change = each.new_zeros(2, len(rows.weight), len(start))
    change.scatter_add_(2, start[position], each).scatter_add_(2, position, -each)
    return change.cumsum(-1)


def with_found(
    sinks: Int[Tensor, "batch 1 position"], found: Bool[Tensor, "head longest"]
) -> Int[Tensor, "batch shared position"]:
    """The table of sinks with the found ones, a row for each head where there are any.

    Sequences may be shorter than those that keys were found in.
    """
    if not found.any():
        return sinks
    own = found[:, : sinks.shape[-1]] * (1 + SINKS.index("found"))
    return torch.where(sinks > 0, sinks, own)
