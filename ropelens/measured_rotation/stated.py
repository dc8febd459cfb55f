"""Frequencies that a model states in its buffers and in its configuration; they can differ."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product

from accelerate.utils import align_module_device
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ropelens.config_facts import layer_parameters, rope_parameters
from ropelens.errors import UnsupportedModel
from ropelens.measured_rotation.read import MeasuredRotation
from ropelens.model.live_model import LiveModel
from ropelens.rope.planes import Planes
from ropelens.rope.variant_config import stated_shape
from ropelens.rope.variants import Shape


def stated_inv_freq(model: PreTrainedModel, layer_type: str) -> list[Tensor]:
    """Buffers `inv_freq` of rotary modules, in rad/token; a buffer of this type comes first."""
    stated = []
    for name, module in product(
        (f"{layer_type}_inv_freq", "inv_freq"), model.modules()
    ):
        if name in module._buffers:
            with align_module_device(module):
                # cloned, because longrope changes the buffer in place
                stated.append(module.get_buffer(name).float().cpu().clone())
    return stated


def stated_factor(model: PreTrainedModel, layer_type: str) -> float | None:
    """The attention factor that a rotary module states for a type of layers, or None."""
    names = (f"{layer_type}_attention_scaling", "attention_scaling")
    pairs = product(names, map(vars, model.modules()))
    return next((float(module[name]) for name, module in pairs if name in module), None)


def match_stated(
    rotation: MeasuredRotation, candidates: Sequence[Tensor], name: tuple[str, int]
) -> tuple[MeasuredRotation, Float[Tensor, " stated"] | None, Planes]:
    """Return the measured rotation, the `candidate` that it matches, and the planes.

    `candidates` are the frequencies that the model states, and `name` is its class and the
    number of the layer. A layer that does not rotate although its model states frequencies is
    a NoPE layer (SmolLM3). If all of them are 0, the layer has planes of frequency 0. Raises
    `UnsupportedModel` if the rotation matches no candidate.
    """
    planes = rotation.planes
    if planes.pairing == "none":
        zero = [w for w in candidates if not w.any() and 2 * len(w) <= planes.head_dim]
        if zero:
            planes = replace(planes, inv_freq=zero[0], pairing="half")
        return rotation, zero[0] if zero else None, planes
    for stated, direction in product(candidates, (1, -1)):
        used = replace(planes, inv_freq=direction * stated)
        turns = _whole_turns(rotation, used.inv_freq)
        if turns is not None:
            aligned = replace(planes, inv_freq=planes.inv_freq + 2 * math.pi * turns)
            return replace(rotation, planes=aligned), stated, used
    if candidates:
        seen, stated = f"layer {name[1]}: {len(planes.inv_freq)} planes", candidates[0]
        seen += f", the fastest at {planes.inv_freq[0]:.6g} rad/token; the buffer inv_freq has "
        seen += f"{len(stated)}, the fastest at {stated[0]:.6g}"
        raise UnsupportedModel(f"{name[0]} does not rotate as it states.", seen=seen)
    return rotation, None, replace(planes, inv_freq=planes.inv_freq.nan_to_num(0))


def _whole_turns(
    rotation: MeasuredRotation, stated: Float[Tensor, " stated"]
) -> Float[Tensor, " frequency"] | None:
    """Whole turns per token between two frequencies; None if the rest shows a difference."""
    planes = rotation.planes
    count = len(planes.inv_freq)
    if len(stated) < count or stated[count:].any() or 2 * len(stated) > planes.head_dim:
        return None
    difference = (stated[:count].double() - planes.inv_freq.double()).nan_to_num(0)
    turns = (difference / (2 * math.pi)).round()
    rest = (difference - 2 * math.pi * turns).abs()
    return turns if (rest <= rotation.resolution).all() else None


def unused_keys(config: PreTrainedConfig, layers: list[Planes]) -> list[str]:
    """Keys that do not change a rotation and that transformers does not report itself."""
    facts = config.to_dict()
    with suppress(OSError, ValueError):  # transformers drops some keys of the file
        written, _ = config.get_config_dict(
            str(config.name_or_path), local_files_only=True
        )
        facts = written | written.get("text_config", {}) | facts
    bases = {None, *(part.get("rope_theta") for part in rope_parameters(config))}
    unused = [
        f"{name} {facts[name]:g}, unlike the base in rope_parameters"
        for name in ("rope_theta", "rotary_emb_base")
        if facts.get(name) not in bases
    ]
    rotating = {
        planes.rotary_dim: planes.head_dim for planes in layers if planes.rotary_dim
    }
    for name, unit in (
        ("rotary_dim", 1),
        ("rotary_pct", max(rotating.values(), default=0)),
    ):
        if (
            rotating
            and facts.get(name) is not None
            and int(facts[name] * unit) not in rotating
        ):
            unused.append(
                f"{name} {facts[name]}, but {max(rotating)} coordinates rotate"
            )
    if facts.get("rope_interleave") and not hasattr(type(config), "rope_interleave"):
        unused.append("rope_interleave, a key of other families")
    fault = "the configuration has a key that the model does not read"
    return [f"{fault}: {key}" for key in unused]


def shape_of(live: LiveModel, layer: int, *, rotary_dim: int, length: int) -> Shape:
    """Quantities of one layer on which the frequencies of a variant depend."""
    parameters = layer_parameters(live.config, layer)
    if "rope_theta" not in parameters:
        what = f"{live.class_name} does not state the base of its RoPE."
        raise UnsupportedModel(
            what, hint="ropelens.rescale with the frequencies themselves"
        )
    return replace(
        stated_shape(live.config, parameters), head_dim=rotary_dim, length=length
    )


def sharpening(live: LiveModel) -> float:
    """Factor by which modules with latent keys multiply their scale (DeepSeek's mscale)."""
    for module in map(vars, live.model.modules()):
        if {"scaling", "qk_head_dim"} <= {*module}:
            return float(module["scaling"] * math.sqrt(module["qk_head_dim"]))
    return 1.0
