"""Split padded and packed batches into sequences, which have the same numbers by themselves."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ropelens.config_facts import changes_with_position, slides
from ropelens.errors import BadArgument, explained

TEXT_INPUTS = {
    "input_ids",
    "attention_mask",
    "position_ids",
    "labels",
    "length",
    "seq_idx",
}
TEXT_INPUTS |= {"special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping"}
TEXT_INPUTS |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
"""Inputs that a batch of text may have. Only the first three are read."""


@dataclass(frozen=True)
class PackedRow:
    """A packed row as the model takes it, and the number of the sequence of each token."""

    inputs: dict[str, Tensor]
    sequence: Int[Tensor, " position"]  # from 1; masked tokens have the number 0


def split_batch(
    encoding: Mapping[str, Any], documents: Any = None, config: Any = None
) -> dict[str, Any]:
    """The fields of a `Text` of the sequences of `encoding` with two tokens or more."""
    of_row, places, numbers = number_sequences(encoding, documents, config)
    ids, real = _rows_of(encoding), of_row > 0
    row, column = real.nonzero(as_tuple=True)
    begins = _first_and((row.diff() != 0) | (of_row[real].diff() != 0))
    sequence, place = begins.cumsum(0) - 1, places[real]
    slot = place - place[begins][sequence]
    lengths = slot.new_zeros(int(begins.sum())).scatter_reduce(
        0, sequence, slot + 1, "amax"
    )
    slots = torch.arange(int(lengths.max()))
    hidden = slots < lengths[:, None]
    source = (column[begins][:, None] + slots).clamp(max=ids.shape[1] - 1)
    tokens = ids[row[begins]].gather(1, source) * hidden
    tokens[sequence, slot], hidden[sequence, slot] = ids[real], False
    long, number = lengths >= 2, None
    if documents is not None or int(of_row.max()) > 1:
        number = (
            torch.arange(len(lengths)) if documents is None else numbers[real][begins]
        )
        number = number[long]
    fields: dict[str, Any] = {"ids": tokens[long], "hidden": hidden[long]}
    fields |= {"lengths": lengths[long], "documents": number}
    packed = (of_row.amax(1) > 1).nonzero().flatten()[:1]
    if len(packed):
        names = encoding.keys() & {"input_ids", "attention_mask", "position_ids"}
        rows = {
            name: torch.atleast_2d(torch.as_tensor(encoding[name])) for name in names
        }
        inputs = {name: values[..., packed, :] for name, values in rows.items()}
        fields["packed"] = PackedRow(inputs, of_row[packed[0]])
    return fields


def _rows_of(encoding: Mapping[str, Any]) -> Tensor:
    """Dense input_ids on the CPU; torch computes little with unsigned numbers."""
    ids = torch.atleast_2d(torch.as_tensor(encoding["input_ids"]).to_dense()).cpu()
    return (
        ids.long() if ids.dtype in (torch.uint16, torch.uint32, torch.uint64) else ids
    )


def number_sequences(
    encoding: Mapping[str, Any], documents: Any, config: Any
) -> tuple[
    Int[Tensor, "row column"], Int[Tensor, "row column"], Int[Tensor, "row column"]
]:
    """Number of the sequence within its row (from 1), position and document of each token.

    A zero in `attention_mask` is padding on either side, or hides a token inside a sequence.
    `position_ids` begin anew with each document of a packed row. They may count hidden tokens
    or leave them out. `documents` numbers the rows, or the tokens [row, position]; negative
    numbers are padding. `config` is the configuration of the model, or None. Masked tokens get
    the sequence number 0.
    """
    zero = {
        n
        for n in encoding
        if "type_ids" in n and not torch.as_tensor(encoding[n]).any()
    }
    if unread := encoding.keys() - TEXT_INPUTS - zero:
        what, hint = (
            "Models are measured on token ids only.",
            "the batch without these inputs",
        )
        raise BadArgument(what, seen=", ".join(sorted(unread)), hint=hint)
    what = "A batch must have input_ids in rows of equal length."
    with explained(what, "tokenizer(texts, padding=True)", error=BadArgument):
        ids = _rows_of(encoding)
    numbers = torch.zeros_like(ids) if documents is None else torch.as_tensor(documents)
    if numbers.ndim == 1:
        numbers = numbers[:, None].expand_as(ids)
    columns = torch.arange(ids.shape[1]).expand_as(ids)
    by_default = {"attention_mask": torch.ones_like(ids), "position_ids": columns}
    given = by_default | dict(encoding) | {"documents": numbers}
    real, places, numbers = (
        _number_per_token(name, given[name], ids.shape)
        for name in (*by_default, "documents")
    )
    real = real.bool() & (numbers >= 0)
    if not real.any():
        raise BadArgument("attention_mask hides every token.")
    row, column = real.nonzero(as_tuple=True)
    place, number = places[real], numbers[real]
    same = (row.diff() == 0) & (number.diff() == 0)
    follows = same & ((place.diff() == 1) | (place.diff() == column.diff()))
    begins, skips = _first_and(~follows), follows & (place.diff() < column.diff())
    odd = (
        (same & ~follows & (place[1:] > 0) & (place.diff() >= 0))
        .nonzero()
        .flatten()[:1]
    )
    late, what = place[begins].max() if "position_ids" in encoding else 0, ""
    if len(odd):
        what = "position_ids must increase by 1 or begin anew at 0."
        seen = f"position {int(place[odd + 1])} after position {int(place[odd])}"
    elif skips.any() and slides(config, ids.shape[1] - 2):
        what = "position_ids leave out hidden tokens, which the windows of this model count."
        seen = f"a row of {ids.shape[1]} tokens, longer than the window of some layers"
    elif late and config is not None and changes_with_position(config):
        what = "Positions must begin at 0 in a model whose RoPE or queries change with them."
        seen = f"a sequence that begins at position {int(late)}"
    if what:
        hint = "position_ids that count every token of a sequence from 0, or no position_ids"
        raise BadArgument(what, seen=seen, hint=hint)
    of_row = torch.zeros_like(ids).masked_scatter(real, begins.long()).cumsum(1) * real
    return of_row, places, numbers


def _number_per_token(
    name: str, value: Any, shape: torch.Size
) -> Int[Tensor, "row column"]:
    value = torch.atleast_2d(torch.as_tensor(value).to_dense()).cpu().long()
    if value.ndim == 3 and bool((value == value[0]).all()):
        value = value[0]  # text has the same position on all axes of M-RoPE
    if value.shape != shape:
        seen = f"shape {tuple(value.shape)}, input_ids {tuple(shape)}"
        means = "tokens of an image, whose positions differ by axis, cannot be measured"
        what = f"{name} must have a number for each of the input_ids."
        raise BadArgument(what, seen=seen, means=means * (value.ndim == 3))
    return value


def _first_and(begins: Bool[Tensor, " more"]) -> Bool[Tensor, " token"]:
    """Mark the first token, which begins a sequence, and the later tokens in `begins`."""
    return torch.cat([begins.new_ones(1), begins])
