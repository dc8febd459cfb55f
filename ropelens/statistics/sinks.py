"""Keys that take attention whatever stands there.

A sink is position 0; every place where the token that all sequences begin with stands again
(documents packed into one sequence); a token that the caller names; and a key that is found
to take most rows' attention (Gu et al. 2025, arXiv 2410.10781).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ropelens.statistics.block import CallRows

SINKS = ("first", "named", "found")
"""Kinds of sinks, 1, 2, 3 in tables of them: each has a weight of its own in the models."""

LEAST_SHARE = 0.3
"""Mean attention of the rows behind a key above which it is found to be a sink."""

LEAST_ROWS = 16
"""Rows that such a mean is over, at least."""


def beginning_of(tokens: Int[Tensor, "sequence position"], bos: int | None) -> int | None:
    """The token that marks a beginning: `bos`, or the first of all of several sequences."""
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
def find_sinks(rows: CallRows) -> Bool[Tensor, "head position"]:
    """The keys, beside the sinks known, that the rows of most sequences attend to.

    Such a key takes more than 0.3 of the attention of the rows behind it, 16 or more in all,
    in more than half of the sequences that have such rows. A key is found by its position, so
    a single sequence, where that says no more than its token, has none.
    """
    batch, heads, context = *rows.q.shape[:2], rows.k.shape[2]
    weight, last = rows.weight.cpu().double(), rows.position.expand(batch, -1)
    first, behind = rows.call.start.cpu()[last], torch.stack([(weight > 0).double(), weight])
    ends = torch.zeros(2, batch, context + 1, dtype=torch.float64)
    ends.scatter_add_(-1, first.expand(2, -1, -1), behind)
    ends.scatter_add_(-1, last.expand(2, -1, -1), -behind)
    count, weight = ends.cumsum(-1)[..., :-1]  # of the rows behind each key
    mass = torch.zeros(batch, heads, context, dtype=torch.float64)
    for block in rows.blocks():
        own = block.own[:, None, None, :, None].expand(*block.q.shape[:4], 1)
        attention = block.attention.scatter_(-1, own, 0.0)
        taken = (block.weight[:, None, None, None] @ attention)[..., 0, :].flatten(1, 2)
        keys = slice(block.keys.start, block.keys.stop)
        mass[:, block.query_heads, keys] += taken.to("cpu", torch.float64)
    takes = (mass > LEAST_SHARE * weight[:, None]) & (rows.sinks.cpu() == 0)
    often = takes.sum(0) > (count > 0).sum(0) / 2
    return often & (count.sum(0) >= LEAST_ROWS) & (batch > 1)


def with_found(
    sinks: Int[Tensor, "batch 1 position"], found: Bool[Tensor, "head longest"]
) -> Int[Tensor, "batch shared position"]:
    """The table of sinks with the found ones, a row for each head where there are any."""
    if not found.any():
        return sinks
    kind = found[:, : sinks.shape[-1]] * (1 + SINKS.index("found"))
    return torch.where(sinks > 0, sinks, kind)
