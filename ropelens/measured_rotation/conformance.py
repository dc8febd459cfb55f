"""The rotation that a configuration asks for, and the properties in which another differs."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropelens.measured_rotation.read import MeasuredRotation
from ropelens.measured_rotation.stated import unused_keys
from ropelens.rope.planes import PAIRINGS, Pairing, Planes
from ropelens.rope.variant_config import frequencies, stated_shape
from ropelens.rope.variants import parse_variant

# Model types of transformers that pair coordinates 2f and 2f + 1, that rotate only in their
# layers of sliding attention, and whose planes rotate by a negative angle.
INTERLEAVED = {"cohere", "cohere2", "cohere2_moe", "codegen", "deepseek_v2", "ernie4_5"}
INTERLEAVED |= {"ernie4_5_moe", "glm", "glm4", "gptj", "helium", "llama4_text"}
ROTATES_IF_SLIDING = {
    "afmoe",
    "cohere2",
    "cohere2_moe",
    "exaone4",
    "exaone_moe",
    "flint",
}
CLOCKWISE = {"nanochat"}

TURNED = 0.05  # rad: a plane that turns less over all positions may look still
SAME_FACTOR = 3e-3  # relative difference of attention factors that bfloat16 causes


class AskedRotation(NamedTuple):
    """The rotation of one layer that a configuration asks for."""

    inv_freq: (
        Float[Tensor, " frequency"] | None
    )  # None: unknown; empty: it must not rotate
    factor: float
    pairings: tuple[Pairing, ...]  # an implementation may have any of them
    direction: int

    @property
    def plane_counts(self) -> list[int]:
        """The number of planes of a head, if it is known."""
        return [] if self.inv_freq is None else [len(self.inv_freq)]


@dataclass(frozen=True)
class LayerRotation:
    """Rotation of one layer: `measured`, `stated` by the model, and the `planes` to use."""

    measured: MeasuredRotation
    stated: Float[Tensor, " frequency"] | None
    planes: Planes  # with the stated frequencies, exact to the bit, if the model states some
    query_scale: dict[int, float]  # factor on queries at each position
    factor: float | None = None  # the attention factor, if it is known


def asked_rotations(
    config: PreTrainedConfig | None, *, layers: int, length: int | None = None
) -> list[AskedRotation]:
    """The rotation of each layer that the configuration asks for; any without one."""
    if config is None:
        return [AskedRotation(None, 1.0, PAIRINGS, 1)] * layers
    facts, kind = config.to_dict(), config.model_type
    pairings: tuple[Pairing, ...] = (
        PAIRINGS[1:] if kind in INTERLEAVED else PAIRINGS[:1]
    )
    if facts.get("rope_interleave") or kind not in CONFIG_MAPPING:
        pairings = PAIRINGS
    direction = -1 if kind in CLOCKWISE else 1
    types = facts.get("layer_types") or [None]
    rotates = facts.get("no_rope_layers") or facts.get("layer_rope_theta") or [True]
    configured = {of_type: _configured(config, of_type, length) for of_type in types}
    sliding = facts.get("sliding_window") is not None and kind in ROTATES_IF_SLIDING
    asked = []
    for layer in range(layers):
        layer_type = types[layer % len(types)]
        inv_freq, factor = configured[layer_type]
        full = sliding and layer_type != "sliding_attention"
        if full or not rotates[layer % len(rotates)]:
            inv_freq = torch.zeros(0)
        asked.append(AskedRotation(inv_freq, factor, pairings, direction))
    return asked


def _configured(
    config: PreTrainedConfig, layer_type: str | None, length: int | None
) -> tuple[Float[Tensor, " frequency"] | None, float]:
    """Frequencies (rad/token; None if unknown) and attention factor that it asks for."""
    facts = config.to_dict()
    part = facts.get("rope_parameters") or {}
    if {*(facts.get("layer_rope_theta") or ())} - {0, part.get("rope_theta")}:
        return None, 1.0
    layer_type = layer_type if isinstance(part.get(layer_type), dict) else None
    part = part if layer_type is None else part[layer_type]
    init = ROPE_INIT_FUNCTIONS.get(part.get("rope_type", "default"))
    with suppress(AttributeError, KeyError, TypeError, ValueError):  # unknown keys
        if init is not None:
            w, factor = init(config, "cpu", seq_len=length, layer_type=layer_type)
            return w.double(), float(factor)
        shape = stated_shape(config, part)
        rotary = int(shape.head_dim * (part.get("partial_rotary_factor") or 1))
        plain = frequencies(parse_variant("rope"), replace(shape, head_dim=rotary))
        return plain[0].double(), 1.0
    return None, 1.0


def rotation_differences(
    layer: LayerRotation, asked: AskedRotation, *, longest: int = 2**24
) -> list[str]:
    """Properties in which a layer, measured up to `longest`, differs from what is asked for."""
    planes, factor, wanted = layer.planes, layer.factor, asked.inv_freq
    w = asked.direction * planes.inv_freq.double()
    error = layer.measured.resolution if layer.stated is None else torch.zeros(len(w))
    rotates = bool(w.any())
    asks = rotates if wanted is None else bool((wanted.abs() * longest > TURNED).any())
    if not rotates:
        return ["it does not rotate"] * asks
    if not asks:
        return ["the configuration asks for no rotation, but it rotates"]
    texts = []
    if planes.pairing not in asked.pairings:
        texts.append(f"it has {planes.pairing} pairing, not {asked.pairings[0]}")
    if wanted is None:
        return texts
    if factor is not None and abs(factor / asked.factor - 1) > SAME_FACTOR:
        texts.append(f"its attention factor is {factor:.6g}, not {asked.factor:.6g}")
    count = min(len(w), len(wanted))
    rest = torch.cat([w[count:], wanted[count:]]).abs().nan_to_num(0)
    if (planes.pairing == "half" and len(w) != len(wanted)) or (
        rest * longest > TURNED
    ).any():
        texts.append(
            f"{2 * len(w)} coordinates of a head rotate, not {2 * len(wanted)}"
        )
    w, wanted = w[:count], wanted[:count]
    error = error[:count] + 1e-6 * wanted.abs()

    def differ(inv_freq: Tensor) -> bool:
        turned = torch.remainder(w - inv_freq + math.pi, 2 * math.pi) - math.pi
        return bool((turned.abs() > error).any())

    if not differ(wanted):
        return texts
    if not differ(-wanted):
        return [*texts, "its planes rotate backward"]
    ratio = (w / wanted).where(wanted != 0, 1).nan_to_num(1)
    worst, cause = int((ratio - 1).abs().argmax()), "differ from its configuration"
    if (ratio - 1).abs()[worst] <= 4e-3:
        cause = "are rounded to half precision"
    elif (ratio / ratio[0] - 1).abs().max() < 1e-3:
        cause = f"are {float(ratio[0]):.4g} times as high as in its configuration"
    seen = f"plane {worst} rotates by {float(w[worst]):.6g} rad/token"
    asks_for = f"the configuration asks for {float(wanted[worst]):.6g}"
    return [*texts, f"the frequencies {cause}: {seen}, {asks_for}"]


def configuration_faults(
    layers: Sequence[LayerRotation], config: PreTrainedConfig, length: int | None = None
) -> list[str]:
    """Properties in which measured layers differ from the configuration."""
    faults = unused_keys(config, [layer.planes for layer in layers])
    asked = asked_rotations(config, layers=len(layers), length=length)
    for number, (layer, wanted) in enumerate(zip(layers, asked, strict=True)):
        found = rotation_differences(layer, wanted)
        text = "; ".join(found if layer.planes.head_dim else [])
        if text and not any(text in earlier for earlier in faults):
            faults.append(f"layer {number}: {text}")
    return faults
