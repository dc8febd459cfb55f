"""Sequences too long for one pass: run in chunks with a key-value cache, measured as if whole.

Sums over tokens are taken chunk by chunk. Of the queries the rows that are looked at are kept;
the cache has all keys when the last chunk is run, so each layer then has one call that differs
from that of a single pass only in leaving out rows that nobody looks at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Int
from torch import Tensor

from ropelens.models.subject import Subject
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.rows import Rows

ONE_PASS = 2**16
"""Tokens of the longest sequences that run in one pass."""

MASK_ELEMENTS = 2**25
"""Keys times rows of a chunk: a model makes a mask over both, by way of some 40 bytes each."""


def chunk_of(subject: Subject, context: int) -> int | None:
    """Tokens that run at a time of sequences of `context` tokens; None: all in one pass.

    So does a bridge, and a RoPE that changes with the length: the keys in a cache would be
    rotated as they were when the sequence was shorter.
    """
    one_pass = context <= ONE_PASS or subject.depends_on_length
    if one_pass or not subject.in_chunks:
        return None
    return max(1, min(ONE_PASS, MASK_ELEMENTS // context))


@dataclass(frozen=True)
class _Kept:
    """Of one layer what stays until its last chunk: the rows `at`, and all of `start`."""

    query: Tensor
    output: Tensor
    start: Tensor

    @classmethod
    def room(cls, call: AttentionCall, rows: int, context: int) -> _Kept:
        """Empty, and all of it there from the start, as the cache has it.

        Pieces kept between masks that grow with every chunk would leave holes that none fits
        into.
        """
        query, output, start = call.query, call.output, call.start
        return cls(
            query.new_empty((*query.shape[:2], rows, query.shape[3])),
            output.new_empty((len(output), rows, *output.shape[2:])),
            start.new_empty((*start.shape[:-1], context)),
        )


@dataclass(frozen=True)
class Chunks:
    """An observer of chunks: `part` sees the tokens of each, `whole` the rows of all.

    `part` is given a call of a chunk's own queries and keys, and the position of the first;
    `whole` at the end of the `context` one call a layer, of the rows `at` and all keys.
    """

    at: Int[Tensor, " row"]
    context: int
    part: Callable[[AttentionCall, int], None]
    whole: Callable[[AttentionCall], None]
    kept: dict[int, _Kept] = field(default_factory=dict)

    @classmethod
    def of_rows(
        cls,
        *rows: Rows,
        context: int,
        part: Callable[[AttentionCall, int], None] = lambda call, first: None,
        whole: Callable[[AttentionCall], None],
    ) -> Chunks:
        """Those of all these rows of a batch whose sequences are `context` tokens long."""
        return cls(
            torch.cat([x.position.flatten() for x in rows]).unique(), context, part, whole
        )

    def __call__(self, call: AttentionCall) -> None:
        """See one layer's call of one chunk."""
        first, end = call.past, call.key.shape[2]
        here = (self.at >= first) & (self.at < end)
        rows = (self.at[here] - first).to(call.query.device)
        if first == 0:
            self.kept[call.layer] = _Kept.room(call, len(self.at), self.context)
        kept = self.kept[call.layer]
        kept.query[:, :, here] = call.query[:, :, rows]
        kept.output[:, here] = call.output[:, rows]
        kept.start[..., first:end] = call.start
        own = replace(call, key=call.key[:, :, first:], value=call.value[:, :, first:], past=0)
        self.part(own, first)
        if end == self.context:
            del self.kept[call.layer]
            self.whole(
                replace(
                    call,
                    query=kept.query,
                    output=kept.output,
                    start=kept.start,
                    past=0,
                    at=self.at,
                )
            )
