"""Two implementations of one model: do they rotate alike, plane by plane?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import xarray as xr
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn

from ropelens.errors import BadArgument
from ropelens.models.door import by_itself
from ropelens.models.lone import LoneTokens, lone_tokens
from ropelens.models.rotation import read_rotations
from ropelens.models.subject import Subject, as_subject, trained_context
from ropelens.rope.planes import Planes, plane_norms
from ropelens.rope.probe import MeasuredRotation, probe_positions
from ropelens.statistics.ragged import stack

LARGEST_DIFFERENCE = 1e-3
"""Radians between two angles, and share between two lengths, that rounding may make."""


@dataclass(frozen=True)
class Turns:
    """How an implementation turns lone tokens: its layers, and the rotation read off each."""

    positions: Int[Tensor, " position"]
    noise: float
    rotations: list[MeasuredRotation]
    lone: list[LoneTokens]


def compare_rope(one: nn.Module, other: nn.Module, *, context: int | None = None) -> xr.Dataset:
    """The rotations of two implementations of one model, plane by plane: do they agree?

    `one` and `other` are transformers models or TransformerLens bridges with the same weights:
    a model and what a library, a conversion or an edited configuration made of it. (A bridge
    changes the model that it is made of; load that twice.) Each runs tokens alone at
    positions 0, 1, 2, 4, 8, ... and the last one within `context` (by default what `one` was
    trained for), where queries and keys change by their rotation alone.

    Returns a dataset over `implementation` ("one", "other"), `layer`, `frequency` (the planes
    of `one`) and `position`:

    - `angle` (implementation, layer, frequency, position), rad from -pi to pi: how far queries
      and keys have turned from position 0. NaN in planes where they have no length.
    - `difference` (layer, frequency, position), rad from 0 to pi: between the two.
    - `residual` (implementation, layer): what changes with position beside that angle (lengths,
      heads or keys that turn otherwise, what lies in no plane), relative to the mean length.
    - `strength_ratio` (layer): scale times the mean square of queries and keys, of `other` to
      `one`; 1 where both scale alike (YaRN's attention factor is part of it).
    - `pairing`, `rotary_dim` (implementation, layer): as `measure_rope` has them.
    - attributes `verdict` ("same", "different") and `why`, a sentence.

    They are the same where all differences stay below 1e-3 rad and the rounding of an angle in
    float32, all residuals and ratios within 1e-3 (in half precision, of what it rounds). Raises
    `BadArgument` where the layers or heads of the two are not of one shape, and
    `UnsupportedModel` for an implementation that hides its attention. That either rotates as
    its config states is not asked: `measure_rope` does that.
    """
    first = read_turns(as_subject(one), context=context)
    last = int(first.positions[-1]) + 1
    return compare_turns(first, read_turns(as_subject(other), context=last))


def read_turns(subject: Subject, *, context: int | None = None) -> Turns:
    """How an implementation turns tokens within `context`, or the trained one."""
    context = context or trained_context(subject.model)
    if context < 2:
        raise BadArgument("A rotation is seen from position 1 on.", seen=f"context {context}")
    positions = probe_positions(context - 1)
    with by_itself(subject.model):
        lone = lone_tokens(subject, positions)
    noise = torch.finfo(subject.model.dtype).eps
    rotations = read_rotations(subject.model, lone, positions)
    layers = [lone[layer] for layer in sorted(lone)]
    return Turns(positions, noise, rotations, layers)


def compare_turns(one: Turns, other: Turns) -> xr.Dataset:
    """What `compare_rope` returns, of two implementations that were run before."""
    sides = (one, other)
    shapes = [[tuple(layer.vectors.shape[::2]) for layer in side.lone] for side in sides]
    if shapes[0] != shapes[1]:
        raise BadArgument(
            "These are not two implementations of one model.",
            seen=" and ".join(f"{len(s)} layers, heads of {s[0][1]}" for s in shapes),
            attempt="models of the same configuration and weights",
        )
    planes = [rotation.planes for rotation in one.rotations]
    angle = torch.stack([_angles(side, planes) for side in sides])
    apart = torch.remainder(angle[1] - angle[0] + math.pi, 2 * math.pi) - math.pi
    strength = [torch.tensor([_strength(layer) for layer in side.lone]) for side in sides]
    by_layer = ("implementation", "layer")
    own = [[rotation.planes for rotation in side.rotations] for side in sides]
    values = {
        "angle": ((*by_layer, "frequency", "position"), angle.numpy()),
        "difference": (("layer", "frequency", "position"), apart.abs().numpy()),
        "residual": (by_layer, [list(map(_change, s.lone, planes)) for s in sides]),
        "strength_ratio": ("layer", (strength[1] / strength[0]).numpy()),
        "pairing": (by_layer, [[p.pairing for p in layers] for layers in own]),
        "rotary_dim": (by_layer, [[p.rotary_dim for p in layers] for layers in own]),
    }
    found = xr.Dataset(
        values,
        coords={"implementation": ["one", "other"], "position": one.positions.numpy()}
        | {"layer": range(len(planes))},
    )
    for name, (long_name, units) in _DESCRIBED.items():
        found[name].attrs = {"long_name": long_name, "units": units}
    why = _what_differs(one, other, found)
    alike = f"All planes of {len(planes)} layers turn alike: {_largest(found)}."
    return found.assign_attrs(verdict="different" if why else "same", why=why or alike)


_DESCRIBED = {
    "angle": ("turned since position 0", "rad"),
    "difference": ("angle between the two implementations", "rad"),
    "residual": ("change with position beside the angle", "1"),
    "strength_ratio": ("scale times lengths of queries and keys, other to one", "1"),
    "pairing": ("which coordinates share a plane", ""),
    "rotary_dim": ("coordinates of a head that rotate", "1"),
}


def _angles(side: Turns, planes: list[Planes]) -> Float[Tensor, "layer frequency position"]:
    """How far queries and keys have turned in these planes since position 0, in rad."""
    layers = []
    for layer, own in zip(side.lone, planes, strict=True):
        x = layer.vectors
        z = torch.complex(x[..., own.first], x[..., own.second])
        length = z.abs().square().mean(dim=(0, 1)).sqrt()
        unseen = length <= 32 * side.noise * x.square().mean().sqrt()
        layers.append(_turned(z).masked_fill(unseen, math.nan).T)
    return torch.from_numpy(stack(layers))


def _turned(
    z: Complex[Tensor, "vector position frequency"],
) -> Float[Tensor, "position frequency"]:
    """The angle that all vectors of a plane have in common, against position 0."""
    return (z * z[:, :1].conj()).sum(dim=0).angle()


def _change(layer: LoneTokens, planes: Planes) -> float:
    """Change with position of all that one common turn of these planes would leave as it is."""
    x = layer.vectors
    z = torch.complex(x[..., planes.first], x[..., planes.second])
    angle = _turned(z)
    turned_back = z * torch.polar(torch.ones_like(angle), -angle)
    rest = torch.ones(x.shape[-1], dtype=torch.bool)
    rest[planes.first] = rest[planes.second] = False
    moved = [(turned_back - z[:, :1]).abs(), (x - x[:, :1])[..., rest].abs()]
    change = torch.cat(moved, dim=-1).square().mean(dim=0).sqrt().max()
    return float(change / plane_norms(x, planes).square().mean().sqrt())


def _strength(layer: LoneTokens) -> float:
    """Scale times the mean square of queries and keys: what scores grow with."""
    return layer.scale * float(layer.vectors.square().mean())


def _what_differs(one: Turns, other: Turns, found: xr.Dataset) -> str:
    """A sentence on the first layer that two implementations turn differently, or nothing."""
    limit = max(LARGEST_DIFFERENCE, 16 * max(one.noise, other.noise))
    for layer, rotation in enumerate(one.rotations):
        at = found.isel(layer=layer)
        kinds = [
            f"{dim} coordinates, {pairing} pairing"
            for dim, pairing in zip(at["rotary_dim"].values, at["pairing"].values, strict=True)
        ]
        for side, name, residual in zip(
            (one, other), ("one", "the other"), at["residual"].values, strict=True
        ):
            if side.rotations[layer].residual > limit:
                return (
                    f"Layer {layer}: {name} does not rotate, the lengths of its planes change "
                    f"with position (residual {side.rotations[layer].residual:.2g})."
                )
            if residual > limit and kinds[0] != kinds[1]:
                return f"Layer {layer}: one turns {kinds[0]}, the other {kinds[1]}."
            if residual > limit:
                return (
                    f"Layer {layer}: {name} turns some heads, or queries and keys, otherwise "
                    f"than the rest (residual {residual:.2g})."
                )
        inv_freq = rotation.planes.inv_freq.nan_to_num(0).abs()[:, None].double()
        rounding = 4 * torch.finfo(torch.float32).eps * inv_freq * one.positions
        apart = torch.from_numpy(at["difference"].values)[: len(inv_freq)]
        if (apart > limit + rounding).any():
            return f"Layer {layer}: planes are turned otherwise; {_largest(at)}."
        ratio = float(at["strength_ratio"])
        if not abs(ratio - 1) <= limit:
            return (
                f"Layer {layer}: the other's scores are {ratio:.4g} times as large, though its "
                "planes turn alike."
            )
    return ""


def _largest(found: xr.Dataset) -> str:
    """The largest difference in words; of one layer or of all."""
    found = found.isel(position=slice(None, None, -1))  # of equal ones the farthest
    difference = found["difference"].fillna(-1)
    if not difference.size:
        return "no plane turns"
    at = {str(name): int(index) for name, index in difference.argmax(...).items()}
    largest = difference.isel(at)
    layer = "" if "layer" not in at else f"layer {at['layer']}, "
    return (
        f"the largest difference is {float(largest):.2g} rad ({layer}plane {at['frequency']}, "
        f"position {int(largest['position']):,})"
    )
