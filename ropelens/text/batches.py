"""Split padded and packed batches into sequences, which have the same numbers by themselves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ropelens.text.batch_tokens import (
    READ_INPUTS,
    BatchTokens,
    first_and,
    number_tokens,
    tensor_of,
)


@dataclass(frozen=True)
class PackedRow:
    """A packed row as the model takes it, and the number of the sequence of each token."""

    inputs: dict[str, Tensor]
    sequence: Int[Tensor, " position"]  # from 1; masked tokens have the number 0


@dataclass(frozen=True)
class SplitBatch:
    """The sequences of a batch, padded on the right: fields of a `Text`.

    `hidden` marks the tokens inside a sequence that a mask hides, and `packed` is the first row
    with several sequences.
    """

    ids: Int[Tensor, "sequence position"]
    lengths: Int[Tensor, " sequence"]
    documents: Int[Tensor, " sequence"] | None
    hidden: Bool[Tensor, "sequence position"]
    packed: PackedRow | None


@dataclass(frozen=True)
class Slots:
    """The sequence and the slot in it of each real token, and where each sequence begins.

    Slots count hidden tokens between real tokens if the positions count them.
    """

    sequence: Int[Tensor, " token"]
    slot: Int[Tensor, " token"]
    lengths: Int[Tensor, " sequence"]
    row: Int[Tensor, " sequence"]
    column: Int[Tensor, " sequence"]

    @classmethod
    def of(cls, tokens: BatchTokens) -> "Slots":
        """The slots of all real tokens of a batch."""
        row, column = tokens.real.nonzero(as_tuple=True)
        number = tokens.sequence[tokens.real]
        position = tokens.position[tokens.real]
        begins = first_and((row.diff() != 0) | (number.diff() != 0))
        sequence = begins.cumsum(0) - 1
        slot = position - position[begins][sequence]
        zeros = slot.new_zeros(int(begins.sum()))
        lengths = zeros.scatter_reduce(0, sequence, slot + 1, "amax")
        return cls(sequence, slot, lengths, row[begins], column[begins])

    @property
    def within(self) -> Bool[Tensor, "sequence position"]:
        """Slots before the end of their sequence."""
        longest = int(self.lengths.max())
        return torch.arange(longest, device="cpu") < self.lengths[:, None]

    @property
    def hidden(self) -> Bool[Tensor, "sequence position"]:
        """Slots without a real token."""
        hidden = self.within
        hidden[self.sequence, self.slot] = False
        return hidden

    def ids(self, tokens: BatchTokens) -> Int[Tensor, "sequence position"]:
        """The id in each slot; hidden tokens have the ids of their columns, padding 0."""
        within = self.within
        columns = self.column[:, None] + torch.arange(within.shape[1], device="cpu")
        columns = columns.clamp(max=tokens.ids.shape[1] - 1)
        ids = tokens.ids[self.row].gather(1, columns) * within
        ids[self.sequence, self.slot] = tokens.ids[tokens.real]
        return ids

    def documents(self, tokens: BatchTokens) -> Int[Tensor, " sequence"]:
        """The number of the document of each sequence."""
        return tokens.document[self.row, self.column]


def split_batch(
    encoding: Mapping[str, Any], documents: Any = None, config: Any = None
) -> SplitBatch:
    """The sequences of `encoding` with two tokens or more; see `number_tokens`."""
    tokens = number_tokens(encoding, documents, config)
    slots = Slots.of(tokens)
    packed = None
    numbers = None
    if int(tokens.sequence.max()) > 1:
        packed = packed_row(encoding, tokens)
        numbers = torch.arange(len(slots.lengths), device="cpu")
    if documents is not None:
        numbers = slots.documents(tokens)
    long = slots.lengths >= 2
    return SplitBatch(
        ids=slots.ids(tokens)[long],
        lengths=slots.lengths[long],
        documents=None if numbers is None else numbers[long],
        hidden=slots.hidden[long],
        packed=packed,
    )


def packed_row(encoding: Mapping[str, Any], tokens: BatchTokens) -> PackedRow:
    """The first row with several sequences."""
    row = (tokens.sequence.amax(1) > 1).nonzero().flatten()[:1]
    inputs = {}
    for name in encoding.keys() & READ_INPUTS:
        values = torch.atleast_2d(tensor_of(encoding[name]))
        inputs[name] = values[..., row, :]
    return PackedRow(inputs, tokens.sequence[row[0]])
