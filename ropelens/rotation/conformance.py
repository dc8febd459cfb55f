"""The rotation that a configuration asks for, and the properties in which another differs."""

import math
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig

from ropelens.rope.planes import PAIRINGS, MeasuredRotation, Pairing
from ropelens.rotation.stated import configured_rotations

INTERLEAVED = {
    *("cohere", "cohere2", "cohere2_moe", "codegen", "deepseek_v2", "ernie4_5", "ernie4_5_moe"),
    *("glm", "glm4", "gptj", "helium", "llama4_text"),
}
"""Model types of transformers that pair coordinates 2f and 2f + 1."""

ROTATES_IF_SLIDING = {"afmoe", "cohere2", "cohere2_moe", "exaone4", "exaone_moe", "flint"}
"""Model types that rotate only in their layers of sliding attention."""

CLOCKWISE = {"nanochat"}
"""Model types whose planes rotate by a negative angle."""

TURNED = 0.05  # rad: a plane that turns less over all positions may look still
SAME_FACTOR = 3e-3  # relative difference of attention factors that bfloat16 causes


class AskedRotation(NamedTuple):
    """The rotation of one layer that a configuration asks for.

    `inv_freq` is None if it is unknown, and empty if the layer must not rotate. An
    implementation may have any of the `pairings`.
    """

    inv_freq: Float[Tensor, " frequency"] | None
    factor: float
    pairings: tuple[Pairing, ...]
    direction: int


def asked_rotations(
    config: PreTrainedConfig | None, *, layers: int, length: int | None = None
) -> list[AskedRotation]:
    """The rotation of each layer that the configuration asks for; any without one."""
    if config is None:
        return [AskedRotation(None, 1.0, PAIRINGS, 1)] * layers
    facts, kind = config.to_dict(), config.model_type
    pairings: tuple[Pairing, ...] = PAIRINGS[1:] if kind in INTERLEAVED else PAIRINGS[:1]
    if facts.get("rope_interleave") or kind not in CONFIG_MAPPING:
        pairings = PAIRINGS
    sliding = facts.get("sliding_window") is not None and kind in ROTATES_IF_SLIDING
    types, rotates = facts.get("layer_types") or [""], facts.get("no_rope_layers") or [True]
    asked = []
    configured = configured_rotations(config, layers=layers, length=length)
    for layer, (inv_freq, factor) in enumerate(configured):
        full = sliding and types[layer % len(types)] != "sliding_attention"
        if full or not rotates[layer % len(rotates)]:
            inv_freq = torch.zeros(0)
        direction = -1 if kind in CLOCKWISE else 1
        asked.append(AskedRotation(inv_freq, factor, pairings, direction))
    return asked


def rotation_differences(
    rotation: MeasuredRotation,
    asked: AskedRotation,
    *,
    longest: int = 2**24,
    factor: float | None = None,
) -> list[str]:
    """Properties in which a rotation differs from the rotation that is asked for.

    `longest` is the largest distance at which it was measured, and `factor` is the attention
    factor if it is known.
    """
    planes, error = rotation.planes, rotation.resolution
    w, wanted, texts = asked.direction * planes.inv_freq.double(), asked.inv_freq, []
    if wanted is not None:
        turns = bool((wanted.abs() * longest > TURNED).any())
        if turns != bool(w.any()):
            still = "" if turns else "the configuration asks for no rotation, but "
            return [f"{still}it {'does not rotate' if turns else 'rotates'}"]
    if not w.any():
        return []
    if planes.pairing not in asked.pairings:
        texts.append(f"it has {planes.pairing} pairing, not {asked.pairings[0]}")
    if wanted is None:
        return texts
    if factor is not None and abs(factor / asked.factor - 1) > SAME_FACTOR:
        texts.append(f"its attention factor is {factor:.6g}, not {asked.factor:.6g}")
    count = min(len(w), len(wanted))
    rest = torch.cat([w[count:], wanted[count:]]).abs().nan_to_num(0)
    if (planes.pairing == "half" and len(w) != len(wanted)) or (rest * longest > TURNED).any():
        sizes = 2 * len(w), 2 * len(wanted)
        texts.append("{} coordinates of a head rotate, not {}".format(*sizes))
    w, wanted, error = w[:count], wanted[:count], error[:count] + 1e-6 * wanted[:count].abs()

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
    return [
        *texts,
        f"the frequencies {cause}: plane {worst} rotates by {float(w[worst]):.6g} rad/token, "
        f"the configuration asks for {float(wanted[worst]):.6g}",
    ]
