"""The planes and heads that an edit changes, and the planes that a truncation sweep stops."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from ropelens.errors import BadArgument
from ropelens.rope.planes import Planes

ALL_HEADS = "*.*"
HeadMask = Bool[Tensor, "layer head"]

Selection = Callable[[Planes], Bool[Tensor, " frequency"]]
"""Selects planes of a layer, as the model without edits rotates them, fastest first.

Any such function can be used, for example lambda planes: planes.inv_freq < 0.01
"""


@dataclass(frozen=True)
class Slowest:
    """The slowest `fraction` of the planes, which p-RoPE with p = 1 - fraction stops."""

    fraction: float | int

    def __post_init__(self) -> None:
        if not 0 <= self.fraction <= 1:
            raise BadArgument(
                f"A fraction of planes is from 0 to 1, not {self.fraction}."
            )

    def __call__(self, planes: Planes) -> Bool[Tensor, " frequency"]:
        number = kept_planes(1 - self.fraction, planes.rotary_dim)
        return torch.arange(len(planes.inv_freq)) >= number


@dataclass(frozen=True)
class Fastest(Slowest):
    """The fastest `fraction` of the planes, as many as `Slowest` (the paper's "reversed")."""

    def __call__(self, planes: Planes) -> Bool[Tensor, " frequency"]:
        return super().__call__(planes).flip(0)


@dataclass(frozen=True)
class PlaneNumbers:
    """The planes with these numbers, as far as a layer has them; 0 is the fastest."""

    numbers: Sequence[int]

    def __call__(self, planes: Planes) -> Bool[Tensor, " frequency"]:
        numbers = torch.tensor(self.numbers, dtype=torch.long)
        return torch.isin(torch.arange(len(planes.inv_freq)), numbers)


ALL_PLANES = Slowest(1)


def kept_planes(p: float | int, rotary_dim: int) -> int:
    """Number of planes that p-RoPE keeps of D = `rotary_dim` coordinates: int(p D // 2)."""
    return int(round(p, 12) * rotary_dim // 2)  # 1 - 0.9 is less than 0.1


def heads_by_layer(
    heads: str,
    able: HeadMask,
    kinds: Callable[[], Sequence[str]] = tuple,
    *,
    doing: str = "attend",
) -> HeadMask:
    """The heads in a list such as "3.5,4.*,full.*" that are `able` to attend or to rotate.

    Raises `BadArgument` if an item of the list matches no head.
    """
    names = kinds() if any(letter.isalpha() for letter in heads) else ()
    (layers, count), among = able.shape, able.any(1).nonzero().flatten().tolist()
    chosen = torch.zeros_like(able)
    for part in heads.split(","):
        layer, _, head = part.strip().partition(".")
        of_kind = [layer == kind for kind in names]
        in_layer = torch.tensor(of_kind) if any(of_kind) else _numbered(layer, layers)
        named = in_layer[:, None] & _numbered(head, count)
        if not (able & named).any():
            that = f" that {doing}s" * bool(named.any())
            able_layers = f" ({', '.join(map(str, among))} {doing})" * (
                len(among) < layers
            )
            seen = f"layers 0 to {layers - 1}{able_layers}, heads 0 to {count - 1}"
            seen += f"; kinds of layers: {', '.join(dict.fromkeys(names))}" * bool(
                names
            )
            hint = '"1.0" for head 0 of layer 1, "1.*" for all of layer 1, "0-2.0,*.1"'
            what = f"The model has no head {part.strip()!r}{that}."
            raise BadArgument(what, seen=seen, hint=hint)
        chosen |= able & named
    return chosen


def _numbered(name: str, count: int) -> Bool[Tensor, " number"]:
    first, dash, last = name.partition("-")
    ends = [0, count] if name == "*" else [first, last if dash else first]
    within = all(str(end).isdecimal() for end in ends)
    low, high = (min(int(end), count) for end in ends) if within else (count, count)
    number = torch.arange(count)
    return (number >= low) & (number <= high)
