"""An attention call, the sampled rows of it that statistics use, and its known sinks."""

from copy import copy
from dataclasses import fields, replace
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.attention import fast_products
from ropelens.attention.call import AttentionCall
from ropelens.attention.visibility import Visibility
from ropelens.caches import kept, on_device
from ropelens.rope.planes import Planes, unrotate
from ropelens.text.rows import Rows

_unrotate_once = kept(most=1)(unrotate)  # keys keep their copy without rotation

OF_ROWS = ("row_q", "row_q_still", "visibility", "device_visibility", "sum_of_keys")
"""Properties that only calls with the same rows share."""


class SampledCall:
    """An attention call whose layer rotates in `planes`, and the `rows` that statistics use.

    `q` [batch, head, row, coordinate] and `k` [batch, kv_head, key, coordinate] are the queries
    and keys in float32 or wider; `q_still` and `k_still` are the same without their rotation.
    `position` [shared, row] and `weight` [batch, row] belong to `rows`; `shared` is 1 if all
    sequences have the same rows. `sinks` [batch, shared, key] is the kind of sink of each key
    (0: none), for all heads or by head; by default position 0 is a sink. `tokens` [batch, key]
    are the ids of the keys.
    """

    def __init__(
        self,
        call: AttentionCall,
        rows: Rows,
        planes: Planes,
        *,
        sinks: Int[Tensor, "batch shared position"] | None = None,
        tokens: Int[Tensor, "batch token"] | None = None,
    ) -> None:
        dtype = torch.promote_types(call.query.dtype, torch.float32)
        self.call, self.rows, self.planes = call, rows, planes
        self.q, self.k = call.query.to(dtype), call.key.to(dtype).contiguous()
        device = self.k.device
        self.key_position = call.visibility.key_position(device)
        self.position = rows.shared_position
        if tokens is None:
            tokens = torch.empty(len(self.k), 0, dtype=torch.long, device=device)
        self.tokens = on_device(tokens, device)
        if sinks is None:
            keys = call.visibility.key_position(torch.device("cpu"))
            sinks = (keys == 0).long().expand(len(self.k), 1, -1)
        self.sinks = sinks
        self.buffers: dict[str, Tensor] = {}

    def with_rows(self, rows: Rows) -> "SampledCall":
        """The same call with other rows."""
        other, same_rows = copy(self), rows.position is self.rows.position
        for name in ("weight", "padding", *(() if same_rows else OF_ROWS)):
            vars(other).pop(name, None)
        other.rows, other.position, other.buffers = rows, rows.shared_position, {}
        return other

    def of_sequences(
        self, chosen: slice | Bool[Tensor, " batch"] | Int[Tensor, " some"]
    ) -> "SampledCall":
        if isinstance(chosen, slice) and len(range(len(self.k))[chosen]) == len(self.k):
            return self
        on = chosen if isinstance(chosen, slice) else on_device(chosen, self.k.device)
        names = ("query", "key", "value", "output")
        parts: dict[str, Any] = {name: vars(self.call)[name][on] for name in names}
        call = replace(
            self.call, visibility=self.call.visibility.of_sequences(chosen), **parts
        )
        tables = {
            field.name: vars(self.rows)[field.name] for field in fields(self.rows)
        }
        parts = {name: x[chosen] for name, x in tables.items() if isinstance(x, Tensor)}
        rows = replace(self.rows, **parts)
        sinks, tokens = self.sinks[chosen], self.tokens[on]
        other = SampledCall(call, rows, self.planes, sinks=sinks, tokens=tokens)
        if "k_still" in vars(self):
            other.k_still = self.k_still[on].contiguous()
        return other

    @cached_property
    def weight(self) -> Float[Tensor, "batch row"]:
        return on_device(self.rows.weight, self.k.device).to(self.k.dtype)

    @cached_property
    def sink_kind(self) -> Int[Tensor, "batch shared_kv_head shared_group key"]:
        """`sinks` by key-value head and group."""
        return by_kv_head(on_device(self.sinks, self.k.device), self.k.shape[1])

    @cached_property
    def padding(self) -> Bool[Tensor, "batch key"] | None:
        """The keys that are padding or that a mask hides, or None if there are none."""
        visible = self.call.visibility
        if (
            self.rows.hidden is None
            and int(self.rows.length.min()) >= visible.keys.stop
        ):
            return None
        keys = visible.key_position(self.rows.length.device)
        return self.rows.padding(keys).to(self.k.device)

    @cached_property
    def q_still(self) -> Float[Tensor, "batch head row coordinate"]:
        """q~: the queries with their rotation removed."""
        position = self.call.visibility.position[0]
        if len(position) == len(self.key_position):  # the rows are the keys
            position = self.key_position
        return unrotate(self.q, position, self.planes)

    @cached_property
    def k_still(self) -> Float[Tensor, "batch kv_head key coordinate"]:
        """k~: the keys with their rotation removed."""
        return _unrotate_once(
            self.k, self.key_position, self.planes.of_keys(self.k.shape[1])
        )

    @cached_property
    def row_q(self) -> Float[Tensor, "batch kv_head group row coordinate"]:
        """The queries of the rows, grouped by the key-value head that they read."""
        index, _ = _rows_of_call(self.rows, self.call.visibility)
        if self.rows.dense:
            rows = self.q[:, :, int(index[0, 0]) :][:, :, : index.shape[1]]
        else:
            rows = fast_products.take_rows(self.q, index)
        return rows.unflatten(1, (self.k.shape[1], -1))

    @cached_property
    def row_q_still(self) -> Float[Tensor, "batch kv_head group row coordinate"]:
        """q~ of the rows."""
        q, position = self.row_q.flatten(1, 2), self.device_visibility.position_of_heads
        return unrotate(q, position, self.planes).view_as(self.row_q)

    @cached_property
    def visibility(self) -> Visibility:
        return _rows_of_call(self.rows, self.call.visibility)[1]

    @cached_property
    def device_visibility(self) -> Visibility:
        """`visibility`, with its tables on the device of the keys."""
        return self.visibility.on(self.k.device)

    @cached_property
    def sum_of_keys(self) -> Float[Tensor, "batch kv_head 1 row coordinate"]:
        return self.visibility.sum_keys(self.k)[:, :, None]


@kept(most=2)
def _rows_of_call(
    rows: Rows, visible: Visibility
) -> tuple[Int[Tensor, "_ row"], Visibility]:
    """The indices of the rows in a call, and the keys that they see."""
    return visible.index_of(rows.shared_position), visible.at(rows.shared_position)


@kept()
def sink_positions(sinks: Int[Tensor, "batch shared key"]) -> Int[Tensor, " sink"]:
    """The positions at which some head has a sink."""
    return (sinks > 0).flatten(0, 1).any(0).nonzero()[:, 0]


def by_kv_head(
    sinks: Int[Tensor, "batch shared key"], kv_heads: int
) -> Int[Tensor, "batch shared_kv_head shared_group key"]:
    """A table of sinks by key-value head and group; its axes are 1 if all heads share it."""
    return sinks.unflatten(1, (1, 1) if sinks.shape[1] == 1 else (kv_heads, -1))
