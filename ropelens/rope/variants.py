"""The variants of RoPE by name, with frequencies and with settings of configurations.

If transformers knows a variant, its own `rope_parameters` state it, so that the checkpoint
loads anywhere. Other frequencies are computed here, in transformers' order of operations.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ropelens.errors import BadArgument, explained
from ropelens.rope.planes import Planes, zero_frequencies
from ropelens.rope.select import ALL_PLANES, Fastest, Selection, Slowest, kept_planes

OWN = "ropelens-"
"""Prefix of every `rope_type` that only ropelens knows."""

LARGEST = 1e15  # float32 cannot hold powers of larger numbers


@dataclass(frozen=True)
class Shape:
    """Sizes of the model that a variant is applied to."""

    head_dim: int  # coordinates that rotate
    base: float  # for variants without a base
    context: int  # trained length in tokens, before the variant
    length: int = 0  # of the sequence, for "dynamic"


def _no_parameters(value: Any, shape: Shape) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class Variant:
    """A variant of RoPE, and its value if one was given, as in "p-rope:0.75".

    `read` parses the value after the colon, or raises ValueError. `formula` computes `inv_freq`
    of every plane (rad/token, 0 for a stopped plane) from the value and the shape. `stops`
    selects the planes that stop, if all remaining planes keep their frequencies. transformers
    has the formula of a variant with neither. `parameters` are added to the `rope_parameters`
    of a configuration, next to `rope_type` and the base. `layers` is the kind of layers that
    change ("full", "sliding"); "" is all layers.
    """

    usage: str
    read: Callable[[str], Any]
    rope_type: str
    parameters: Callable[[Any, Shape], dict[str, Any]] = _no_parameters
    formula: Callable[[Any, Shape], Float[Tensor, " frequency"]] | None = None
    stops: Callable[[Any], Selection] | None = None
    value: Any = None
    layers: str = ""

    def rope_parameters(self, shape: Shape) -> dict[str, Any]:
        """`rope_parameters` of the variant in a configuration of transformers."""
        base = {"rope_type": self.rope_type, "rope_theta": shape.base}
        return base | self.parameters(self.value, shape)

    def inv_freq(self, shape: Shape) -> Float[Tensor, " frequency"] | None:
        """`inv_freq` of every plane; None if transformers has the formula."""
        if self.stops is not None:
            plain = Planes(_powers(shape.base, shape.head_dim), shape.head_dim, "half")
            return plain.inv_freq.masked_fill(self.stops(self.value)(plain), 0.0)
        if self.formula is not None:
            return self.formula(self.value, shape)
        return None


def parse_variant(text: str) -> Variant:
    """Parse NAME[:VALUE][@LAYERS]. Raises `BadArgument`, which lists the variants."""
    usages = ", ".join(variant.usage for variant in VARIANTS.values())
    what = f"There is no RoPE variant {text[:80]!r}."
    spelled, _, layers = text.partition("@")
    name, _, value = spelled.partition(":")
    with explained(what, f"one of: {usages}", error=BadArgument):
        variant = VARIANTS[name]
        return replace(variant, value=variant.read(value), layers=layers)


def _read_number(text: str, *, low: float, high: float) -> float:
    if not text:
        raise ValueError("it needs a value")
    number = float(text)
    if not low <= number <= high:
        raise ValueError(f"it must be between {low:g} and {high:g}")
    return number


def _read_share(text: str) -> float:
    return _read_number(text, low=0.0, high=1.0)


def _read_stretch(text: str) -> float:
    """A base, or the factor by which a context grows."""
    return _read_number(text, low=1.0, high=LARGEST)


def _read_base(text: str) -> float | None:
    return _read_stretch(text) if text else None


def _read_nothing(text: str) -> None:
    if text:
        raise ValueError("it takes no value")


def _powers(base: float, dim: int) -> Float[Tensor, " frequency"]:
    """base^(-2f / dim), f = 0, 1, ..."""
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device="cpu") / dim
    return 1.0 / (base**exponent)


def _plain_rope(base: float | None, shape: Shape) -> Float[Tensor, " frequency"]:
    return _powers(base or shape.base, shape.head_dim)


def _partial_rope(p: float, shape: Shape) -> Float[Tensor, " frequency"]:
    """The first int(p D // 2) planes rotate, and the frequencies are spread over these."""
    inv_freq = zero_frequencies(shape.head_dim // 2)
    rotated = kept_planes(p, shape.head_dim)
    if rotated:
        inv_freq[:rotated] = _powers(shape.base, 2 * rotated)
    return inv_freq


def _ntk_rope(stretch: float, shape: Shape) -> Float[Tensor, " frequency"]:
    return _powers(_ntk_base(stretch, shape), shape.head_dim)


def _ntk_base(stretch: float, shape: Shape) -> float:
    """The base that makes the slowest plane `stretch` times slower and keeps the fastest."""
    return float(shape.base * stretch ** (shape.head_dim / (shape.head_dim - 2)))


def _llama3_parameters(stretch: float, shape: Shape) -> dict[str, Any]:
    return {
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "factor": stretch,
        "original_max_position_embeddings": shape.context,
    }


VARIANTS: Mapping[str, Variant] = {
    "rope": Variant(  # arXiv 2104.09864
        usage="rope[:base]",
        read=_read_base,
        rope_type="default",
        parameters=lambda base, shape: {"rope_theta": base or shape.base},
        formula=_plain_rope,
    ),
    "abf": Variant(  # arXiv 2309.16039
        usage="abf:base",
        read=_read_stretch,
        rope_type="default",
        parameters=lambda base, shape: {"rope_theta": base},
        formula=_plain_rope,
    ),
    "p-rope": Variant(  # arXiv 2410.06205
        usage="p-rope:p",
        read=_read_share,
        rope_type="proportional",
        parameters=lambda p, shape: {"partial_rotary_factor": p},
        stops=lambda p: Slowest(1 - p),
    ),
    "p-rope-reversed": Variant(  # arXiv 2410.06205
        usage="p-rope-reversed:p",
        read=_read_share,
        rope_type=f"{OWN}p-rope-reversed",
        parameters=lambda p, shape: {"p": p},
        stops=lambda p: Fastest(1 - p),
    ),
    "partial": Variant(  # GPT-NeoX, arXiv 2204.06745
        usage="partial:p",
        read=_read_share,
        rope_type=f"{OWN}partial",
        parameters=lambda p, shape: {"p": p},
        formula=_partial_rope,
    ),
    "nope": Variant(  # arXiv 2305.19466
        usage="nope",
        read=_read_nothing,
        rope_type="proportional",
        parameters=lambda value, shape: {"partial_rotary_factor": 0.0},
        stops=lambda value: ALL_PLANES,
    ),
    "linear": Variant(  # arXiv 2306.15595
        usage="linear:s",
        read=_read_stretch,
        rope_type="linear",
        parameters=lambda stretch, shape: {"factor": stretch},
    ),
    "ntk": Variant(  # arXiv 2309.00071, as for the next two
        usage="ntk:s",
        read=_read_stretch,
        rope_type="default",
        parameters=lambda stretch, shape: {"rope_theta": _ntk_base(stretch, shape)},
        formula=_ntk_rope,
    ),
    "dynamic": Variant(
        usage="dynamic:s",
        read=_read_stretch,
        rope_type="dynamic",
        parameters=lambda stretch, shape: {"factor": stretch},
    ),
    "yarn": Variant(
        usage="yarn:s",
        read=_read_stretch,
        rope_type="yarn",
        parameters=lambda stretch, shape: {
            "factor": stretch,
            "original_max_position_embeddings": shape.context,
        },
    ),
    "llama3": Variant(  # arXiv 2407.21783
        usage="llama3:s",
        read=_read_stretch,
        rope_type="llama3",
        parameters=_llama3_parameters,
    ),
}
