"""The tokens of a batch as a model takes it, and the sequence to which each token belongs."""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ropelens.config_facts import changes_with_position, slides
from ropelens.errors import BadArgument, explained

READ_INPUTS = {"input_ids", "attention_mask", "position_ids"}
PACKING_INPUTS = {"seq_idx", "cu_seq_lens_q", "cu_seq_lens_k"}
"""Inputs that divide packed rows, as position_ids do."""
UNREAD_INPUTS = {
    "labels",
    "length",
    "special_tokens_mask",
    "offset_mapping",
    "overflow_to_sample_mapping",
    "max_length_q",
    "max_length_k",
    *PACKING_INPUTS,
}
"""Further inputs that a batch of text may have."""
LEFT_OUT = -100  # label of a target that the loss of a training leaves out

ByToken = Int[Tensor, "row column"]


@dataclass(frozen=True)
class BatchTokens:
    """Ids, sequences, positions and documents of the tokens [row, column] of a batch.

    The sequences of each row are numbered from 1. Masked tokens have the number 0.
    """

    ids: ByToken
    sequence: ByToken
    position: ByToken
    document: ByToken

    @property
    def real(self) -> Bool[Tensor, "row column"]:
        """Tokens that no mask hides."""
        return self.sequence > 0


@dataclass(frozen=True)
class RealTokens:
    """The tokens of a batch that no mask hides, row by row."""

    row: Int[Tensor, " token"]
    column: Int[Tensor, " token"]
    position: Int[Tensor, " token"]
    document: Int[Tensor, " token"]

    @property
    def stays(self) -> Bool[Tensor, " next"]:
        """Whether the next token is in the same row and document."""
        return (self.row.diff() == 0) & (self.document.diff() == 0)

    @property
    def follows(self) -> Bool[Tensor, " next"]:
        """Whether the next token belongs to the same sequence.

        Its position is one larger, or counts the hidden tokens before it.
        """
        step = self.position.diff()
        return self.stays & ((step == 1) | (step == self.column.diff()))

    @property
    def begins(self) -> Bool[Tensor, " token"]:
        """Whether a sequence begins with the token."""
        return first_and(~self.follows)


def number_tokens(
    encoding: Mapping[str, Any], documents: Any, config: Any
) -> BatchTokens:
    """Number the sequences of a batch.

    A zero in `attention_mask` is padding on either side, or hides a token inside a sequence.
    `position_ids` begin anew with each document of a packed row. They may count hidden tokens
    or leave them out. `documents` numbers the rows, or the tokens [row, position]; negative
    numbers are padding. `config` is the configuration of the model, or None.
    """
    check_inputs(encoding)
    with explained(
        "A batch must have input_ids in rows of equal length.",
        "tokenizer(texts, padding=True)",
        error=BadArgument,
    ):
        ids = dense_ids(encoding)
    mask = number_of_each_token(
        "attention_mask", encoding.get("attention_mask", torch.ones_like(ids)), ids
    )
    columns = torch.arange(ids.shape[1], device="cpu").expand_as(ids)
    position = number_of_each_token(
        "position_ids", encoding.get("position_ids", columns), ids
    )
    document = number_of_each_token("documents", document_numbers(documents, ids), ids)
    real = mask.bool() & (document >= 0)
    if not real.any():
        raise BadArgument("attention_mask hides every token.")
    row, column = real.nonzero(as_tuple=True)
    tokens = RealTokens(row, column, position[real], document[real])
    check_positions(
        tokens, ids.shape[1], config, positions_given="position_ids" in encoding
    )
    begins = torch.zeros_like(ids).masked_scatter(real, tokens.begins.long())
    warn_of_labels(encoding, real & (begins == 0))
    return BatchTokens(ids, begins.cumsum(1) * real, position, document)


def check_inputs(encoding: Mapping[str, Any]) -> None:
    """Raise `BadArgument` for inputs that are not text; unused type ids are zeros."""
    zeros = {
        name
        for name in encoding
        if "type_ids" in name and not tensor_of(encoding[name]).any()
    }
    unknown = encoding.keys() - READ_INPUTS - UNREAD_INPUTS - zeros
    if unknown:
        raise BadArgument(
            "Models are measured on token ids only.",
            seen=", ".join(sorted(unknown)),
            hint="the batch without these inputs",
        )
    packing = PACKING_INPUTS & encoding.keys()
    if packing and "position_ids" not in encoding:
        raise BadArgument(
            "A packed batch is divided into its documents by position_ids.",
            seen=f"{', '.join(sorted(packing))} without position_ids",
            hint="DataCollatorWithFlattening(return_position_ids=True), or the batch "
            "without these inputs for attention across documents",
        )


def warn_of_labels(
    encoding: Mapping[str, Any], targets: Bool[Tensor, "row column"]
) -> None:
    """Warn if labels leave targets out of the loss, because losses here have all targets."""
    if encoding.get("labels") is None:
        return
    labels = torch.atleast_2d(tensor_of(encoding["labels"]).to_dense()).cpu()
    if labels.shape != targets.shape:
        return
    left_out = int((targets & (labels == LEFT_OUT)).sum())
    if left_out:
        warnings.warn(
            f"labels are not read: {left_out:,} of {int(targets.sum()):,} targets with the "
            f"label {LEFT_OUT} count like other targets, also in losses",
            stacklevel=4,
        )


def tensor_of(values: Any) -> Tensor:
    """The values of an encoding. A tensor stays on its device, and lists are on the CPU."""
    if isinstance(values, Tensor):
        return values
    return torch.as_tensor(values, device="cpu")


def dense_ids(encoding: Mapping[str, Any]) -> ByToken:
    """Dense input_ids on the CPU; torch computes little with unsigned numbers."""
    ids = torch.atleast_2d(tensor_of(encoding["input_ids"]).to_dense()).cpu()
    if ids.dtype in (torch.uint16, torch.uint32, torch.uint64):
        return ids.long()
    return ids


def document_numbers(documents: Any, ids: ByToken) -> Tensor:
    """The numbers of the documents of rows, as a table; the document 0 by default."""
    if documents is None:
        return torch.zeros_like(ids)
    numbers = tensor_of(documents)
    if numbers.ndim == 1:
        return numbers[:, None].expand_as(ids)
    return numbers


def number_of_each_token(name: str, values: Any, ids: ByToken) -> ByToken:
    """The values as a table of whole numbers; raises `BadArgument` for another shape."""
    numbers = torch.atleast_2d(tensor_of(values).to_dense()).cpu().long()
    if numbers.ndim == 3 and bool((numbers == numbers[0]).all()):
        numbers = numbers[0]  # text has the same position on all axes of M-RoPE
    if numbers.shape == ids.shape:
        return numbers
    means = ""
    if numbers.ndim == 3:
        means = "tokens of an image, whose positions differ by axis, cannot be measured"
    raise BadArgument(
        f"{name} must have a number for each of the input_ids.",
        seen=f"shape {tuple(numbers.shape)}, input_ids {tuple(ids.shape)}",
        means=means,
    )


def check_positions(
    tokens: RealTokens, width: int, config: Any, *, positions_given: bool
) -> None:
    """Raise `BadArgument` for positions in rows of `width` tokens that cannot be measured.

    The model may count tokens in another way than the positions, if `config` is known.
    """
    step = tokens.position.diff()
    fault = ""
    jumps = tokens.stays & ~tokens.follows & (tokens.position[1:] > 0) & (step >= 0)
    skips = tokens.follows & (step < tokens.column.diff())
    latest_begin = int(tokens.position[tokens.begins].max()) if positions_given else 0
    if jumps.any():
        jump = int(jumps.nonzero()[0])
        fault = "position_ids must increase by 1 or begin anew at 0."
        seen = f"position {int(tokens.position[jump + 1])} after position "
        seen += f"{int(tokens.position[jump])}"
    elif skips.any() and slides(config, width - 2):
        fault = "position_ids leave out hidden tokens, which the windows of this model count."
        seen = f"a row of {width} tokens, longer than the window of some layers"
    elif latest_begin and config is not None and changes_with_position(config):
        fault = "Positions must begin at 0 in a model whose RoPE or queries change with them."
        seen = f"a sequence that begins at position {latest_begin}"
    if fault:
        raise BadArgument(
            fault,
            seen=seen,
            hint="position_ids that count every token of a sequence from 0, or no "
            "position_ids",
        )


def first_and(begins: Bool[Tensor, " next"]) -> Bool[Tensor, " token"]:
    """Mark the first token, which begins a sequence, and the later tokens in `begins`."""
    return torch.cat([begins.new_ones(1), begins])
