"""Sequences that are measured together, and what is known of them before a model runs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ropelens.statistics.groups import Documents, deal
from ropelens.statistics.sinks import beginning_of, known_sinks

LONG = 0.75
"""Of the length that half of all tokens are in sequences of, or longer: a long sequence."""


@dataclass(frozen=True)
class Corpus:
    """Sequences, padded on the right: of each the first `lengths` tokens count.

    `group` says which sequences are drawn together when text is drawn again, `sinks` of which
    kind of sink each key is by its place and token (see `SINKS`; 0 of none, and in padding).
    Models are fitted to `long` sequences of one `fold` and scored on the other: what was fitted
    to short ones knows nothing of farther offsets. `alone` says that one fold has no long
    sequence, so that rows are folded in place of sequences.
    """

    tokens: Int[Tensor, "sequence position"]
    lengths: Int[Tensor, " sequence"]
    group: Int[Tensor, " sequence"]
    sinks: Int[Tensor, "sequence 1 position"]
    fold: Int[Tensor, " sequence"]
    long: Bool[Tensor, " sequence"]
    alone: bool

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
        group, long = deal(documents, len(tokens)), _long(lengths)
        fold = _folds(lengths, group)
        return cls(tokens, lengths, group, sinks, fold, long, len(fold[long].unique()) < 2)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths.max())

    @cached_property
    def seen_before(self) -> Bool[Tensor, "sequence position"]:
        """Which tokens their sequence has had before, padding apart."""
        seen = seen_before(self.tokens.cpu())
        return seen & (torch.arange(seen.shape[1]) < self.lengths[:, None])

    def part(self, chosen: slice | list[int], *, width: int | None = None) -> Corpus:
        """Some of the sequences, to their longest or to `width` positions."""
        width = int(self.lengths[chosen].max()) if width is None else width
        return Corpus(
            self.tokens[chosen, :width],
            self.lengths[chosen],
            self.group[chosen],
            self.sinks[chosen, :, :width],
            self.fold[chosen],
            self.long[chosen],
            self.alone,
        )


def seen_before(
    tokens: Int[Tensor, "sequence position"],
) -> Bool[Tensor, "sequence position"]:
    """Which tokens their sequence has had before."""
    ordered, order = tokens.sort(dim=1, stable=True)
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(again).scatter_(1, order, again)


def _long(lengths: Int[Tensor, " sequence"]) -> Bool[Tensor, " sequence"]:
    """Which sequences are not much shorter than those that most tokens are in."""
    ordered = lengths.sort(descending=True).values
    half = (2 * ordered.cumsum(0) < ordered.sum()).sum()
    return lengths >= LONG * ordered[half]


def _folds(
    lengths: Int[Tensor, " sequence"], group: Int[Tensor, " sequence"]
) -> Int[Tensor, " sequence"]:
    """Groups belong to two folds in turn, by their longest sequence: both have long ones."""
    count = int(group.max()) + 1
    longest = lengths.new_zeros(count).scatter_reduce(0, group, lengths, "amax")
    fold = torch.zeros(count, dtype=torch.long)
    fold[longest.argsort(descending=True, stable=True)] = torch.arange(count) % 2
    return fold[group]
