"""The text of a measurement, checked once against the model that will read it."""

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from ropelens.attention.call import AttentionCall, attention_map
from ropelens.errors import BadArgument
from ropelens.model.live_model import LiveModel
from ropelens.text.batches import PackedRow
from ropelens.text.text import Text
from ropelens.text.tokenize import TextInput, read_text

ROWS_ACROSS = 128  # rows of a packed row whose attention across documents is measured


def model_text(
    live: LiveModel, text: TextInput, *, tokenizer: Any = None, sinks: Iterable[int] = ()
) -> Text:
    """Return `text` as a `Text` that the model can read; tokens in `sinks` are sinks.

    Raises `BadArgument` for tokens outside the vocabulary and for lengths that count padding.
    """
    tokenizer = live.tokenizer if tokenizer is None else tokenizer
    text = read_text(text, tokenizer=tokenizer, config=live.config, context=live.context)
    check_ids(text.ids, vocabulary=live.vocabulary)
    check_padding(text.ids.cpu(), text.lengths, padding_ids(live.model))
    return replace(text, bos=live.bos, sink_ids=tuple(sinks))


def check_ids(ids: Int[Tensor, "sequence position"], *, vocabulary: int) -> None:
    """Raise `BadArgument` for short sequences and for tokens outside the vocabulary."""
    if ids.shape[1] < 3:
        raise BadArgument("A text must have 3 tokens or more.", seen=f"{ids.shape[1]} tokens")
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary:
        raise BadArgument(
            "Some tokens are not in the vocabulary of the model.",
            seen=f"ids {int(ids.min())} to {int(ids.max())}, vocabulary {vocabulary}",
        )


def padding_ids(model: PreTrainedModel) -> dict[int, int]:
    """Ids that pad batches, with the number of copies that a text does not begin with.

    If no other id is padding, an end-of-text token is, and one copy may begin a text.
    """
    ids = []
    config = model.config.get_text_config()
    for facts in (config.to_dict(), (model.generation_config or config).to_dict()):
        end = facts.get("eos_token_id")
        ids += [facts.get("pad_token_id"), *(end if isinstance(end, list) else [end])]
    return {id: 1 if id == ids[0] else 2 for id in ids if id is not None}


def check_padding(
    ids: Int[Tensor, "sequence position"],
    lengths: Int[Tensor, " sequence"],
    padding: Mapping[int, int],
) -> None:
    """Raise `BadArgument` if lengths count padding; `padding` is explained in `padding_ids`."""
    beyond = torch.arange(ids.shape[1]) >= lengths[:, None]
    if not beyond.any():
        return
    for id, copies in padding.items():
        other = ids != id
        wrong = ~other[:, :copies].any(1) & (beyond & other).any(1)
        wrong |= ~(other & ~beyond).any(1)
        if wrong.any():
            raise BadArgument(
                "Token ids must be padded on the right, because lengths count from the left.",
                seen=f"sequence {int(wrong.nonzero()[0])} begins with padding (id {id})",
                hint="a BatchEncoding with its attention_mask",
            )


def attention_across(live: LiveModel, row: PackedRow) -> float:
    """Share of its attention that a packed row gives to other documents.

    The model reads the row unmodified, because it may keep the documents apart. The share is a
    mean over heads, layers and up to 128 rows of attention. Warns if it is not 0.
    """
    sequence, shares = row.sequence.to(live.device), []
    count = len(sequence) - 1
    position = torch.linspace(1, count, min(count, ROWS_ACROSS)).long()

    def add_share(call: AttentionCall) -> None:
        attention = attention_map(call.of_rows(position))
        others = (attention * (sequence[position, None] != sequence)).sum(-1)
        shares.append(float(others[..., sequence[position] > 0].mean()))

    with torch.no_grad(), live.observe(add_share):
        inputs = {name: x.to(live.device) for name, x in row.inputs.items()}
        live.model(**inputs, use_cache=False)
    if share := sum(shares) / max(1, len(shares)):
        warnings.warn(
            f"in packed rows this model gives {share:.0%} of its attention to other documents; "
            "here each document is measured by itself",
            stacklevel=5,
        )
    return share
