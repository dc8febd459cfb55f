"""The rotation of each layer of a live model, measured, checked and matched with statements."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedConfig

from ropelens.compatibility import rotates_by_axes
from ropelens.config_facts import depends_on_length, trained_length
from ropelens.errors import UnsupportedModel
from ropelens.measured_rotation.conformance import FARTHEST
from ropelens.measured_rotation.read import (
    LayerRotation,
    MeasuredRotation,
    probe_positions,
)
from ropelens.measured_rotation.single_tokens import (
    FULL,
    ProbeSettings,
    SingleTokenProbe,
    probe_single_tokens,
    relative_change,
)
from ropelens.measured_rotation.stated import (
    match_stated,
    require_filled_buffers,
    stated_ropes,
)
from ropelens.model.live_model import LiveModel
from ropelens.noise import NOISE_FACTOR, allowed_residual
from ropelens.rope.planes import Planes, zero_frequencies


def measure_layers(
    live: LiveModel, context: int | None = None, *, settings: ProbeSettings = FULL
) -> list[LayerRotation]:
    """Rotation of each layer without edits; `measure_rope` explains `context`."""
    require_filled_buffers(live.model)
    stated = stated_ropes(live.model, live.layer_types)
    has_buffers = any(rope.inv_freq for rope in stated.values())
    if "rope_parameters" not in live.config.to_dict() or not has_buffers:
        farthest = live.context - 1  # positions may index a table
    else:
        farthest = _farthest_position(live.config, context)
    positions = probe_positions(farthest)
    probes = probe_single_tokens(live, positions, settings=settings)
    # Again, because RoPE that changes with the length changed its buffers.
    stated = stated_ropes(live.model, live.layer_types)
    measured = {
        layer: probe.rotation(stated[live.layer_types[layer]].plane_counts)
        for layer, probe in probes.items()
    }
    check_rotation(
        live.class_name,
        measured,
        probes,
        eps=live.eps,
        may_be_still=any(rope.still for rope in stated.values()),
    )
    layers = [_unmeasured(positions)] * live.layers
    for layer, rotation in measured.items():
        rope = stated[live.layer_types[layer]]
        unmatched = LayerRotation(
            measured=rotation,
            stated=None,
            planes=rotation.planes,
            query_scale=probes[layer].query_scales(),
            factor=rope.factor,
        )
        layers[layer] = match_stated(
            unmatched, rope.inv_freq, class_name=live.class_name, layer=layer
        )
    has_axes = rotates_by_axes(live.model.modules())
    if has_axes and settings.finds_axes:
        return _with_axes(live, layers, positions)
    return layers


def _farthest_position(config: PreTrainedConfig, context: int | None) -> int:
    if depends_on_length(config):
        return max(context or 0, trained_length(config)) - 1
    return FARTHEST  # a wavelength of 10 million tokens still turns


def _unmeasured(positions: Int[Tensor, " position"]) -> LayerRotation:
    """The rotation of a layer that does not attend."""
    nothing = Planes(zero_frequencies(0), 0, "none")
    return LayerRotation(
        measured=MeasuredRotation(nothing, math.nan, math.nan, zero_frequencies(0)),
        stated=None,
        planes=nothing,
        query_scale=dict.fromkeys(positions.tolist(), math.nan),
    )


def check_rotation(
    class_name: str,
    measured: Mapping[int, MeasuredRotation],
    probes: Mapping[int, SingleTokenProbe],
    *,
    eps: float,
    may_be_still: bool,
) -> None:
    """Refuse a model whose queries do not rotate or whose values do."""
    for layer, rotation in measured.items():
        allowed = allowed_residual(rotation.noise, eps)
        if not rotation.residual <= allowed:
            seen = f"layer {layer}: the lengths of its planes change with position (residual "
            seen += f"{rotation.residual:.2g}; a rotation keeps them to {allowed:.0e})"
            fault = "changes its queries with position, but not by a rotation"
            raise _not_a_rotation(class_name, fault, seen)
    still = [rotation.planes.pairing == "none" for rotation in measured.values()]
    if all(still) and not may_be_still:
        seen = "queries and keys are the same at every position (residual 0)"
        raise _not_a_rotation(class_name, "does not rotate its queries", seen)
    for layer, probe in probes.items():
        change = relative_change(probe.values, probe.values[:, :1])
        if change > allowed_residual(probe.value_noise, eps):
            seen = f"layer {layer}: the values of a token change with its position"
            raise _not_a_rotation(class_name, "rotates its values too", seen)


def _not_a_rotation(class_name: str, fault: str, seen: str) -> UnsupportedModel:
    hint = (
        "a model that rotates only queries and keys, such as Llama, Qwen, Gemma or GLM"
    )
    return UnsupportedModel(f"{class_name} {fault}.", seen=seen, hint=hint)


def _with_axes(
    live: LiveModel, layers: list[LayerRotation], positions: Int[Tensor, " position"]
) -> list[LayerRotation]:
    """Layers with the axis, of the three axes of M-RoPE, by which each plane rotates."""
    moved: dict[int, list[Tensor]] = {}
    for axis in range(3):
        on_axis = positions * (torch.arange(3, device="cpu") == axis)[:, None]
        for layer, probe in probe_single_tokens(live, on_axis).items():
            first = layers[layer].planes.first
            x = probe.vectors[..., first]
            change = (x - x[:, :1]).square().mean((0, 1)).sqrt()
            by_axis = moved.setdefault(layer, [])
            by_axis.append(change > NOISE_FACTOR * probe.noise[first])
    layers = list(layers)
    for layer, by_axis in moved.items():
        axis_of_plane = torch.stack(by_axis).byte().argmax(0)
        planes = replace(layers[layer].planes, axis=axis_of_plane)
        layers[layer] = replace(layers[layer], planes=planes)
    return layers
