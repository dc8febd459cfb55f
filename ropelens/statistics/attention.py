"""One pass over the attention of one layer, in blocks of rows.

For each block: the scores Q K^T and their softmax A, one product A K for selectivity
and entropy, and the scores again with the rotation removed. Nothing larger than a block
of rows is ever held, and only the lower triangle is computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.rope.planes import Planes, plane_norms, unrotate
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.rows import Rows

HIDDEN = -1e30
"""Score of a key that the row does not see: its weight is exactly 0, its product finite."""

BLOCK_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
"""Scores held at once; on a CPU a block should stay in its caches."""

BLOCK_ROWS = {"cpu": 128, "cuda": 1024}
"""Rows of a block where they fit: products of few rows run far below a processor's speed."""


@dataclass(frozen=True)
class TokenSums:
    """Sums over the tokens of each sequence, in the units of q and k.

    `q_still`, `k_still` sum the vectors with their rotation removed.
    """

    q_norm: Float[Tensor, "batch head term"]
    k_norm: Float[Tensor, "batch kv_head term"]
    q_still: Float[Tensor, "batch head coordinate"]
    k_still: Float[Tensor, "batch kv_head coordinate"]


@dataclass(frozen=True)
class RowSums:
    """Sums over the rows of each sequence; nats where they are scores or entropies.

    `selectivity` is sum_j (A_ij - U_ij) q_i k_j by coordinate: planes add theirs up.
    `content` is sum_j A_ij log A~_ij, A~ the softmax of the scores without rotation.
    `learned_sink` is the weight that a sink logit takes from the keys (gpt-oss); all
    else describes the attention that is left to the keys, as a distribution.
    """

    selectivity: Float[Tensor, "batch head coordinate"]
    offset_mass: Float[Tensor, "batch head offset"]
    sink_mass: Float[Tensor, "batch head"]
    entropy: Float[Tensor, "batch head"]
    content: Float[Tensor, "batch head"]
    learned_sink: Float[Tensor, "batch head"]


def sum_attention(call: AttentionCall, rows: Rows, planes: Planes) -> tuple[TokenSums, RowSums]:
    """The sums of one attention call over its tokens and `rows`, in float64.

    Rows beyond a sequence's length have no weight, so padding is never counted.
    """
    dtype = torch.promote_types(call.query.dtype, torch.float32)
    q, k = call.query.to(dtype), call.key.to(dtype)
    position = torch.arange(q.shape[2], device=q.device)
    q_still, k_still = unrotate(q, position, planes), unrotate(k, position, planes)
    padding = (position >= rows.length.to(q.device)[:, None])[:, None, :, None]

    def total(x: Tensor) -> Tensor:
        if padding.any():
            x = x.masked_fill(padding, 0)
        return x.sum(2).to("cpu", torch.float64)

    tokens = TokenSums(
        q_norm=total(plane_norms(q, planes)),
        k_norm=total(plane_norms(k, planes)),
        q_still=total(q_still),
        k_still=total(k_still),
    )
    work = _Work.prepare(call, rows, q, k, q_still, k_still)
    totals, scratch = _Totals(work), _Scratch(k)
    for begin, end, heads in work.blocks():
        _sum_block(work, begin, end, heads, totals, scratch)
    return tokens, totals.row_sums()


@dataclass(frozen=True)
class _Work:
    """One call laid out for the row blocks: heads stand by the kv head that they read.

    `q` and `q_still` hold the rows only (of all rows, views: no copy); `k_scaled` and
    `k_still_scaled` carry the scale of the scores; `k_mean` is the mean of the keys that
    each row sees. `position` has batch 1 where all sequences have the same rows.
    """

    call: AttentionCall
    dense: bool
    position: Int[Tensor, "shared row"]
    weight: Float[Tensor, "batch row"]
    q: Float[Tensor, "batch kv_head group row coordinate"]
    q_still: Float[Tensor, "batch kv_head group row coordinate"]
    k: Float[Tensor, "batch kv_head position coordinate"]
    k_scaled: Float[Tensor, "batch kv_head position coordinate"]
    k_still_scaled: Float[Tensor, "batch kv_head position coordinate"]
    k_mean: Float[Tensor, "batch kv_head row coordinate"]

    @classmethod
    def prepare(
        cls,
        call: AttentionCall,
        rows: Rows,
        q: Tensor,
        k: Tensor,
        q_still: Tensor,
        k_still: Tensor,
    ) -> _Work:
        """Pick the rows, group the heads, and average the keys that each row sees."""
        position = rows.position[:1] if rows.dense else rows.position
        heads = (k.shape[1], q.shape[1] // k.shape[1])

        def picked(x: Tensor) -> Tensor:
            of_rows = x[:, :, 1 : position.shape[1] + 1] if rows.dense else _pick(x, position)
            return of_rows.unflatten(1, heads)

        return cls(
            call=call,
            dense=rows.dense,
            position=position,
            weight=rows.weight.to(k.device, k.dtype),
            q=picked(q),
            q_still=picked(q_still),
            k=k,
            k_scaled=k * call.scale,
            k_still_scaled=k_still * call.scale,
            k_mean=_mean_keys(k, position, call.start[position]),
        )

    def blocks(self) -> Iterator[tuple[int, int, slice]]:
        """Ranges of rows, and of kv heads, whose scores fill about one block."""
        batch, kv_heads, group, rows, _ = self.q.shape
        device = self.k.device.type
        area = BLOCK_ELEMENTS[device] // (batch * group)
        keys = self.position.amax(0) + 1  # that some sequence's row may see
        begin = 0
        while begin < rows:
            step = min(BLOCK_ROWS[device], rows - begin)
            while step > 16 and step * int(keys[begin : begin + step].max()) > area:
                step = (step + 1) // 2
            end = begin + step
            heads = max(1, area // (step * int(keys[begin:end].max())))
            for first in range(0, kv_heads, heads):
                yield begin, end, slice(first, min(first + heads, kv_heads))
            begin = end


_PER_HEAD = ("sink_mass", "entropy", "content", "learned_sink")


class _Totals:
    """Running sums of the blocks, in float64; `per_head` holds `_PER_HEAD` side by side."""

    def __init__(self, work: _Work) -> None:
        batch, kv_heads, group, _, dim = work.q.shape
        zeros = torch.zeros(batch, kv_heads * group, 1, dtype=torch.float64)
        self.selectivity = zeros.repeat(1, 1, dim)
        self.offset_mass = zeros.repeat(1, 1, work.k.shape[2])
        self.per_head = zeros.repeat(1, 1, len(_PER_HEAD))

    def row_sums(self) -> RowSums:
        """The sums by their names."""
        named = dict(zip(_PER_HEAD, self.per_head.unbind(-1), strict=True))
        return RowSums(selectivity=self.selectivity, offset_mass=self.offset_mass, **named)


class _Scratch:
    """Memory that every block uses again: fresh pages cost more than the products."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._held: dict[str, Tensor] = {}

    def take(self, name: str, *shape: int) -> Tensor:
        """A tensor of this shape in the memory of this name; what it held is lost."""
        size = math.prod(shape)
        if name not in self._held or len(self._held[name]) < size:
            self._held[name] = self._like.new_empty(size)
        return self._held[name][:size].view(shape)


def _sum_block(
    work: _Work, begin: int, end: int, heads: slice, totals: _Totals, scratch: _Scratch
) -> None:
    """Add the rows from `begin` to `end`, of the query heads of some kv heads, to `totals`."""
    call = work.call
    position = work.position[:, begin:end]
    # One key more than any row sees, where there is one: its weight is 0 in every row.
    low = max(int(call.start[position].min()) - 1, 0)
    high = int(position.max()) + 1
    q, q_still = work.q[:, heads, :, begin:end], work.q_still[:, heads, :, begin:end]
    keys = work.k[:, heads, low:high]
    hidden = _hidden(position, call.start, low, high, device=keys.device)
    own = (position - low).to(keys.device)

    scores = _hide(_scores(q, work.k_scaled[:, heads, low:high], call.softcap, scratch), hidden)
    weights = torch.softmax(scores, -1, out=scratch.take("weights", *scores.shape))
    # A row's largest weight is at least 1 / keys, so its logarithm is exact.
    log_norm = scores.amax(-1) - weights.amax(-1).log()
    read = (weights.flatten(2, 3) @ keys).unflatten(2, q.shape[2:4])
    if call.softcap is None:
        expected = call.scale * torch.linalg.vecdot(q, read)
    else:
        expected = torch.linalg.vecdot(weights, scores)
    still_keys = work.k_still_scaled[:, heads, low:high]
    still = _scores(q_still, still_keys, call.softcap, scratch)  # where the scores were
    spare = scratch.take("spare", *still.shape)
    expected_still = torch.mul(weights, still, out=spare).sum(-1)
    _hide(still, hidden)
    log_still = torch.log_softmax(still, -1, out=spare)
    log_norm_still = _column(still, own) - _column(log_still, own)

    per_row = {
        "sink_mass": weights[..., 0] if low == 0 else torch.zeros_like(log_norm),
        "entropy": log_norm - expected,
        "content": expected_still - log_norm_still,
        "learned_sink": torch.zeros_like(log_norm),
    }
    if call.sink_logits is not None:
        sink = call.sink_logits.to(log_norm.dtype).unflatten(0, work.q.shape[1:3])
        per_row["learned_sink"] = torch.sigmoid(sink[heads, :, None] - log_norm)
    row_weight = work.weight[:, begin:end]
    over_rows = row_weight[:, None, None, None]
    query_heads = slice(heads.start * q.shape[2], heads.stop * q.shape[2])
    scalars = torch.stack([per_row[name] for name in _PER_HEAD], dim=-1)
    _add(totals.per_head, query_heads, (over_rows @ scalars)[..., 0, :])
    push = q * (read - work.k_mean[:, heads, None, begin:end])
    _add(totals.selectivity, query_heads, call.scale * (over_rows @ push)[..., 0, :])
    weights[..., 0] = 0  # the sink is no offset
    by_offset = _sum_diagonals if work.dense else _sum_offsets
    _add(totals.offset_mass, query_heads, by_offset(weights, own, row_weight))


def _add(
    total: Float[Tensor, "batch head value"],
    heads: slice,
    part: Float[Tensor, "batch kv_head group part"],
) -> None:
    """Add a block's sums to those of its query heads; fewer values stand for the first."""
    part = part.flatten(1, 2).to("cpu", torch.float64)
    total[:, heads, : part.shape[-1]].add_(part)


def _mean_keys(
    k: Float[Tensor, "batch kv_head position coordinate"],
    position: Int[Tensor, "shared row"],
    start: Int[Tensor, "shared row"],
) -> Float[Tensor, "batch kv_head row coordinate"]:
    """Mean of the keys that each row sees, from their running sum."""
    total = k.cumsum(2)
    seen = _pick(total, position)
    if start.any():
        before = _pick(total, (start - 1).clamp(min=0))
        seen -= before * (start > 0).to(k.device)[:, None, :, None]
    return seen.div_((position + 1 - start).to(k.device)[:, None, :, None])


def _pick(
    x: Float[Tensor, "batch head position coordinate"], at: Int[Tensor, "shared row"]
) -> Float[Tensor, "batch head row coordinate"]:
    """`x` at the positions `at`, which one row of may serve the whole batch."""
    at = at.to(x.device)
    if len(at) == 1:
        return x.index_select(2, at[0])
    return x.gather(2, at[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def _scores(
    q: Float[Tensor, "batch kv_head group row coordinate"],
    k: Float[Tensor, "batch kv_head key coordinate"],
    softcap: float | None,
    scratch: _Scratch,
) -> Float[Tensor, "batch kv_head group row key"]:
    """Scores as the softmax gets them: one product serves all the heads of a kv head."""
    batch, kv_heads, group, rows, _ = q.shape
    scores = scratch.take("scores", batch, kv_heads, group, rows, k.shape[2])
    product = scores.view(batch * kv_heads, group * rows, -1)
    torch.bmm(q.flatten(2, 3).flatten(0, 1), k.flatten(0, 1).mT, out=product)
    return scores if softcap is None else scores.div_(softcap).tanh_().mul_(softcap)


def _column(
    x: Float[Tensor, "batch kv_head group row key"], column: Int[Tensor, "shared row"]
) -> Float[Tensor, "batch kv_head group row"]:
    """One entry of each row of `x`."""
    index = column[:, None, None, :, None].expand(*x.shape[:-1], 1)
    return x.gather(-1, index)[..., 0]


def _hidden(
    position: Int[Tensor, "shared row"],
    start: Int[Tensor, " position"],
    low: int,
    high: int,
    *,
    device: torch.device,
) -> list[tuple[slice, Float[Tensor, "shared 1 1 row key"]]]:
    """The columns of low..high that some row does not see, and what hides them there."""
    first, last = start[position], position
    ranges = [(low, int(first.max())), (int(last.min()) + 1, high)]
    hidden = []
    for left, right in ranges:
        if left < right:
            key = torch.arange(left, right)
            seen = (key >= first[..., None]) & (key <= last[..., None])
            penalty = torch.where(seen, 0.0, HIDDEN)[:, None, None].to(device)
            hidden.append((slice(left - low, right - low), penalty))
    return hidden


def _hide(
    scores: Float[Tensor, "batch kv_head group row key"], hidden: list[tuple[slice, Tensor]]
) -> Float[Tensor, "batch kv_head group row key"]:
    """`scores`, changed in place: HIDDEN where a row does not see a key."""
    for columns, penalty in hidden:
        scores[..., columns] += penalty
    return scores


def _sum_diagonals(
    weights: Float[Tensor, "batch kv_head group row key"],
    own: Int[Tensor, "1 row"],
    row_weight: Float[Tensor, "batch row"],
) -> Float[Tensor, "batch kv_head group offset"]:
    """Sum of row weights times attention along each diagonal, for consecutive rows.

    Row i of r holds its own key in column S - r + i. With one more element of stride a
    row, a diagonal becomes a column, and their sums one vector-matrix product over
    memory that stays where it is. What such a column picks up from the tail of the row
    above lies right of that row's own key, where weights are zero; the first row, which
    has no row above, is added apart.
    """
    weights = weights.contiguous()
    heads, (rows, keys) = weights.shape[:3], weights.shape[3:]
    by_head = row_weight[:, None, None].expand(*heads, rows).reshape(-1, 1, rows)
    skewed = weights.view(-1, rows, keys).as_strided(
        (by_head.shape[0], rows - 1, keys),
        (rows * keys, keys + 1, 1),
        weights.storage_offset() + keys + 1 - (rows - 1),
    )
    sums = (by_head[..., 1:] @ skewed)[:, 0]
    sums[:, rows - 1 :] += (
        by_head[:, 0, :1] * weights.view(-1, rows, keys)[:, 0, : keys - rows + 1]
    )
    return sums.flip(-1).view(*heads, keys)


def _sum_offsets(
    weights: Float[Tensor, "batch kv_head group row key"],
    own: Int[Tensor, "batch row"],
    row_weight: Float[Tensor, "batch row"],
) -> Float[Tensor, "batch kv_head group offset"]:
    """Sum of row weights times attention at each offset, for rows anywhere.

    Offsets beyond what a row sees read the first key, whose weight is 0 in every row.
    """
    column = own[..., None] - torch.arange(weights.shape[-1], device=weights.device)
    index = column.clamp(min=0)[:, None, None].expand_as(weights)
    return (row_weight[:, None, None, None] @ weights.gather(-1, index))[..., 0, :]
