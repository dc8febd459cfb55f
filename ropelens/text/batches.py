"""Batches as tokenizers and packing collators make them become sequences, padded on the right.

RoPE scores depend on how far two tokens are apart, so a sequence in a padded or packed row has
the numbers of the same sequence alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from ropelens.config_facts import changes_with_position, slides
from ropelens.errors import BadArgument

TEXT = {"input_ids", "attention_mask", "position_ids", "labels", "length", "seq_idx"}
TEXT |= {"special_tokens_mask", "offset_mapping", "overflow_to_sample_mapping"}
TEXT |= {"cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"}
"""What a batch of text may have; only the first three are read."""


def split_batch(
    encoding: Mapping[str, Any], documents: Any = None, config: Any = None
) -> tuple[
    Int[Tensor, "sequence position"],
    Int[Tensor, " sequence"],
    Bool[Tensor, "sequence position"] | None,
    Int[Tensor, " sequence"] | None,
    Int[Tensor, "row column"],
]:
    """Ids, lengths, hidden tokens and documents of the sequences in `encoding`.

    Last comes which of its row's sequences each token is of; see `number_sequences`, which
    explains the arguments. Sequences of one token are dropped.
    """
    of_row, places, numbers = number_sequences(encoding, documents, config)
    ids, real = torch.atleast_2d(torch.as_tensor(encoding["input_ids"])).cpu(), of_row > 0
    row, column = real.nonzero(as_tuple=True)
    begins = _first_and((row.diff() != 0) | (of_row[real].diff() != 0))
    sequence, place = begins.cumsum(0) - 1, places[real]
    slot = place - place[begins][sequence]
    lengths = slot.new_zeros(int(begins.sum())).scatter_reduce(0, sequence, slot + 1, "amax")
    slots = torch.arange(int(lengths.max()))
    hidden = slots < lengths[:, None]
    source = (column[begins][:, None] + slots).clamp(max=ids.shape[1] - 1)
    tokens = ids[row[begins]].gather(1, source) * hidden
    tokens[sequence, slot], hidden[sequence, slot] = ids[real], False
    known = documents is not None
    if known or int(of_row.max()) > 1:
        documents = numbers[real][begins] if known else torch.arange(len(lengths))
    long = lengths >= 2
    documents = None if documents is None else documents[long]
    masked = hidden[long] if hidden[long].any() else None
    return tokens[long], lengths[long], masked, documents, of_row


def number_sequences(
    encoding: Mapping[str, Any], documents: Any, config: Any
) -> tuple[Int[Tensor, "row column"], Int[Tensor, "row column"], Int[Tensor, "row column"]]:
    """Which of its row's sequences each token is of, from 1 on, its position, its document.

    `encoding` has `input_ids` and may have an `attention_mask`, whose zeros are padding on
    either side, or hide tokens inside a sequence, and `position_ids`, which begin anew with
    every document of a packed row and may count hidden tokens or leave them out; under a
    window that `config` states, which counts them always, `BadArgument`, as where they begin
    beyond 0 and change the RoPE or the length of queries. `documents` numbers the document of
    each row, or of each token [row, position], below 0 padding. Masked tokens are of 0. Raises
    `BadArgument` for inputs that would be left out, such as an image.
    """
    zero = {n for n in encoding if "type_ids" in n and not torch.as_tensor(encoding[n]).any()}
    if unread := encoding.keys() - TEXT - zero:
        raise BadArgument(
            "Models are measured on token ids alone.",
            seen=", ".join(sorted(unread)),
            hint="the batch without these inputs",
        )
    ids = torch.atleast_2d(torch.as_tensor(encoding["input_ids"])).cpu()
    numbers = torch.zeros_like(ids) if documents is None else torch.as_tensor(documents)
    if numbers.ndim == 1:
        numbers = numbers[:, None].expand_as(ids)
    columns = torch.arange(ids.shape[1]).expand_as(ids)
    by_default = {"attention_mask": torch.ones_like(ids), "position_ids": columns}
    given = by_default | dict(encoding) | {"documents": numbers}
    real, places, numbers = (
        _of_each_token(name, given[name], ids.shape) for name in (*by_default, "documents")
    )
    real = real.bool() & (numbers >= 0)
    if not real.any():
        raise BadArgument("attention_mask hides every token.")
    row, column = real.nonzero(as_tuple=True)
    place, number = places[real], numbers[real]
    same = (row.diff() == 0) & (number.diff() == 0)
    follows = same & ((place.diff() == 1) | (place.diff() == column.diff()))
    odd = (same & ~follows & (place[1:] > 0) & (place.diff() >= 0)).nonzero().flatten()[:1]
    if len(odd):
        raise BadArgument(
            "position_ids neither go on by 1 nor begin anew at 0.",
            seen=f"position {int(place[odd + 1])} behind position {int(place[odd])}",
        )
    if (follows & (place.diff() < column.diff())).any() and slides(config, ids.shape[1] - 2):
        raise BadArgument(
            "position_ids leave out hidden tokens, which the windows of this model count.",
            seen=f"a row of {ids.shape[1]} tokens, longer than the window of some layers",
            hint="the batch without these tokens, or position_ids that count them",
        )
    begins = _first_and(~follows)
    late = place[begins].max() if "position_ids" in encoding else 0
    if late and config is not None and changes_with_position(config):
        raise BadArgument(
            "Positions begin at 0 where a model changes with them: its RoPE or its queries.",
            seen=f"a sequence that begins at position {int(late)}",
        )
    of_row = torch.zeros_like(ids).masked_scatter(real, begins.long()).cumsum(1) * real
    return of_row, places, numbers


def _of_each_token(name: str, value: Any, shape: torch.Size) -> Int[Tensor, "row column"]:
    value = torch.atleast_2d(torch.as_tensor(value)).cpu().long()
    if value.ndim == 3 and bool((value == value[0]).all()):
        value = value[0]  # the axes of M-RoPE, on which text stands at the same positions
    if value.shape != shape:
        raise BadArgument(
            f"{name} must have a number for each of the input_ids.",
            seen=f"shape {tuple(value.shape)}, input_ids {tuple(shape)}",
            means="tokens of an image, whose positions differ by axis, cannot be measured"
            * (value.ndim == 3),
        )
    return value


def _first_and(begins: Bool[Tensor, " more"]) -> Bool[Tensor, " token"]:
    """The first token begins a sequence, and those behind it where they do."""
    return torch.cat([begins.new_ones(1), begins])
