"""Rows of tables of variables: the name, dims and unit of every number of a result.

`Statistic` rows are sums over an attention call, `Derived` rows follow from these sums, and
`Fitted` rows follow from the fits of the attention budget. formulas.py has the formulas.
Summing, averaging, saving and the reference in docs/measures.md iterate over the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike

if TYPE_CHECKING:  # figures read these rows, and do not import torch
    from torch import Tensor

else:
    Tensor = Any


@dataclass(frozen=True)
class Variable:
    """A variable of a result.

    `column` is its group of columns in heads.csv: "budget" among the bits, "score" after them,
    "follow", "end", or "" if it is not a column. Comparisons show the variable for finished
    models if `compared` is "final", and also for earlier checkpoints if it is "growth".
    """

    name: str
    dims: tuple[str, ...]
    units: str
    long_name: str
    column: Literal["", "budget", "score", "follow", "end"] = ""
    compared: Literal["", "final", "growth"] = ""
    saved: bool = True

    @property
    def saved_dims(self) -> tuple[str, ...]:
        return self.dims


@dataclass(frozen=True)
class Statistic(Variable):
    """A mean over rows or tokens of the attention of a layer.

    `values` returns the numbers that are averaged. Its argument and result depend on `over`:

    - "rows": takes a `Block` of rows and returns [batch, kv_head, group, row], possibly with
      one more axis.
    - "offsets": takes a `Block` and returns a value for every key [..., row, key]. The values
      are summed by offset, without position 0, because a sink has no offset.
    - "tokens": takes the `SampledCall` and returns [batch, head or kv_head, position, value].

    `dims` are the dims of the mean, "layer" first. With "coordinate" instead of "frequency",
    the values are parts of q k by coordinate: the mean is multiplied by the scale of the
    scores, and the profile has the sum over the coordinates of each plane. Instead of the mean
    over rows, `pool` takes the maximum ("max") or divides pairs of means ("ratio"). A statistic
    that is not `saved` only serves other variables.
    """

    values: Callable[[Any], Tensor] = field(kw_only=True)
    over: Literal["rows", "offsets", "tokens"] = "rows"
    pool: Literal["mean", "max", "ratio"] = "mean"

    @property
    def saved_dims(self) -> tuple[str, ...]:
        """The dims in the dataset. A variable by coordinate is saved by plane."""
        return tuple("frequency" if dim == "coordinate" else dim for dim in self.dims)

    def value(self, layer: Any) -> Tensor:
        mean = layer[self.name]
        if self.pool == "ratio":
            ratio = mean[..., ::2] / mean[..., 1::2]
            return ratio if self.dims[2:] else ratio[..., 0]
        return layer.planes.sum_coordinates(mean) if "coordinate" in self.dims else mean


@dataclass(frozen=True)
class Derived(Variable):
    """A variable that follows from the sums. Without the dim "layer", layers share it."""

    value: Callable[[Any], Tensor] = field(kw_only=True)


@dataclass(frozen=True)
class Fitted(Variable):
    """A variable that follows from the fitted models of the attention budget."""


def labelled(
    values: Mapping[str, ArrayLike], rows: Iterable[Variable]
) -> dict[str, xr.Variable]:
    """Arrays as variables, with the dims, unit and long name of the row with the same name."""
    by_name, variables = {row.name: row for row in rows}, {}
    for name, array in values.items():
        row = by_name[name]
        attrs = {"long_name": row.long_name, "units": row.units}
        variables[name] = xr.Variable(row.saved_dims, array, attrs)
    return variables


def stack(arrays: Iterable[Tensor]) -> np.ndarray:
    """Arrays stacked along a new first axis, in float64; shorter arrays end with NaN."""
    parts = [array.detach().double().cpu().numpy() for array in arrays]
    shape = np.max([part.shape for part in parts], axis=0)
    stacked = np.full((len(parts), *shape), np.nan)
    for target, part in zip(stacked, parts, strict=True):
        target[tuple(slice(size) for size in part.shape)] = part
    return stacked
