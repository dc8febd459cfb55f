"""Sequences that are too long for one pass run in chunks with a key-value cache.

Statistics over tokens are summed chunk by chunk, and queries are kept for the measured rows.
With the last chunk each layer gets one call of these rows and all keys.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.attention.call import AttentionCall
from ropelens.attention.visibility import Visibility
from ropelens.model.hook_blocks import Observer
from ropelens.text.rows import Rows


def ignore_call(call: AttentionCall) -> None:
    """An observer that measures nothing."""


def observer_of_chunks(
    chunk: int | None,
    rows: Sequence[Rows],
    context: int,
    whole: Observer,
    part: Observer = ignore_call,
) -> Observer:
    """Observer of a pass over sequences of `context` tokens in chunks of `chunk` tokens.

    `part` receives the calls of each chunk, and `whole` one call of the `rows` and all keys for
    each layer. If `chunk` is None, the observer is `whole`.
    """
    if chunk is None:
        return whole
    return ChunkObserver(rows, context, whole, part).see


@dataclass
class KeptRows:
    """The measured rows of a layer, which the calls of its chunks fill one after another."""

    query: Float[Tensor, "batch head row coordinate"]
    output: Float[Tensor, "batch row head feature"]
    visibility: Visibility  # for the rows up to the last chunk that was seen


class ChunkObserver:
    """Observes calls in chunks, and joins the measured rows of each layer to one call."""

    def __init__(
        self, rows: Sequence[Rows], context: int, whole: Observer, part: Observer
    ) -> None:
        positions = [batch_rows.position.flatten() for batch_rows in rows]
        self.positions = torch.cat(positions).unique()
        self.context = context
        self.whole = whole
        self.part = part
        self.kept: dict[int, KeptRows] = {}  # by layer

    def see(self, call: AttentionCall) -> None:
        """Keep the measured rows of a chunk, and pass on its call and the joined call."""
        first = call.past
        end = call.key.shape[2]
        in_chunk = (self.positions >= first) & (self.positions < end)
        indices = self.positions[in_chunk] - first
        if first == 0:
            self.kept[call.layer] = self.reserve(call, indices)
        kept = self.kept[call.layer]
        measured = call.of_rows(indices)
        kept.query[:, :, in_chunk] = measured.query
        kept.output[:, in_chunk] = measured.output
        if first > 0:
            kept.visibility = kept.visibility.append(measured.visibility)
        self.part(of_last_keys(call, first))
        if end == self.context:
            del self.kept[call.layer]
            self.whole(
                replace(
                    call,
                    query=kept.query,
                    output=kept.output,
                    visibility=kept.visibility,
                )
            )

    def reserve(
        self, first_call: AttentionCall, indices: Int[Tensor, " _"]
    ) -> KeptRows:
        """Room for all rows at once; pieces would leave holes between masks that grow."""
        count = len(self.positions)
        query = first_call.query
        output = first_call.output
        return KeptRows(
            query=query.new_empty((*query.shape[:2], count, query.shape[3])),
            output=output.new_empty((len(output), count, *output.shape[2:])),
            visibility=first_call.visibility.rows(indices[None]),
        )


def of_last_keys(call: AttentionCall, first: int) -> AttentionCall:
    """The call of a chunk that begins at position `first`, with the keys of the chunk only."""
    return replace(
        call,
        key=call.key[:, :, first:],
        value=call.value[:, :, first:],
        visibility=replace(call.visibility, keys=range(first, call.key.shape[2])),
    )
