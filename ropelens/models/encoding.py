"""Batches as tokenizers and packing collators make them become sequences, padded on the right.

RoPE scores depend on how far two tokens are apart, so a sequence in a padded or packed row has
the numbers of the same sequence alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ropelens.errors import BadArgument


def cut(
    encoding: Mapping[str, Any], documents: Any = None
) -> tuple[
    Int[Tensor, "sequence position"],
    Int[Tensor, " sequence"],
    Int[Tensor, " sequence"] | None,
    Int[Tensor, "row column"],
]:
    """Ids, lengths and documents of the sequences in `encoding`, each of at least 2 tokens.

    Last comes which of its row's sequences each token is of, from 1 on; 0 in padding.

    `encoding` has `input_ids` and may have an `attention_mask`, whose zeros are padding on
    either side, and `position_ids`, which begin anew with every document of a packed row.
    `documents` numbers the document of each row, or of each token [row, position].

    Raises `BadArgument` for a mask with a hole, whose rows are no sequence of tokens.
    """
    ids = torch.atleast_2d(torch.as_tensor(encoding["input_ids"])).cpu()

    def of_each_token(name: str, value: Any) -> Int[Tensor, "row position"]:
        value = torch.atleast_2d(torch.as_tensor(value)).cpu().long()
        if value.shape != ids.shape:
            raise BadArgument(
                f"{name} must have a number for each of the input_ids.",
                seen=f"shape {tuple(value.shape)}, input_ids {tuple(ids.shape)}",
            )
        return value

    real = of_each_token("attention_mask", encoding.get("attention_mask", torch.ones_like(ids)))
    real = real.bool()
    begins = real.clone()
    begins[:, 1:] &= ~real[:, :-1]
    if int(begins.sum(1).max()) > 1:
        raise BadArgument(
            "attention_mask may hide tokens before and after a sequence, not inside it.",
            seen=f"a mask with a hole in row {int(begins.sum(1).argmax())}",
            attempt="ropelens.observe, which takes any mask",
        )
    if (positions := encoding.get("position_ids")) is not None:
        begins[:, 1:] |= real[:, 1:] & (of_each_token("position_ids", positions).diff() != 1)
    if documents is not None:
        documents = torch.as_tensor(documents).cpu().long()
        if documents.ndim == 1:
            documents = documents[:, None].expand(-1, ids.shape[1])
        begins[:, 1:] |= real[:, 1:] & (of_each_token("documents", documents).diff() != 0)
        documents = documents[begins]
    elif int(begins.sum(1).max()) > 1:
        documents = torch.arange(int(begins.sum()))
    number = begins.cumsum(1) * real
    lengths = (begins.flatten().cumsum(0)[real.flatten()] - 1).bincount()
    tokens = pad_sequence(ids[real].split(lengths.tolist()), batch_first=True)
    long = lengths >= 2
    documents = None if documents is None else documents[long]
    return tokens[long], lengths[long], documents, number


def check_left_padding(
    tokens: Int[Tensor, "sequence position"], lengths: Int[Tensor, " sequence"], pad: int | None
) -> None:
    """Raise `BadArgument` where a sequence begins with padding that its length counts."""
    if pad is None:
        return
    real = tokens.cpu() != pad
    beyond = torch.arange(tokens.shape[1]) >= lengths[:, None]
    wrong = ~real[:, 0] & (beyond & real).any(1)
    if bool(wrong.any()):
        raise BadArgument(
            "tokens must be padded on the right: lengths count from the left.",
            seen=f"sequence {int(wrong.nonzero()[0])} begins with padding (id {pad})",
            attempt="the tokenizer's BatchEncoding, which has an attention_mask",
        )
