"""How a model rotates: measured, compared with another, and shown call by call."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad

from ropelens.attention.call import AttentionCall
from ropelens.attention.variables import labelled, stack, table
from ropelens.errors import BadArgument, Positive, public
from ropelens.model.live_model import Model, as_live_model
from ropelens.rope.planes import Planes, probe_positions
from ropelens.rotation.configured import configured_inv_freqs
from ropelens.rotation.probe import (
    SingleTokenProbe,
    planes_of,
    probe_single_tokens,
    read_rotations,
)

ROTATION = table("""
inv_freq (layer, frequency) rad/token: angular frequency, measured
inv_freq_stated (layer, frequency) rad/token: angular frequency that the model states
inv_freq_configured (layer, frequency) rad/token: angular frequency that it is configured for
query_scale (layer, position) 1: length of queries, against position 0
wavelength (layer, frequency) token: tokens per turn
residual (layer) 1: change with position beside a rotation
rotary_dim (layer) 1: coordinates of a head that rotate
pairing (layer): which coordinates share a plane
layer_type (layer): what the configuration calls the layer
""")

COMPARED = table("""
angle (implementation, layer, frequency, position) rad: turned since position 0
difference (layer, frequency, position) rad: angle between the two implementations
residual (implementation, layer) 1: change with position beside a rotation
strength_ratio (layer) 1: size of scores, other to one
score_difference (layer, frequency) 1: between the plane's parts of scores, relative to them
""")


@public
def measure_rope(model: Model, *, context: Positive | None = None) -> xr.Dataset:
    """The rotation of every layer of `model`, measured from one forward pass.

    A sequence of one token has the same hidden state whatever its position, so at positions
    0, 1, 2, 4, 8, ... its queries and keys differ by their rotation alone. RoPE that changes
    with the length (dynamic, longrope) is measured as it is at `context` tokens; None means
    within the trained context. Under `edit_rope`, what the edit leaves.

    Returns a dataset over `layer` and `frequency`: `inv_freq` (rad/token, measured; negative
    in planes that turn against the others), `wavelength` (tokens; infinite where nothing
    turns), `inv_freq_stated` and `inv_freq_configured` (rad/token, the buffer of the model, and
    what its configuration asks for; NaN where not known), `residual` (change of a plane's
    length between positions, relative to the mean length), `pairing` ("half", "interleaved",
    "none"), `rotary_dim` (coordinates in planes), `layer_type`, and over `position` the
    `query_scale`: by how much queries are longer than at position 0 (Ministral 3, Llama 4).
    Coordinates that RoPE leaves alone are the last frequency, with inv_freq 0. Layers that do
    not attend are NaN.

    Warns where the model does not rotate as its configuration asks.

    Raises `UnsupportedModel` where queries do not rotate, or not as the model states, and
    where a layer hides its attention; `BadArgument` where an edit makes heads differ.
    """
    live = as_live_model(model)
    layers, edited = live.rotations(context), live.planes(context, alike=True)
    configured = configured_inv_freqs(live, length=context)
    planes, measured = [], []
    voices: tuple[list[Tensor], list[Tensor]] = ([], [])
    for layer, now, asked in zip(layers, edited, configured, strict=True):
        same = torch.equal(now.inv_freq, layer.planes.inv_freq)
        planes.append(layer.measured.planes if same else now)
        direction = -1 if layer.planes.inv_freq.sum() < 0 else 1  # which no model states
        measured.append(direction * planes[-1].term_inv_freq)
        edit = direction * now.inv_freq
        asked = None if layer.planes.pairing == "none" else asked
        for voice, known in zip(voices, (layer.stated, asked), strict=True):
            known = known if same else edit
            known = torch.zeros(0) if known is None else known[: planes[-1].terms].double()
            voice.append(pad(known, (0, planes[-1].terms - len(known)), value=math.nan))
    scales = [layer.query_scale for layer in layers]
    values: dict[str, Any] = {
        "inv_freq": stack(measured),
        "wavelength": stack(2 * math.pi / w.double().abs() for w in measured),
        "inv_freq_stated": stack(voices[0]),
        "inv_freq_configured": stack(voices[1]),
        "residual": [layer.measured.residual for layer in layers],
        "pairing": [layer.pairing for layer in planes],
        "rotary_dim": [layer.rotary_dim for layer in planes],
        "layer_type": live.kinds,
        "query_scale": [list(scale.values()) for scale in scales],
    }
    coords = {"layer": range(len(layers)), "position": list(scales[0])}
    return xr.Dataset(labelled(values, ROTATION), coords=coords)


@public
@contextmanager
def observe(
    model: Model, function: Callable[[AttentionCall, Planes], object]
) -> Iterator[None]:
    """Hand every attention call of `model` to `function(call, planes)` while the block runs.

    `call` (`AttentionCall`) has the layer, queries [batch, head, position, coordinate] and keys
    with their rotation, values, the scale, and the keys that each row sees. Its tensors are the
    model's own: clone them to keep or change them. `planes` (`Planes`) says how the layer
    rotates, as `measure_rope` measures. With a key-value cache a call has its new rows alone,
    and all keys (`call.past`). The output of the model keeps every bit.

    Under `edit_rope` the function sees edited queries, keys and `planes`; where heads of the
    layer differ, `planes.inv_freq` has a row and `call.key` a head for each query head. Under
    `silence_heads` `call.output` is what the heads gave before.

    Raises `UnsupportedModel` as `measure_rope` does, and, when the model runs, for a cache of
    a RoPE that changes with the length, past the length that it was trained for.
    """
    live = as_live_model(model)
    live.rotations()  # measured, or refused, before the block

    def show(call: AttentionCall) -> None:
        function(call, planes_of(live, call))

    with live.observe(show):
        yield


# two implementations


@public
def compare_rope(one: Model, other: Model, *, context: Positive | None = None) -> xr.Dataset:
    """The rotations of two implementations of one model, plane by plane: do they agree?

    `one` and `other` have the same weights. (A bridge changes its model; load that twice.) Each
    runs tokens alone at positions 0, 1, 2, 4, 8, ... within `context` (by default what `one`
    was trained for).

    Returns a dataset over `implementation` ("one", "other"), `layer`, `frequency` (the planes
    of `one`) and `position`:

    - `angle` (implementation, layer, frequency, position), rad from -pi to pi: how far queries
      and keys have turned from position 0. NaN in planes where they have no length.
    - `difference` (layer, frequency, position), rad from 0 to pi: between the two.
    - `residual` (implementation, layer): what changes with position beside that angle (lengths,
      heads or keys that turn otherwise, what lies in no plane), relative to the mean length;
      for `other` also what scales its queries with position otherwise.
    - `strength_ratio` (layer): root mean square of the scores of tokens at one position, of
      `other` to `one` (with the scale and YaRN's attention factor).
    - `score_difference` (layer, frequency): between what the plane adds to these scores, each
      relative to their root mean square. Rows in another order keep angles, not this.
    - attributes `verdict` ("same", "different") and `why`, a sentence.

    They are the same where differences stay below 1e-3 rad and the rounding of an angle in
    float32, and the rest within 1e-3 (in half precision, of what it rounds). Raises
    `BadArgument` where layers or heads are not of one shape, and `UnsupportedModel` for an
    implementation that hides its attention.
    """
    sides = [as_live_model(one), as_live_model(other)]
    positions = probe_positions((context or sides[0].context) - 1)
    tokens = [probe_single_tokens(side, positions) for side in sides]
    lone = [list(of.values()) for of in tokens]
    shapes = [[tuple(layer.vectors.shape[::2]) for layer in layers] for layers in lone]
    if shapes[0] != shapes[1]:
        raise BadArgument(
            "These are not two implementations of one model.",
            seen=" and ".join(f"{len(s)} layers, heads of {s[0][1]}" for s in shapes),
        )
    planes = [layer.planes for layer in read_rotations(sides[0], tokens[0], positions).values()]
    noise = torch.tensor([side.noise for side in sides])
    layers = [_compared(*layer, noise=noise) for layer in zip(*lone, planes, strict=True)]
    angle, difference, residual, ratio, apart = zip(*layers, strict=True)
    values: dict[str, Any] = {
        "angle": stack(angle).swapaxes(0, 1),
        "difference": stack(difference),
        "residual": stack(residual).T,
        "strength_ratio": list(map(float, ratio)),
        "score_difference": stack(apart),
    }
    coords = {"implementation": ["one", "other"], "position": positions.numpy()}
    coords |= {"layer": list(tokens[0])}
    compared = xr.Dataset(labelled(values, COMPARED), coords=coords)
    limit = max(1e-3, 16 * float(noise.max()))  # rad of angles, share of lengths
    whys = [_what_differs(compared.isel(layer=[at]), of, limit) for at, of in enumerate(planes)]
    why = next(filter(None, whys), "")
    alike = f"All planes of {len(planes)} layers turn alike: {_largest(compared)}."
    return compared.assign_attrs(verdict="different" if why else "same", why=why or alike)


def _compared(
    one: SingleTokenProbe,
    other: SingleTokenProbe,
    planes: Planes,
    *,
    noise: Float[Tensor, " 2"],
) -> tuple[Tensor, ...]:
    """Of one layer the variables of `compare_rope`, in their order there."""
    x = torch.stack([one.vectors, other.vectors])
    z = torch.complex(x[..., planes.first], x[..., planes.second])
    turned = (z * z[:, :, :1].conj()).sum(1, keepdim=True).angle()
    # what one common turn of these planes would leave as it is
    turned_back = z * torch.polar(torch.ones_like(turned), -turned)
    rest = torch.ones(x.shape[-1], dtype=torch.bool)
    rest[planes.first] = rest[planes.second] = False
    moved = [(turned_back - z[:, :, :1]).abs(), (x - x[:, :, :1])[..., rest].abs()]
    change = torch.cat(moved, dim=-1).square().mean(1).sqrt().amax((1, 2))
    residual = change / planes.norms(x).square().mean((1, 2, 3)).sqrt()
    residual[1] += (other.query_scale / one.query_scale - 1).abs().max()

    length, size = z.abs().square().mean((1, 2)), x.square().mean((1, 2, 3))
    unseen = length.sqrt() <= 32 * (noise * size.sqrt())[:, None]
    angle = turned[:, 0].masked_fill(unseen[:, None], math.nan).mT
    difference = (torch.remainder(angle[1] - angle[0] + math.pi, 2 * math.pi) - math.pi).abs()

    scale = torch.tensor([one.scale, other.scale], dtype=torch.float64)
    tokens, _, kv_heads, _ = one.values.shape
    query, key = x[:, :, 0].unflatten(1, (tokens, -1)).tensor_split([-kv_heads], dim=2)
    key = key.repeat_interleave(query.shape[2] // kv_heads, dim=2)
    products = scale.view(2, 1, 1, 1, 1) * query[:, :, None] * key[:, None]
    scores = products.sum(-1).square().mean((1, 2, 3)).sqrt().clamp(min=1e-30)
    parts = products[..., planes.first] + products[..., planes.second]
    apart = (parts[0] / scores[0] - parts[1] / scores[1]).square().mean((0, 1, 2)).sqrt()
    return angle, difference, residual, scores[1] / scores[0], apart


def _what_differs(compared: xr.Dataset, planes: Planes, limit: float) -> str:
    """A sentence on how one layer turns differently in two implementations, or nothing."""
    at = compared.isel(layer=0)
    inv_freq = planes.inv_freq.nan_to_num(0).abs()[:, None].double().numpy()
    rounding = 4 * torch.finfo(torch.float32).eps * inv_freq * at["position"].values
    residual, ratio = float(at["residual"].max()), float(at["strength_ratio"])
    scores = at["score_difference"].values
    if residual > limit:
        why = f"something else than the angles of planes changes (residual {residual:.2g})"
    elif (at["difference"].values[: len(inv_freq)] > limit + rounding).any():
        why = f"planes turn otherwise: {_largest(compared)}"
    elif (scores > limit).any():
        why = (
            f"planes turn alike, but plane {np.nanargmax(scores)} adds something else to the "
            "scores, as where rows of q and k are in another order"
        )
    elif not abs(ratio - 1) <= limit:
        why = f"planes turn alike, but scores are {ratio:.4g} times as large"
    else:
        return ""
    return f"Layer {int(at['layer'])}: {why}."


def _largest(compared: xr.Dataset) -> str:
    """The largest difference in words."""
    difference = compared["difference"].isel(position=slice(None, None, -1)).fillna(-1)
    if not difference.size:
        return "no plane turns"
    at = difference.argmax(...)  # of equal ones the farthest
    largest = difference.isel(at)
    return (
        f"the largest difference is {float(largest):.2g} rad (layer {int(largest['layer'])}, "
        f"plane {int(at['frequency'])}, position {int(largest['position']):,})"
    )
