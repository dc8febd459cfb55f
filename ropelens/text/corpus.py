"""The sequences of a measurement, and what is known of them before a model runs.

A sink is a key that takes attention whatever stands there: by its place and token (see
`known_sinks`), or found to take most rows' attention (see held_out.py).

Sequences of one document are alike, so intervals that resample single sequences are far too
narrow: they resample groups of sequences.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

from ropelens.errors import BadArgument
from ropelens.intervals import ENOUGH_DOCUMENTS

Documents = Int[Tensor, "*_"] | Int[np.ndarray, "*_"] | Sequence[int]
"""The number of the document of each sequence, or of each token of packed rows."""

GROUPS = 64  # most groups: of more documents, neighbours share one
BLOCKS = 16  # most stretches of neighbours into which a text of few documents is divided

SINKS = ("first", "named", "found")
"""Kinds of sinks, 1, 2, 3 in tables of them: each has a weight of its own in the models."""

LONG = 0.75
"""A long sequence has this share of the length that half of all tokens reach, or more."""


@dataclass(frozen=True)
class Corpus:
    """Sequences, padded on the right: the first `lengths[s]` tokens of sequence s count.

    `group` numbers the sequences that are resampled together. `sinks` is the kind of sink of
    each key by its place and token (see `SINKS`; 0 for none, and in padding). Models are fitted
    to `long` sequences of one `fold` and scored on the other; short ones say nothing of farther
    offsets. With a `single_long_sequence` one fold has no long sequence, so rows are folded
    instead of sequences.
    `hidden` marks the tokens inside a sequence that a mask hides; None where there are none.
    """

    tokens: Int[Tensor, "sequence position"]
    lengths: Int[Tensor, " sequence"]
    group: Int[Tensor, " sequence"]
    sinks: Int[Tensor, "sequence 1 position"]
    fold: Int[Tensor, " sequence"]
    long: Bool[Tensor, " sequence"]
    single_long_sequence: bool
    hidden: Bool[Tensor, "sequence position"] | None = None

    @classmethod
    def of(
        cls,
        tokens: Int[Tensor, "sequence position"],
        lengths: Int[Tensor, " sequence"],
        *,
        bos: int | None = None,
        documents: Documents | None = None,
        named: Iterable[int] = (),
        hidden: Bool[Tensor, "sequence position"] | None = None,
    ) -> Corpus:
        """Sequences cut from `documents`; `bos` at the start and `named` tokens are sinks."""
        sinks = known_sinks(tokens, bos=bos, named=named)
        group, ordered = (
            assign_groups(documents, len(tokens)),
            lengths.sort(descending=True).values,
        )
        half = (2 * ordered.cumsum(0) < ordered.sum()).sum()
        long, fold = lengths >= LONG * ordered[half], _folds(lengths, group)
        single_long_sequence = len(fold[long].unique()) < 2
        text = cls(tokens, lengths, group, sinks, fold, long, single_long_sequence, hidden)
        return replace(text, sinks=sinks.masked_fill(~text.real[:, None], 0))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def context(self) -> int:
        """Tokens of the longest sequence."""
        return int(self.lengths.max())

    @cached_property
    def real(self) -> Bool[Tensor, "sequence position"]:
        """Which tokens count: they are no padding, and no mask hides them."""
        within = torch.arange(self.tokens.shape[1]) < self.lengths[:, None]
        return within if self.hidden is None else within & ~self.hidden

    @cached_property
    def predicted(self) -> Bool[Tensor, "sequence position"]:
        """Which tokens count and stand right behind one that does."""
        return self.real & pad(self.real, (1, -1))

    @cached_property
    def seen_before(self) -> Bool[Tensor, "sequence position"]:
        """Which predicted tokens their sequence has had before."""
        return seen_before(self.tokens.cpu().where(self.real, -1)) & self.predicted

    def part(self, chosen: slice | list[int], *, width: int | None = None) -> Corpus:
        """Some of the sequences, to their longest or to `width` positions."""
        width = int(self.lengths[chosen].max()) if width is None else width
        each = {name: vars(self)[name][chosen] for name in ("lengths", "group", "fold", "long")}
        tokens, sinks = self.tokens[chosen, :width], self.sinks[chosen, :, :width]
        hidden = None if self.hidden is None else self.hidden[chosen, :width]
        hidden = hidden if hidden is not None and hidden.any() else None
        return replace(self, tokens=tokens, sinks=sinks, hidden=hidden, **each)


def assign_groups(documents: Documents | None, sequences: int) -> Int[Tensor, " sequence"]:
    """The group of each sequence: its document where there are 8 or more.

    Otherwise groups are stretches of neighbouring sequences.
    """
    shape = (sequences,) if documents is None else torch.as_tensor(documents).shape
    if shape != (sequences,):
        raise BadArgument(
            "documents says, for every sequence, which document it was cut from.",
            seen=f"{tuple(shape)} numbers for {sequences} sequences",
        )
    if count_documents(documents) >= ENOUGH_DOCUMENTS:
        _, rank = torch.unique(torch.as_tensor(documents).cpu(), return_inverse=True)
        count = int(rank.max()) + 1
        return rank * min(count, GROUPS) // count
    blocks = min(sequences, BLOCKS)
    return torch.arange(sequences) * blocks // sequences


def count_documents(documents: Documents | None) -> int:
    """Number of different documents; 0 where it is not known."""
    return 0 if documents is None else len(torch.as_tensor(documents).unique())


def seen_before(tokens: Int[Tensor, "sequence position"]) -> Bool[Tensor, "sequence position"]:
    """Which tokens their sequence has had before."""
    ordered, order = tokens.sort(dim=1, stable=True)
    again = torch.zeros_like(ordered, dtype=torch.bool)
    again[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    return torch.zeros_like(again).scatter_(1, order, again)


def known_sinks(
    tokens: Int[Tensor, "sequence position"], *, bos: int | None, named: Iterable[int] = ()
) -> Int[Tensor, "sequence 1 position"]:
    """The kind of sink that each key is by its place and token (see `SINKS`), or 0.

    Of the first kind are position 0 and every copy of the token that all of several sequences
    begin with; a single sequence begins with one where it is `bos`.
    """
    tokens = tokens.cpu()
    kinds = torch.isin(tokens, torch.tensor(list(named), dtype=tokens.dtype)).long()
    kinds *= 1 + SINKS.index("named")
    first, begins = 1 + SINKS.index("first"), tokens[:, 0]
    if (begins == begins[0]).all() and (len(begins) > 1 or int(begins[0]) == bos):
        kinds[tokens == begins[0]] = first
    kinds[:, 0] = first
    return kinds[:, None]


def _folds(
    lengths: Int[Tensor, " sequence"], group: Int[Tensor, " sequence"]
) -> Int[Tensor, " sequence"]:
    """The fold of each sequence: groups alternate, by their longest sequence."""
    count = int(group.max()) + 1
    longest = lengths.new_zeros(count).scatter_reduce(0, group, lengths, "amax")
    fold = torch.zeros(count, dtype=torch.long)
    fold[longest.argsort(descending=True, stable=True)] = torch.arange(count) % 2
    return fold[group]
