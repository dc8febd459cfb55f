"""Kinds of layers: layers of one kind see the same keys and rotate alike."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from ropelens.attention.call import AttentionCall
from ropelens.config_facts import layer_parameters
from ropelens.measured_rotation.read import LayerRotation

LONGEST_WINDOW = 2**13  # tokens; layers with longer windows count as full attention
SAME_BASE = 1e-3  # relative difference up to which two bases count as the same


class LayerKind(NamedTuple):
    """Kind of a layer, the tokens that it sees, and the base and scaling of its rotation.

    `name` is "sliding", "full", "chunked", "none" (no rotation) or "recurrent" (no attention),
    with a number from the second kind of this name on: "full-2". `reach` is the window or
    chunk, and the trained context of other layers. `base` is NaN if it is unknown.
    """

    name: str
    reach: int
    base: float
    scaling: str


@dataclass(frozen=True)
class LayerMask:
    """Name of the mask of a layer, and the number of tokens that a row sees at most."""

    name: str
    reach: int


@dataclass(frozen=True)
class ComparedLayer:
    """The reach and the rotation of a layer, which decide whether two layers are alike."""

    reach: int
    rotation: LayerRotation

    def is_like(self, other: "ComparedLayer") -> bool:
        inv_freq = self.rotation.planes.inv_freq.double()
        other_inv_freq = other.rotation.planes.inv_freq.double()
        if self.reach != other.reach or len(inv_freq) != len(other_inv_freq):
            return False
        if self.rotation.stated is not None and other.rotation.stated is not None:
            return torch.equal(inv_freq, other_inv_freq)
        error = self.rotation.measured.resolution + other.rotation.measured.resolution
        difference = (inv_freq - other_inv_freq).abs()
        return not (difference > error[: len(inv_freq)]).any()


def stated_windows(config: PreTrainedConfig, context: int) -> list[int]:
    """Windows and chunks (tokens) that a configuration states, shorter than the context."""
    settings = config.to_dict()
    longest = min(context - 2, LONGEST_WINDOW)
    widths = [settings.get(name) for name in ("sliding_window", "attention_chunk_size")]
    return [width for width in widths if isinstance(width, int) and width <= longest]


def mask_of(call: AttentionCall, context: int) -> LayerMask:
    """The mask of a layer, from a call that is longer than all windows."""
    first = call.visibility.first[0]
    reach = int((first == 0).sum())
    if call.visibility.mask is not None or reach == len(first):
        return LayerMask("full", context)
    return LayerMask("sliding" if first[reach] == 1 else "chunked", reach)


def layer_kinds(
    config: PreTrainedConfig,
    masks: Mapping[int, LayerMask],
    layers: Sequence[LayerRotation],
) -> list[LayerKind]:
    """Kind of each layer, from the masks of the layers that attend and their rotations."""
    kinds = []
    first_layers: dict[str, list[ComparedLayer]] = {}  # one of each kind, by name
    for layer, rotation in enumerate(layers):
        mask = masks.get(layer, LayerMask("recurrent", 0))
        name = mask.name
        if layer in masks and rotation.planes.pairing == "none":
            name = "none"
        number = _number_of_kind(
            ComparedLayer(mask.reach, rotation), first_layers.setdefault(name, [])
        )
        parameters = {}
        if rotation.planes.rotary_dim:
            parameters = layer_parameters(config, layer)
        kinds.append(
            LayerKind(
                name=name if number == 1 else f"{name}-{number}",
                reach=mask.reach,
                base=_base(rotation, parameters),
                scaling=_scaling(parameters),
            )
        )
    return kinds


def _number_of_kind(layer: ComparedLayer, first_layers: list[ComparedLayer]) -> int:
    """Number of the first layer that is alike, from 1; a layer of a new kind is appended."""
    for number, first in enumerate(first_layers, start=1):
        if layer.is_like(first):
            return number
    first_layers.append(layer)
    return len(first_layers)


def _base(rotation: LayerRotation, parameters: Mapping[str, Any]) -> float:
    """The stated base, except if unscaled frequencies show another one."""
    inv_freq = rotation.planes.inv_freq.double().abs()
    if len(inv_freq) < 2 or not inv_freq[1]:
        return math.nan
    stated = float(parameters.get("rope_theta") or math.nan)
    if parameters.get("rope_type", "default") != "default":
        return stated
    measured = float((inv_freq[0] / inv_freq[1]) ** len(inv_freq))
    is_same = abs(measured / stated - 1) < SAME_BASE
    return stated if is_same else measured


def _scaling(parameters: Mapping[str, Any]) -> str:
    """Type and factor of the scaling in `rope_parameters`: "yarn 4"; empty if there is none."""
    rope_type = parameters.get("rope_type", "default")
    factor = parameters.get("factor")
    if rope_type == "default":
        return ""
    return f"{rope_type} {factor:g}" if factor else rope_type
