"""The variants of RoPE by name: one row of `VARIANTS`, one function of frequencies each.

    parse_variant("p-rope:0.75").frequencies(Shape(head_dim=128))

Where transformers knows a variant, its row writes transformers' own `rope_parameters`, so that
checkpoints load anywhere; the others carry a `rope_type` that begins with "ropelens-".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ropelens.errors import BadArgument
from ropelens.rope import formulas
from ropelens.rope.formulas import Factors, Rates, Shape
from ropelens.rope.select import Every, Fastest, Selection, Slowest

OWN = "ropelens-"
"""The beginning of each `rope_type` that only ropelens knows."""


@dataclass(frozen=True)
class VariantRow:
    """A variant of RoPE: how it is written, what it means, its formula, its source.

    `parse` reads what stands behind the colon, and complains with a ValueError. A config
    names the variant by `rope_type`, the base, and what `parameters` say. `stops`:
    the planes that the variant stops on a model whose other planes stay as they are; for
    a variant that has other frequencies, None.
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
    """A row of `VARIANTS` with its value, as "p-rope:0.75" has it."""

    name: str
    text: str
    value: Any

    @property
    def row(self) -> VariantRow:
        """The row of the table."""
        return VARIANTS[self.name]

    def frequencies(self, shape: Shape) -> Rates:
        """`inv_freq` of every plane in rad/token, and by how much queries and keys grow."""
        return self.row.frequencies(self.value, shape)

    def rope_parameters(self, shape: Shape) -> dict[str, Any]:
        """What transformers' configs call this variant."""
        further = {name: of(self.value, shape) for name, of in self.row.parameters.items()}
        return {"rope_type": self.row.rope_type, "rope_theta": shape.base, **further}

    def needs_ropelens(self) -> bool:
        """Whether a checkpoint with this variant loads only where ropelens was imported."""
        return self.row.rope_type.startswith(OWN)

    def stops_in(self, layer: int) -> bool:
        """Whether planes that the variant stops are stopped in the layer of this number."""
        return self.name != "nope-every" or (layer + 1) % self.value == 0


def parse_variant(text: str) -> Variant:
    """The variant written as NAME or NAME:VALUE.

    Raises `BadArgument`, which lists the variants, for any other text.
    """
    name, _, value = text.partition(":") if isinstance(text, str) else (repr(text), "", "")
    if name not in VARIANTS:
        raise BadArgument(f"No RoPE variant is called {name[:80]!r}.", attempt=_usages())
    try:
        return Variant(name, text, VARIANTS[name].parse(value))
    except ValueError as error:
        raise BadArgument(
            f"The RoPE variant {VARIANTS[name].usage} cannot have the value {value!r}.",
            seen=str(error),
            attempt=_usages(),
        ) from error


def _usages() -> str:
    return "one of: " + ", ".join(row.usage for row in VARIANTS.values())


# What stands behind the colon

LARGEST = 1e15
"""Bases and stretches beyond it are mistakes, and float32 would not hold their powers."""


def _number(low: float, high: float) -> Callable[[str], float]:
    """What reads a number from `low` to `high`."""

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


# What transformers calls them


def _value(value: Any, shape: Shape) -> Any:
    return value


def _context(value: Any, shape: Shape) -> int:
    return shape.context


def _base_of(value: float | None, shape: Shape) -> float:
    return value or shape.base


_PAPER = "Barbero et al. 2024, arXiv 2410.06205"

VARIANTS: Mapping[str, VariantRow] = {
    "rope": VariantRow(
        usage="rope[:base]",
        meaning="plain RoPE of this base; else of the model's base, or 10,000",
        source="Su et al. 2021, arXiv 2104.09864",
        parse=_base_or_none,
        frequencies=formulas.rope,
        rope_type="default",
        parameters={"rope_theta": _base_of},
    ),
    "abf": VariantRow(
        usage="abf:base",
        meaning="another base, such as 500000, for longer contexts",
        source="Xiong et al. 2023, arXiv 2309.16039",
        parse=_BASE,
        frequencies=formulas.rope,
        rope_type="default",
        parameters={"rope_theta": _base_of},
    ),
    "p-rope": VariantRow(
        usage="p-rope:p",
        meaning="the fastest share p of the planes turn as before, the rest stand still",
        source=_PAPER,
        parse=_SHARE,
        frequencies=formulas.p_rope,
        rope_type="proportional",
        parameters={"partial_rotary_factor": _value},
        stops=lambda p: Slowest(1 - p),
    ),
    "p-rope-reversed": VariantRow(
        usage="p-rope-reversed:p",
        meaning="the slowest share p of the planes turn as before, the rest stand still",
        source=_PAPER,
        parse=_SHARE,
        frequencies=formulas.p_rope_reversed,
        rope_type=OWN + "p-rope-reversed",
        parameters={"p": _value},
        stops=lambda p: Fastest(1 - p),
    ),
    "partial": VariantRow(
        usage="partial:p",
        meaning="a share p of the planes turn, all frequencies spread anew over them",
        source="Black et al. 2022 (GPT-NeoX), arXiv 2204.06745",
        parse=_SHARE,
        frequencies=formulas.partial,
        rope_type=OWN + "partial",
        parameters={"p": _value},
    ),
    "nope": VariantRow(
        usage="nope",
        meaning="no plane turns",
        source="Kazemnejad et al. 2023, arXiv 2305.19466",
        parse=_nothing,
        frequencies=formulas.nope,
        rope_type="proportional",
        parameters={"partial_rotary_factor": lambda v, s: 0.0},
        stops=lambda value: Every(),
    ),
    "nope-every": VariantRow(
        usage="nope-every:n",
        meaning="every n-th layer does not rotate, as in SmolLM3",
        source="Yang et al. 2025, arXiv 2501.18795",
        parse=_every,
        frequencies=formulas.nope_every,
        rope_type="default",
        stops=lambda value: Every(),
    ),
    "linear": VariantRow(
        usage="linear:s",
        meaning="position interpolation: every plane s times slower",
        source="Chen et al. 2023, arXiv 2306.15595",
        parse=_STRETCH,
        frequencies=formulas.linear,
        rope_type="linear",
        parameters={"factor": _value},
    ),
    "ntk": VariantRow(
        usage="ntk:s",
        meaning="a base so much larger that the slowest plane is s times slower",
        source="Peng et al. 2023, arXiv 2309.00071",
        parse=_STRETCH,
        frequencies=formulas.ntk,
        rope_type="default",
        parameters={"rope_theta": formulas.ntk_base},
    ),
    "dynamic": VariantRow(
        usage="dynamic:s",
        meaning="ntk that grows with the sequence, past the trained context",
        source="Peng et al. 2023, arXiv 2309.00071",
        parse=_STRETCH,
        frequencies=formulas.dynamic,
        rope_type="dynamic",
        parameters={"factor": _value},
    ),
    "yarn": VariantRow(
        usage="yarn:s",
        meaning="slow planes s times slower, fast ones as before, scores sharper",
        source="Peng et al. 2023, arXiv 2309.00071",
        parse=_STRETCH,
        frequencies=formulas.yarn,
        rope_type="yarn",
        parameters={
            "factor": _value,
            "original_max_position_embeddings": _context,
        },
    ),
    "llama3": VariantRow(
        usage="llama3:s",
        meaning="wavelengths past the context s times longer, up to a quarter as before",
        source="Llama team 2024, arXiv 2407.21783, as transformers has it",
        parse=_STRETCH,
        frequencies=formulas.llama3,
        rope_type="llama3",
        parameters={
            "factor": _value,
            "low_freq_factor": lambda value, shape: 1.0,
            "high_freq_factor": lambda value, shape: 4.0,
            "original_max_position_embeddings": _context,
        },
    ),
    "longrope": VariantRow(
        usage="longrope:s/shorts/longs",
        meaning="a factor a plane: 1,1.1,... up to the trained context, others past it",
        source="Ding et al. 2024, arXiv 2402.13753",
        parse=_factors,
        frequencies=formulas.longrope,
        rope_type="longrope",
        parameters={
            "factor": lambda factors, shape: factors.stretch,
            "short_factor": lambda factors, shape: list(factors.short),
            "long_factor": lambda factors, shape: list(factors.long),
            "original_max_position_embeddings": _context,
        },
    ),
}
"""Every variant by its name. `rope_theta` in the rows' parameters is the shape's base."""
