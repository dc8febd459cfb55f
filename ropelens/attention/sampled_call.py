"""An attention call, the sampled rows of it that statistics use, and its known sinks."""

from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.attention import fast_products
from ropelens.attention.call import AttentionCall
from ropelens.attention.visibility import SequenceIndex, Visibility
from ropelens.caches import kept, on_device
from ropelens.rope.planes import Planes, unrotate
from ropelens.text.rows import Rows

_unrotate_once = kept(most=1)(unrotate)  # keys keep their copy without rotation

OF_WEIGHTS = ("weight", "padding")
OF_POSITIONS = (
    "_visible_rows",
    "row_q",
    "row_q_still",
    "device_visibility",
    "sum_of_keys",
)
"""Properties that calls share only if their rows have the same weights or positions."""


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
        self.call = call
        self.rows = rows
        self.planes = planes
        self.q = call.query.to(dtype)
        self.k = call.key.to(dtype).contiguous()
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
        other = copy(self)
        other._forget(OF_WEIGHTS)
        if rows.position is not self.rows.position:
            other._forget(OF_POSITIONS)
        other.rows = rows
        other.position = rows.shared_position
        other.buffers = {}
        return other

    def _forget(self, properties: tuple[str, ...]) -> None:
        for name in properties:
            self.__dict__.pop(name, None)

    def of_sequences(self, index: SequenceIndex) -> "SampledCall":
        """The call and the rows of some sequences."""
        batch = len(self.k)
        if isinstance(index, slice) and len(range(batch)[index]) == batch:
            return self
        device_index = index
        if isinstance(index, Tensor):
            device_index = on_device(index, self.k.device)
        other = SampledCall(
            self.call.of_sequences(index),
            _rows_of_sequences(self.rows, index),
            self.planes,
            sinks=self.sinks[index],
            tokens=self.tokens[device_index],
        )
        if "k_still" in self.__dict__:  # otherwise it is computed for fewer sequences
            other.k_still = self.k_still[device_index].contiguous()
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
        shortest = int(self.rows.length.min())
        if self.rows.hidden is None and shortest >= visible.keys.stop:
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
        planes = self.planes.of_keys(self.k.shape[1])
        return _unrotate_once(self.k, self.key_position, planes)

    @cached_property
    def row_q(self) -> Float[Tensor, "batch kv_head group row coordinate"]:
        """The queries of the rows, grouped by the key-value head that they read."""
        index = self._visible_rows.index
        if self.rows.dense:
            rows = self.q[:, :, int(index[0, 0]) :][:, :, : index.shape[1]]
        else:
            rows = fast_products.take_rows(self.q, index)
        return rows.unflatten(1, (self.k.shape[1], -1))

    @cached_property
    def row_q_still(self) -> Float[Tensor, "batch kv_head group row coordinate"]:
        """q~ of the rows."""
        q = self.row_q.flatten(1, 2)
        position = self.device_visibility.position_of_heads
        return unrotate(q, position, self.planes).view_as(self.row_q)

    @property
    def visibility(self) -> Visibility:
        """The keys that the rows see."""
        return self._visible_rows.visibility

    @cached_property
    def _visible_rows(self) -> "_VisibleRows":
        return _find_rows(self.rows, self.call.visibility)

    @cached_property
    def device_visibility(self) -> Visibility:
        """`visibility`, with its tables on the device of the keys."""
        return self.visibility.on(self.k.device)

    @cached_property
    def sum_of_keys(self) -> Float[Tensor, "batch kv_head 1 row coordinate"]:
        return self.visibility.sum_keys(self.k)[:, :, None]


@dataclass(frozen=True)
class _VisibleRows:
    """The indices of rows in a call, and the keys that they see."""

    index: Int[Tensor, "_ row"]
    visibility: Visibility


@kept(most=2)
def _find_rows(rows: Rows, visible: Visibility) -> _VisibleRows:
    position = rows.shared_position
    return _VisibleRows(visible.index_of(position), visible.at(position))


def _rows_of_sequences(rows: Rows, index: SequenceIndex) -> Rows:
    return replace(
        rows,
        position=rows.position[index],
        weight=rows.weight[index],
        length=rows.length[index],
        hidden=None if rows.hidden is None else rows.hidden[index],
        order=None if rows.order is None else rows.order[index],
    )


@kept()
def sink_positions(sinks: Int[Tensor, "batch shared key"]) -> Int[Tensor, " sink"]:
    """The positions at which some head has a sink."""
    return (sinks > 0).flatten(0, 1).any(0).nonzero()[:, 0]


def by_kv_head(
    sinks: Int[Tensor, "batch shared key"], kv_heads: int
) -> Int[Tensor, "batch shared_kv_head shared_group key"]:
    """A table of sinks by key-value head and group; its axes are 1 if all heads share it."""
    if sinks.shape[1] == 1:
        return sinks[:, None]
    return sinks.unflatten(1, (kv_heads, -1))
