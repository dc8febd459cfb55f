"""The rotation in queries and keys that any runtime wrote as arrays; see `measure_rope`."""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor
from transformers import PreTrainedConfig

from ropelens.config_facts import changes_with_position
from ropelens.errors import BadArgument
from ropelens.measured_rotation.array_source import (
    LAYOUT,
    ArraySource,
    HeadVectors,
    LayerVectors,
    RuntimeArrays,
    read_arrays,
)
from ropelens.measured_rotation.conformance import (
    AskedRotation,
    asked_rotations,
    rotation_differences,
)
from ropelens.measured_rotation.read import (
    LayerRotation,
    MeasuredRotation,
    planes_around,
    read_rotation,
)
from ropelens.noise import FLOOR, allowed_residual
from ropelens.rope.planes import PAIRINGS, Planes, zero_frequencies

NOT_A_ROTATION = 0.05  # relative change of lengths; bfloat16 stays below
EXACT = 1e-5  # relative noise in float32
LARGEST_NOISE = 1e-2  # relative noise in any runtime
FARTHEST_SHIFT = 4096  # tokens


@dataclass(frozen=True)
class ArrayLayers:
    """The rotation of each layer, and all differences from the configuration."""

    layers: dict[int, LayerRotation]  # of q, or of k if q is missing
    last_position: int
    faults: list[str]


@dataclass(frozen=True)
class ArrayRotation:
    """The rotation of queries or keys of a layer.

    `fault` is "" if one rotation explains the array. `growth` is the length relative to the
    first position. If the array before RoPE is known, `factor` is the attention factor, and
    `shifts` are the positions by which RoPE rotates each head too far.
    """

    positions: Int[Tensor, " position"]
    measured: MeasuredRotation
    fault: str
    growth: Float[Tensor, " position"]
    factor: float | None = None
    shifts: tuple[int, ...] = ()

    @property
    def of_layer(self) -> LayerRotation:
        growth = zip(self.positions.tolist(), self.growth.tolist(), strict=True)
        return LayerRotation(
            measured=self.measured,
            stated=None,
            planes=self.measured.planes,
            query_scale=dict(growth),
            factor=self.factor,
        )

    def faults(self, asked: AskedRotation, *, may_grow: bool) -> list[str]:
        """Differences from the rotation that a configuration asks for."""
        if self.fault:
            faults = [self.fault]
        else:
            distance = int(self.positions[-1] - self.positions[0])
            faults = rotation_differences(self.of_layer, asked, distance=distance)
        rotates = self.measured.planes.rotary_dim > 0
        if rotates and not may_grow and (self.growth != 1).any():
            faults.append("the length changes with position")
        return faults


@dataclass(frozen=True)
class TokenVectors:
    """Vectors of one token at several positions, or factors that rotate such vectors.

    `rounding` is the relative rounding error of the vectors. `counts` are the numbers of
    planes to try first.
    """

    vectors: HeadVectors
    positions: Int[Tensor, " position"]
    rounding: float
    counts: list[int]


def array_layers(
    source: ArraySource, config: PreTrainedConfig | None, context: int | None
) -> ArrayLayers:
    """Measure the rotation in the arrays of a runtime, and compare it with `config`."""
    arrays = read_arrays(source)
    if config is not None:
        _check_sizes(arrays, config)
    length = context or 1 + arrays.last_position
    asked = asked_rotations(config, layers=arrays.layers, length=length)
    may_grow = config is None or changes_with_position(config)
    layers: dict[int, LayerRotation] = {}
    faults = []
    shifts: dict[int, set[int]] = {}
    for vectors in arrays.vectors:
        layer = vectors.layer
        wanted = asked[layer]
        rotation = read_vectors(vectors, arrays.positions, wanted.plane_counts)
        differences = rotation.faults(wanted, may_grow=may_grow)
        if differences:
            faults.append(f"layer {layer}, {vectors.side}: {'; '.join(differences)}")
        layers.setdefault(layer, rotation.of_layer)
        shifts.setdefault(layer, set()).update(rotation.shifts)
    faults += _differing_shifts(shifts)
    return ArrayLayers(layers, arrays.last_position, faults)


def _differing_shifts(shifts: dict[int, set[int]]) -> list[str]:
    """Faults of layers whose heads, of queries and keys, are shifted by different numbers."""
    return [
        f"layer {layer}: heads rotate {sorted(of_layer)} positions too far"
        for layer, of_layer in shifts.items()
        if len(of_layer) > 1
    ]


def _check_sizes(arrays: RuntimeArrays, config: PreTrainedConfig) -> None:
    sizes = config.to_dict()
    configured = {sizes.get("num_attention_heads"), sizes.get("num_key_value_heads")}
    heads = {len(vectors.after) for vectors in arrays.vectors}
    positions = len(arrays.positions)
    if arrays.layers > config.num_hidden_layers:
        seen = f"layer {arrays.layers - 1}; the configuration has "
        seen += f"{config.num_hidden_layers} layers"
    elif positions in configured and not heads & configured:
        seen = f"{positions} positions of {min(heads)} heads: the axes are exchanged"
    else:
        return
    what = "The arrays do not fit the configuration."
    raise BadArgument(what, seen=seen, hint=LAYOUT)


def read_vectors(
    vectors: LayerVectors, positions: Int[Tensor, " position"], counts: list[int]
) -> ArrayRotation:
    """Measure the rotation of queries or keys; see `TokenVectors` for `counts`."""
    token = TokenVectors(
        vectors=vectors.after.double(),
        positions=positions,
        rounding=_rounding(vectors.after),
        counts=counts,
    )
    if vectors.before is None:
        return read_token(token)
    return _read_change(token, vectors.before.double())


def _read_change(token: TokenVectors, before: HeadVectors) -> ArrayRotation:
    """Measure the rotation from vectors `before` RoPE to the vectors of `token`."""
    candidates = [
        replace(token, vectors=_factors(before, token.vectors, planes))
        for planes in _candidate_planes(before, token)
    ]
    rotations = [read_token(candidate) for candidate in candidates]
    residuals = [rotation.measured.residual for rotation in rotations]
    least = min(residuals) + 8 * token.rounding
    fits = [residual <= 2 * least for residual in residuals]
    best = fits.index(True)  # the first, because several may fit
    rotation = rotations[best]
    if rotation.measured.planes.pairing == "none":
        return rotation
    z = rotation.measured.planes.complex(candidates[best].vectors)
    factor = float(z.abs().mean())
    return replace(rotation, factor=factor, shifts=_shifts(z, rotation))


def _shifts(
    z: Complex[Tensor, "head position plane"], rotation: ArrayRotation
) -> tuple[int, ...]:
    """Positions by which RoPE rotates each head too far, from its factor of each plane."""
    turned = torch.arange(-FARTHEST_SHIFT, FARTHEST_SHIFT + 1, device="cpu")
    inv_freq = rotation.measured.planes.inv_freq.double()
    angle = (rotation.positions[0] + turned)[:, None] * inv_freq
    agreement = (z[:, :1] * torch.exp(-1j * angle.nan_to_num(0))).real.sum(-1)
    return tuple(turned[agreement.argmax(1)].tolist())


def _rounding(vectors: HeadVectors) -> float:
    """Relative rounding error of the narrowest dtype that holds these numbers."""
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(vectors.to(dtype).to(vectors.dtype), vectors):
            return torch.finfo(dtype).eps / 4
    return torch.finfo(torch.float32).eps / 4


def _candidate_planes(before: HeadVectors, token: TokenVectors) -> list[Planes]:
    """Planes that include every coordinate that RoPE changes."""
    size = before.shape[-1]
    change = (token.vectors - before).square().mean((0, 1)).sqrt()
    moved = change > FLOOR * before.square().mean().sqrt()
    changed = moved.nonzero()[:, 0].tolist() or [0]
    candidates = []
    for count in (*token.counts, size // 2):
        if changed[-1] < 2 * count <= size:
            inv_freq = zero_frequencies(count)
            candidates += [Planes(inv_freq, size, pairing) for pairing in PAIRINGS]
    candidates += [planes_around(changed, size, pairing) for pairing in PAIRINGS]
    return candidates


def _factors(before: HeadVectors, after: HeadVectors, planes: Planes) -> HeadVectors:
    """The factors by which RoPE multiplies each plane, and coordinates outside of planes.

    RoPE gives these vectors to a token whose planes and coordinates are all 1.
    """
    of_planes = planes.complex(after) / planes.complex(before)
    factors = after / before
    factors[..., planes.first] = of_planes.real
    factors[..., planes.second] = of_planes.imag
    return factors.nan_to_num(1, 1, 1)


def read_token(token: TokenVectors) -> ArrayRotation:
    """Measure the rotation of one token, and check that the token only rotates."""
    allowed = allowed_residual(0, token.rounding)
    length = token.vectors.square().sum((0, 2)).sqrt()
    growth = length / length[0]
    growth = growth.where((growth - 1).abs() > allowed, 1)
    of_one_length = replace(token, vectors=token.vectors / growth[:, None])
    measured = _measure(of_one_length)
    grown = (growth - 1).abs() > measured.residual
    return ArrayRotation(
        positions=token.positions,
        measured=measured,
        fault=_fault(of_one_length, measured),
        growth=growth.where(grown, 1),
    )


def _measure(token: TokenVectors) -> MeasuredRotation:
    x = token.vectors
    offsets = token.positions - token.positions[0]
    size = x.square().mean((0, 1)).sqrt()
    size = size.clamp(min=0.1 * size.square().mean().sqrt())
    noise = token.rounding * size
    measured = read_rotation(x, offsets, noise=noise, counts=token.counts)
    if measured.residual > EXACT:  # lengths show the noise of a runtime in bfloat16
        noise = min(measured.residual / 2, LARGEST_NOISE) * size
        measured = read_rotation(x, offsets, noise=noise, counts=token.counts)
    return measured


def _fault(token: TokenVectors, measured: MeasuredRotation) -> str:
    """Why the measured rotation does not explain the vectors; "" if it does."""
    if measured.residual > NOT_A_ROTATION:
        return f"changes with position, but not by a rotation ({measured.residual:.2g})"
    x = token.vectors
    z = measured.planes.complex(x)
    distance = (token.positions - token.positions[0])[:, None]
    inv_freq = measured.planes.inv_freq.double().nan_to_num(0)
    angle = distance * inv_freq
    still = z * torch.exp(-1j * angle)
    error = distance * measured.resolution.nan_to_num(0, 0, 0) * z.abs()
    moved = ((still - still[:, :1]).abs() - error).clamp(min=0).square().sum(-1)
    change = (moved / x.square().sum(-1)).sqrt()
    allowed = max(allowed_residual(0, token.rounding), 4 * measured.residual)
    if (change > allowed).any():
        return "changes with position, but not by one rotation of all heads"
    return ""
