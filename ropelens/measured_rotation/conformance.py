"""The rotation that a configuration asks for, and the properties in which another differs."""

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropelens.compatibility import options_of_formula
from ropelens.measured_rotation.read import LayerRotation
from ropelens.measured_rotation.unused_keys import unused_keys
from ropelens.rope.planes import (
    PAIRINGS,
    Frequencies,
    Pairing,
    Planes,
    zero_frequencies,
)
from ropelens.rope.rope_types import stated_shape
from ropelens.rope.variant_config import frequencies
from ropelens.rope.variants import parse_variant

# Model types of transformers that pair coordinates 2f and 2f + 1, that rotate only in their
# layers of sliding attention, and whose planes rotate by a negative angle.
INTERLEAVED = {
    "cohere",
    "cohere2",
    "cohere2_moe",
    "codegen",
    "deepseek_v2",
    "ernie4_5",
    "ernie4_5_moe",
    "glm",
    "glm4",
    "gptj",
    "helium",
    "llama4_text",
}
ROTATES_IF_SLIDING = {
    "afmoe",
    "cohere2",
    "cohere2_moe",
    "exaone4",
    "exaone_moe",
    "flint",
}
CLOCKWISE = {"nanochat"}

FARTHEST = 2**24  # tokens, up to which models are measured
TURNED = 0.05  # rad: a plane that turns less over all positions may look still
SAME_FACTOR = 3e-3  # relative difference of attention factors that bfloat16 causes
HALF_PRECISION = 4e-3  # relative change of frequencies that are rounded to bfloat16
SAME_RATIO = 1e-3  # relative difference of ratios of frequencies that count as equal


@dataclass(frozen=True)
class AskedRotation:
    """The rotation of one layer that a configuration asks for.

    `inv_freq` (rad/token) is None if it is unknown, and empty if the layer must not rotate. An
    implementation may have any of the `pairings`. `direction` is -1 for clockwise rotation.
    """

    inv_freq: Frequencies | None
    factor: float
    pairings: tuple[Pairing, ...]
    direction: int

    @property
    def plane_counts(self) -> list[int]:
        """The number of planes of a head, if it is known."""
        return [] if self.inv_freq is None else [len(self.inv_freq)]


@dataclass(frozen=True)
class ConfiguredRope:
    """Frequencies in rad/token (None: unknown) and the attention factor."""

    inv_freq: Frequencies | None
    factor: float


UNKNOWN_ROPE = ConfiguredRope(None, 1.0)


def asked_rotations(
    config: PreTrainedConfig | None, *, layers: int, length: int | None = None
) -> list[AskedRotation]:
    """The rotation of each layer that the configuration asks for; any without one."""
    if config is None:
        return [AskedRotation(None, 1.0, PAIRINGS, 1)] * layers
    settings = config.to_dict()
    layer_types = settings.get("layer_types") or [None]
    rotates = settings.get("no_rope_layers") or settings.get("layer_rope_theta")
    rotates = rotates or [True]
    ropes = {
        layer_type: _configured(config, layer_type, length)
        for layer_type in layer_types
    }
    has_window = settings.get("sliding_window") is not None
    only_sliding = has_window and config.model_type in ROTATES_IF_SLIDING
    pairings = _pairings(config)
    direction = -1 if config.model_type in CLOCKWISE else 1
    asked = []
    for layer in range(layers):
        layer_type = layer_types[layer % len(layer_types)]
        inv_freq = ropes[layer_type].inv_freq
        if only_sliding and layer_type != "sliding_attention":
            inv_freq = zero_frequencies(0)
        if not rotates[layer % len(rotates)]:
            inv_freq = zero_frequencies(0)
        asked.append(
            AskedRotation(
                inv_freq=inv_freq,
                factor=ropes[layer_type].factor,
                pairings=pairings,
                direction=direction,
            )
        )
    return asked


def _pairings(config: PreTrainedConfig) -> tuple[Pairing, ...]:
    if config.to_dict().get("rope_interleave"):
        return PAIRINGS
    if config.model_type not in CONFIG_MAPPING:
        return PAIRINGS
    return ("interleaved",) if config.model_type in INTERLEAVED else ("half",)


def _configured(
    config: PreTrainedConfig, layer_type: str | None, length: int | None
) -> ConfiguredRope:
    settings = config.to_dict()
    parameters = settings.get("rope_parameters") or {}
    bases = set(settings.get("layer_rope_theta") or ())
    if bases - {0, parameters.get("rope_theta")}:
        return UNKNOWN_ROPE
    if isinstance(parameters.get(layer_type), dict):
        parameters = parameters[layer_type]
    else:
        layer_type = None
    formula = ROPE_INIT_FUNCTIONS.get(parameters.get("rope_type", "default"))
    with suppress(AttributeError, KeyError, TypeError, ValueError):  # unknown keys
        if formula is not None:
            options = options_of_formula(parameters, settings)
            with torch.device("cpu"):  # some formulas use the default device as well
                inv_freq, factor = formula(
                    config, "cpu", seq_len=length, layer_type=layer_type, **options
                )
            return ConfiguredRope(inv_freq.double(), float(factor))
        shape = stated_shape(config, parameters)
        share = parameters.get("partial_rotary_factor") or 1
        rotated = replace(shape, head_dim=int(shape.head_dim * share))
        inv_freq, _ = frequencies(parse_variant("rope"), rotated)
        return ConfiguredRope(inv_freq.double(), 1.0)
    return UNKNOWN_ROPE


@dataclass(frozen=True)
class FrequencyComparison:
    """Measured and wanted frequencies of common planes, and allowed errors, in rad/token."""

    measured: Frequencies
    wanted: Frequencies
    error: Frequencies

    def _equals(self, inv_freq: Frequencies) -> bool:
        """Whether the planes rotate by `inv_freq`, up to whole turns per token."""
        change = self.measured - inv_freq
        turned = torch.remainder(change + math.pi, 2 * math.pi) - math.pi
        return not (turned.abs() > self.error).any()

    def describe(self) -> str:
        """The difference in words; "" if there is none."""
        if self._equals(self.wanted):
            return ""
        if self._equals(-self.wanted):
            return "its planes rotate backward"
        ratio = (self.measured / self.wanted).where(self.wanted != 0, 1).nan_to_num(1)
        change = (ratio - 1).abs()
        worst = int(change.argmax())
        difference = "differ from its configuration"
        if change[worst] <= HALF_PRECISION:
            difference = "are rounded to half precision"
        elif (ratio / ratio[0] - 1).abs().max() < SAME_RATIO:
            times = f"{float(ratio[0]):.4g} times as high"
            difference = f"are {times} as in its configuration"
        measured = (
            f"plane {worst} rotates by {float(self.measured[worst]):.6g} rad/token"
        )
        wanted = f"the configuration asks for {float(self.wanted[worst]):.6g}"
        return f"the frequencies {difference}: {measured}, {wanted}"


def rotation_differences(
    layer: LayerRotation, asked: AskedRotation, *, distance: int = FARTHEST
) -> list[str]:
    """Properties in which a layer, measured up to `distance` tokens, is not as asked."""
    rotates = bool(layer.planes.inv_freq.any())
    asks = rotates
    if asked.inv_freq is not None:
        asks = bool((asked.inv_freq.abs() * distance > TURNED).any())
    if not rotates:
        return ["it does not rotate"] if asks else []
    if not asks:
        return ["the configuration asks for no rotation, but it rotates"]
    differences = []
    if layer.planes.pairing not in asked.pairings:
        pairing = f"{layer.planes.pairing} pairing, not {asked.pairings[0]}"
        differences.append(f"it has {pairing}")
    if asked.inv_freq is None:
        return differences
    factor = layer.factor
    if factor is not None and abs(factor / asked.factor - 1) > SAME_FACTOR:
        factors = f"{factor:.6g}, not {asked.factor:.6g}"
        differences.append(f"its attention factor is {factors}")
    if _number_of_planes_differs(layer.planes, asked.inv_freq, distance):
        sizes = f"{layer.planes.rotary_dim} coordinates of a head rotate, not "
        differences.append(f"{sizes}{2 * len(asked.inv_freq)}")
    difference = _compare_frequencies(layer, asked.inv_freq, asked.direction).describe()
    return [*differences, difference] if difference else differences


def _number_of_planes_differs(
    planes: Planes, asked: Float[Tensor, " asked"], distance: int
) -> bool:
    """Whether more or fewer planes rotate than is asked for.

    An extra plane counts if it turns visibly within `distance` tokens. With "half" pairing it
    always counts, because the number of planes decides which coordinates are paired.
    """
    measured = planes.inv_freq.double()
    if planes.pairing == "half" and len(measured) != len(asked):
        return True
    common = min(len(measured), len(asked))
    extra = torch.cat([measured[common:], asked[common:]]).abs().nan_to_num(0)
    return bool((extra * distance > TURNED).any())


def _compare_frequencies(
    layer: LayerRotation, asked: Float[Tensor, " asked"], direction: int
) -> FrequencyComparison:
    common = min(len(layer.planes.inv_freq), len(asked))
    wanted = asked[:common]
    error = 1e-6 * wanted.abs()
    if layer.stated is None:
        error = layer.measured.resolution[:common] + error
    measured = direction * layer.planes.inv_freq[:common].double()
    return FrequencyComparison(measured, wanted, error)


def configuration_faults(
    layers: Sequence[LayerRotation], config: PreTrainedConfig, length: int | None = None
) -> list[str]:
    """Properties in which measured layers differ from the configuration."""
    faults = unused_keys(config, [layer.planes for layer in layers])
    asked = asked_rotations(config, layers=len(layers), length=length)
    for number, (layer, wanted) in enumerate(zip(layers, asked, strict=True)):
        if not layer.planes.head_dim:  # the layer does not attend
            continue
        fault = "; ".join(rotation_differences(layer, wanted))
        if fault and not any(fault in earlier for earlier in faults):
            faults.append(f"layer {number}: {fault}")
    return faults
