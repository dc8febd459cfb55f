"""The table of variables: what every number of a result is called, its dims, its unit.

A row is a `Variable`. Rows of a profile that are sums over an attention call are `Statistic`,
what follows from the sums is `Derived`; their formulas stand in measures.py. Summing,
averaging, describing, saving and the reference in docs/measures.md iterate over the rows.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import xarray as xr
from numpy.typing import ArrayLike

from ropelens.errors import IN_WORDS, BadArgument
from ropelens.statistics import measures
from ropelens.statistics.labels import GAINS

if TYPE_CHECKING:  # figures read names and columns from the rows, and they do without torch
    from torch import Tensor

    from ropelens.statistics.sums import LayerMeans
else:
    Tensor = LayerMeans = Any

IN_WORDS[xr.Dataset] = "results, such as the profile, truncation or reach of rl.open(FOLDER)"

BY_HEAD = ("layer", "head")
BY_PLANE = ("layer", "head", "frequency")
BY_KEY_PLANE = ("layer", "kv_head", "frequency")
BY_COORDINATE = ("layer", "head", "coordinate")
BY_OFFSET = ("layer", "head", "offset_bin")


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

    @property
    def saved_dims(self) -> tuple[str, ...]:
        """The dims in the dataset: a variable by coordinate is saved by plane."""
        return tuple("frequency" if dim == "coordinate" else dim for dim in self.dims)

    def value(self, layer: LayerMeans) -> Tensor:
        """The variable of one layer."""
        mean = layer[self.name]
        return layer.planes.sum_coordinates(mean) if "coordinate" in self.dims else mean


@dataclass(frozen=True)
class Derived(Variable):
    """A variable that follows from the sums, as `value` computes it for a layer.

    Without "layer" among `dims` it is the same for all layers.
    """

    value: Callable[[Any], Tensor] = field(kw_only=True)


def table(text: str) -> tuple[Variable, ...]:
    """A variable a line, "name (dims) units: long name"; indented lines continue it."""
    rows = re.findall(r"^(\w+) \((.*?)\) ?(.*?): (.*(?:\n +.*)*)", text, re.MULTILINE)
    return tuple(
        Variable(name, tuple(dims.split(", ")), units, " ".join(long_name.split()))
        for name, dims, units, long_name in rows
    )


# fmt: off
MEASURES: tuple[Variable, ...] = (
    Statistic("q_norm", BY_PLANE, "1", "mean length of the query in the plane",
        compared="growth", over="tokens", of=measures.q_norm),
    Statistic("k_norm", BY_KEY_PLANE, "1", "mean length of the key in the plane",
        compared="growth", over="tokens", of=measures.k_norm),
    Statistic("v_norm", BY_KEY_PLANE, "1", "mean length of the value in the plane of its key",
        over="tokens", of=measures.v_norm),
    Statistic("q_still", BY_COORDINATE, "model units", "mean query without rotation",
        over="tokens", saved=False, of=lambda call: call.q_still),
    Statistic("k_still", ("layer", "kv_head", "coordinate"), "model units",
        "mean key without rotation", over="tokens", saved=False, of=lambda call: call.k_still),
    Derived("q_coherence", BY_PLANE, "1",
        "length of the mean unrotated query over its mean length", value=measures.q_coherence),
    Derived("k_coherence", BY_KEY_PLANE, "1",
        "length of the mean unrotated key over its mean length", value=measures.k_coherence),
    Statistic("selectivity", BY_COORDINATE, "nat",
        "push of the plane toward the keys attended to", of=measures.selectivity),
    Statistic("selectivity_keys", BY_COORDINATE, "nat",
        "the part of selectivity on keys that are no sinks",
        compared="growth", of=measures.selectivity_keys),
    Derived("selectivity_sink", BY_PLANE, "nat", "the part of selectivity on sinks",
        value=measures.selectivity_sink),
    Derived("predicted_kernel", BY_OFFSET, "nat",
        "score of the mean query and key at the bin's first offset",
        value=measures.predicted_kernel),
    Statistic("offset_mass", BY_OFFSET, "1", "mean attention on keys at the bin's offsets",
        over="offsets", of=lambda block: block.attention),
    Derived("offset_share", ("layer", "offset_bin"), "1",
        "share of rows that see the bin's first offset",
        value=lambda layer: layer.offset_share),
    *table("""
kernel (layer, head, offset_bin) 1: fitted weight of one offset of the bin
offset (layer, head) token: offset with the most weight in the kernel
offset_weight (layer, head) 1: share of the kernel at that offset
offset_low (layer, head) token: first offset of the middle half of the kernel
offset_high (layer, head) token: last offset of the middle half of the kernel
found_sink (layer, head) token: position of a key found to be a sink, beside those known
"""),
    *(replace(row, column="budget", compared="final") for row in table("""
total_bits (layer, head) bit: information in the choice of keys
sink_bits (layer, head) bit: part of it that sinks explain
position_bits (layer, head) bit: part of it that only the offset explains
content_bits (layer, head) bit: part of it that the tokens explain
interaction_bits (layer, head) bit: the rest: what needs both at once
""")),
    Derived("previous_token", BY_HEAD, "1", "mean attention on the previous token",
        column="score", compared="growth", value=measures.previous_token),
    Derived("self_mass", BY_HEAD, "1", "mean attention on the row's own token",
        column="score", compared="final", value=measures.self_mass),
    Statistic("sink_mass", BY_HEAD, "1", "mean attention on sinks",
        column="score", compared="final", of=measures.sink_mass),
    Statistic("entropy", BY_HEAD, "nat", "mean entropy of the attention",
        saved=False, of=measures.entropy),
    Derived("entropy_bits", BY_HEAD, "bit", "mean entropy of the attention",
        column="score", value=lambda layer: layer["entropy"] * measures.BITS),
    Statistic("learned_sink_mass", BY_HEAD, "1",
        "mean attention on a sink logit that is no key", of=measures.learned_sink_mass),
    Derived("group_rows", ("group",), "1", "rows of the group of sequences",
        value=lambda layer: layer.whole.row_weight.sum(1)),
    Derived("group_loss", ("group",), "nat/token",
        "mean loss of the predicted tokens of the group",
        value=lambda layer: layer.whole.group_loss / layer.whole.group_predicted),
    Derived("group_predicted", ("group",), "token", "predicted tokens of the group",
        value=lambda layer: layer.whole.group_predicted),
    Variable("group_scored", ("group",), "1", "rows of the group that models are scored on"),
    *(Variable(f"group_{name}", ("group", *BY_HEAD), "bit", f"{what}, within the group")
        for name, what in GAINS.items()),
    *table("""
surrogate_offset_fraction (draw, layer, head) 1: share the offset explains; draw 0: the model
surrogate_log_wavelength (draw, layer, head) ln(token): mean log wavelength; draw 0: the model
"""),
    Variable("induction", BY_HEAD, "1",
        "mean attention on the token after the earlier occurrence", "score", "growth"),
    Variable("trial_induction", ("trial", *BY_HEAD), "1",
        "induction on each sequence of random tokens", compared="growth"),
    Variable("duplicate_token", BY_HEAD, "1",
        "mean attention on the earlier occurrence of the token", "score", "final"),
)
"""The variables of a profile over layers, heads, planes, offsets and groups.

What is neither `Statistic` nor `Derived` comes from models fitted to some rows
(measure/summary.py); the last three from a pass over repeated random tokens
(measure/tasks.py)."""

STATISTICS = tuple(row for row in MEASURES if isinstance(row, Statistic))

AXES = table("""
layer (layer): index of the layer
head (head): index of the query head in its layer
kv_head (kv_head): index of the key-value head in its layer
frequency (frequency): index of the plane, 0 turns fastest
inv_freq (layer, frequency) rad/token: angular frequency of the plane
wavelength (layer, frequency) token: tokens per turn of the plane
head_wavelength (layer, head, frequency) token: tokens per turn of the plane in the head
offset_start (offset_bin) token: first offset of the bin
offset_stop (offset_bin) token: first offset beyond the bin
farthest_offset (layer) token: farthest offset that a row of the layer sees
excerpt_token (excerpt, excerpt_key): token of the excerpt
excerpt_length (excerpt) token: tokens
excerpt_attention (excerpt, layer, head, excerpt_query, excerpt_key) 1: attention on the excerpt
excerpt_query_still (excerpt, layer, head, excerpt_query, coordinate) 1: query without its
    rotation: real parts, imaginary parts, and what does not rotate
excerpt_key_still (excerpt, layer, kv_head, excerpt_key, coordinate) 1: key without its
    rotation: real parts, imaginary parts, and what does not rotate
excerpt_score_gradient (excerpt, layer, head, excerpt_query, excerpt_key) 1: what a nat more of
    the score adds to the lead
excerpt_answer (excerpt, excerpt_rank): the two tokens that are likeliest to come next
excerpt_lead (excerpt) nat: lead of the first of them
excerpt_scale (layer) 1: scale of the scores
excerpt_planes (layer): planes
layer_type (layer): what the configuration calls the layer
""")
"""What a profile says of its planes, its bins of offsets, and excerpts of its text."""

ATTRIBUTION = table("""
attribution (layer, head, frequency) 1: gradient of the answer times the plane's contributions
pair_attribution (pair_head, frequency, query, key) 1: the same, for each pair of tokens
dropped (layer, head, frequency) 1: change of the answer when the plane alone is dropped
patched (layer, head, frequency) 1: change of the answer when the plane alone takes its queries
    and keys from another prompt
pair_head (pair_head): layer.head
inv_freq (layer, frequency) rad/token: angular frequency; negative: clockwise
wavelength (layer, frequency) token: tokens per turn
""")
"""What `attribute_planes` gives; `attribution` and `dropped` are in units of the answer."""

EVALUATED = (
    *table("""
edit (edit): name of the edit
control_of (edit): the edit whose heads it has replaced by random ones
loss (edit, sequence) nat/token: mean loss of the sequence's predicted tokens
seen_loss (edit, sequence) nat/token: mean loss of predicted tokens that the sequence had before
class_loss (edit, sequence, token_class) nat/token: mean loss of its tokens of a class
class_tokens (sequence, token_class) token: predicted tokens of the sequence of a class
token_class (token_class): class of tokens
predicted_tokens (sequence) token: predicted tokens of the sequence
seen_tokens (sequence) token: predicted tokens that the sequence had before
far_loss (edit, sequence) nat/token: mean loss in bins in the second half of the context
far_tokens (sequence) token: predicted tokens of the sequence there
group (sequence): sequences that are drawn together: those of a document, or of a stretch
mean_loss (edit) nat/token: mean loss of all predicted tokens
mean_loss_se (edit) nat/token: its standard error over groups of sequences
position_loss (edit, position_bin) nat/token: mean loss of the tokens at the bin's positions
position_loss_se (edit, position_bin) nat/token: its standard error over groups of sequences
position_start (position_bin) token: first position of the bin
position_stop (position_bin) token: first position beyond the bin
first_loss (edit, trial) nat/token: mean loss of random tokens, the first time
repeat_loss (edit, trial) nat/token: mean loss of the same tokens, repeated
copy_loss (edit, copy_distance, trial) nat/token: mean loss of random tokens that come again,
    but for the first
copy_distance (copy_distance) token: tokens from a token to its copy
attention_change (edit, layer, head) bit: divergence from the attention of the model as it is
class_change (edit, layer, head, token_class) bit: the same over rows of a class of tokens
label (edit, layer, head): label of the head
class_label (edit, layer, head, token_class): the same over rows of a class of tokens
labels_changed_resampled (edit, resample) 1: heads with another label, groups drawn again
positional_fraction (edit, layer, head) 1: share of the bits that sinks do not explain which
    only the offset explains
retrieval (edit, retrieval_length, depth) 1: share of needles whose value was found
retrieval_hit (edit, retrieval_length, depth, retrieval_trial) 1: whether the value was found
retrieval_length (retrieval_length) token: tokens of the prompt
depth (depth) 1: share of the prompt's text before the needle
"""),
    *(
        replace(row, dims=("edit", *row.dims))
        for row in MEASURES
        if row.column == "budget"
        or row.name in ("induction", "trial_induction", "duplicate_token")
    ),
)
"""The variables of an evaluation, beside those of the planes of the model as it is."""

SWEEP = table("""
edit (edit): what was done to the model
kind (edit): what stopped: nothing, one end, a band, or random planes as control
kept (edit) 1: share of the model's rotating planes that still rotate
planes (edit): numbers of the stopped planes, 0 the fastest
planes_stopped (edit) 1: number of stopped planes of a layer, the largest of all layers
wavelength_low (edit) token: shortest wavelength that stopped
wavelength_high (edit) token: longest wavelength that stopped
draw (edit) 1: number of the random draw, -1 where nothing is random
band (edit) 1: number of the band, 0 the fastest, -1 outside bands
""")
"""What a truncation sweep says of each of its edits."""

NEEDLES = 8  # needles of a prompt, of which one is asked for: chance is 1 in 8
OWN = "own"  # the variant of a reach that is the model as it rotates by itself
# fmt: on


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


def check_new(statistics: Sequence[Variable]) -> None:
    """Raise `BadArgument` for a statistic whose name is taken, in a profile or beside it."""
    taken = {row.name for row in MEASURES}
    for row in statistics:
        if row.name in taken:
            raise BadArgument(f"There is a variable {row.name!r} already.")
        taken.add(row.name)


def columns(place: str) -> list[str]:
    """Names of the variables at this place of heads.csv ("budget", "score")."""
    return [row.name for row in MEASURES if row.column == place]


def compared(*how: str) -> list[str]:
    """Names of the variables that comparisons show ("final", "growth")."""
    return [row.name for row in MEASURES if row.compared in how]
