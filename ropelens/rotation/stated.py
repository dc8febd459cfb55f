"""Frequencies that a live model states in its buffers, compared with the measured rotation."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch
from accelerate.utils import align_module_device
from jaxtyping import Float
from torch import Tensor

from ropelens.errors import UnsupportedModel
from ropelens.model.live_model import LiveModel
from ropelens.rope.planes import MeasuredRotation, Planes


def stated_inv_freq(live: LiveModel, layer: int) -> list[Tensor]:
    """Candidates for the `inv_freq` of a layer, in rad/token, that the model states.

    Rotary modules keep `inv_freq` as a buffer. If types of layers differ (Gemma 3), the name
    of the buffer is `{layer_type}_inv_freq`, and this buffer comes first.
    """
    types = live.config.to_dict().get("layer_types")
    names = ["inv_freq"] if types is None else [f"{types[layer]}_inv_freq", "inv_freq"]
    stated = []
    for name in names:
        for module in live.model.modules():
            if name in module._buffers:
                with align_module_device(module):
                    # cloned, because longrope changes the buffer in place
                    stated.append(module.get_buffer(name).float().cpu().clone())
    return stated


def match_stated(
    rotation: MeasuredRotation,
    candidates: Sequence[Tensor],
    *,
    layer: int,
    class_name: str,
    longest: int,
    noise: float,
) -> tuple[MeasuredRotation, Float[Tensor, " stated"] | None, Planes]:
    """Return the measured rotation, the stated frequencies that it matches, and the planes.

    `longest` is the largest position of the measurement. A layer that does not rotate while
    its model states frequencies is a NoPE layer (SmolLM3). If the stated frequencies are all
    0, the layer has planes of frequency 0. Raises `UnsupportedModel` if the measured rotation
    does not match any frequencies that the model states.
    """
    planes = rotation.planes
    if planes.pairing == "none":
        zero = [w for w in candidates if not w.any() and 2 * len(w) <= planes.head_dim]
        if zero:
            planes = replace(planes, inv_freq=zero[0], pairing="half")
        return rotation, zero[0] if zero else None, planes
    for stated, direction in product(candidates, (1, -1)):
        used = replace(planes, inv_freq=direction * stated)
        turns = _whole_turns(rotation, used.inv_freq, longest, noise)
        if turns is not None:
            aligned = replace(planes, inv_freq=planes.inv_freq + 2 * math.pi * turns)
            return replace(rotation, planes=aligned), stated, used
    if candidates:
        raise UnsupportedModel(
            f"{class_name} does not rotate as it states.",
            seen=f"layer {layer}: {len(planes.inv_freq)} planes, the fastest at "
            f"{planes.inv_freq[0]:.6g} rad/token; the buffer inv_freq has "
            f"{len(candidates[0])}, the fastest at {candidates[0][0]:.6g}",
        )
    return rotation, None, replace(planes, inv_freq=planes.inv_freq.nan_to_num(0))


def _whole_turns(
    rotation: MeasuredRotation, stated: Float[Tensor, " stated"], longest: int, noise: float
) -> Float[Tensor, " frequency"] | None:
    """Whole turns per token by which stated and measured frequencies differ.

    Positions are integers, so that a whole turn per token is not visible. Return None if the
    rest of a difference exceeds the resolution of the measurement. A plane without a visible
    query or key matches any frequency.
    """
    planes, resolution = rotation.planes, rotation.resolution
    count = len(planes.inv_freq)
    if len(stated) < count or stated[count:].any() or 2 * len(stated) > planes.head_dim:
        return None
    difference = (stated[:count].double() - planes.inv_freq.double()).nan_to_num(0)
    turns = (difference / (2 * math.pi)).round()
    allowed = 32 * torch.where(
        resolution.isfinite(), resolution * stated[:count].abs(), noise / longest
    )
    return turns if ((difference - 2 * math.pi * turns).abs() <= allowed).all() else None
