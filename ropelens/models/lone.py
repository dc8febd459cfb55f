"""Lone tokens at many positions: what differs between them is what position alone does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from ropelens.errors import UnsupportedModel
from ropelens.models.subject import Subject, check_layers
from ropelens.statistics.call import AttentionCall

TOKENS = 4
LENGTH_DEPENDENT = {"dynamic", "longrope"}


@dataclass(frozen=True)
class LoneTokens:
    """What one layer's attention is given for sequences of one token, in float64.

    A sequence of one token has the same hidden state whatever its position. `vectors` are its
    queries and keys, a few tokens times all heads; `values` those of all key-value heads.
    """

    vectors: Float[Tensor, "vector position coordinate"]
    values: Float[Tensor, "token position kv_head feature"]
    scale: float


def lone_tokens(subject: Subject, positions: Int[Tensor, " position"]) -> dict[int, LoneTokens]:
    """By layer, some tokens each alone at each of `positions`.

    Raises `UnsupportedModel` where a layer hides its attention, or attends more than once.
    """
    vocabulary = subject.model.config.get_text_config().vocab_size
    tokens = torch.arange(1, TOKENS + 1) * vocabulary // (TOKENS + 2)
    found: dict[int, LoneTokens] = {}

    def collect(call: AttentionCall) -> None:
        if call.layer in found:
            raise UnsupportedModel(
                f"{type(subject.model).__name__} attends more than once in a layer.",
                seen=f"a second attention call of layer {call.layer} in one pass",
                means="layers that run again, a model inside the model, or two attentions that "
                "make one: a head has no one attention matrix",
                attempt="a model whose layers attend once each",
            )
        both = torch.cat([call.query, call.key], dim=1)[:, :, 0].double().cpu()
        vectors = both.unflatten(0, (len(tokens), -1)).transpose(1, 2).flatten(0, 1)
        values = call.value[:, :, 0].double().cpu().unflatten(0, (len(tokens), -1))
        found[call.layer] = LoneTokens(vectors, values, float(call.scale))

    with torch.no_grad():
        if depends_on_length(subject.model):
            subject.forward(tokens[:1, None])  # dynamic RoPE forgets what was longer before
        with subject.observe(collect):
            subject.forward(
                tokens.repeat_interleave(len(positions))[:, None],
                positions.repeat(len(tokens))[:, None],
            )
    check_layers(subject.model, set(found))
    return found


def depends_on_length(model: PreTrainedModel) -> bool:
    """Whether the model's RoPE changes with the length of a batch: dynamic, longrope."""
    return bool(LENGTH_DEPENDENT & {str(p.get("rope_type")) for p in rope_parameters(model)})


def rope_parameters(model: PreTrainedModel) -> list[dict[str, Any]]:
    """The `rope_parameters` of the config, for every type of layer that has its own."""
    facts = model.config.get_text_config().to_dict()
    parameters = facts.get("rope_parameters") or {}
    return [p for p in parameters.values() if isinstance(p, dict)] or [parameters]
