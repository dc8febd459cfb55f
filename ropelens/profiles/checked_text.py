"""A text that a model can read: checks of its tokens, its padding and its packed rows."""

import warnings
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from transformers import PreTrainedModel

from ropelens.attention.call import AttentionCall, attention_map
from ropelens.errors import BadArgument
from ropelens.model.live_model import LiveModel
from ropelens.text.batches import PackedRow
from ropelens.text.rows import Ids, Lengths, TokenMask
from ropelens.text.text import Text
from ropelens.text.tokenize import TextInput, read_text

ROWS_ACROSS = 128
"""Positions of a packed row whose attention across documents is measured."""


def model_text(
    live: LiveModel,
    text: TextInput,
    *,
    tokenizer: Any = None,
    sinks: Collection[int] = (),
) -> Text:
    """Return `text` as a `Text` that the model can read; tokens in `sinks` are sinks."""
    if tokenizer is None:
        tokenizer = live.tokenizer
    text = read_text(
        text, tokenizer=tokenizer, config=live.config, context=live.context
    )
    if text.ids.shape[1] < 3 or not text.real.any():
        tokens = min(text.ids.shape[1], int(text.real.sum()))
        raise BadArgument("A text must have 3 tokens or more.", seen=f"{tokens} tokens")
    check_ids(text.ids, vocabulary=live.vocabulary)
    if sinks:
        sink_ids = torch.tensor([*sinks], dtype=torch.long, device="cpu")
        check_ids(sink_ids, vocabulary=live.vocabulary)
    check_padding(live.model, text.ids.cpu(), text.lengths)
    warn_of_two_bos(text.ids, bos=live.bos)
    return replace(text, bos=live.bos, sink_ids=tuple(sinks))


def warn_of_two_bos(ids: Ids, *, bos: Any) -> None:
    """Warn if most sequences begin with BOS twice."""
    if not isinstance(bos, int):
        return
    twice = int((ids[:, :2] == bos).all(1).sum())
    if 2 * twice > len(ids):
        warnings.warn(
            f"{twice:,} of {len(ids):,} sequences begin with BOS twice (id {bos}): a chat "
            "template writes it, and a tokenizer puts another one in front unless "
            "add_special_tokens=False",
            stacklevel=4,
        )


def check_ids(ids: Int[Tensor, "*shape"], *, vocabulary: int) -> None:
    """Raise `BadArgument` for tokens outside the vocabulary."""
    lowest = int(ids.min())
    highest = int(ids.max())
    if lowest < 0 or highest >= vocabulary:
        raise BadArgument(
            "Some tokens are not in the vocabulary of the model.",
            seen=f"ids {lowest} to {highest}, vocabulary {vocabulary}",
            hint="the tokenizer of this model; if tokens were added to it, "
            "model.resize_token_embeddings(len(tokenizer))",
        )


def check_padding(model: PreTrainedModel, ids: Ids, lengths: Lengths) -> None:
    """Raise `BadArgument` if lengths count padding on the left of a sequence."""
    beyond = torch.arange(ids.shape[1], device="cpu") >= lengths[:, None]
    if not beyond.any():
        return
    ends = stated_tokens(model, "eos_token_id")
    pad_token = model.config.get_text_config().to_dict().get("pad_token_id")
    for padding in dict.fromkeys([*stated_tokens(model, "pad_token_id"), *ends]):
        # A text may begin with one end-of-text token.
        copies = 1 if padding == pad_token else 2
        wrong = begins_with_padding(ids, beyond, padding=padding, copies=copies)
        if wrong.any():
            sequence = int(wrong.nonzero()[0])
            raise BadArgument(
                "Token ids must be padded on the right, because lengths count from "
                "the left.",
                seen=f"sequence {sequence} begins with padding (id {padding})",
                hint="a BatchEncoding with its attention_mask",
            )


def stated_tokens(model: PreTrainedModel, name: str) -> list[int]:
    """Ids of this token in the configuration of a model, and in its generation settings."""
    generation = getattr(model, "generation_config", None)  # older classes have none
    tokens: list[int] = []
    for config in (model.config.get_text_config(), generation):
        stated = None if config is None else config.to_dict().get(name)
        if isinstance(stated, list):
            tokens += stated
        elif stated is not None:
            tokens.append(stated)
    return tokens


def begins_with_padding(
    ids: Ids, beyond: TokenMask, *, padding: int, copies: int
) -> Bool[Tensor, " sequence"]:
    """Sequences whose first tokens are padding, and whose text goes on `beyond` their length.

    Sequences of nothing but padding are among them.
    """
    other = ids != padding
    padded = ~other[:, :copies].any(1)
    goes_on = (beyond & other).any(1)
    empty = ~(other & ~beyond).any(1)
    return padded & goes_on | empty


def attention_across(live: LiveModel, row: PackedRow) -> float:
    """Mean share of the attention of a packed row on other documents; warns if it is not 0."""
    sequence = row.sequence.to(live.device)
    rows = len(sequence) - 1
    position = torch.linspace(
        1, rows, min(rows, ROWS_ACROSS), dtype=torch.float32, device="cpu"
    ).long()
    is_other = sequence[position, None] != sequence
    is_real = sequence[position] > 0
    shares: list[float] = []

    def add_share(call: AttentionCall) -> None:
        attention = attention_map(call.of_rows(position))
        on_others = (attention * is_other).sum(-1)
        shares.append(float(on_others[..., is_real].mean()))

    with torch.no_grad(), live.observe(add_share):
        inputs = {name: x.to(live.device) for name, x in row.inputs.items()}
        live.model(**inputs, use_cache=False)
    share = sum(shares) / max(1, len(shares))
    if share:
        warnings.warn(
            f"in packed rows this model gives {share:.0%} of its attention to other "
            "documents; here each document is measured by itself",
            stacklevel=5,
        )
    return share
