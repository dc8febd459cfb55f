"""The sums of a profile, computed from transformers' `output_attentions`.

Hooks record queries and keys, and transformers' function rotates them. transformers returns
attention as one matrix per head. The sums of each layer are: norms by plane, selectivity by
plane (of all keys, and of keys that are not sinks), attention by offset, entropy, information,
sinks and previous tokens. The code uses plain float32 tensors and one sequence, with the
matrices of one head at a time. A profile has more statistics (the kernel, gains of planes,
intervals), so this is a lower bound of the cost of its numbers.
"""

import math
from functools import partial

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


def dense_sums(model: LlamaForCausalLM, ids: Tensor) -> list[dict[str, Tensor]]:
    """Means over rows from position 1 on, for every layer; `ids` [1, position]."""
    recorded, attentions, rotation = run(model, ids)
    layers = []
    for layer, attention in zip(recorded, attentions, strict=True):
        query, key = apply_rotary_pos_emb(layer["q"], layer["k"], *rotation)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        scaled = query / math.sqrt(model.config.head_dim)
        of_heads = []
        for q, k, a in zip(scaled[0], key[0], attention[0], strict=True):
            of_heads.append(head_sums(q, k, a))
        sums = {}
        for name in of_heads[0]:
            sums[name] = torch.stack([of_head[name] for of_head in of_heads])
        for name, x in layer.items():
            norm = by_plane(x[0].square()).sqrt()
            sums[f"{name}_norm"] = norm.mean(1)
        layers.append(sums)
    return layers


Recorded = dict[str, Tensor]  # queries and keys [sequence, head, position, coordinate]


def run(
    model: LlamaForCausalLM, ids: Tensor
) -> tuple[list[Recorded], tuple[Tensor, ...], tuple[Tensor, Tensor]]:
    """Queries and keys without rotation, attention, and the rotation, of all layers."""
    recorded: list[Recorded] = [{} for _ in model.model.layers]
    hooks = []
    for vectors, layer in zip(recorded, model.model.layers, strict=True):
        for name in ("q", "k"):
            projection = getattr(layer.self_attn, f"{name}_proj")
            hook = partial(record, vectors, name, model.config.head_dim)
            hooks.append(projection.register_forward_hook(hook))
    try:
        outputs = model(ids, output_attentions=True, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    positions = torch.arange(ids.shape[1])[None]
    rotation = model.model.rotary_emb(outputs.logits, positions)
    return recorded, outputs.attentions, rotation


def record(
    vectors: Recorded, name: str, size: int, _: object, __: object, out: Tensor
) -> None:
    vectors[name] = out.unflatten(-1, (-1, size)).transpose(1, 2)


def by_plane(x: Tensor) -> Tensor:
    """Sums of the two coordinates of each plane."""
    return x.unflatten(-1, (2, -1)).sum(-2)


def head_sums(query: Tensor, key: Tensor, attention: Tensor) -> dict[str, Tensor]:
    """Sums of one head; scaled `query` and `key` [position, coordinate], square `attention`."""
    length = len(query)
    count = torch.arange(1, length + 1)[:, None]
    attended_key = attention @ key
    mean_key = key.cumsum(0) / count
    on_sink = attention[:, :1]
    others = (mean_key * count - key[:1]) / (count - 1).clamp(min=1)
    no_sink = attended_key - on_sink * key[:1] - (1 - on_sink) * others
    scores = (query @ key.T).tril_().masked_fill_(hidden(length), -math.inf)
    log_norm = scores.logsumexp(-1)
    entropy = log_norm - (query * attended_key).sum(-1)
    offset = (torch.arange(length)[:, None] - torch.arange(1, length)).clamp_(min=0)
    mass = torch.zeros(length).index_add_(
        0, offset.flatten(), attention[:, 1:].flatten()
    )
    rows = slice(1, None)
    return {
        "selectivity": by_plane(query * (attended_key - mean_key))[rows].mean(0),
        "selectivity_keys": by_plane(query * no_sink)[rows].mean(0),
        "entropy": entropy[rows].mean(),
        "information": (count.squeeze(1).log() - entropy)[rows].mean(),
        "offset_mass": mass / (length - 1),
        "sink_mass": on_sink[rows].mean(),
        "self_mass": attention.diagonal()[rows].mean(),
        "previous_token": attention.diagonal(-1)[1:].mean(),  # from position 2 on
    }


def hidden(length: int) -> Tensor:
    """Pairs of a row and a later key."""
    return torch.ones(length, length, dtype=torch.bool).triu_(1)
