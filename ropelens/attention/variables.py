"""Variables of results: each has a name, dims, a unit and a long name.

A `Statistic` is a sum over an attention call, and a `Derived` variable is computed from such
sums; formulas.py has the formulas. Tables of variables are in profiles/measures.py and others.
Code that sums, averages, saves or documents variables iterates over these tables.
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

if TYPE_CHECKING:  # figures read the tables and do without torch
    from torch import Tensor

else:
    Tensor = Any

IN_WORDS[xr.Dataset] = "results, such as the profile, truncation or reach of rl.open(FOLDER)"


@dataclass(frozen=True)
class Variable:
    """A variable of a result.

    `column` is its place in heads.csv: "budget" is among the bits, "score" after the bits, and
    "" is not in the file. Comparisons show a variable of finished models if `compared` is
    "final", and also of earlier checkpoints if it is "growth".
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
    """A sum over rows or tokens of the attention of a layer. The profile has the mean.

    `values` returns the numbers that are summed:

    - over "rows", from a `Block`: [batch, kv_head, group, row], or one more axis;
    - over "offsets", from a `Block`: a value for every key [batch, kv_head, group, row, key],
      which is summed by offset, without position 0, because a sink is at no offset;
    - over "tokens", from a `SampledCall`: [batch, head or kv_head, position, value].

    `dims` are the dims of the mean, "layer" first. "coordinate" instead of "frequency" means
    that values over rows are parts of q k by coordinate. The sum is then multiplied by the
    scale of the scores, and the profile adds the coordinates of each plane. A statistic that is
    not `saved` is only used by other variables.
    """

    values: Callable[[Any], Tensor] = field(kw_only=True)
    over: Literal["rows", "offsets", "tokens"] = "rows"

    @property
    def saved_dims(self) -> tuple[str, ...]:
        """The dims in the dataset; a variable by coordinate is saved by plane."""
        return tuple("frequency" if dim == "coordinate" else dim for dim in self.dims)

    def value(self, layer: Any) -> Tensor:
        """The variable of one layer."""
        mean = layer[self.name]
        return layer.planes.sum_coordinates(mean) if "coordinate" in self.dims else mean


@dataclass(frozen=True)
class Derived(Variable):
    """A variable that `value` computes from the means of a layer.

    Without "layer" among `dims`, the variable is the same for all layers.
    """

    value: Callable[[Any], Tensor] = field(kw_only=True)


@dataclass(frozen=True)
class Fitted(Variable):
    """A variable that is computed from the fitted models of the attention budget."""


def table(text: str, *, row: type[Variable] = Variable) -> tuple[Variable, ...]:
    """Parse one variable per line: "name (dims) units: long name", continued if indented."""
    rows = re.findall(r"^(\w+) \((.*?)\) ?(.*?): (.*(?:\n +.*)*)", text, re.MULTILINE)
    return tuple(
        row(name, tuple(dims.split(", ")), units, " ".join(long_name.split()))
        for name, dims, units, long_name in rows
    )


def labelled(
    values: Mapping[str, ArrayLike], rows: Iterable[Variable]
) -> dict[str, xr.Variable]:
    """Arrays as variables, with the dims, unit and long name of the row with the same name."""
    by_name = {row.name: row for row in rows}
    return {
        name: xr.Variable(by_name[name].saved_dims, array, by_name[name].attrs)
        for name, array in values.items()
    }


def stack(arrays: Iterable[Tensor]) -> np.ndarray:
    """Stack arrays of one rank along a new first axis, in float64, filled up with NaN."""
    parts = [array.detach().double().cpu().numpy() for array in arrays]
    shape = np.max([part.shape for part in parts], axis=0)
    stacked = np.full((len(parts), *shape), np.nan)
    for row, part in zip(stacked, parts, strict=True):
        row[tuple(slice(size) for size in part.shape)] = part
    return stacked
