"""What a statistic is: one function, and one row that says what its number is.

Summing, grouping, averaging, describing and saving iterate over rows, and so do the tests and
the reference in docs/measures.md. The rows of a profile stand in measures.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:  # figures read names and columns from the rows, and they do without torch
    from torch import Tensor

    from ropelens.statistics.layer import LayerMeans
else:
    Tensor = LayerMeans = Any


@dataclass(frozen=True)
class Variable:
    """One variable of a profile, and what is said of it.

    `column` is its place in heads.csv: "budget" among the bits, "score" behind them, "" none.
    Comparisons show it where `compared` is "final" of finished models alone, and where it is
    "growth" also of their earlier checkpoints.
    """

    name: str
    dims: tuple[str, ...]
    units: str
    long_name: str
    column: Literal["", "budget", "score"] = ""
    compared: Literal["", "final", "growth"] = ""
    saved: bool = True

    @property
    def saved_dims(self) -> tuple[str, ...]:
        """The dims of the variable in the profile: of what is by coordinate, by plane."""
        return tuple("frequency" if dim == "coordinate" else dim for dim in self.dims)

    @property
    def attrs(self) -> dict[str, str]:
        """What the saved variable says of itself."""
        return {"long_name": self.long_name, "units": self.units}


@dataclass(frozen=True)
class Statistic(Variable):
    """A sum over rows or tokens of the attention of a layer; the profile has its mean.

    `of` gives the values that are summed, for a block of rows or for the vectors of a call:

    - over "rows": from a `Block` [batch, kv_head, group, row], or one more axis behind;
    - over "offsets": from a `Block` a value for every key of every row, which is summed by
      offset. Position 0 is left out, for a sink is at no offset;
    - over "tokens": from the `Vectors` of a call [batch, head or kv_head, position, value].

    `dims` are those of the mean, "layer" first. "coordinate" in place of "frequency" says
    that values over rows are parts of q k by coordinate: their sum takes the scale of the
    scores, and in the profile the coordinates of a plane are added up. What is not `saved`
    serves other variables.
    """

    of: Callable[[Any], Tensor] = field(kw_only=True)
    over: Literal["rows", "offsets", "tokens"] = "rows"

    def value(self, layer: LayerMeans) -> Tensor:
        """The variable of one layer."""
        mean = layer[self.name]
        return layer.planes.sum_coordinates(mean) if "coordinate" in self.dims else mean


@dataclass(frozen=True)
class Derived(Variable):
    """A variable that follows from the sums: `of` has it from the `LayerMeans` of a layer.

    Where `dims` name no layer, it is the same for all.
    """

    of: Callable[[Any], Tensor] = field(kw_only=True)

    def value(self, layer: LayerMeans) -> Tensor:
        """The variable of one layer."""
        return self.of(layer)
