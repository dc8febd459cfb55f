"""The frequencies of every variant of RoPE, in transformers' order of operations.

Functions of a variant's value and of the `Shape` of a model. Sources stand in the table of
variants (`ropelens.rope.variants`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ropelens.errors import BadArgument
from ropelens.rope.select import kept_planes


@dataclass(frozen=True)
class Shape:
    """The model that a variant is put to.

    `head_dim` coordinates rotate; `base` is for variants that name none; `context` is the
    trained length in tokens, before the variant; `length` is that of the sequence, for variants
    that change with it (dynamic, longrope), 0 for any short one.
    """

    head_dim: int
    base: float = 10_000.0
    context: int = 2048
    length: int = 0


Rates = tuple[Float[Tensor, " frequency"], float]
"""inv_freq of every plane (rad/token, 0: it stands still), and the attention factor."""


@dataclass(frozen=True)
class Factors:
    """LongRoPE: planes are slowed by `short` up to the trained context, by `long` past it."""

    stretch: float
    short: tuple[float, ...]
    long: tuple[float, ...]


def _plain(shape: Shape, *, base: float | None = None, dim: int | None = None) -> Tensor:
    """base^(-2f / dim), f = 0, 1, ..., in transformers' order of operations."""
    dim = dim or shape.head_dim
    exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / ((base or shape.base) ** exponent)


def rope(base: float | None, shape: Shape) -> Rates:
    """Plain RoPE."""
    return _plain(shape, base=base), 1.0


def p_rope(p: float, shape: Shape) -> Rates:
    """The first int(p D // 2) planes turn."""
    inv_freq = _plain(shape)
    inv_freq[kept_planes(p, shape.head_dim) :] = 0
    return inv_freq, 1.0


def p_rope_reversed(p: float, shape: Shape) -> Rates:
    """The last int(p D // 2) planes turn."""
    inv_freq = _plain(shape)
    inv_freq[: len(inv_freq) - kept_planes(p, shape.head_dim)] = 0
    return inv_freq, 1.0


def partial(p: float, shape: Shape) -> Rates:
    """The first int(p D // 2) planes turn, frequencies spread anew over them."""
    inv_freq = torch.zeros(shape.head_dim // 2)
    rotated = kept_planes(p, shape.head_dim)
    if rotated:
        inv_freq[:rotated] = _plain(shape, dim=2 * rotated)
    return inv_freq, 1.0


def nope(value: None, shape: Shape) -> Rates:
    """No plane turns."""
    return torch.zeros(shape.head_dim // 2), 1.0


def nope_every(every: int, shape: Shape) -> Rates:
    """Plain RoPE, in the layers that rotate."""
    return _plain(shape), 1.0


def linear(stretch: float, shape: Shape) -> Rates:
    """Positions as if `stretch` times closer."""
    return _plain(shape) / stretch, 1.0


def ntk_base(stretch: float, shape: Shape) -> float:
    """The base that makes the slowest plane `stretch` times slower, and keeps the fastest."""
    if shape.head_dim < 4:
        raise BadArgument(
            "NTK scaling slows one plane and keeps another.",
            seen=f"{shape.head_dim} rotating coordinates, which are one plane",
        )
    return float(shape.base * stretch ** (shape.head_dim / (shape.head_dim - 2)))


def ntk(stretch: float, shape: Shape) -> Rates:
    """Plain RoPE with the base of `ntk_base`."""
    return _plain(shape, base=ntk_base(stretch, shape)), 1.0


def dynamic(stretch: float, shape: Shape) -> Rates:
    """As ntk, with a stretch that grows with the sequence past the trained context."""
    length = max(shape.length, shape.context)
    growth = stretch * length / shape.context - (stretch - 1)
    return _plain(shape, base=ntk_base(growth, shape)), 1.0


def yarn(stretch: float, shape: Shape) -> Rates:
    """Planes of over 32 turns in the context stay; those of under one are slowed."""
    if shape.base <= 1:
        raise BadArgument(
            "YaRN needs planes of different speeds.",
            seen=f"base {shape.base:g}, with which all planes turn alike or faster",
        )

    def plane_of(turns: float) -> float:
        ratio = math.log(shape.context / (turns * 2 * math.pi)) / math.log(shape.base)
        return shape.head_dim * ratio / 2

    low = max(math.floor(plane_of(32.0)), 0)
    high = min(math.ceil(plane_of(1.0)), shape.head_dim - 1)
    plain = _plain(shape)
    ramp = (torch.arange(len(plain)) - low) / (high - low if high != low else 0.001)
    slowed = ramp.clamp(0, 1)
    inv_freq = plain / stretch * slowed + plain * (1 - slowed)
    return inv_freq, 0.1 * math.log(stretch) + 1.0


def llama3(stretch: float, shape: Shape) -> Rates:
    """Wavelengths up to a quarter of the context stay; those past the context grow."""
    plain = _plain(shape)
    stays = (shape.context * plain / (2 * math.pi) - 1.0) / (4.0 - 1.0)
    stays = stays.clamp(0, 1)
    return (1 - stays) * plain / stretch + stays * plain, 1.0


def longrope(factors: Factors, shape: Shape) -> Rates:
    """Every plane slowed by its own factor."""
    used = factors.long if shape.length > shape.context else factors.short
    if len(used) != shape.head_dim // 2:
        raise BadArgument(
            "LongRoPE needs a factor for every plane.",
            seen=f"{len(used)} factors for {shape.head_dim // 2} planes",
        )
    growth = math.log(factors.stretch) / math.log(shape.context)
    return _plain(shape) / torch.tensor(used), math.sqrt(1 + growth)
