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

from ropelens.models.doorway import TransformersSubject
from ropelens.models.lone import depends_on_length
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
    one_pass = context <= ONE_PASS or depends_on_length(subject.model)
    if one_pass or not isinstance(subject, TransformersSubject):
        return None
    return max(1, min(ONE_PASS, MASK_ELEMENTS // context))


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
    kept: dict[int, list[AttentionCall]] = field(default_factory=dict)

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
        here = (self.at[(self.at >= first) & (self.at < end)] - first).to(call.query.device)
        none = call.key[:, :, :0].clone()  # a view would hold the keys of every chunk
        rows = replace(call, query=call.query[:, :, here], output=call.output[:, here])
        kept = self.kept.setdefault(call.layer, [])
        kept.append(replace(rows, key=none, value=call.value[:, :, :0].clone()))
        own = replace(call, key=call.key[:, :, first:], value=call.value[:, :, first:], past=0)
        self.part(own, first)
        if end == self.context:
            del self.kept[call.layer]
            self.whole(
                replace(
                    call,
                    query=torch.cat([x.query for x in kept], dim=2),
                    output=torch.cat([x.output for x in kept], dim=1),
                    start=torch.cat([x.start for x in kept], dim=-1),
                    past=0,
                    at=self.at,
                )
            )
