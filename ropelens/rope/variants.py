"""The variants of RoPE by name, with frequencies and with settings of configurations.

If transformers knows a variant, its own `rope_parameters` state it, so that the checkpoint
loads anywhere. Other frequencies are computed here, in transformers' order of operations.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ropelens.errors import BadArgument, explained
from ropelens.rope.planes import Planes
from ropelens.rope.select import ALL_PLANES, Fastest, Selection, Slowest, kept_planes

OWN = "ropelens-"
"""Prefix of every `rope_type` that only ropelens knows."""


@dataclass(frozen=True)
class Shape:
    """Sizes of the model that a variant is applied to."""

    head_dim: int  # coordinates that rotate
    base: float  # for variants without a base
    context: int  # trained length in tokens, before the variant
    length: int = 0  # of the sequence, for "dynamic"


@dataclass(frozen=True)
class Variant:
    """A variant of RoPE, and its value if one was given, as in "p-rope:0.75".

    `read` parses the value after the colon, or raises ValueError. `formula` computes `inv_freq`
    of every plane (rad/token, 0 for a stopped plane) from the value and the shape. `stops`
    selects the planes that stop, if all remaining planes keep their frequencies. transformers
    has the formula of a variant with neither.
    """

    usage: str
    formula: Callable[[Any, Shape], Float[Tensor, " frequency"]] | None
    read: Callable[[str], Any]
    rope_type: str
    parameters: Callable[[Any, Shape], dict[str, Any]] = lambda value, shape: {}
    stops: Callable[[Any], Selection] | None = None
    value: Any = None

    def rope_parameters(self, shape: Shape) -> dict[str, Any]:
        """`rope_parameters` of the variant in a configuration of transformers."""
        base = {"rope_type": self.rope_type, "rope_theta": shape.base}
        return base | self.parameters(self.value, shape)

    def inv_freq(self, shape: Shape) -> Float[Tensor, " frequency"] | None:
        """`inv_freq` of every plane; None if transformers has the formula."""
        if self.stops is None:
            return self.formula and self.formula(self.value, shape)
        plain = Planes(_rope(None, shape), shape.head_dim, "half")
        return plain.inv_freq.masked_fill(self.stops(self.value)(plain), 0.0)


def parse_variant(text: str) -> Variant:
    """Parse NAME or NAME:VALUE. Raises `BadArgument`, which lists the variants."""
    usages = "one of: " + ", ".join(row.usage for row in VARIANTS.values())
    name, _, value = text.partition(":")
    with explained(
        f"There is no RoPE variant {text[:80]!r}.", usages, error=BadArgument
    ):
        return replace(VARIANTS[name], value=VARIANTS[name].read(value))


def _rope(base: float | None, shape: Shape, *, dim: int | None = None) -> Tensor:
    """base^(-2f / dim), f = 0, 1, ..."""
    dim = dim or shape.head_dim
    exponent = torch.arange(0, dim, 2, dtype=torch.float32) / dim
    return 1.0 / ((base or shape.base) ** exponent)


def _partial(p: float, shape: Shape) -> Tensor:
    """The first int(p D // 2) planes rotate, and the frequencies are spread over these."""
    inv_freq = torch.zeros(shape.head_dim // 2)
    if rotated := kept_planes(p, shape.head_dim):
        inv_freq[:rotated] = _rope(None, shape, dim=2 * rotated)
    return inv_freq


def _ntk_base(stretch: float, shape: Shape) -> float:
    """The base that makes the slowest plane `stretch` times slower and keeps the fastest."""
    return float(shape.base * stretch ** (shape.head_dim / (shape.head_dim - 2)))


def _number(text: str, *, low: float, high: float) -> float:
    if not low <= (number := float(text)) <= high:
        raise ValueError(f"it must be between {low:g} and {high:g}")
    return number


def _no_value(text: str) -> None:
    if text:
        raise ValueError("it takes no value")


_share = partial(_number, low=0.0, high=1.0)
_stretch = partial(
    _number, low=1.0, high=1e15
)  # float32 cannot hold powers of larger numbers


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
    "nope": Variant("nope", None, _no_value, "proportional",  # arXiv 2305.19466
        lambda value, shape: {"partial_rotary_factor": 0.0}, stops=lambda value: ALL_PLANES),
    "linear": Variant("linear:s", None, _stretch, "linear",  # arXiv 2306.15595
        lambda stretch, shape: {"factor": stretch}),
    "ntk": Variant("ntk:s",  # arXiv 2309.00071, as for the next two
        lambda stretch, shape: _rope(_ntk_base(stretch, shape), shape), _stretch,
        "default", lambda stretch, shape: {"rope_theta": _ntk_base(stretch, shape)}),
    "dynamic": Variant("dynamic:s", None, _stretch, "dynamic",
        lambda stretch, shape: {"factor": stretch}),
    "yarn": Variant("yarn:s", None, _stretch, "yarn", _in_context),
    "llama3": Variant("llama3:s", None, _stretch, "llama3", lambda stretch, shape: {
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,  # arXiv 2407.21783
        **_in_context(stretch, shape)}),
}
# fmt: on
