"""The sums of a profile, computed from transformers' `output_attentions`.

Hooks record queries and keys, and transformers' function rotates them. transformers returns
attention as one matrix per head. The sums of each layer are: norms by plane, selectivity by
plane (of all keys, and of keys that are not sinks), attention by offset, entropy, information,
sinks and previous tokens. The code uses plain float32 tensors and one sequence, with the
matrices of one head at a time. A profile has more statistics (the kernel, gains of planes,
intervals), so this is a lower bound of the cost of its numbers.
"""

import math

import torch
from torch import Tensor
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb


def dense_sums(model: LlamaForCausalLM, ids: Tensor) -> list[dict[str, Tensor]]:
    """Means over rows from position 1 on, for every layer; `ids` [1, position]."""
    recorded: dict[int, dict[str, Tensor]] = {}
    hooks = []
    for number, layer in enumerate(model.model.layers):
        for name in ("q", "k"):

            def record(
                _: object,
                __: object,
                out: Tensor,
                number: int = number,
                name: str = name,
            ) -> None:
                recorded.setdefault(number, {})[name] = out

            projection = getattr(layer.self_attn, f"{name}_proj")
            hooks.append(projection.register_forward_hook(record))
    try:
        outputs = model(ids, output_attentions=True, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    length = ids.shape[1]
    size = model.config.head_dim
    positions = torch.arange(length)[None]
    cos, sin = model.model.rotary_emb(outputs.logits, positions)
    layers = []
    for number, attention in enumerate(outputs.attentions):
        heads = {
            name: x.view(1, length, -1, size).transpose(1, 2)
            for name, x in recorded[number].items()
        }
        query, key = apply_rotary_pos_emb(heads["q"], heads["k"], cos, sin)
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        of_heads = [
            head_sums(q / math.sqrt(size), k, a)
            for q, k, a in zip(query[0], key[0], attention[0], strict=True)
        ]
        stacked = {
            name: torch.stack([sums[name] for sums in of_heads]) for name in of_heads[0]
        }
        norms = {
            f"{name}_norm": by_plane(x[0].square()).sqrt() for name, x in heads.items()
        }
        means = {name: x.mean(1) for name, x in norms.items()}
        layers.append(stacked | means)
    return layers


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
    log_norm = (
        (query @ key.T).tril_().masked_fill_(hidden(length), -math.inf).logsumexp(-1)
    )
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
