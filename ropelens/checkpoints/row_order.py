"""Are the rows of q and k in the order in which the model rotates them?

Files of Meta and GGUF files pair coordinates 2j and 2j + 1 of a head, transformers j and
j + size / 2. A conversion that permutes the rows once too often, or never, makes a model that
rotates as its configuration says, and predicts badly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from transformers import PreTrainedModel

from ropelens.runtime.devices import device_of
from ropelens.text.tokenize import encode

STORY = """The old man lived by the sea. Every morning he walked along the beach, and every \
evening he sat by the fire and read the same book. One day a boy came to his door. "Who are \
you?" the old man asked. "I am the son of the man who sold you this house," the boy said, "and \
I have come to ask you for a favour." The old man thought about it for a while, and then he \
asked the boy to come in and sit by the fire."""

MARGIN = 0.1
"""Nats per token by which another order must be better to be the right one."""


@torch.no_grad()
def row_order(model: PreTrainedModel, tokenizer: Any) -> tuple[bool, str] | None:
    """Whether the rows are in the wrong order, and a sentence, from losses on a short story.

    The other orders undo a permutation from pairs to halves, or make it. None for a model
    without `q_proj` and `k_proj` of floats, or whose heads rotate in part.
    """
    config = model.config.get_text_config()
    queries = config.num_attention_heads
    heads = {"q_proj": queries, "k_proj": getattr(config, "num_key_value_heads", queries)}
    weights = {
        f"{name}.weight": (part.weight, heads[name.rpartition(".")[2]])
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and name.endswith(tuple(heads))
    }
    in_part = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1)
    floats = [weight.is_floating_point() for weight, _ in weights.values()]
    if not floats or not all(floats) or in_part != 1:
        return None
    bos, ids = encode(STORY, tokenizer)
    tokens = torch.tensor([bos + ids], device=device_of(model))

    def loss(shape: tuple[int, int] | None = None) -> float:
        """In nats/token, with the rows of each head, laid out in `shape`, read by column."""
        permuted = {}
        for name, (weight, count) in weights.items() if shape else ():
            rows = torch.arange(len(weight), device=weight.device).view(count, -1)
            permuted[name] = weight[rows.unflatten(1, shape).mT.flatten()]
        options = {"labels": tokens, "use_cache": False}
        return float(functional_call(model, permuted, (tokens,), options).loss)

    as_is, other = loss(), min(loss((-1, 2)), loss((2, -1)))
    order = "in an order that hardly matters"
    if wrong := other < as_is - MARGIN:
        order = "in the wrong order, permuted once too often or never"
    elif as_is < other - MARGIN:
        order = "in the right order"
    losses = f"loss on a short story {as_is:.2f} nats/token, permuted {other:.2f}"
    return wrong, f"The rows of q and k are {order}: {losses}."
