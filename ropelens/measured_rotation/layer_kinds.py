"""Kinds of layers: layers of one kind see the same keys and rotate alike."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedConfig

from ropelens.attention.call import AttentionCall
from ropelens.config_facts import layer_parameters
from ropelens.measured_rotation.conformance import LayerRotation

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


def stated_windows(config: PreTrainedConfig, context: int) -> list[int]:
    """Windows and chunks (tokens) that a configuration states, shorter than the context."""
    longest, facts = min(context - 2, LONGEST_WINDOW), config.to_dict()
    stated = [facts.get(name) for name in ("sliding_window", "attention_chunk_size")]
    return [width for width in stated if isinstance(width, int) and width <= longest]


def mask_of(call: AttentionCall, context: int) -> tuple[str, int]:
    """Name and reach (tokens) of the mask of a layer, in a call longer than all windows."""
    first = call.visibility.first[0]
    reach = int((first == 0).sum())
    if call.visibility.mask is not None or reach == len(first):
        return "full", context
    return "sliding" if first[reach] == 1 else "chunked", reach


def layer_kinds(
    config: PreTrainedConfig,
    masks: Mapping[int, tuple[str, int]],
    layers: Sequence[LayerRotation],
) -> list[LayerKind]:
    """Kind of each layer, from the masks of the layers that attend and their rotations."""
    kinds, seen = [], dict[str, list[tuple[int, LayerRotation]]]()
    for layer, rotation in enumerate(layers):
        mask, reach = masks.get(layer, ("recurrent", 0))
        name = "none" if layer in masks and rotation.planes.pairing == "none" else mask
        same_name = seen.setdefault(name, [])
        alike = (
            n
            for n, other in enumerate(same_name)
            if _same_kind((reach, rotation), other)
        )
        number = next(alike, len(same_name))
        if number == len(same_name):
            same_name.append((reach, rotation))
        name += f"-{number + 1}" * (number > 0)
        parameters = (
            layer_parameters(config, layer) if rotation.planes.rotary_dim else {}
        )
        kinds.append(
            LayerKind(name, reach, _base(rotation, parameters), _scaling(parameters))
        )
    return kinds


def _same_kind(
    one: tuple[int, LayerRotation], other: tuple[int, LayerRotation]
) -> bool:
    (reach, first), (other_reach, second) = one, other
    w, other_w = (x.planes.inv_freq.double() for x in (first, second))
    if reach != other_reach or len(w) != len(other_w):
        return False
    if first.stated is not None and second.stated is not None:
        return torch.equal(w, other_w)
    error = first.measured.resolution + second.measured.resolution
    return not ((w - other_w).abs() > error[: len(w)]).any()


def _base(rotation: LayerRotation, parameters: Mapping[str, Any]) -> float:
    """The stated base, except if unscaled frequencies show another one."""
    w = rotation.planes.inv_freq.double().abs()
    if len(w) < 2 or not w[1]:
        return math.nan
    measured = float((w[0] / w[1]) ** len(w))
    stated = float(parameters.get("rope_theta") or math.nan)
    plain = parameters.get("rope_type", "default") == "default"
    return measured if plain and not abs(measured / stated - 1) < SAME_BASE else stated


def _scaling(parameters: Mapping[str, Any]) -> str:
    """Type and factor of the scaling in `rope_parameters`: "yarn 4"; empty if there is none."""
    kind, factor = parameters.get("rope_type", "default"), parameters.get("factor")
    scaling = kind * (kind != "default")
    return f"{scaling} {factor:g}" if scaling and factor else scaling
