"""The table of variables: what every number of a result is called, its dims, its unit.

A row is a `Variable`. Rows of a profile that are sums over an attention call are `Statistic`,
what follows from the sums is `Derived`; their formulas stand in formulas.py. Summing,
averaging, describing, saving and the reference in docs/formulas.md iterate over the rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike

from ropelens.errors import IN_WORDS

if TYPE_CHECKING:  # figures read names and columns from the rows, and they do without torch
    from torch import Tensor

else:
    Tensor = Any

IN_WORDS[xr.Dataset] = "results, such as the profile, truncation or reach of rl.open(FOLDER)"


@dataclass(frozen=True)
class Variable:
    """A variable of a result.

    `column` is its place in heads.csv: "budget" among the bits, "score" behind them, "" none.
    Comparisons show the variable of finished models where `compared` is "final", and of
    earlier checkpoints too where it is "growth".
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
        """The dims in the dataset."""
        return self.dims

    @property
    def attrs(self) -> dict[str, str]:
        """The attributes of the saved variable."""
        return {"long_name": self.long_name, "units": self.units}


@dataclass(frozen=True)
class Statistic(Variable):
    """A sum over rows or tokens of the attention of a layer; the profile has its mean.

    `values` gives the numbers that are summed:

    - over "rows": from a `Block` of rows [batch, kv_head, group, row], or one more axis;
    - over "offsets": from a `Block` a value for every key of every row [..., row, key], which
      is summed by offset. Position 0 is left out: a sink is at no offset;
    - over "tokens": from the `SampledCall` of a call [batch, head or kv_head, position, value].

    `dims` are those of the mean, "layer" first. Values over rows with "coordinate" in place of
    "frequency" are parts of q k by coordinate: their sum is multiplied by the scale of the
    scores, and the profile adds up the coordinates of each plane. A statistic that is not
    `saved` serves other variables.
    """

    values: Callable[[Any], Tensor] = field(kw_only=True)
    over: Literal["rows", "offsets", "tokens"] = "rows"

    @property
    def saved_dims(self) -> tuple[str, ...]:
        """The dims in the dataset: a variable by coordinate is saved by plane."""
        return tuple("frequency" if dim == "coordinate" else dim for dim in self.dims)

    def value(self, layer: Any) -> Tensor:
        """The variable of one layer."""
        mean = layer[self.name]
        return layer.planes.sum_coordinates(mean) if "coordinate" in self.dims else mean


@dataclass(frozen=True)
class Derived(Variable):
    """A variable that follows from the sums, as `value` computes it for a layer.

    Without "layer" among `dims` it is the same for all layers.
    """

    value: Callable[[Any], Tensor] = field(kw_only=True)


@dataclass(frozen=True)
class Fitted(Variable):
    """A variable that follows from the fitted models of the attention budget."""


def table(text: str, *, row: type[Variable] = Variable) -> tuple[Variable, ...]:
    """One variable per line, "name (dims) units: long name"; indented lines continue it."""
    rows = re.findall(r"^(\w+) \((.*?)\) ?(.*?): (.*(?:\n +.*)*)", text, re.MULTILINE)
    return tuple(
        row(name, tuple(dims.split(", ")), units, " ".join(long_name.split()))
        for name, dims, units, long_name in rows
    )


def labelled(
    values: Mapping[str, ArrayLike], rows: Iterable[Variable]
) -> dict[str, xr.Variable]:
    """Arrays as variables, each with the dims, unit and long name of the row of its name."""
    by_name = {row.name: row for row in rows}
    return {
        name: xr.Variable(by_name[name].saved_dims, array, by_name[name].attrs)
        for name, array in values.items()
    }


def stack(arrays: Iterable[Tensor]) -> np.ndarray:
    """Arrays of one rank stacked along a new first axis, in float64, NaN where one ends."""
    parts = [array.detach().double().cpu().numpy() for array in arrays]
    shape = np.max([part.shape for part in parts], axis=0)
    stacked = np.full((len(parts), *shape), np.nan)
    for place, part in zip(stacked, parts, strict=True):
        place[tuple(slice(size) for size in part.shape)] = part
    return stacked
