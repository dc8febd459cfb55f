"""The rotations of two implementations of one model, compared plane by plane."""

import math
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor

from ropelens.arguments import Positive, public
from ropelens.errors import BadArgument
from ropelens.measured_rotation.probe import SingleTokenProbe, probe_single_tokens
from ropelens.measured_rotation.read import probe_positions, read_rotation
from ropelens.measured_rotation.stated import stated_inv_freq
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.noise import NOISE_FACTOR, allowed_residual
from ropelens.rope.planes import Planes
from ropelens.schema import COMPARED_ROTATION, labelled, stack


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
    lives = [as_live_model(one), as_live_model(other)]
    positions = probe_positions((context or lives[0].context) - 1)
    by_layer = [probe_single_tokens(live, positions) for live in lives]
    probes = [list(layers.values()) for layers in by_layer]
    shapes = [
        [tuple(probe.vectors.shape[::2]) for probe in layers] for layers in probes
    ]
    if shapes[0] != shapes[1]:
        seen = " and ".join(f"{len(s)} layers, heads of {s[0][1]}" for s in shapes)
        raise BadArgument("These are not two implementations of one model.", seen=seen)
    planes = []
    for layer, x in by_layer[0].items():
        counts = map(len, stated_inv_freq(lives[0].model, lives[0].layer_types[layer]))
        rotation = read_rotation(x.vectors, positions, noise=x.noise, counts=counts)
        planes.append(rotation.planes)
    layers = [_compare_layer(*pair) for pair in zip(*probes, planes, strict=True)]
    angle, difference, residual, ratio, score_difference, noise = zip(
        *layers, strict=True
    )
    values: dict[str, Any] = {
        "angle": stack(angle).swapaxes(0, 1),
        "difference": stack(difference),
        "residual": stack(residual).T,
        "strength_ratio": list(map(float, ratio)),
        "score_difference": stack(score_difference),
    }
    coords = {"implementation": ["one", "other"], "position": positions.numpy()}
    coords |= {"layer": list(by_layer[0])}
    compared = xr.Dataset(labelled(values, COMPARED_ROTATION), coords=coords)
    eps = max(live.eps for live in lives)
    reasons = (
        _describe_difference(
            compared.isel(layer=[index]), planes[index], noise[index], eps
        )
        for index in range(len(planes))
    )
    why = next(filter(None, reasons), "")
    alike = f"All planes of {len(planes)} layers rotate alike: {_largest(compared)}."
    return compared.assign_attrs(
        verdict="different" if why else "same", why=why or alike
    )


def _compare_layer(
    one: SingleTokenProbe, other: SingleTokenProbe, planes: Planes
) -> tuple[Tensor, ...]:
    """Variables of `compare_rope` for one layer, and the noise of angles and of scores."""
    x = torch.stack([one.vectors, other.vectors])
    z = planes.complex(x)
    turned = (z * z[:, :, :1].conj()).sum(1, keepdim=True).angle()
    # rotated back by the common angle: a pure rotation leaves no change
    rotated_back = z * torch.polar(torch.ones_like(turned), -turned)
    outside = planes.term_of >= len(planes.inv_freq)
    changes = [
        (rotated_back - z[:, :, :1]).abs(),
        (x - x[:, :, :1])[..., outside].abs(),
    ]
    change = torch.cat(changes, dim=-1).square().mean(1).sqrt().amax((1, 2))
    residual = change / planes.norms(x).square().mean((1, 2, 3)).sqrt()
    residual[1] += (other.query_scale / one.query_scale - 1).abs().max()

    coordinate_noise = torch.stack([one.noise, other.noise])
    of_planes = (coordinate_noise[:, part] for part in (planes.first, planes.second))
    noise = torch.hypot(*of_planes) / z.abs().square().mean((1, 2)).sqrt()
    unseen = noise >= 1 / NOISE_FACTOR
    angle = turned[:, 0].masked_fill(unseen[:, None], math.nan).mT
    difference = (
        torch.remainder(angle[1] - angle[0] + math.pi, 2 * math.pi) - math.pi
    ).abs()

    scale = torch.tensor([one.scale, other.scale], dtype=torch.float64)
    tokens, _, kv_heads, _ = one.values.shape
    query, key = x[:, :, 0].unflatten(1, (tokens, -1)).tensor_split([-kv_heads], dim=2)
    key = key.repeat_interleave(query.shape[2] // kv_heads, dim=2)
    products = scale.view(2, 1, 1, 1, 1) * query[:, :, None] * key[:, None]
    size = products.sum(-1).square().mean((1, 2, 3)).sqrt().clamp(min=1e-30)
    parts = products[..., planes.first] + products[..., planes.second]
    score_difference = (
        (parts[0] / size[0] - parts[1] / size[1]).square().mean((0, 1, 2)).sqrt()
    )
    part_sizes = parts.square().mean((1, 2, 3)).sqrt() / size[:, None]
    noise = torch.stack([noise.sum(0), (noise * part_sizes).sum(0)])
    return angle, difference, residual, size[1] / size[0], score_difference, noise


def _describe_difference(
    compared: xr.Dataset,
    planes: Planes,
    noise: Float[Tensor, "2 frequency"],
    eps: float,
) -> str:
    """Sentence on how the rotation of one layer differs between two implementations, or ""."""
    smallest = allowed_residual(0, eps)
    limits = np.maximum(NOISE_FACTOR * noise.nan_to_num(0).numpy(), smallest)
    limit = float(np.median(limits[0])) if limits.size else smallest
    layer = compared.isel(layer=0)
    inv_freq = planes.inv_freq.nan_to_num(0).abs()[:, None].double().numpy()
    rounding = 4 * torch.finfo(torch.float32).eps * inv_freq * layer["position"].values
    angle_limits = limits[0][:, None] + rounding
    residual, ratio = float(layer["residual"].max()), float(layer["strength_ratio"])
    scores = layer["score_difference"].values[: len(inv_freq)]
    if residual > limit:
        why = f"more than the angles of planes changes with position (residual {residual:.2g})"
    elif (layer["difference"].values[: len(inv_freq)] > angle_limits).any():
        why = f"planes rotate differently: {_largest(compared)}"
    elif (scores > limits[1]).any():
        why = (
            f"planes rotate alike, but plane {np.nanargmax(scores)} has another part in the "
            "scores, for example because rows of q and k are in another order"
        )
    elif not abs(ratio - 1) <= limit:
        why = f"planes rotate alike, but scores are {ratio:.4g} times as large"
    else:
        return ""
    return f"Layer {int(layer['layer'])}: {why}."


def _largest(compared: xr.Dataset) -> str:
    difference = compared["difference"].isel(position=slice(None, None, -1)).fillna(-1)
    if not difference.size:
        return "no plane rotates"
    index = difference.argmax(...)  # the farthest position if several are equal
    largest = difference.isel(index)
    return (
        f"the largest difference is {float(largest):.2g} rad (layer {int(largest['layer'])}, "
        f"plane {int(index['frequency'])}, position {int(largest['position']):,})"
    )
