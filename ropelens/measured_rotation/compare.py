"""The rotations of two implementations of one model, compared plane by plane."""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
import xarray as xr
from jaxtyping import Complex, Float
from numpy.typing import ArrayLike
from torch import Tensor

from ropelens.arguments import Positive, public
from ropelens.errors import BadArgument
from ropelens.measured_rotation.read import probe_positions
from ropelens.measured_rotation.single_tokens import (
    SingleTokenProbe,
    probe_single_tokens,
)
from ropelens.measured_rotation.stated import stated_ropes
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.model.live_model import LiveModel
from ropelens.noise import NOISE_FACTOR, allowed_residual
from ropelens.rope.planes import Planes
from ropelens.schema.rotation import COMPARED_ROTATION
from ropelens.schema.rows import labelled, stack


@public
def compare_rope(
    one: Model, other: Model, *, context: Positive | None = None
) -> xr.Dataset:
    """The rotations of two implementations of one model, plane by plane: do they agree?

    `one` and `other` have the same weights. (A bridge changes its model; load the model a
    second time for it.) Both run sequences of one token at positions 0, 1, 2, 4, 8, ... within
    `context`, by default the trained context of `one`.

    Returns a dataset over `implementation` ("one", "other"), `layer`, `frequency` (the planes
    of `one`) and `position`. Each variable has `long_name` and `units`.

    - `angle` (implementation, layer, frequency, position) is from -pi to pi, and NaN in planes
      without length. `difference` (layer, frequency, position) is from 0 to pi.
    - `residual` (implementation, layer): change with position that the angle does not explain,
      relative to the mean length. For `other` it includes a different scale of queries.
    - `strength_ratio` (layer): root mean square of the scores of tokens at one position, of
      `other` relative to `one` (with the scale and YaRN's attention factor).
    - `score_difference` (layer, frequency): difference between the contributions of the plane
      to these scores, each relative to their root mean square. Only this variable shows that
      rows of q and k have another order.
    - attributes `verdict` ("same", "different") and `why`, a sentence.

    The verdict is "same" if angles differ by at most 1e-3 rad plus the rounding of an angle in
    float32, and the rest by at most 1e-3, or by 30 times the rounding noise of queries and keys
    (the difference of runs at one position) if this is larger. Raises `BadArgument` if the
    shapes of layers or heads differ, and `UnsupportedModel` for an implementation that hides
    its attention.
    """
    models = [as_live_model(one), as_live_model(other)]
    positions = probe_positions((context or models[0].context) - 1)
    probes = [probe_single_tokens(live, positions) for live in models]
    _check_sizes(probes)
    layers = _compare_layers(models[0], probes)
    compared = _dataset(layers)
    smallest = allowed_residual(0, max(live.eps for live in models))
    for layer in layers:
        why = layer.difference_in_words(smallest)
        if why:
            return compared.assign_attrs(verdict="different", why=why)
    largest = _largest_difference(layers)
    why = f"All planes of {len(layers)} layers rotate alike: {largest}."
    return compared.assign_attrs(verdict="same", why=why)


def _check_sizes(probes: list[dict[int, SingleTokenProbe]]) -> None:
    """Raise `BadArgument` if layers of the two models have other numbers of heads or sizes."""
    shapes = [
        [(len(probe.vectors), probe.vectors.shape[-1]) for probe in layers.values()]
        for layers in probes
    ]
    if shapes[0] != shapes[1]:
        sizes = [f"{len(layers)} layers, heads of {layers[0][1]}" for layers in shapes]
        what = "These are not two implementations of one model."
        raise BadArgument(what, seen=" and ".join(sizes))


def _compare_layers(
    one: LiveModel, probes: list[dict[int, SingleTokenProbe]]
) -> list["LayerComparison"]:
    ropes = stated_ropes(one.model, one.layer_types)
    layers = []
    for number, other_probe in zip(probes[0], probes[1].values(), strict=True):
        probe = probes[0][number]
        rope = ropes[one.layer_types[number]]
        planes = probe.rotation(rope.plane_counts).planes
        layers.append(LayerComparison(number, planes, probe, other_probe))
    return layers


def _dataset(layers: list["LayerComparison"]) -> xr.Dataset:
    values: dict[str, ArrayLike] = {
        "angle": stack(layer.angle for layer in layers).swapaxes(0, 1),
        "difference": stack(layer.difference for layer in layers),
        "residual": stack(layer.residual for layer in layers).T,
        "strength_ratio": [layer.scores.strength_ratio for layer in layers],
        "score_difference": stack(layer.scores.difference for layer in layers),
    }
    coords = {
        "implementation": ["one", "other"],
        "position": layers[0].one.positions.numpy(),
        "layer": [layer.number for layer in layers],
    }
    return xr.Dataset(labelled(values, COMPARED_ROTATION), coords=coords)


@dataclass(frozen=True)
class ScoreComparison:
    """Scores of tokens at one position in two implementations.

    `strength_ratio` is the size of the scores of `other` relative to `one`. `size` is the size
    of the contribution of each plane, relative to the scores, and `difference` the difference
    between the contributions.
    """

    strength_ratio: float
    size: Float[Tensor, "implementation frequency"]
    difference: Float[Tensor, " frequency"]


@dataclass(frozen=True)
class LayerComparison:
    """The rotation of one layer in two implementations; `compare_rope` explains the numbers."""

    number: int
    planes: Planes  # of `one`
    one: SingleTokenProbe
    other: SingleTokenProbe

    @cached_property
    def _vectors(self) -> Float[Tensor, "implementation vector position coordinate"]:
        return torch.stack([self.one.vectors, self.other.vectors])

    @cached_property
    def _z(self) -> Complex[Tensor, "implementation vector position plane"]:
        return self.planes.complex(self._vectors)

    @cached_property
    def _turned(self) -> Float[Tensor, "implementation 1 position frequency"]:
        """The angle that all vectors of an implementation have in common."""
        return (self._z * self._z[:, :, :1].conj()).sum(1, keepdim=True).angle()

    @cached_property
    def angle_noise(self) -> Float[Tensor, "implementation frequency"]:
        """Rounding noise of angles, in rad."""
        noise = torch.stack([self.one.noise, self.other.noise])
        of_planes = torch.hypot(
            noise[:, self.planes.first], noise[:, self.planes.second]
        )
        return of_planes / self._z.abs().square().mean((1, 2)).sqrt()

    @cached_property
    def angle(self) -> Float[Tensor, "implementation frequency position"]:
        unseen = self.angle_noise >= 1 / NOISE_FACTOR
        return self._turned[:, 0].masked_fill(unseen[:, None], math.nan).mT

    @cached_property
    def difference(self) -> Float[Tensor, "frequency position"]:
        difference = self.angle[1] - self.angle[0]
        return (torch.remainder(difference + math.pi, 2 * math.pi) - math.pi).abs()

    @cached_property
    def residual(self) -> Float[Tensor, " implementation"]:
        """Change that is left after all planes are rotated back by their common angle."""
        x = self._vectors
        rotated_back = self._z * torch.polar(
            torch.ones_like(self._turned), -self._turned
        )
        outside = self.planes.term_of >= len(self.planes.inv_freq)
        changes = [
            (rotated_back - self._z[:, :, :1]).abs(),
            (x - x[:, :, :1])[..., outside].abs(),
        ]
        change = torch.cat(changes, dim=-1).square().mean(1).sqrt().amax((1, 2))
        size = self.planes.norms(x).square().mean((1, 2, 3)).sqrt()
        residual = change / size
        growth = self.other.query_scale / self.one.query_scale
        residual[1] += (growth - 1).abs().max()
        return residual

    @cached_property
    def scores(self) -> ScoreComparison:
        scale = torch.tensor(
            [self.one.scale, self.other.scale], dtype=torch.float64, device="cpu"
        )
        tokens, _, kv_heads, _ = self.one.values.shape
        by_token = self._vectors[:, :, 0].unflatten(1, (tokens, -1))
        query, key = by_token.tensor_split([-kv_heads], dim=2)
        key = key.repeat_interleave(query.shape[2] // kv_heads, dim=2)
        products = scale.view(2, 1, 1, 1, 1) * query[:, :, None] * key[:, None]
        size = products.sum(-1).square().mean((1, 2, 3)).sqrt().clamp(min=1e-30)
        parts = products[..., self.planes.first] + products[..., self.planes.second]
        difference = parts[0] / size[0] - parts[1] / size[1]
        return ScoreComparison(
            strength_ratio=float(size[1] / size[0]),
            size=parts.square().mean((1, 2, 3)).sqrt() / size[:, None],
            difference=difference.square().mean((0, 1, 2)).sqrt(),
        )

    def difference_in_words(self, smallest: float) -> str:
        """Sentence on the difference, "" if there is none; `smallest` is always allowed."""
        angle_limit = _limit(self.angle_noise.sum(0), smallest)
        score_limit = _limit((self.angle_noise * self.scores.size).sum(0), smallest)
        limit = float(np.median(angle_limit)) if angle_limit.size else smallest
        inv_freq = self.planes.inv_freq.nan_to_num(0).abs()[:, None].double().numpy()
        eps = torch.finfo(torch.float32).eps
        rounding = 4 * eps * inv_freq * self.one.positions.numpy()
        residual = float(self.residual.nan_to_num(0).max())
        ratio = self.scores.strength_ratio
        score_difference = self.scores.difference.numpy()
        if residual > limit:
            why = "more than the angles of planes changes with position "
            why += f"(residual {residual:.2g})"
        elif (self.difference.numpy() > angle_limit[:, None] + rounding).any():
            why = f"planes rotate differently: {_largest_difference([self])}"
        elif (score_difference > score_limit).any():
            plane = np.nanargmax(score_difference)
            why = f"planes rotate alike, but plane {plane} has another part in the scores, "
            why += "for example because rows of q and k are in another order"
        elif not abs(ratio - 1) <= limit:
            why = f"planes rotate alike, but scores are {ratio:.4g} times as large"
        else:
            return ""
        return f"Layer {self.number}: {why}."


def _limit(noise: Float[Tensor, " frequency"], smallest: float) -> np.ndarray:
    return np.maximum(NOISE_FACTOR * noise.nan_to_num(0).numpy(), smallest)


def _largest_difference(layers: list[LayerComparison]) -> str:
    """The largest angle between the implementations, in words; NaN is no difference."""
    difference = np.nan_to_num(stack(layer.difference for layer in layers), nan=-1)
    if not difference.size:
        return "no plane rotates"
    from_last = difference[..., ::-1]  # the farthest position if several are equal
    layer, plane, index = np.unravel_index(from_last.argmax(), from_last.shape)
    largest = f"{from_last[layer, plane, index]:.2g} rad"
    position = int(layers[0].one.positions.flip(0)[index])
    place = f"layer {layers[layer].number}, plane {plane}, position {position:,}"
    return f"the largest difference is {largest} ({place})"
