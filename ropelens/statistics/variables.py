"""The table of variables: what every number of a result is called, its dims, its unit.

A row is a `Variable`. Rows of a profile that are sums over an attention call are `Statistic`,
what follows from the sums is `Derived`; their formulas stand in measures.py. Summing,
averaging, describing, saving and the reference in docs/measures.md iterate over the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import xarray as xr

from ropelens.errors import BadArgument
from ropelens.statistics import measures
from ropelens.statistics.labels import GAINS

if TYPE_CHECKING:  # figures read names and columns from the rows, and they do without torch
    from torch import Tensor

    from ropelens.statistics.layer import LayerMeans
else:
    Tensor = LayerMeans = Any

BY_HEAD = ("layer", "head")
BY_PLANE = ("layer", "head", "frequency")
BY_KEY_PLANE = ("layer", "kv_head", "frequency")
BY_COORDINATE = ("layer", "head", "coordinate")
BY_OFFSET = ("layer", "head", "offset_bin")
BY_GROUP = ("group", "layer", "head")
BY_DRAW = ("draw", "layer", "head")


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
        """The dims in the dataset: a variable by coordinate is saved by plane."""
        return tuple("frequency" if dim == "coordinate" else dim for dim in self.dims)

    @property
    def attrs(self) -> dict[str, str]:
        """The attributes of the saved variable."""
        return {"long_name": self.long_name, "units": self.units}


@dataclass(frozen=True)
class Statistic(Variable):
    """A sum over rows or tokens of the attention of a layer; the profile has its mean.

    `of` gives the values that are summed:

    - over "rows": from a `Block` of rows [batch, kv_head, group, row], or one more axis;
    - over "offsets": from a `Block` a value for every key of every row [..., row, key], which
      is summed by offset. Position 0 is left out: a sink is at no offset;
    - over "tokens": from the `CallRows` of a call [batch, head or kv_head, position, value].

    `dims` are those of the mean, "layer" first. Values over rows with "coordinate" in place of
    "frequency" are parts of q k by coordinate: their sum is multiplied by the scale of the
    scores, and the profile adds up the coordinates of each plane. A statistic that is not
    `saved` serves other variables.
    """

    of: Callable[[Any], Tensor] = field(kw_only=True)
    over: Literal["rows", "offsets", "tokens"] = "rows"

    def value(self, layer: LayerMeans) -> Tensor:
        """The variable of one layer."""
        mean = layer[self.name]
        return layer.planes.sum_coordinates(mean) if "coordinate" in self.dims else mean


@dataclass(frozen=True)
class Derived(Variable):
    """A variable that follows from the sums: `of` computes it from the `LayerMeans` of a layer.

    Without "layer" among `dims` it is the same for all layers.
    """

    of: Callable[[Any], Tensor] = field(kw_only=True)

    def value(self, layer: LayerMeans) -> Tensor:
        """The variable of one layer."""
        return self.of(layer)


# fmt: off
MEASURES: tuple[Variable, ...] = (
    Statistic("q_norm", BY_PLANE, "1", "mean length of the query in the plane",
        compared="growth", over="tokens", of=measures.q_norm),
    Statistic("k_norm", BY_KEY_PLANE, "1", "mean length of the key in the plane",
        compared="growth", over="tokens", of=measures.k_norm),
    Statistic("q_still", BY_COORDINATE, "model units", "mean query without rotation",
        over="tokens", saved=False, of=lambda call: call.q_still),
    Statistic("k_still", ("layer", "kv_head", "coordinate"), "model units",
        "mean key without rotation",
        over="tokens", saved=False, of=lambda call: call.k_still),
    Derived("q_coherence", BY_PLANE, "1",
        "length of the mean unrotated query over its mean length",
        of=measures.q_coherence),
    Derived("k_coherence", BY_KEY_PLANE, "1",
        "length of the mean unrotated key over its mean length",
        of=measures.k_coherence),
    Statistic("selectivity", BY_COORDINATE, "nat",
        "push of the plane toward the keys attended to", of=measures.selectivity),
    Statistic("selectivity_keys", BY_COORDINATE, "nat",
        "the part of selectivity on keys that are no sinks",
        compared="growth", of=measures.selectivity_keys),
    Derived("selectivity_sink", BY_PLANE, "nat", "the part of selectivity on sinks",
        of=measures.selectivity_sink),
    Derived("predicted_kernel", BY_OFFSET, "nat",
        "score of the mean query and key at the bin's first offset",
        of=measures.predicted_kernel),
    Statistic("offset_mass", BY_OFFSET, "1", "mean attention on keys at the bin's offsets",
        over="offsets", of=lambda block: block.attention),
    Derived("offset_share", ("layer", "offset_bin"), "1",
        "share of rows that see the bin's first offset",
        of=lambda layer: layer.offset_share),
    Variable("kernel", BY_OFFSET, "1", "fitted weight of one offset of the bin"),
    Variable("offset", BY_HEAD, "token", "offset with the most weight in the kernel"),
    Variable("offset_weight", BY_HEAD, "1", "share of the kernel at that offset"),
    Variable("offset_low", BY_HEAD, "token", "first offset of the middle half of the kernel"),
    Variable("offset_high", BY_HEAD, "token", "last offset of the middle half of the kernel"),
    Variable("found_sink", BY_HEAD, "token",
        "position of a key found to be a sink, beside those known"),
    Variable("total_bits", BY_HEAD, "bit", "information in the choice of keys",
        column="budget", compared="final"),
    Variable("sink_bits", BY_HEAD, "bit", "part of it that sinks explain",
        column="budget", compared="final"),
    Variable("position_bits", BY_HEAD, "bit", "part of it that only the offset explains",
        column="budget", compared="final"),
    Variable("content_bits", BY_HEAD, "bit", "part of it that the tokens explain",
        column="budget", compared="final"),
    Variable("interaction_bits", BY_HEAD, "bit", "the rest: what needs both at once",
        column="budget", compared="final"),
    Derived("previous_token", BY_HEAD, "1", "mean attention on the previous token",
        column="score", compared="growth",
        of=measures.previous_token),
    Derived("self_mass", BY_HEAD, "1", "mean attention on the row's own token",
        column="score", compared="final",
        of=measures.self_mass),
    Statistic("sink_mass", BY_HEAD, "1", "mean attention on sinks",
        column="score", compared="final", of=measures.sink_mass),
    Statistic("entropy", BY_HEAD, "nat", "mean entropy of the attention",
        saved=False, of=measures.entropy),
    Derived("entropy_bits", BY_HEAD, "bit", "mean entropy of the attention",
        column="score", of=lambda layer: layer["entropy"] * measures.BITS),
    Statistic("learned_sink_mass", BY_HEAD, "1",
        "mean attention on a sink logit that is no key",
        of=measures.learned_sink_mass),
    Derived("group_rows", ("group",), "1", "rows of the group of sequences",
        of=lambda layer: layer.group_rows),
    Derived("group_loss", ("group",), "nat/token",
        "mean loss of the predicted tokens of the group",
        of=lambda layer: layer.whole.group_loss / layer.whole.group_predicted),
    Derived("group_predicted", ("group",), "token", "predicted tokens of the group",
        of=lambda layer: layer.whole.group_predicted),
    Variable("group_scored", ("group",), "1", "rows of the group that models are scored on"),
    *(
        Variable(f"group_{name}", BY_GROUP, "bit", f"{what}, within the group")
        for name, what in GAINS.items()
    ),
    Variable("surrogate_offset_fraction", BY_DRAW, "1",
        "share that the offset explains, of the model (draw 0) and its surrogates"),
    Variable("surrogate_log_wavelength", BY_DRAW, "ln(token)",
        "mean log wavelength, of the model (draw 0) and its surrogates"),
    Variable("induction", BY_HEAD, "1",
        "mean attention on the token after the earlier occurrence",
        column="score", compared="growth"),
    Variable("trial_induction", ("trial", *BY_HEAD), "1",
        "induction on each sequence of random tokens", compared="growth"),
    Variable("duplicate_token", BY_HEAD, "1",
        "mean attention on the earlier occurrence of the token",
        column="score", compared="final"),
)
# fmt: on
"""The variables of a profile over layers, heads, planes, offsets and groups.

What is neither `Statistic` nor `Derived` comes from models fitted to some rows
(measure/budget.py); the last three from a pass over repeated random tokens
(measure/repeats.py)."""

STATISTICS = tuple(row for row in MEASURES if isinstance(row, Statistic))

INDICES = (
    Variable("layer", ("layer",), "", "index of the layer"),
    Variable("head", ("head",), "", "index of the query head in its layer"),
    Variable("kv_head", ("kv_head",), "", "index of the key-value head in its layer"),
    Variable("frequency", ("frequency",), "", "index of the plane, 0 turns fastest"),
)

PLANES = (
    Variable("inv_freq", ("layer", "frequency"), "rad/token", "angular frequency of the plane"),
    Variable("wavelength", ("layer", "frequency"), "token", "tokens per turn of the plane"),
    Variable("head_wavelength", BY_PLANE, "token", "tokens per turn of the plane in the head"),
)

BINS = (
    Variable("offset_start", ("offset_bin",), "token", "first offset of the bin"),
    Variable("offset_stop", ("offset_bin",), "token", "first offset beyond the bin"),
)


def described(dataset: xr.Dataset, rows: Iterable[Variable]) -> xr.Dataset:
    """`dataset` with `long_name` and `units` on each variable that has a row, by its name."""
    for row in rows:
        if row.name in dataset.variables:
            dataset[row.name].attrs = row.attrs
    return dataset


def named(*names: str) -> list[Any]:
    """The rows of a profile with these names, in this order."""
    by_name = {row.name: row for row in MEASURES}
    return [by_name[name] for name in names]


def check_new(statistics: Sequence[Variable]) -> None:
    """Raise `BadArgument` for a statistic whose name is taken, in a profile or beside it."""
    names = [row.name for row in (*MEASURES, *statistics)]
    for row in statistics:
        if names.count(row.name) > 1:
            raise BadArgument(
                f"There is a variable {row.name!r} already.",
                attempt="a name of its own for every statistic",
            )


def columns(place: str) -> list[str]:
    """Names of the variables at this place of heads.csv ("budget", "score")."""
    return [row.name for row in MEASURES if row.column == place]


def compared(*how: str) -> list[str]:
    """Names of the variables that comparisons show ("final", "growth")."""
    return [row.name for row in MEASURES if row.compared in how]


def of_planes() -> list[str]:
    """Names of the variables that comparisons show plane by plane."""
    return [row.name for row in MEASURES if row.compared and "frequency" in row.saved_dims]
