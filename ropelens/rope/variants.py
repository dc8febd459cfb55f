"""The variants of RoPE by name: the frequencies of each, and how a configuration states it.

    parse_variant("p-rope:0.75").frequencies(Shape(head_dim=128))

Frequencies are computed in transformers' order of operations, and configurations state a
variant in transformers' own `rope_parameters` where it knows it: checkpoints load anywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ropelens.errors import BadArgument
from ropelens.rope.planes import Planes
from ropelens.rope.select import EVERY, Fastest, Selection, Slowest, kept_planes

OWN = "ropelens-"
"""The beginning of each `rope_type` that only ropelens knows."""


@dataclass(frozen=True)
class Shape:
    """The model that a variant is put to."""

    head_dim: int  # coordinates that rotate
    base: float = 10_000.0  # for variants that name none
    context: int = 2048  # trained length in tokens, before the variant
    length: int = 0  # of the sequence, for `_dynamic`


Rates = tuple[Float[Tensor, " frequency"], float]
"""inv_freq of every plane (rad/token, 0: it stands still), and the attention factor."""


@dataclass(frozen=True)
class Variant:
    """A variant of RoPE, with its value where it was written, as in "p-rope:0.75".

    `read` makes the value of the text behind the colon; it raises ValueError. `formula` makes
    frequencies of value and shape. `stops` selects planes that stop in a model whose other
    planes keep their frequencies; without a `formula` these are those of plain RoPE. A
    configuration of transformers has the `rope_type` (where it can express the variant), the
    base, and `parameters` of value and shape.
    """

    usage: str
    formula: Callable[[Any, Shape], Rates] | None
    read: Callable[[str], Any]
    rope_type: str
    parameters: Callable[[Any, Shape], dict[str, Any]] = lambda value, shape: {}
    stops: Callable[[Any], Selection] | None = None
    text: str = ""
    value: Any = None

    def frequencies(self, shape: Shape) -> Rates:
        """`inv_freq` of every plane in rad/token, and the factor on queries and keys."""
        if self.formula is not None:
            return self.formula(self.value, shape)
        assert self.stops is not None
        plain = Planes(_plain(shape), shape.head_dim, "half")
        return plain.inv_freq.masked_fill(self.stops(self.value)(plain), 0.0), 1.0

    def rope_parameters(self, shape: Shape) -> dict[str, Any]:
        """The variant in a configuration of transformers."""
        base = {"rope_type": self.rope_type, "rope_theta": shape.base}
        return base | self.parameters(self.value, shape)


def parse_variant(text: str) -> Variant:
    """The variant written as NAME or NAME:VALUE.

    Raises `BadArgument`, which lists the variants, for any other text.
    """
    usages = "one of: " + ", ".join(row.usage for row in VARIANTS.values())
    name, _, value = text.partition(":")
    if name not in VARIANTS:
        raise BadArgument(f"No RoPE variant is called {name[:80]!r}.", attempt=usages)
    row = VARIANTS[name]
    try:
        return replace(row, text=text, value=row.read(value))
    except ValueError as error:
        what = f"The RoPE variant {row.usage} cannot have the value {value!r}."
        raise BadArgument(what, seen=str(error), attempt=usages) from error


# frequencies


def _plain(shape: Shape, *, base: float | None = None, dim: int | None = None) -> Tensor:
    """base^(-2f / dim), f = 0, 1, ..."""
    dim = dim or shape.head_dim
    exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / ((base or shape.base) ** exponent)


def _rope(base: float | None, shape: Shape) -> Rates:
    return _plain(shape, base=base), 1.0


def _partial(p: float, shape: Shape) -> Rates:
    """The first int(p D // 2) planes turn, frequencies spread anew over them."""
    inv_freq = torch.zeros(shape.head_dim // 2)
    rotated = kept_planes(p, shape.head_dim)
    if rotated:
        inv_freq[:rotated] = _plain(shape, dim=2 * rotated)
    return inv_freq, 1.0


def _ntk_base(stretch: float, shape: Shape) -> float:
    """The base that makes the slowest plane `stretch` times slower, and keeps the fastest."""
    return float(shape.base * stretch ** (shape.head_dim / (shape.head_dim - 2)))


def _dynamic(stretch: float, shape: Shape) -> Rates:
    """As ntk, with a stretch that grows with the sequence past the trained context."""
    length = max(shape.length, shape.context)
    growth = stretch * length / shape.context - (stretch - 1)
    return _rope(_ntk_base(growth, shape), shape)


def _yarn(stretch: float, shape: Shape) -> Rates:
    """Planes of over 32 turns in the context stay; those of under one are slowed."""

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


def _llama3(stretch: float, shape: Shape) -> Rates:
    """Wavelengths up to a quarter of the context stay; those past the context grow."""
    plain = _plain(shape)
    stays = (shape.context * plain / (2 * math.pi) - 1.0) / (4.0 - 1.0)
    stays = stays.clamp(0, 1)
    return (1 - stays) * plain / stretch + stays * plain, 1.0


# values


def _number(text: str, *, low: float, high: float) -> float:
    if not low <= (number := float(text)) <= high:
        raise ValueError(f"it must be between {low:g} and {high:g}")
    return number


_share = partial(_number, low=0.0, high=1.0)
_stretch = partial(_number, low=1.0, high=1e15)  # float32 does not hold powers of larger ones


def _nothing(text: str) -> None:
    if text:
        raise ValueError("it takes none")


def _every(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise ValueError("it must be a whole number, 2 or more")
    return int(text)


# the table


def _factor(stretch: float, shape: Shape) -> dict[str, Any]:
    return {"factor": stretch}


def _in_context(stretch: float, shape: Shape) -> dict[str, Any]:
    return {"factor": stretch, "original_max_position_embeddings": shape.context}


# fmt: off
VARIANTS: Mapping[str, Variant] = {
    "rope": Variant("rope[:base]", _rope, lambda text: _stretch(text) if text else None,
        "default", lambda base, shape: {"rope_theta": base or shape.base}),  # arXiv 2104.09864
    "abf": Variant("abf:base", _rope, _stretch, "default",
        lambda base, shape: {"rope_theta": base}),  # arXiv 2309.16039
    "p-rope": Variant("p-rope:p", None, _share, "proportional",  # arXiv 2410.06205
        lambda p, shape: {"partial_rotary_factor": p}, stops=lambda p: Slowest(1 - p)),
    "p-rope-reversed": Variant("p-rope-reversed:p", None, _share,  # arXiv 2410.06205
        OWN + "p-rope-reversed", lambda p, shape: {"p": p}, stops=lambda p: Fastest(1 - p)),
    "partial": Variant("partial:p", _partial, _share, OWN + "partial",
        lambda p, shape: {"p": p}),  # GPT-NeoX, arXiv 2204.06745
    "nope": Variant("nope", None, _nothing, "proportional",  # arXiv 2305.19466
        lambda value, shape: {"partial_rotary_factor": 0.0}, stops=lambda value: EVERY),
    "nope-every": Variant("nope-every:n", None, _every, "",  # SmolLM3, arXiv 2501.18795
        stops=lambda value: EVERY),
    "linear": Variant("linear:s", lambda stretch, shape: (_plain(shape) / stretch, 1.0),
        _stretch, "linear", _factor),  # arXiv 2306.15595
    "ntk": Variant("ntk:s",  # arXiv 2309.00071, as the next two
        lambda stretch, shape: _rope(_ntk_base(stretch, shape), shape), _stretch,
        "default", lambda stretch, shape: {"rope_theta": _ntk_base(stretch, shape)}),
    "dynamic": Variant("dynamic:s", _dynamic, _stretch, "dynamic", _factor),
    "yarn": Variant("yarn:s", _yarn, _stretch, "yarn", _in_context),
    "llama3": Variant("llama3:s", _llama3, _stretch, "llama3", lambda stretch, shape: {
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,  # arXiv 2407.21783
        **_in_context(stretch, shape)}),
}
# fmt: on
