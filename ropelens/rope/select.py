"""The planes and heads that an edit changes, and the planes that a truncation sweep stops."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from ropelens.errors import BadArgument
from ropelens.rope.planes import Planes

ALL_HEADS = "*.*"
NUMBERS = re.compile(r"(?P<first>\d+)(-(?P<last>\d+))?")
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
        kept = kept_planes(1 - self.fraction, planes.rotary_dim)
        return torch.arange(len(planes.inv_freq), device="cpu") >= kept


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
        numbers = torch.tensor(self.numbers, dtype=torch.long, device="cpu")
        return torch.isin(torch.arange(len(planes.inv_freq), device="cpu"), numbers)


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

    `kinds` returns the kind of each layer, if the list has letters. Raises `BadArgument` if an
    item of the list matches no head.
    """
    names = kinds() if any(letter.isalpha() for letter in heads) else ()
    chosen = torch.zeros_like(able)
    for item in heads.split(","):
        listed = _listed_heads(item.strip(), able, names)
        if not (able & listed).any():
            who = f"head {item.strip()!r}"
            if listed.any():
                who += f" that {doing}s"
            raise BadArgument(
                f"The model has no {who}.",
                seen=_heads_of_model(able, names, doing),
                hint='"1.0" for head 0 of layer 1, "1.*" for all of layer 1, "0-2.0,*.1"',
            )
        chosen |= able & listed
    return chosen


def _listed_heads(item: str, able: HeadMask, kinds: Sequence[str]) -> HeadMask:
    """The heads of one item, such as "3.5", "0-2.*" or "full.*", also if they do not attend."""
    layers, heads = able.shape
    layer, _, head = item.partition(".")
    if layer in kinds:
        in_layer = torch.tensor(
            [layer == kind for kind in kinds], dtype=torch.bool, device="cpu"
        )
    else:
        in_layer = _listed_numbers(layer, layers)
    return in_layer[:, None] & _listed_numbers(head, heads)


def _listed_numbers(text: str, count: int) -> Bool[Tensor, " number"]:
    """Which of the numbers from 0 are in "*", "3" or "0-2"; none for any other text."""
    if text == "*":
        return torch.ones(count, dtype=torch.bool, device="cpu")
    match = NUMBERS.fullmatch(text)
    if match is None:
        return torch.zeros(count, dtype=torch.bool, device="cpu")
    first = match["first"]
    last = first if match["last"] is None else match["last"]
    number = torch.arange(count, device="cpu")
    return (number >= min(int(first), count)) & (number <= min(int(last), count))


def _heads_of_model(able: HeadMask, kinds: Sequence[str], doing: str) -> str:
    """The layers, heads and kinds of layers of a model in words, for an error message."""
    layers, heads = able.shape
    able_layers = able.any(1).nonzero().flatten().tolist()
    words = f"layers 0 to {layers - 1}"
    if len(able_layers) < layers:
        words += f" ({', '.join(map(str, able_layers))} {doing})"
    words += f", heads 0 to {heads - 1}"
    if kinds:
        words += f"; kinds of layers: {', '.join(dict.fromkeys(kinds))}"
    return words
