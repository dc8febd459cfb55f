"""Which planes of a layer, and which heads, an edit changes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool
from torch import Tensor

from ropelens.errors import BadArgument
from ropelens.rope.plain import plain_list, plain_number
from ropelens.rope.planes import Planes

ALL_HEADS = "*.*"


@runtime_checkable
class Selection(Protocol):
    """Some of a layer's planes, as the model has them by itself, fastest first."""

    def __call__(self, planes: Planes) -> Bool[Tensor, " frequency"]: ...


@dataclass(frozen=True)
class Every:
    """Every plane."""

    def __call__(self, planes: Planes) -> Bool[Tensor, " frequency"]:
        return torch.ones(len(planes.inv_freq), dtype=torch.bool)


@dataclass(frozen=True)
class Slowest:
    """The slowest `fraction` of the planes.

    With D rotated coordinates, int((1 - fraction) D // 2) planes are left out of it: what
    p-RoPE with p = 1 - fraction keeps (Barbero et al. 2024, arXiv 2410.06205), counted as
    transformers counts for `rope_type` "proportional".
    """

    fraction: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "fraction", _fraction(self.fraction))

    def __call__(self, planes: Planes) -> Bool[Tensor, " frequency"]:
        kept = kept_planes(1 - self.fraction, planes.rotary_dim)
        return torch.arange(len(planes.inv_freq)) >= kept


@dataclass(frozen=True)
class Fastest:
    """The fastest `fraction` of the planes, all but int((1 - fraction) D // 2) of them."""

    fraction: float

    def __post_init__(self) -> None:
        object.__setattr__(self, "fraction", _fraction(self.fraction))

    def __call__(self, planes: Planes) -> Bool[Tensor, " frequency"]:
        count = len(planes.inv_freq)
        kept = kept_planes(1 - self.fraction, planes.rotary_dim)
        return torch.arange(count) < count - kept


@dataclass(frozen=True)
class Wavelengths:
    """The planes whose wavelength, in tokens, is at least `low` and below `high`.

    A plane that stands still has an infinite one, which only `high` infinite includes.
    """

    low: float
    high: float = math.inf

    def __post_init__(self) -> None:
        low, high = plain_number(self.low), plain_number(self.high)
        if not 0 <= low < high:
            raise BadArgument(
                "A range of wavelengths goes from a low to a higher one, in tokens.",
                seen=f"from {self.low} to {self.high}",
            )
        object.__setattr__(self, "low", low)
        object.__setattr__(self, "high", high)

    def __call__(self, planes: Planes) -> Bool[Tensor, " frequency"]:
        wavelength = planes.wavelength[: len(planes.inv_freq)]
        return (wavelength >= self.low) & ((wavelength < self.high) | (self.high == math.inf))


@dataclass(frozen=True)
class PlaneNumbers:
    """The planes of these numbers, 0 the fastest; those of them that a layer has."""

    numbers: Sequence[int]

    def __post_init__(self) -> None:
        given = plain_list(self.numbers)
        if given is None:
            raise BadArgument(
                "Planes are listed by their numbers.", seen=repr(self.numbers)[:80]
            )
        wrong = [n for n in given if isinstance(n, bool) or not isinstance(n, Integral)]
        if wrong:
            raise BadArgument("Planes have whole numbers.", seen=repr(wrong[0])[:80])
        object.__setattr__(self, "numbers", tuple(map(int, given)))

    def __call__(self, planes: Planes) -> Bool[Tensor, " frequency"]:
        return torch.isin(torch.arange(len(planes.inv_freq)), torch.tensor(self.numbers).long())


def kept_planes(p: float, rotary_dim: int) -> int:
    """Planes that p-RoPE keeps of `rotary_dim` coordinates: int(p D // 2), as transformers.

    p is rounded to 12 digits, for 1 - 0.9 is a little less than 0.1.
    """
    return int(round(p, 12) * rotary_dim // 2)


def _fraction(given: object) -> float:
    fraction = plain_number(given)
    if not 0 <= fraction <= 1:
        raise BadArgument(
            "A fraction of the planes is a number from 0 to 1.", seen=repr(given)[:80]
        )
    return fraction


def parse_heads(heads: str) -> tuple[tuple[int | None, int | None], ...]:
    """The (layer, head) pairs of a list such as "3.5,4.*"; None stands for every one.

    Raises `BadArgument` for anything else, naming the part that is wrong.
    """
    pairs = []
    for part in heads.split(",") if isinstance(heads, str) else (repr(heads),):
        found = re.fullmatch(r"\s*(\d+|\*)\.(\d+|\*)\s*", part, re.ASCII)
        if found is None:
            raise BadArgument(
                "A list of heads names each as layer.head.",
                seen=f"{part.strip()!r} in {heads!r}",
                attempt='"3.5" for head 5 of layer 3, "4.*" for all of layer 4, "*.0,3.5"',
            )
        layer, head = (None if name == "*" else int(name) for name in found.groups())
        pairs.append((layer, head))
    return tuple(pairs)


def heads_by_layer(
    heads: str, *, layers: int, heads_of_layer: int
) -> Bool[Tensor, "layer head"]:
    """Which heads of each layer a list such as "3.5,4.*" names.

    Raises `BadArgument` for a head that the model does not have, and as `parse_heads` does.
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


def chosen_heads(
    pairs: tuple[tuple[int | None, int | None], ...], *, layer: int, heads: int
) -> Bool[Tensor, " head"]:
    """Which heads of a layer the pairs name."""
    chosen = torch.zeros(heads, dtype=torch.bool)
    for at, head in pairs:
        if at in (None, layer):
            chosen[slice(None) if head is None else head] = True
    return chosen
