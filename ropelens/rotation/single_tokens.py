"""Queries and keys of sequences of one token, which differ only by their rotation.

A sequence of one token has the same hidden state at every position. The model runs a few such
sequences at positions 0, 1, 2, 4, 8, ..., and each layer's attention call is recorded.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.attention.call import AttentionCall
from ropelens.errors import UnsupportedModel
from ropelens.model.live_model import LiveModel
from ropelens.rope.planes import Planes


@dataclass(frozen=True)
class SingleTokenProbe:
    """Queries and keys (`vectors`) and values of one layer for sequences of one token.

    Some models scale queries by their position (Ministral 3, Llama 4). `vectors` are divided by
    this factor, `query_scale`.
    """

    vectors: Float[Tensor, "vector position coordinate"]
    values: Float[Tensor, "token position kv_head feature"]
    scale: float
    query_scale: Float[Tensor, " position"]


@torch.no_grad()
def probe_single_tokens(
    live: LiveModel, positions: Int[Tensor, "*axis position"]
) -> dict[int, SingleTokenProbe]:
    """Run four tokens, each as a sequence of its own at each of `positions`, without edits."""
    tokens = torch.arange(1, 5) * live.vocabulary // 6
    row_scales = {  # Llama 4 scales some queries by their row, which these sequences lack
        module["layer_idx"]: 1
        + module["attn_scale"] * ((positions + 1) // module["floor_scale"]).double().log1p()
        for module in map(vars, live.model.modules())
        if module.get("attn_temperature_tuning") and not module["use_rope"]
    }

    def read(call: AttentionCall) -> SingleTokenProbe:
        query, key, values = (
            x[:, :, 0].double().cpu().unflatten(0, (len(tokens), -1))
            for x in (call.query, call.key, call.value)
        )
        if not (query.isfinite().all() and key.isfinite().all()):
            raise UnsupportedModel(
                f"{live.class_name} has queries or keys that are NaN or infinite.",
                seen=f"layer {call.layer}",
                hint="whole weights, and rope_parameters that give frequencies",
            )
        length = query.square().sum((0, 2, 3)).sqrt()
        scale = (length / length[0]).nan_to_num(1)
        scale = scale.where((scale - 1).abs() > live.tolerance, 1)
        both = torch.cat([query / scale[:, None, None], key], dim=2)
        vectors = both.transpose(1, 2).flatten(0, 1)
        scale = scale * row_scales.get(call.layer, 1)
        return SingleTokenProbe(vectors, values, float(call.scale), scale)

    position_ids = positions.repeat(*(1,) * (positions.ndim - 1), len(tokens))[..., None]
    sequences = tokens.repeat_interleave(positions.shape[-1])[:, None]
    dtypes = {x.dtype for x in live.model.parameters() if x.is_floating_point()}
    device = live.device.type
    # A model of several dtypes runs only under the autocast that is open.
    mixed = len(dtypes) > 1 and torch.is_autocast_enabled(device)
    autocast = torch.autocast(device, torch.get_autocast_dtype(device), enabled=mixed)
    with live.without_hooks(), autocast:
        if live.depends_on_length:
            live.forward(tokens[:1, None])  # a short sequence resets dynamic RoPE
        return live.record_calls(sequences, read, position_ids)


def find_axes(
    live: LiveModel, planes: list[Planes], positions: Int[Tensor, " position"]
) -> dict[int, Int[Tensor, " frequency"]]:
    """Index of the position axis that rotates each plane, by layer (M-RoPE).

    A token of M-RoPE has three positions. The probe moves a token along one axis at a time.
    """
    rotated: dict[int, list[Tensor]] = {}
    for axis in range(3):
        on_axis = positions * (torch.arange(3) == axis)[:, None]
        for layer, probe in probe_single_tokens(live, on_axis).items():
            x = probe.vectors[..., planes[layer].first]
            change = (x - x[:, :1]).square().mean((0, 1)).sqrt()
            moved = change > 32 * live.noise * x.square().mean().sqrt()
            rotated.setdefault(layer, []).append(moved)
    return {layer: torch.stack(axes).byte().argmax(0) for layer, axes in rotated.items()}
