"""The variants of RoPE by name: one row of `VARIANTS`, one function of frequencies each.

    parse_variant("p-rope:0.75").frequencies(Shape(head_dim=128))

Where transformers knows a variant, its row writes transformers' own `rope_parameters`, so that
checkpoints load anywhere; the others carry a `rope_type` that begins with "ropelens-".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ropelens.errors import BadArgument
from ropelens.rope import formulas
from ropelens.rope.formulas import Factors, Rates, Shape
from ropelens.rope.select import Every, Fastest, Selection, Slowest

OWN = "ropelens-"
"""The beginning of each `rope_type` that only ropelens knows."""

LARGEST = 1e15
"""Bases and stretches beyond it are mistakes, and float32 would not hold their powers."""


@dataclass(frozen=True)
class VariantRow:
    """A variant of RoPE: how it is written, its meaning, source and formula.

    `parse` reads the value behind the colon, and raises ValueError for a wrong one. A config
    names the variant by `rope_type`, the base, and `parameters` of its value. `stops` are the
    planes that the variant stops in a model whose other planes keep their frequencies; None
    for a variant with frequencies of its own.
    """

    usage: str
    meaning: str
    source: str
    parse: Callable[[str], Any]
    frequencies: Callable[[Any, Shape], Rates]
    rope_type: str
    parameters: Mapping[str, Callable[[Any, Shape], Any]] = field(default_factory=dict)
    stops: Callable[[Any], Selection] | None = None


@dataclass(frozen=True)
class Variant:
    """A row of `VARIANTS` with its value, as written in "p-rope:0.75"."""

    name: str
    text: str
    value: Any

    @property
    def row(self) -> VariantRow:
        """The row of the table."""
        return VARIANTS[self.name]

    def frequencies(self, shape: Shape) -> Rates:
        """`inv_freq` of every plane in rad/token, and the factor on queries and keys."""
        return self.row.frequencies(self.value, shape)

    def rope_parameters(self, shape: Shape) -> dict[str, Any]:
        """The variant in a config of transformers."""
        further = {name: of(self.value, shape) for name, of in self.row.parameters.items()}
        return {"rope_type": self.row.rope_type, "rope_theta": shape.base, **further}

    def needs_ropelens(self) -> bool:
        """Whether a checkpoint with this variant loads only after `import ropelens`."""
        return self.row.rope_type.startswith(OWN)

    def stops_in(self, layer: int) -> bool:
        """Whether the planes that the variant stops are stopped in this layer."""
        return self.name != "nope-every" or (layer + 1) % self.value == 0


def parse_variant(text: str) -> Variant:
    """The variant written as NAME or NAME:VALUE.

    Raises `BadArgument`, which lists the variants, for any other text.
    """
    usages = "one of: " + ", ".join(row.usage for row in VARIANTS.values())
    name, _, value = text.partition(":")
    if name not in VARIANTS:
        raise BadArgument(f"No RoPE variant is called {name[:80]!r}.", attempt=usages)
    try:
        return Variant(name, text, VARIANTS[name].parse(value))
    except ValueError as error:
        raise BadArgument(
            f"The RoPE variant {VARIANTS[name].usage} cannot have the value {value!r}.",
            seen=str(error),
            attempt=usages,
        ) from error


def _number(low: float, high: float) -> Callable[[str], float]:
    """A parser of numbers from `low` to `high`."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number") from None
        if not low <= number <= high:
            raise ValueError(f"it must be between {low:g} and {high:g}")
        return number

    return read


_SHARE = _number(0.0, 1.0)
_BASE = _STRETCH = _number(1.0, LARGEST)


def _base_or_none(text: str) -> float | None:
    return _BASE(text) if text else None


def _nothing(text: str) -> None:
    if text:
        raise ValueError("it takes none")


def _every(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= 2):
        raise ValueError("it must be a whole number, 2 or more")
    return int(text)


def _factors(text: str) -> Factors:
    parts = text.split("/")
    if len(parts) != 3:
        raise ValueError("it must be s/short,short,.../long,long,..., a factor a plane")
    short, long = (tuple(_STRETCH(f) for f in part.split(",")) for part in parts[1:])
    if len(short) != len(long):
        raise ValueError(f"{len(short)} short factors, {len(long)} long ones")
    return Factors(_STRETCH(parts[0]), short, long)


_PAPER = "Barbero et al. 2024, arXiv 2410.06205"
_YARN = "Peng et al. 2023, arXiv 2309.00071"
_CONTEXT = {"original_max_position_embeddings": lambda value, shape: shape.context}


def _as(name: str) -> Mapping[str, Callable[[Any, Shape], Any]]:
    """The parameter of a config that is the variant's value."""
    return {name: lambda value, shape: value}


# fmt: off
_ROWS = (
    VariantRow("rope[:base]", "plain RoPE of this base; else of the model's base, or 10,000",
        "Su et al. 2021, arXiv 2104.09864", _base_or_none, formulas.rope, "default",
        {"rope_theta": lambda base, shape: base or shape.base}),
    VariantRow("abf:base", "another base, such as 500000, for longer contexts",
        "Xiong et al. 2023, arXiv 2309.16039", _BASE, formulas.rope, "default",
        _as("rope_theta")),
    VariantRow("p-rope:p",
        "the fastest share p of the planes turn as before, the rest stand still",
        _PAPER, _SHARE, formulas.p_rope, "proportional", _as("partial_rotary_factor"),
        stops=lambda p: Slowest(1 - p)),
    VariantRow("p-rope-reversed:p",
        "the slowest share p of the planes turn as before, the rest stand still",
        _PAPER, _SHARE, formulas.p_rope_reversed, OWN + "p-rope-reversed", _as("p"),
        stops=lambda p: Fastest(1 - p)),
    VariantRow("partial:p",
        "a share p of the planes turn, all frequencies spread anew over them",
        "Black et al. 2022 (GPT-NeoX), arXiv 2204.06745",
        _SHARE, formulas.partial, OWN + "partial", _as("p")),
    VariantRow("nope", "no plane turns", "Kazemnejad et al. 2023, arXiv 2305.19466",
        _nothing, formulas.nope, "proportional",
        {"partial_rotary_factor": lambda value, shape: 0.0}, stops=lambda value: Every()),
    VariantRow("nope-every:n", "every n-th layer does not rotate, as in SmolLM3",
        "Yang et al. 2025, arXiv 2501.18795", _every, formulas.nope_every, "default",
        stops=lambda value: Every()),
    VariantRow("linear:s", "position interpolation: every plane s times slower",
        "Chen et al. 2023, arXiv 2306.15595", _STRETCH, formulas.linear, "linear",
        _as("factor")),
    VariantRow("ntk:s", "a base so much larger that the slowest plane is s times slower",
        _YARN, _STRETCH, formulas.ntk, "default", {"rope_theta": formulas.ntk_base}),
    VariantRow("dynamic:s", "ntk that grows with the sequence, past the trained context",
        _YARN, _STRETCH, formulas.dynamic, "dynamic", _as("factor")),
    VariantRow("yarn:s", "slow planes s times slower, fast ones as before, scores sharper",
        _YARN, _STRETCH, formulas.yarn, "yarn", {**_as("factor"), **_CONTEXT}),
    VariantRow("llama3:s",
        "wavelengths past the context s times longer, up to a quarter as before",
        "Llama team 2024, arXiv 2407.21783, as transformers has it",
        _STRETCH, formulas.llama3, "llama3",
        {**_as("factor"), "low_freq_factor": lambda value, shape: 1.0,
         "high_freq_factor": lambda value, shape: 4.0, **_CONTEXT}),
    VariantRow("longrope:s/shorts/longs",
        "a factor a plane: 1,1.1,... up to the trained context, others past it",
        "Ding et al. 2024, arXiv 2402.13753", _factors, formulas.longrope, "longrope",
        {"factor": lambda factors, shape: factors.stretch,
         "short_factor": lambda factors, shape: list(factors.short),
         "long_factor": lambda factors, shape: list(factors.long), **_CONTEXT}),
)
# fmt: on

VARIANTS: Mapping[str, VariantRow] = {re.split(r"[:\[]", row.usage)[0]: row for row in _ROWS}
"""Every variant by its name. `rope_theta` in the rows' parameters is the shape's base."""
