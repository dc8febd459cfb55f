"""The rotation that a configuration asks for, and the properties in which another differs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig

from ropelens import config_facts
from ropelens.model.live_model import LiveModel
from ropelens.rope.planes import PAIRINGS, Pairing, Planes
from ropelens.rotation.arrays import ArrayRotation
from ropelens.rotation.stated import (
    configured_rotations,
    stated_difference,
    stated_factors,
    unused_keys,
)

AS_CONFIGURED = "rotates as configured"

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


@dataclass(frozen=True)
class AskedRotation:
    """The rotation of one layer that a configuration asks for.

    `inv_freq` is None if it is not known, and empty if the layer must not rotate. An
    implementation may have any of the `pairings`. `grows` is set if the length of queries may
    change with their position.
    """

    inv_freq: Float[Tensor, " frequency"] | None
    factor: float
    pairings: tuple[Pairing, ...]
    direction: int
    grows: bool

    @classmethod
    def like(cls, found: ArrayRotation) -> "AskedRotation":
        """The rotation that other arrays have if they rotate as `found`."""
        planes, factor = found.measured.planes, found.factor or 1.0
        inv_freq = None if found.fault else planes.inv_freq.double().nan_to_num(0)
        return cls(inv_freq, factor, (planes.pairing,), 1, grows=True)


def asked_rotations(
    config: PreTrainedConfig | None, *, layers: int, length: int | None = None
) -> list[AskedRotation]:
    """The rotation of each layer that the configuration asks for; none without one."""
    if config is None:
        return []
    facts, kind = config.to_dict(), config.model_type
    pairings: tuple[Pairing, ...] = PAIRINGS[1:] if kind in INTERLEAVED else PAIRINGS[:1]
    if facts.get("rope_interleave") or kind not in CONFIG_MAPPING:
        pairings = PAIRINGS
    sliding = facts.get("sliding_window") is not None and kind in ROTATES_IF_SLIDING
    types, rotates = facts.get("layer_types") or [""], facts.get("no_rope_layers") or [True]
    grows, asked = config_facts.changes_with_position(config), []
    configured = configured_rotations(config, layers=layers, length=length)
    for layer, (inv_freq, factor) in enumerate(configured):
        full = sliding and types[layer % len(types)] != "sliding_attention"
        still = full or not rotates[layer % len(rotates)]
        direction = -1 if kind in CLOCKWISE else 1
        inv_freq = torch.zeros(0) if still else inv_freq
        asked.append(AskedRotation(inv_freq, factor, pairings, direction, grows))
    return asked


def model_faults(
    live: LiveModel,
    layers: Sequence[tuple[Planes, Tensor | None]],
    config: PreTrainedConfig | None = None,
    length: int | None = None,
) -> list[str]:
    """Properties in which a model differs from a configuration, by default from its own.

    `layers` are the planes of each layer, and the frequencies that the model states for it.
    """
    config = config or live.config
    faults = unused_keys(config, [planes for planes, _ in layers])
    asked = asked_rotations(config, layers=len(layers), length=length)
    for layer, ((planes, stated), wanted) in enumerate(zip(layers, asked, strict=True)):
        texts = []
        if stated is not None and wanted.inv_freq is not None and len(wanted.inv_freq):
            texts.append(stated_difference(stated.double(), wanted.inv_freq, planes.rotary_dim))
        factors = stated_factors(live, layer)
        if planes.rotary_dim and factors and wanted.factor not in factors:
            texts.append(f"its attention factor is {factors[0]:.6g}, not {wanted.factor:.6g}")
        if planes.rotary_dim and planes.pairing not in wanted.pairings:
            texts.append(f"it has {planes.pairing} pairing, not {wanted.pairings[0]}")
        if stated is not None and (planes.inv_freq.sum() * stated.sum() * wanted.direction < 0):
            texts.append("its planes rotate backward")
        turns = wanted.inv_freq is not None and bool(wanted.inv_freq.any())
        if turns and planes.pairing == "none" and planes.head_dim:
            texts.append("it does not rotate")
        text = "; ".join(filter(None, texts))
        if text and not any(text in earlier for earlier in faults):
            faults.append(f"layer {layer}: {text}")
    return faults


def array_faults(found: ArrayRotation, asked: AskedRotation, longest: int) -> list[str]:
    """Properties in which queries or keys at offsets up to `longest` differ from `asked`."""
    planes, wanted = found.measured.planes, asked.inv_freq
    if found.fault:
        return [found.fault]
    faults, w = [], asked.direction * planes.inv_freq.double()
    if wanted is not None:
        turns = bool((wanted.abs() * longest > TURNED).any())
        if turns != (planes.pairing != "none"):
            return [f"it {'does' if turns else 'must'} not rotate"]
    if planes.pairing not in (*asked.pairings, "none"):
        faults.append(f"it has {planes.pairing} pairing, not {asked.pairings[0]}")
    if wanted is None or planes.pairing == "none":
        return faults
    both = min(len(w), len(wanted))
    rest = torch.cat([w[both:], wanted[both:]]).abs().nan_to_num(0)
    if (planes.pairing == "half" and len(w) != len(wanted)) or (rest * longest > TURNED).any():
        faults.append(f"{2 * len(w)} coordinates of a head rotate, not {2 * len(wanted)}")
    allowed = found.measured.resolution[:both] + 2e-6 * w[:both].abs().nan_to_num(0)

    def differs(inv_freq: Tensor) -> bool:
        turned = torch.remainder(w[:both] - inv_freq + math.pi, 2 * math.pi) - math.pi
        return bool((turned.abs() > allowed).any())

    if differs(wanted[:both]):
        backward = not differs(-wanted[:both])
        text = stated_difference(w[:both], wanted[:both], planes.rotary_dim)
        faults.append("its planes rotate backward" if backward else text)
    if found.factor is not None and abs(found.factor / asked.factor - 1) > SAME_FACTOR:
        faults.append(f"its attention factor is {found.factor:.6g}, not {asked.factor:.6g}")
    if (found.growth != 1).any() and not asked.grows:
        faults.append(f"its length grows with position, by {float(found.growth.max()):.4g}")
    return faults


def judge_rotation(faults: Sequence[str], *, configured: bool = True) -> dict[str, str]:
    """Attributes of a measured rotation: a verdict, and a sentence that gives the reason."""
    if faults:
        more = f"; and {len(faults) - 3} more faults" * (len(faults) > 3)
        why = f"does not rotate as {'configured' if configured else 'RoPE does'}: "
        return {"verdict": "different", "why": why + "; ".join(faults[:3]) + more}
    if not configured:
        return {"verdict": "unknown", "why": "rotates; there is no configuration to compare"}
    return {"verdict": "same", "why": AS_CONFIGURED}
