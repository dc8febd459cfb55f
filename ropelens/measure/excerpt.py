"""Whole attention matrices on a short excerpt, held against what the model computes itself."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from ropelens.errors import UnsupportedModel
from ropelens.models.subject import Subject, check_layers
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.corpus import Corpus
from ropelens.statistics.maps import attention_map, output_residual

EXCERPT_TOKENS = 64
EXCERPT_WEIGHTS = 2**21
"""Largest number of attention weights kept for the excerpt, over all heads."""

LARGEST_RESIDUAL = 1e-3
"""Largest relative difference between attention as observed and as the model computed it."""


@runtime_checkable
class TokenNames(Protocol):
    """What is needed of a tokenizer to name tokens; transformers' have it."""

    def decode(self, token_ids: Any, **options: Any) -> Any: ...


def excerpt_of(model: PreTrainedModel, text: Corpus) -> Int[Tensor, " excerpt_key"]:
    """The begin of the longest sequence: all that EXCERPT_TOKENS and EXCERPT_WEIGHTS allow."""
    config = model.config.get_text_config()
    heads = config.num_hidden_layers * config.num_attention_heads
    longest = int((text.lengths == text.context).nonzero()[0])
    most = min(EXCERPT_TOKENS, int((EXCERPT_WEIGHTS / heads) ** 0.5))
    return text.tokens[longest, : min(text.context, most)]


def attention_of(
    subject: Subject, tokens: Int[Tensor, " position"]
) -> list[Float[Tensor, "head row key"]]:
    """The attention matrices of every layer on one short sequence.

    What the doorway shows is held against what the model computes: weights from the
    observed queries, keys, scale, soft-cap, mask and sinks, times the values, must give
    the model's own output. Raises `UnsupportedModel` where they do not, as for a model
    that also looks ahead.
    """
    maps: dict[int, Tensor] = {}
    residuals: dict[int, float] = {}

    def observe(call: AttentionCall) -> None:
        weights = attention_map(call)
        maps[call.layer] = weights[0].float().cpu()
        residuals[call.layer] = output_residual(call, weights)

    with torch.no_grad(), subject.observe(observe):
        subject.forward(tokens[None], last=1)
    check_layers(subject.model, set(maps))
    check_attention(subject.model, residuals)
    return [maps[layer] for layer in sorted(maps)]


def check_attention(model: PreTrainedModel, residuals: Mapping[int, float]) -> None:
    """Refuse a model whose attention, as observed, misses its own output: by layer."""
    limit = max(LARGEST_RESIDUAL, 16 * torch.finfo(model.dtype).eps)
    for layer, residual in sorted(residuals.items()):
        if not math.isfinite(residual):
            raise UnsupportedModel(
                f"{type(model).__name__} attends with numbers that are not finite.",
                seen=f"layer {layer}: NaN or infinity in its scores or its output",
                means=f"weights that are broken, or too large for {model.dtype}",
                attempt="dtype=torch.float32, or another checkpoint",
            )
        if not residual <= limit:
            raise UnsupportedModel(
                f"{type(model).__name__} attends in a way that ropelens does not know.",
                seen=f"layer {layer}: attention recomputed from its queries and keys misses "
                f"the model's own output by {residual:.2g} (allowed {limit:.0e})",
                means="the model is not causal, or changes its scores or weights in a way "
                "that it does not tell the attention interface",
                attempt="a causal language model of a tested family (see README)",
            )


def name_token(tokenizer: TokenNames | None, token: int) -> str:
    """The text of one token as it stands inside a text, or its number without a tokenizer.

    Decoded behind itself: alone, many tokenizers drop the space that a token begins with.
    """
    if tokenizer is None:
        return f"#{token}"
    alone, twice = tokenizer.decode([token]), tokenizer.decode([token, token])
    return str(twice)[len(alone) :] or str(alone)
