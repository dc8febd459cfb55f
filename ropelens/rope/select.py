"""Which planes of a layer, and which heads, an edit changes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool
from torch import Tensor

from ropelens.errors import BadArgument
from ropelens.rope.planes import Planes

ALL_HEADS = "*.*"


@runtime_checkable
class Selection(Protocol):
    """Some planes of a layer, fastest first, as the model without edits rotates them."""

    def __call__(self, planes: Planes) -> Bool[Tensor, " frequency"]: ...


@dataclass(frozen=True)
class Every:
    """Every plane."""

    def __call__(self, planes: Planes) -> Bool[Tensor, " frequency"]:
        return torch.ones(len(planes.inv_freq), dtype=torch.bool)


@dataclass(frozen=True)
class Slowest:
    """The slowest `fraction` of the planes.

    All but int((1 - fraction) D // 2) planes of D rotated coordinates: those that p-RoPE with
    p = 1 - fraction stops (Barbero et al. 2024, arXiv 2410.06205), counted as transformers
    counts for `rope_type` "proportional".
    """

    fraction: float | int

    def __post_init__(self) -> None:
        _check_fraction(self.fraction)

    def __call__(self, planes: Planes) -> Bool[Tensor, " frequency"]:
        kept = kept_planes(1 - self.fraction, planes.rotary_dim)
        return torch.arange(len(planes.inv_freq)) >= kept


@dataclass(frozen=True)
class Fastest:
    """The fastest `fraction` of the planes, all but int((1 - fraction) D // 2) of them."""

    fraction: float | int

    def __post_init__(self) -> None:
        _check_fraction(self.fraction)

    def __call__(self, planes: Planes) -> Bool[Tensor, " frequency"]:
        kept = kept_planes(1 - self.fraction, planes.rotary_dim)
        return torch.arange(len(planes.inv_freq)) < len(planes.inv_freq) - kept


@dataclass(frozen=True)
class Wavelengths:
    """The planes whose wavelength, in tokens, is at least `low` and below `high`.

    A plane that stands still has an infinite one, which only an infinite `high` includes.
    """

    low: float | int
    high: float | int = math.inf

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise BadArgument(
                "A range of wavelengths goes from a low to a higher one, in tokens.",
                seen=f"from {self.low} to {self.high}",
            )

    def __call__(self, planes: Planes) -> Bool[Tensor, " frequency"]:
        wavelength = planes.wavelength[: len(planes.inv_freq)]
        return (wavelength >= self.low) & ((wavelength < self.high) | (self.high == math.inf))


@dataclass(frozen=True)
class PlaneNumbers:
    """The planes with these numbers, 0 the fastest, as far as a layer has them."""

    numbers: Iterable[int]

    def __post_init__(self) -> None:
        object.__setattr__(self, "numbers", tuple(map(int, self.numbers)))

    def __call__(self, planes: Planes) -> Bool[Tensor, " frequency"]:
        numbers = torch.tensor(tuple(self.numbers), dtype=torch.long)
        return torch.isin(torch.arange(len(planes.inv_freq)), numbers)


def kept_planes(p: float | int, rotary_dim: int) -> int:
    """Planes that p-RoPE keeps of `rotary_dim` coordinates: int(p D // 2), as transformers.

    p is rounded to 12 digits, for 1 - 0.9 is a little less than 0.1.
    """
    return int(round(p, 12) * rotary_dim // 2)


def _check_fraction(fraction: float | int) -> None:
    if not 0 <= fraction <= 1:
        raise BadArgument(
            "A fraction of the planes is a number from 0 to 1.", seen=f"{fraction}"
        )


HeadPairs = tuple[tuple[int | None, int | None], ...]
"""Pairs (layer, head); None stands for every one."""


def parse_heads(heads: str) -> HeadPairs:
    """The pairs of a list such as "3.5,4.*"; `BadArgument` names the part that is wrong."""
    pairs = []
    for part in heads.split(","):
        match = re.fullmatch(r"\s*(\d+|\*)\.(\d+|\*)\s*", part, re.ASCII)
        if match is None:
            raise BadArgument(
                "A list of heads names each as layer.head.",
                seen=f"{part.strip()!r} in {heads!r}",
                attempt='"3.5" for head 5 of layer 3, "4.*" for all of layer 4, "*.0,3.5"',
            )
        layer, head = (None if name == "*" else int(name) for name in match.groups())
        pairs.append((layer, head))
    return tuple(pairs)


def heads_by_layer(
    heads: str, *, layers: int, heads_of_layer: int
) -> Bool[Tensor, "layer head"]:
    """Which heads of each layer a list such as "3.5,4.*" names.

    Raises `BadArgument` for a head that the model does not have, and as `parse_heads`.
    """
    pairs = parse_heads(heads)
    for layer, head in pairs:
        if (layer or 0) >= layers or (head or 0) >= heads_of_layer:
            raise BadArgument(
                f"The model has no head {'*' if layer is None else layer}."
                f"{'*' if head is None else head}.",
                seen=f"layers 0 to {layers - 1}, heads 0 to {heads_of_layer - 1}",
            )
    return torch.stack(
        [chosen_heads(pairs, layer=layer, heads=heads_of_layer) for layer in range(layers)]
    )


def chosen_heads(pairs: HeadPairs, *, layer: int, heads: int) -> Bool[Tensor, " head"]:
    """Which heads of a layer the pairs name."""
    chosen = torch.zeros(heads, dtype=torch.bool)
    for at, head in pairs:
        if at in (None, layer):
            chosen[slice(None) if head is None else head] = True
    return chosen
