"""Sequences that are measured together, and what is known of them before a model runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Int
from torch import Tensor

from ropelens.statistics.groups import Documents, deal
from ropelens.statistics.sinks import beginning_of, known_sinks


@dataclass(frozen=True)
class Corpus:
    """Sequences, padded on the right: of each the first `lengths` tokens count.

    `group` says which sequences are drawn together when text is drawn again, `sinks` of which
    kind of sink each key is by its place and token (see `SINKS`; 0 of none, and in padding).
    """

    tokens: Int[Tensor, "sequence position"]
    lengths: Int[Tensor, " sequence"]
    group: Int[Tensor, " sequence"]
    sinks: Int[Tensor, "sequence 1 position"]

    @classmethod
    def of(
        cls,
        tokens: Int[Tensor, "sequence position"],
        lengths: Int[Tensor, " sequence"],
        *,
        bos: int | None = None,
        documents: Documents | None = None,
        named: Iterable[int] = (),
    ) -> Corpus:
        """Sequences of `documents`; the tokens `named` are sinks, and `bos` where it begins."""
        kinds = known_sinks(tokens, beginning=beginning_of(tokens, bos), named=named)
        padding = torch.arange(tokens.shape[1]) >= lengths[:, None]
        sinks = kinds.masked_fill(padding[:, None], 0)
        return cls(tokens, lengths, deal(documents, len(tokens)), sinks)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths.max())

    def part(self, chosen: slice | list[int], *, width: int | None = None) -> Corpus:
        """Some of the sequences, to their longest or to `width` positions."""
        width = int(self.lengths[chosen].max()) if width is None else width
        return Corpus(
            self.tokens[chosen, :width],
            self.lengths[chosen],
            self.group[chosen],
            self.sinks[chosen, :, :width],
        )
