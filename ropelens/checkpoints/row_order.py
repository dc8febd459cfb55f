"""Check of the order of the rows of q_proj and k_proj after a conversion.

Files of Meta and GGUF files pair the coordinates 2j and 2j + 1 of a head. transformers pairs j
and j + size / 2. If rows are permuted twice or not at all, the model predicts badly.
"""

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

MARGIN = 0.1  # nats per token by which another order must be better to count as right


@torch.no_grad()
def row_order(model: PreTrainedModel, tokenizer: Any) -> tuple[bool, str] | None:
    """Compare losses on a short story; return whether the order is wrong, and a sentence.

    The two other orders apply the permutation from pairs to halves once more, or undo it.
    Returns None without `q_proj` and `k_proj` in floats, or if only a part of a head rotates.
    """
    config = model.config.get_text_config()
    queries = config.num_attention_heads
    heads = {"q_proj": queries, "k_proj": getattr(config, "num_key_value_heads", queries)}
    weights = {
        f"{name}.weight": (part.weight, heads[name.rpartition(".")[2]])
        for name, part in model.named_modules()
        if isinstance(part, nn.Linear) and name.endswith(tuple(heads))
    }
    rotated = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1)
    floats = [weight.is_floating_point() for weight, _ in weights.values()]
    if not floats or not all(floats) or rotated != 1:
        return None
    bos, ids = encode(STORY, tokenizer)
    tokens = torch.tensor([bos + ids], device=device_of(model))

    def loss(shape: tuple[int, int] | None = None) -> float:
        """Loss in nats/token with the rows of each head laid out as `shape` and transposed."""
        permuted = {}
        for name, (weight, count) in weights.items() if shape else ():
            rows = torch.arange(len(weight), device=weight.device).view(count, -1)
            permuted[name] = weight[rows.unflatten(1, shape).mT.flatten()]
        options = {"labels": tokens, "use_cache": False}
        return float(functional_call(model, permuted, (tokens,), options).loss)

    as_is, other = loss(), min(loss((-1, 2)), loss((2, -1)))
    order = "in an order that hardly affects the loss"
    if wrong := other < as_is - MARGIN:
        order = "in the wrong order: they were permuted twice or not at all"
    elif as_is < other - MARGIN:
        order = "in the right order"
    losses = f"loss on a short story {as_is:.2f} nats/token, permuted {other:.2f}"
    return wrong, f"The rows of q and k are {order}: {losses}."
