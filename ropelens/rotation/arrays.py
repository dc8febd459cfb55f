"""The rotation in queries and keys that any runtime wrote as arrays.

The arrays have queries and keys of one token that is repeated at chosen positions, or queries
and keys of any text before and after RoPE.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Complex, Float, Int
from safetensors.torch import load_file
from torch import Tensor

from ropelens.errors import BadArgument, explained
from ropelens.noise import FLOOR, allowed_residual
from ropelens.rope.planes import PAIRINGS, MeasuredRotation, Planes, read_rotation

Arrays = Mapping[str, Any] | str | Path
ByHead = Float[Tensor, "head position coordinate"]

LAYOUT = (
    "q and k after RoPE, [position, head, coordinate] (q.3 is layer 3) or [layer, position, "
    "head, coordinate]; q_before and k_before of the same shapes; positions, with 0 and 1"
)

NOT_A_ROTATION = 0.05
"""Relative change of lengths that bfloat16 stays below, and another pairing exceeds."""

FARTHEST_SHIFT = 4096  # tokens


@dataclass(frozen=True)
class ArrayRotation:
    """The rotation of the queries or the keys of one layer.

    `fault` states how they change with position if this is not one rotation, and is "" if it
    is one. `growth` is their length relative to the first position. If the arrays before RoPE
    are known, `factor` is the factor of RoPE on lengths. `shift` is then the position by which
    RoPE rotates each head at the first position, minus this position.
    """

    measured: MeasuredRotation
    fault: str
    growth: Float[Tensor, " position"]
    factor: float | None = None
    shift: tuple[int, ...] = ()


def read_arrays(
    source: Arrays,
) -> tuple[Int[Tensor, " position"], dict[tuple[int, str], tuple[ByHead, ByHead | None]]]:
    """Positions, and arrays after and before RoPE for each layer and each of "q" and "k".

    Raises `BadArgument` for unknown names, shapes that do not fit, numbers that are not finite,
    and positions that do not start with two neighbours.
    """
    with explained("The arrays cannot be read.", LAYOUT, error=BadArgument):
        if isinstance(source, (str, Path)):
            numpy = Path(source).suffix == ".npz"
            source = np.load(source, allow_pickle=False) if numpy else load_file(source)
        arrays = {
            name: x.detach().cpu() if isinstance(x, Tensor) else torch.from_numpy(np.array(x))
            for name, x in source.items()
        }
        by_name: dict[tuple[int, str], Tensor] = {}
        for name, x in arrays.items():
            match = re.fullmatch(r"([qk](?:_before)?)(?:\.(\d+))?", name)
            if name != "positions" and (match is None or not x.is_floating_point()):
                raise ValueError(f"an array {name} of {x.dtype}")
            if match is not None:
                layers = enumerate(x) if x.ndim == 4 else [(int(match[2] or 0), x)]
                by_name |= {(layer, match[1]): part for layer, part in layers}
        after = {key: x for key, x in by_name.items() if "_" not in key[1]}
        longest = max((len(x) for x in after.values()), default=0)
        positions = arrays.get("positions", torch.arange(longest)).long()
        order = positions.argsort()
        for (layer, name), x in by_name.items():
            same = x.shape == by_name.get((layer, name[0]), x[:0]).shape
            if x.ndim != 3 or len(x) != len(positions) or not same or not x.isfinite().all():
                shape = f"{name} {[*x.shape]} in layer {layer}, and {len(positions)} positions"
                raise ValueError(f"shapes that do not fit, or numbers that are not: {shape}")
        steps = positions[order].diff().tolist()
        if not after or steps[:1] != [1] or 0 in steps:
            raise ValueError(f"arrays {[*arrays]} at positions {positions[:3].tolist()}, ...")
    by_head = {key: x[order].transpose(0, 1) for key, x in by_name.items()}
    return positions[order], {
        (layer, name): (by_head[layer, name], by_head.get((layer, f"{name}_before")))
        for layer, name in sorted(after, key=lambda key: (key[0], key[1] == "k"))
    }


def read_array(
    x: ByHead, before: ByHead | None, positions: Int[Tensor, " position"], counts: list[int]
) -> ArrayRotation:
    """Read the rotation of one array; `counts` are the numbers of planes to try first."""
    halves = (torch.bfloat16, torch.float16)
    exact = (dtype for dtype in halves if torch.equal(x.to(dtype).to(x.dtype), x))
    rounding, offsets = (
        torch.finfo(next(exact, torch.float32)).eps / 4,
        positions - positions[0],
    )
    if before is None:
        return _read(x.double(), offsets, rounding, counts)
    x, before = x.double(), before.double()
    moved = (x - before).square().mean((0, 1)).sqrt() > FLOOR * before.square().mean().sqrt()
    changed = [*moved.nonzero()[:, 0].tolist()] or [0]
    start = changed[0] - changed[0] % 2
    shapes = [(n, 0) for n in (*counts, x.shape[-1] // 2) if changed[-1] < 2 * n <= x.shape[-1]]
    shapes.append(((changed[-1] - start) // 2 + 1, start))
    options = []
    for (count, offset), pairing in ((shape, p) for shape in shapes for p in PAIRINGS):
        planes = Planes(torch.zeros(count), x.shape[-1], pairing, offset)
        factor = _complex(x, planes) / _complex(before, planes)
        # RoPE does to a vector of ones what it does to the text.
        ones = x / before
        ones[..., planes.first], ones[..., planes.second] = factor.real, factor.imag
        ones = ones.nan_to_num(1, 1, 1)
        options.append((_read(ones, offsets, rounding, counts), ones))
    least = min(found.measured.residual for found, _ in options)
    fits = (o for o in options if o[0].measured.residual <= 2 * least + 16 * rounding)
    found, ones = next(fits)
    planes, turns = found.measured.planes, torch.arange(-FARTHEST_SHIFT, FARTHEST_SHIFT + 1)
    if planes.pairing == "none":
        return found
    z, angle = (
        _complex(ones, planes),
        (positions[0] + turns)[:, None] * planes.inv_freq.double(),
    )
    agreement = (z[:, :1] * torch.exp(-1j * angle.nan_to_num(0))).real.sum(-1)
    shift = tuple(turns[agreement.argmax(1)].tolist())
    return replace(found, factor=float(z.abs().mean()), shift=shift)


def _complex(x: ByHead, planes: Planes) -> Complex[Tensor, "head position frequency"]:
    return torch.complex(x[..., planes.first].double(), x[..., planes.second].double())


def _read(
    x: ByHead, offsets: Int[Tensor, " position"], rounding: float, counts: list[int]
) -> ArrayRotation:
    """Read one token at positions that start with 0 and 1, and check that it only rotates."""
    length = x.square().sum((0, 2)).sqrt()
    growth = length / length[0]
    growth = growth.where((growth - 1).abs() > allowed_residual(0, rounding), 1)
    x = x / growth[:, None]
    size = x.square().mean((0, 1)).sqrt()
    noise = rounding * size.clamp(min=0.1 * size.square().mean().sqrt())
    measured = read_rotation(x, offsets, noise=noise, counts=counts)
    planes, z = measured.planes, _complex(x, measured.planes)
    still = z * torch.exp(-1j * offsets[:, None] * planes.inv_freq.double().nan_to_num(0))
    error = offsets[:, None] * measured.resolution.nan_to_num(0, 0, 0) * z.abs()
    moved = ((still - still[:, :1]).abs() - error).clamp(min=0).square().sum(-1).sqrt()
    allowed = max(allowed_residual(0, rounding), 4 * measured.residual)
    fault, moved = "", moved > allowed * x.square().sum(-1).sqrt()
    if measured.residual > NOT_A_ROTATION or moved.any():
        heads = x.split(1) if len(x) > 1 else ()
        alone = [_read(head, offsets, rounding, counts) for head in heads]
        words = [_describe(head.measured.planes) for head in alone]
        other = next((h for h, text in enumerate(words) if text != words[0]), 0)
        if other and not any(head.fault for head in alone):
            fault = f"heads rotate differently: head 0 {words[0]}, head {other} {words[other]}"
        elif measured.residual > NOT_A_ROTATION:
            fault = f"changes with position, but not by a rotation ({measured.residual:.2g})"
        else:
            fault = "angles are not proportional to the position"
    return ArrayRotation(measured, fault, growth)


def _describe(planes: Planes) -> str:
    if planes.pairing == "none":
        return "does not rotate"
    return f"has {planes.pairing} pairing and {planes.inv_freq[0]:.4g} rad/token"
