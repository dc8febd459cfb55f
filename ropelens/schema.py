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

    `column` is its place in heads.csv: "budget" among the bits, "score" after them, "end", or
    "" if it is not a column. Comparisons show the variable for finished models if `compared` is
    "final", and also for earlier checkpoints if it is "growth".
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


ROTATION = (
    Variable(
        name="inv_freq",
        dims=("layer", "frequency"),
        units="rad/token",
        long_name="angular frequency, measured",
    ),
    Variable(
        name="inv_freq_stated",
        dims=("layer", "frequency"),
        units="rad/token",
        long_name="angular frequency that the model states",
    ),
    Variable(
        name="inv_freq_configured",
        dims=("layer", "frequency"),
        units="rad/token",
        long_name="angular frequency of the configuration",
    ),
    Variable(
        name="query_scale",
        dims=("layer", "position"),
        units="1",
        long_name="length of queries, relative to position 0",
    ),
    Variable(
        name="wavelength",
        dims=("layer", "frequency"),
        units="token",
        long_name="tokens per turn",
    ),
    Variable(
        name="residual",
        dims=("layer",),
        units="1",
        long_name="change with position that is not a rotation",
    ),
    Variable(
        name="rotary_dim",
        dims=("layer",),
        units="1",
        long_name="coordinates of a head that rotate",
    ),
    Variable(
        name="pairing",
        dims=("layer",),
        units="",
        long_name="which coordinates share a plane",
    ),
    Variable(
        name="layer_type",
        dims=("layer",),
        units="",
        long_name=(
            "kind of the layer: sliding, full, chunked, none (no rotation) or recurrent"
        ),
    ),
    Variable(
        name="base",
        dims=("layer",),
        units="1",
        long_name="base of the rotation",
    ),
    Variable(
        name="scaling",
        dims=("layer",),
        units="",
        long_name="type and factor of the scaling of the rotation",
    ),
    Variable(
        name="reach",
        dims=("layer",),
        units="token",
        long_name="window or chunk of the layer, or the trained context",
    ),
)


COMPARED_ROTATION = (
    Variable(
        name="angle",
        dims=("implementation", "layer", "frequency", "position"),
        units="rad",
        long_name="rotation since position 0",
    ),
    Variable(
        name="difference",
        dims=("layer", "frequency", "position"),
        units="rad",
        long_name="angle between the two implementations",
    ),
    Variable(
        name="residual",
        dims=("implementation", "layer"),
        units="1",
        long_name="change with position that is not a rotation",
    ),
    Variable(
        name="strength_ratio",
        dims=("layer",),
        units="1",
        long_name="size of scores, other relative to one",
    ),
    Variable(
        name="score_difference",
        dims=("layer", "frequency"),
        units="1",
        long_name="difference of the plane's parts of scores, relative to the scores",
    ),
)


CAPTURE = (
    Variable(
        name="q_still",
        dims=("head", "query", "frequency", "part"),
        units="1",
        long_name="query without its rotation",
    ),
    Variable(
        name="k_still",
        dims=("head", "key", "frequency", "part"),
        units="1",
        long_name="key without its rotation",
    ),
    Variable(
        name="q_norm",
        dims=("head", "query", "frequency"),
        units="1",
        long_name="length of the query in the plane",
    ),
    Variable(
        name="k_norm",
        dims=("head", "key", "frequency"),
        units="1",
        long_name="length of the key in the plane",
    ),
    Variable(
        name="score",
        dims=("head", "query", "key"),
        units="nat",
        long_name="score of the key, before a soft-cap",
    ),
    Variable(
        name="contribution",
        dims=("head", "frequency", "query", "key"),
        units="nat",
        long_name="contribution of the plane to the score",
    ),
    Variable(
        name="contrast",
        dims=("head", "frequency", "query", "key"),
        units="nat",
        long_name="contribution beyond that to the row's other keys",
    ),
    Variable(
        name="attention",
        dims=("head", "query", "key"),
        units="1",
        long_name="attention of the query on the key",
    ),
    Variable(
        name="value_norm",
        dims=("head", "key"),
        units="1",
        long_name="length of the value",
    ),
    Variable(
        name="write_norm",
        dims=("head", "key"),
        units="1",
        long_name="length of v W_O, the output of the head if it reads only this key",
    ),
    Variable(
        name="written_norm",
        dims=("head", "query"),
        units="1",
        long_name="length of the output of the head",
    ),
    Variable(
        name="logit",
        dims=("head", "answer", "query", "key"),
        units="1",
        long_name="amount that reading the key adds to the logit of the answer",
    ),
    Variable(
        name="inv_freq",
        dims=("head", "frequency"),
        units="rad/token",
        long_name="angular frequency; negative: clockwise",
    ),
    Variable(
        name="wavelength",
        dims=("head", "frequency"),
        units="token",
        long_name="tokens per turn",
    ),
    Variable(
        name="scale",
        dims=("head",),
        units="1",
        long_name="scale of the scores",
    ),
)
"""The variables of a capture; `CapturedHead` fills them."""


CAPTURE_INDICES = (
    Variable(
        name="head",
        dims=("head",),
        units="",
        long_name="layer.head",
    ),
    Variable(
        name="layer",
        dims=("head",),
        units="",
        long_name="layer of the head",
    ),
    Variable(
        name="head_of_layer",
        dims=("head",),
        units="",
        long_name="number of the head in its layer",
    ),
    Variable(
        name="query",
        dims=("query",),
        units="token",
        long_name="position of the query",
    ),
    Variable(
        name="key",
        dims=("key",),
        units="token",
        long_name="position of the key",
    ),
    Variable(
        name="query_token",
        dims=("query",),
        units="",
        long_name="token of the query",
    ),
    Variable(
        name="key_token",
        dims=("key",),
        units="",
        long_name="token of the key",
    ),
    Variable(
        name="answer",
        dims=("answer",),
        units="",
        long_name="token whose logit is looked at",
    ),
)


ATTRIBUTION = (
    Variable(
        name="attribution",
        dims=("layer", "head", "frequency"),
        units="1",
        long_name="gradient of the answer times the plane's contributions",
    ),
    Variable(
        name="pair_attribution",
        dims=("pair_head", "frequency", "query", "key"),
        units="1",
        long_name="the same, for each pair of tokens",
    ),
    Variable(
        name="dropped",
        dims=("layer", "head", "frequency"),
        units="1",
        long_name="change of the answer when only this plane is dropped",
    ),
    Variable(
        name="patched",
        dims=("layer", "head", "frequency"),
        units="1",
        long_name=(
            "change of the answer when only this plane takes its queries and "
            "keys from another prompt"
        ),
    ),
    Variable(
        name="pair_head",
        dims=("pair_head",),
        units="",
        long_name="layer.head",
    ),
    Variable(
        name="inv_freq",
        dims=("layer", "frequency"),
        units="rad/token",
        long_name="angular frequency; negative: clockwise",
    ),
    Variable(
        name="wavelength",
        dims=("layer", "frequency"),
        units="token",
        long_name="tokens per turn",
    ),
)


REACH = (
    Variable(
        name="found_share",
        dims=("variant", "layer", "head", "run_distance"),
        units="1",
        long_name=(
            "share of rows that find the key after the first occurrence of "
            "their token, at this distance"
        ),
    ),
    Variable(
        name="found_by_draw",
        dims=("variant", "layer", "head", "run_distance", "draw"),
        units="1",
        long_name="the same share in each draw",
    ),
    Variable(
        name="found_low",
        dims=("variant", "layer", "head", "run_distance"),
        units="1",
        long_name="lower end of its 95 % interval over draws",
    ),
    Variable(
        name="found_high",
        dims=("variant", "layer", "head", "run_distance"),
        units="1",
        long_name="upper end of its 95 % interval over draws",
    ),
    Variable(
        name="foretold_share",
        dims=("variant", "layer", "head", "run_distance"),
        units="1",
        long_name=(
            "the same share as predicted by the run at the distance before, "
            "with the key turned to this distance"
        ),
    ),
    Variable(
        name="extrapolated_share",
        dims=("variant", "layer", "head", "distance"),
        units="1",
        long_name="the same share as predicted by the farthest run",
    ),
    Variable(
        name="distance",
        dims=("distance",),
        units="token",
        long_name="distance that the key is turned to, beyond the farthest run",
    ),
    Variable(
        name="run_distance",
        dims=("run_distance",),
        units="token",
        long_name="distance between the copies of a run",
    ),
)


EVALUATION = (
    Variable(
        name="edit",
        dims=("edit",),
        units="",
        long_name="name of the edit",
    ),
    Variable(
        name="control_of",
        dims=("edit",),
        units="",
        long_name="the edit for which random heads are the control",
    ),
    Variable(
        name="silenced",
        dims=("edit", "layer", "head"),
        units="1",
        long_name="1 if the edit silences the head, else 0",
    ),
    Variable(
        name="loss",
        dims=("edit", "sequence"),
        units="nat/token",
        long_name="mean loss of the sequence's predicted tokens",
    ),
    Variable(
        name="seen_loss",
        dims=("edit", "sequence"),
        units="nat/token",
        long_name="mean loss of predicted tokens that the sequence had before",
    ),
    Variable(
        name="class_loss",
        dims=("edit", "sequence", "token_class"),
        units="nat/token",
        long_name="mean loss of tokens of a class",
    ),
    Variable(
        name="class_tokens",
        dims=("sequence", "token_class"),
        units="token",
        long_name="predicted tokens of the sequence of a class",
    ),
    Variable(
        name="token_class",
        dims=("token_class",),
        units="",
        long_name="class of tokens",
    ),
    Variable(
        name="predicted_tokens",
        dims=("sequence",),
        units="token",
        long_name="predicted tokens of the sequence",
    ),
    Variable(
        name="seen_tokens",
        dims=("sequence",),
        units="token",
        long_name="predicted tokens that the sequence had before",
    ),
    Variable(
        name="far_loss",
        dims=("edit", "sequence"),
        units="nat/token",
        long_name="mean loss in bins in the second half of the context",
    ),
    Variable(
        name="far_tokens",
        dims=("sequence",),
        units="token",
        long_name="predicted tokens in these bins",
    ),
    Variable(
        name="group",
        dims=("sequence",),
        units="",
        long_name=(
            "group of sequences that are drawn together: a document, or a "
            "stretch of text"
        ),
    ),
    Variable(
        name="mean_loss",
        dims=("edit",),
        units="nat/token",
        long_name="mean loss of all predicted tokens",
    ),
    Variable(
        name="mean_loss_se",
        dims=("edit",),
        units="nat/token",
        long_name="standard error of mean_loss over groups of sequences",
    ),
    Variable(
        name="position_loss",
        dims=("edit", "position_bin"),
        units="nat/token",
        long_name="mean loss of the tokens at the bin's positions",
    ),
    Variable(
        name="position_loss_se",
        dims=("edit", "position_bin"),
        units="nat/token",
        long_name="standard error over groups of sequences",
    ),
    Variable(
        name="position_start",
        dims=("position_bin",),
        units="token",
        long_name="first position of the bin",
    ),
    Variable(
        name="position_stop",
        dims=("position_bin",),
        units="token",
        long_name="first position beyond the bin",
    ),
    Variable(
        name="first_loss",
        dims=("edit", "trial"),
        units="nat/token",
        long_name="mean loss of random tokens, the first time",
    ),
    Variable(
        name="repeat_loss",
        dims=("edit", "trial"),
        units="nat/token",
        long_name="mean loss of the same tokens, repeated",
    ),
    Variable(
        name="copy_loss",
        dims=("edit", "copy_distance", "trial"),
        units="nat/token",
        long_name=(
            "mean loss of random tokens that are repeated, without the first token"
        ),
    ),
    Variable(
        name="copy_distance",
        dims=("copy_distance",),
        units="token",
        long_name="distance between a token and its copy",
    ),
    Variable(
        name="attention_change",
        dims=("edit", "layer", "head"),
        units="bit",
        long_name="divergence from the attention of the unmodified model",
    ),
    Variable(
        name="class_change",
        dims=("edit", "layer", "head", "token_class"),
        units="bit",
        long_name="the same over rows of a class of tokens",
    ),
    Variable(
        name="label",
        dims=("edit", "layer", "head"),
        units="",
        long_name="label of the head",
    ),
    Variable(
        name="class_label",
        dims=("edit", "layer", "head", "token_class"),
        units="",
        long_name="label of the head from rows of a class of tokens",
    ),
    Variable(
        name="labels_changed_resampled",
        dims=("edit", "resample"),
        units="1",
        long_name="heads with another label in a bootstrap resample",
    ),
    Variable(
        name="positional_fraction",
        dims=("edit", "layer", "head"),
        units="1",
        long_name=(
            "share of the offset in the bits that sinks do not explain, with "
            "its part of the shared bits"
        ),
    ),
    Variable(
        name="retrieval",
        dims=("edit", "retrieval_length", "depth"),
        units="1",
        long_name="share of needles whose value was found",
    ),
    Variable(
        name="retrieval_hit",
        dims=("edit", "retrieval_length", "depth", "retrieval_trial"),
        units="1",
        long_name="1 if the value was found",
    ),
    Variable(
        name="retrieval_length",
        dims=("retrieval_length",),
        units="token",
        long_name="tokens of the prompt",
    ),
    Variable(
        name="depth",
        dims=("depth",),
        units="1",
        long_name="share of the prompt's text before the needle",
    ),
)
"""The variables of an evaluation that are not measures of a profile."""


SWEEP = (
    Variable(
        name="edit",
        dims=("edit",),
        units="",
        long_name="name of the edit",
    ),
    Variable(
        name="layers",
        dims=("edit",),
        units="",
        long_name="kind of the layers whose planes stopped, or all",
    ),
    Variable(
        name="kind",
        dims=("edit",),
        units="",
        long_name=(
            "which planes stopped: none, one end, a band, or random planes as a control"
        ),
    ),
    Variable(
        name="kept",
        dims=("edit",),
        units="1",
        long_name="share of the model's rotating planes that still rotate",
    ),
    Variable(
        name="planes",
        dims=("edit",),
        units="",
        long_name="numbers of the stopped planes; plane 0 is the fastest",
    ),
    Variable(
        name="planes_stopped",
        dims=("edit",),
        units="1",
        long_name="number of stopped planes of a layer, the largest of all layers",
    ),
    Variable(
        name="wavelength_low",
        dims=("edit",),
        units="token",
        long_name="shortest wavelength that stopped",
    ),
    Variable(
        name="wavelength_high",
        dims=("edit",),
        units="token",
        long_name="longest wavelength that stopped",
    ),
    Variable(
        name="draw",
        dims=("edit",),
        units="1",
        long_name="number of the random draw, -1 if nothing is random",
    ),
    Variable(
        name="band",
        dims=("edit",),
        units="1",
        long_name="number of the band, 0 the fastest, -1 outside bands",
    ),
)
"""The variables that a truncation sweep adds to its evaluation."""


AXES = (
    Variable(
        name="layer",
        dims=("layer",),
        units="",
        long_name="index of the layer",
    ),
    Variable(
        name="head",
        dims=("head",),
        units="",
        long_name="index of the query head in its layer",
    ),
    Variable(
        name="kv_head",
        dims=("kv_head",),
        units="",
        long_name="index of the key-value head in its layer",
    ),
    Variable(
        name="frequency",
        dims=("frequency",),
        units="",
        long_name="index of the plane; plane 0 rotates fastest",
    ),
    Variable(
        name="inv_freq",
        dims=("layer", "frequency"),
        units="rad/token",
        long_name="angular frequency of the plane",
    ),
    Variable(
        name="wavelength",
        dims=("layer", "frequency"),
        units="token",
        long_name="tokens per turn of the plane",
    ),
    Variable(
        name="head_wavelength",
        dims=("layer", "head", "frequency"),
        units="token",
        long_name="tokens per turn of the plane in the head",
    ),
    Variable(
        name="offset_start",
        dims=("offset_bin",),
        units="token",
        long_name="first offset of the bin",
    ),
    Variable(
        name="offset_stop",
        dims=("offset_bin",),
        units="token",
        long_name="first offset beyond the bin",
    ),
    Variable(
        name="distance_start",
        dims=("distance_bin",),
        units="token",
        long_name="first distance of the bin",
    ),
    Variable(
        name="distance_stop",
        dims=("distance_bin",),
        units="token",
        long_name="first distance beyond the bin",
    ),
    Variable(
        name="farthest_offset",
        dims=("layer",),
        units="token",
        long_name="farthest offset that a row of the layer sees",
    ),
    Variable(
        name="excerpt_token",
        dims=("excerpt", "excerpt_key"),
        units="",
        long_name="token of the excerpt",
    ),
    Variable(
        name="excerpt_length",
        dims=("excerpt",),
        units="token",
        long_name="number of tokens",
    ),
    Variable(
        name="excerpt_attention",
        dims=("excerpt", "layer", "head", "excerpt_query", "excerpt_key"),
        units="1",
        long_name="attention on the excerpt",
    ),
    Variable(
        name="excerpt_query_still",
        dims=("excerpt", "layer", "head", "excerpt_query", "coordinate"),
        units="1",
        long_name=(
            "query without its rotation: real parts, imaginary parts, and "
            "coordinates that do not rotate"
        ),
    ),
    Variable(
        name="excerpt_key_still",
        dims=("excerpt", "layer", "kv_head", "excerpt_key", "coordinate"),
        units="1",
        long_name=(
            "key without its rotation: real parts, imaginary parts, and "
            "coordinates that do not rotate"
        ),
    ),
    Variable(
        name="excerpt_score_gradient",
        dims=("excerpt", "layer", "head", "excerpt_query", "excerpt_key"),
        units="1",
        long_name="change of the lead if the score grows by one nat",
    ),
    Variable(
        name="excerpt_answer",
        dims=("excerpt", "excerpt_rank"),
        units="",
        long_name="the two tokens that are most likely to come next",
    ),
    Variable(
        name="excerpt_lead",
        dims=("excerpt",),
        units="nat",
        long_name="lead of the first of the two tokens",
    ),
    Variable(
        name="excerpt_scale",
        dims=("layer",),
        units="1",
        long_name="scale of the scores",
    ),
    Variable(
        name="excerpt_planes",
        dims=("layer",),
        units="",
        long_name="number of planes",
    ),
    Variable(
        name="layer_type",
        dims=("layer",),
        units="",
        long_name=(
            "kind of the layer: sliding, full, chunked, none (no rotation) or recurrent"
        ),
    ),
    Variable(
        name="base",
        dims=("layer",),
        units="1",
        long_name="base of the rotation",
    ),
    Variable(
        name="scaling",
        dims=("layer",),
        units="",
        long_name="type and factor of the scaling of the rotation",
    ),
    Variable(
        name="reach",
        dims=("layer",),
        units="token",
        long_name="window or chunk of the layer, or the trained context",
    ),
)
"""The coordinates of a profile, and the variables of the excerpts of its text."""
