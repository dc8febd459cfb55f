"""Frequencies that a model states in its buffers and in its configuration; they can differ."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from accelerate.utils import align_module_device
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from ropelens.config_facts import layer_parameters
from ropelens.errors import UnsupportedModel
from ropelens.measured_rotation.read import LayerRotation, MeasuredRotation
from ropelens.model.live_model import LiveModel
from ropelens.rope.rope_types import stated_shape
from ropelens.rope.variants import Shape

SLOWEST = 1e-9
"""Rad/token. A model whose fastest plane is slower does not rotate in any text."""
FASTEST = 1e30
"""Rad/token. Angles of faster planes overflow float32."""


def stated_inv_freq(model: PreTrainedModel, layer_type: str) -> list[Tensor]:
    """Buffers `inv_freq` of rotary modules, in rad/token; a buffer of this type comes first."""
    stated = []
    for name in (f"{layer_type}_inv_freq", "inv_freq"):
        for module in model.modules():
            if name in module._buffers:
                with align_module_device(module):
                    # cloned, because longrope changes the buffer in place
                    stated.append(module.get_buffer(name).float().cpu().clone())
    return stated


def require_filled_buffers(model: PreTrainedModel) -> None:
    """Refuse a model with a buffer of frequencies that was never filled.

    The buffers are not in checkpoints. If a model is made on the device "meta" and then moved
    by `to_empty`, the buffers contain the earlier content of the memory.
    """
    for name, module in model.named_modules():
        for buffer, content in module._buffers.items():
            if not f"_{buffer}".endswith("_inv_freq"):
                continue
            if content is None or not content.numel():
                continue
            with align_module_device(module):
                fastest = float(module.get_buffer(buffer).float().abs().max())
            if fastest == 0 or SLOWEST < fastest < FASTEST:  # False for NaN
                continue
            raise UnsupportedModel(
                f"{type(model).__name__} has frequencies that no model has.",
                seen=f"{fastest:.3g} rad/token in model.{name}.{buffer}",
                means="the buffer was not filled, as after to_empty, which fills no buffer",
                hint=f"model.{name} = type(model.{name})(model.config), or from_pretrained",
            )


def stated_factor(model: PreTrainedModel, layer_type: str) -> float | None:
    """The attention factor that a rotary module states for a type of layers, or None."""
    for name in (f"{layer_type}_attention_scaling", "attention_scaling"):
        for module in model.modules():
            if name in vars(module):
                return float(vars(module)[name])
    return None


@dataclass(frozen=True)
class StatedRope:
    """What rotary modules state for one type of layers, in the order of their modules."""

    inv_freq: list[Tensor]  # rad/token
    factor: float | None

    @property
    def plane_counts(self) -> list[int]:
        return [len(inv_freq) for inv_freq in self.inv_freq]

    @property
    def still(self) -> bool:
        """Whether the planes of some module do not rotate."""
        return any(len(w) > 0 and not w.any() for w in self.inv_freq)


def stated_ropes(
    model: PreTrainedModel, layer_types: Iterable[str]
) -> dict[str, StatedRope]:
    """What the model states for each type of layers."""
    return {
        layer_type: StatedRope(
            inv_freq=stated_inv_freq(model, layer_type),
            factor=stated_factor(model, layer_type),
        )
        for layer_type in set(layer_types)
    }


def match_stated(
    rotation: LayerRotation,
    candidates: Sequence[Tensor],
    *,
    class_name: str,
    layer: int,
) -> LayerRotation:
    """The rotation, with the `candidate` that it matches and the planes of this candidate.

    `candidates` are the frequencies that the model states. A layer that does not rotate
    although its model states frequencies is a NoPE layer (SmolLM3). If all of them are 0, the
    layer has planes of frequency 0. Raises `UnsupportedModel`, which names the class of the
    model and the number of the layer, if the rotation matches no candidate.
    """
    measured = rotation.measured
    planes = measured.planes
    if planes.pairing == "none":
        return _match_zero(rotation, candidates)
    for stated in candidates:
        for inv_freq in (stated, -stated):
            turns = _whole_turns(measured, inv_freq)
            if turns is None:
                continue
            aligned = planes.inv_freq + 2 * math.pi * turns
            return replace(
                rotation,
                measured=replace(measured, planes=replace(planes, inv_freq=aligned)),
                stated=stated,
                planes=replace(planes, inv_freq=inv_freq),
            )
    if not candidates:
        without_nan = replace(planes, inv_freq=planes.inv_freq.nan_to_num(0))
        return replace(rotation, planes=without_nan)
    stated = candidates[0]
    seen = f"layer {layer}: {len(planes.inv_freq)} planes"
    seen += (
        f", the fastest at {planes.inv_freq[0]:.6g} rad/token; the buffer inv_freq has "
    )
    seen += f"{len(stated)}, the fastest at {stated[0]:.6g}"
    raise UnsupportedModel(f"{class_name} does not rotate as it states.", seen=seen)


def _match_zero(rotation: LayerRotation, candidates: Sequence[Tensor]) -> LayerRotation:
    planes = rotation.measured.planes
    for stated in candidates:
        if not stated.any() and 2 * len(stated) <= planes.head_dim:
            still = replace(planes, inv_freq=stated, pairing="half")
            return replace(rotation, stated=stated, planes=still)
    return rotation


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


def shape_of(live: LiveModel, layer: int, *, rotary_dim: int, length: int) -> Shape:
    """Quantities of one layer on which the frequencies of a variant depend."""
    parameters = layer_parameters(live.config, layer)
    if "rope_theta" not in parameters:
        what = f"{live.class_name} does not state the base of its RoPE."
        hint = "ropelens.rescale with the frequencies themselves"
        raise UnsupportedModel(what, hint=hint)
    shape = stated_shape(live.config, parameters)
    return replace(shape, head_dim=rotary_dim, length=length)


def sharpening(live: LiveModel) -> float:
    """Factor by which modules with latent keys multiply their scale (DeepSeek's mscale)."""
    for module in live.model.modules():
        attributes = vars(module)
        if "scaling" in attributes and "qk_head_dim" in attributes:
            size = math.sqrt(attributes["qk_head_dim"])
            return float(attributes["scaling"] * size)
    return 1.0
