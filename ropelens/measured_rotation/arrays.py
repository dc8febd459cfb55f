"""The rotation in queries and keys that any runtime wrote as arrays; see `measure_rope`."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig

from ropelens.config_facts import changes_with_position
from ropelens.errors import BadArgument, explained
from ropelens.measured_rotation.conformance import (
    LayerRotation,
    asked_rotations,
    rotation_differences,
)
from ropelens.measured_rotation.read import MeasuredRotation, read_rotation
from ropelens.noise import FLOOR, allowed_residual
from ropelens.rope.planes import PAIRINGS, Planes

ArraySource = Mapping[str, Any] | str | Path
OfHeads = Float[Tensor, "head position coordinate"]

LAYOUT = (
    "q and k after RoPE, [position, head, coordinate] (q.3 is layer 3) or [layer, position, "
    "head, coordinate]; q_before and k_before of the same shapes; positions, with 0 and 1"
)

NOT_A_ROTATION = 0.05  # relative change of lengths; bfloat16 stays below
EXACT, LARGEST_NOISE = 1e-5, 1e-2  # relative noise in float32 and in any runtime
FARTHEST_SHIFT = 4096  # tokens


class ArrayRotation(NamedTuple):
    """The rotation of queries or keys of a layer; arrays before RoPE give `factor`, `shift`."""

    measured: MeasuredRotation
    fault: str  # "" if one rotation explains the array
    growth: Float[Tensor, " position"]  # length relative to the first position
    factor: float | None = None  # the attention factor
    shift: tuple[int, ...] = ()  # positions by which RoPE rotates each head too far


def read_arrays(
    source: ArraySource,
) -> tuple[
    Int[Tensor, " position"], dict[tuple[int, str], tuple[OfHeads, OfHeads | None]]
]:
    """Positions, and arrays after and before RoPE for each layer and each of "q" and "k"."""
    with explained("The arrays cannot be read.", LAYOUT, error=BadArgument):
        if isinstance(source, (str, Path)):
            numpy = Path(source).suffix == ".npz"
            source = np.load(source, allow_pickle=False) if numpy else load_file(source)
        arrays = {
            name: x.detach().cpu()
            if isinstance(x, Tensor)
            else torch.from_numpy(np.array(x))
            for name, x in source.items()
        }
        by_name, known = dict[tuple[int, str], Tensor](), {"positions"}
        for name, x in arrays.items():
            match = re.fullmatch(r"([qk](?:_before)?)(?:\.(\d+))?", name)
            if match and x.is_floating_point():
                layers = enumerate(x) if x.ndim == 4 else [(int(match[2] or 0), x)]
                by_name |= {(layer, match[1]): part for layer, part in layers}
                known.add(name)
        after = {key: x for key, x in by_name.items() if "_" not in key[1]}
        longest = max((len(x) for x in after.values()), default=0)
        positions = arrays.get("positions", torch.arange(longest)).long()
        order = positions.argsort()
        steps = positions[order].diff().tolist()
        sides, before = (
            {name for _, name in after},
            {n[0] for _, n in by_name if "_" in n},
        )
        fits = (
            bool(sides)
            and before in (set(), sides)
            and steps[:1] == [1]
            and 0 not in steps
        )
        for (layer, name), x in by_name.items():
            same = x.shape == by_name.get((layer, name[0]), x[:0]).shape
            fits &= same and x.ndim == 3 and len(x) == len(positions)
            fits &= bool(x.isfinite().all())
        if not fits or arrays.keys() - known:
            shapes = (f"{name} {[*x.shape]} of {x.dtype}" for name, x in arrays.items())
            raise ValueError(
                f"{', '.join(shapes)}, positions {positions[:3].tolist()}, ..."
            )
    by_head = {key: x[order].transpose(0, 1) for key, x in by_name.items()}
    return positions[order], {
        (layer, name): (by_head[layer, name], by_head.get((layer, f"{name}_before")))
        for layer, name in sorted(after, key=lambda key: (key[0], key[1] == "k"))
    }


def array_layers(
    source: ArraySource, config: PreTrainedConfig | None, context: int | None
) -> tuple[dict[int, LayerRotation], list[str]]:
    """The rotation of q by layer (of k if q is missing), and all differences from `config`."""
    positions, arrays = read_arrays(source)
    longest, count = (
        int(positions[-1] - positions[0]),
        1 + max(layer for layer, _ in arrays),
    )
    facts = {} if config is None else config.to_dict()
    known = {facts.get("num_attention_heads"), facts.get("num_key_value_heads")}
    heads, seen = {len(x) for x, _ in arrays.values()}, ""
    if config is not None and count > config.num_hidden_layers:
        seen = f"layer {count - 1}; the configuration has {config.num_hidden_layers} layers"
    elif not heads & known and len(positions) in known:
        seen = (
            f"{len(positions)} positions of {min(heads)} heads: the axes are exchanged"
        )
    if seen:
        raise BadArgument(
            "The arrays do not fit the configuration.", seen=seen, hint=LAYOUT
        )
    asked = asked_rotations(
        config, layers=count, length=context or int(positions[-1]) + 1
    )
    grows = config is None or changes_with_position(config)
    layers: dict[int, LayerRotation] = {}
    faults, shifts = [], dict[int, set[int]]()
    for (layer, name), (x, before) in arrays.items():
        inv_freq = asked[layer].inv_freq
        found = read_array(
            x, before, positions, [] if inv_freq is None else [len(inv_freq)]
        )
        planes = found.measured.planes
        scale = dict(zip(positions.tolist(), found.growth.tolist(), strict=True))
        rotation = LayerRotation(found.measured, None, planes, scale, found.factor)
        texts = [found.fault] * bool(found.fault)
        texts = texts or rotation_differences(rotation, asked[layer], longest=longest)
        if not grows and planes.rotary_dim and (found.growth != 1).any():
            texts.append("the length changes with position")
        faults += [f"layer {layer}, {name}: {'; '.join(texts)}"] * bool(texts)
        layers.setdefault(layer, rotation)
        shifts.setdefault(layer, set()).update(found.shift)
    faults += [
        f"layer {layer}: heads rotate {sorted(shift)} positions too far"
        for layer, shift in shifts.items()
        if len(shift) > 1
    ]
    return layers, faults


def read_array(
    x: OfHeads,
    before: OfHeads | None,
    positions: Int[Tensor, " position"],
    counts: list[int],
) -> ArrayRotation:
    """Read the rotation of one array; `counts` are the numbers of planes to try first."""
    halves = (torch.bfloat16, torch.float16)
    exact = (dtype for dtype in halves if torch.equal(x.to(dtype).to(x.dtype), x))
    rounding = torch.finfo(next(exact, torch.float32)).eps / 4
    offsets, size = positions - positions[0], x.shape[-1]
    if before is None:
        return _read_token(x.double(), offsets, rounding, counts)
    x, before = x.double(), before.double()
    moved = (x - before).square().mean(
        (0, 1)
    ).sqrt() > FLOOR * before.square().mean().sqrt()
    changed = moved.nonzero()[:, 0].tolist() or [0]
    start, options = changed[0] - changed[0] % 2, []
    shapes = [(n, 0) for n in (*counts, size // 2) if changed[-1] < 2 * n <= size]
    for count, offset in (*shapes, ((changed[-1] - start) // 2 + 1, start)):
        for pairing in PAIRINGS:
            planes = Planes(torch.zeros(count), size, pairing, offset)
            ratio, factor = x / before, planes.complex(x) / planes.complex(before)
            # If each plane of a token is 1, RoPE changes it to this factor.
            ratio[..., planes.first], ratio[..., planes.second] = (
                factor.real,
                factor.imag,
            )
            ratio = ratio.nan_to_num(1, 1, 1)
            options.append((_read_token(ratio, offsets, rounding, counts), ratio))
    least = min(found.measured.residual for found, _ in options) + 8 * rounding
    found, ratio = next(o for o in options if o[0].measured.residual <= 2 * least)
    planes, turns = (
        found.measured.planes,
        torch.arange(-FARTHEST_SHIFT, FARTHEST_SHIFT + 1),
    )
    if planes.pairing == "none":
        return found
    z = planes.complex(ratio)
    angle = (positions[0] + turns)[:, None] * planes.inv_freq.double()
    agreement = (z[:, :1] * torch.exp(-1j * angle.nan_to_num(0))).real.sum(-1)
    shift = tuple(turns[agreement.argmax(1)].tolist())
    return found._replace(factor=float(z.abs().mean()), shift=shift)


def _read_token(
    x: OfHeads, offsets: Int[Tensor, " position"], rounding: float, counts: list[int]
) -> ArrayRotation:
    """Read one token at positions that start with 0 and 1, and check that it only rotates."""
    length, allowed = x.square().sum((0, 2)).sqrt(), allowed_residual(0, rounding)
    growth = length / length[0]
    growth = growth.where((growth - 1).abs() > allowed, 1)
    x = x / growth[:, None]
    size = x.square().mean((0, 1)).sqrt()
    size = size.clamp(min=0.1 * size.square().mean().sqrt())
    measured = read_rotation(x, offsets, noise=rounding * size, counts=counts)
    if measured.residual > EXACT:  # lengths show the noise of a runtime in bfloat16
        share = min(measured.residual / 2, LARGEST_NOISE)
        measured = read_rotation(x, offsets, noise=share * size, counts=counts)
    z, distance = measured.planes.complex(x), offsets[:, None]
    still = z * torch.exp(
        -1j * distance * measured.planes.inv_freq.double().nan_to_num(0)
    )
    error = distance * measured.resolution.nan_to_num(0, 0, 0) * z.abs()
    moved = ((still - still[:, :1]).abs() - error).clamp(min=0).square().sum(-1)
    moved = (moved / x.square().sum(-1)).sqrt() > max(allowed, 4 * measured.residual)
    fault = "changes with position, but not by one rotation of all heads" * bool(
        moved.any()
    )
    if measured.residual > NOT_A_ROTATION:
        fault = (
            f"changes with position, but not by a rotation ({measured.residual:.2g})"
        )
    grown = (growth - 1).abs() > measured.residual
    return ArrayRotation(measured, fault, growth.where(grown, 1))
