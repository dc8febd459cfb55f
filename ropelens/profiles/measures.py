"""The table of measures: each variable of a profile, with its dims, unit and formula."""

import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import xarray as xr

from ropelens.attention import distances, formulas
from ropelens.errors import BadArgument
from ropelens.runtime.netcdf import open_results
from ropelens.schema.rows import Derived, Fitted, Statistic, Variable, labelled

BY_HEAD = ("layer", "head")
BY_PLANE = ("layer", "head", "frequency")
BY_KEY_PLANE = ("layer", "kv_head", "frequency")
BY_COORDINATE = ("layer", "head", "coordinate")
BY_KEY_COORDINATE = ("layer", "kv_head", "coordinate")
BY_OFFSET = ("layer", "head", "offset_bin")

MEASURES: tuple[Variable, ...] = (
    Statistic(
        name="q_norm",
        dims=BY_PLANE,
        units="1",
        long_name="mean length of the query in the plane",
        compared="growth",
        over="tokens",
        values=formulas.q_norm,
    ),
    Statistic(
        name="k_norm",
        dims=BY_KEY_PLANE,
        units="1",
        long_name="mean length of the key in the plane",
        compared="growth",
        over="tokens",
        values=formulas.k_norm,
    ),
    Statistic(
        name="v_norm",
        dims=BY_KEY_PLANE,
        units="1",
        long_name="mean length of the value in the plane of its key",
        over="tokens",
        values=formulas.v_norm,
    ),
    Statistic(
        name="q_still",
        dims=BY_COORDINATE,
        units="model units",
        long_name="mean query without rotation",
        over="tokens",
        saved=False,
        values=lambda call: call.q_still,
    ),
    Statistic(
        name="k_still",
        dims=BY_KEY_COORDINATE,
        units="model units",
        long_name="mean key without rotation",
        over="tokens",
        saved=False,
        values=lambda call: call.k_still,
    ),
    Derived(
        name="q_coherence",
        dims=BY_PLANE,
        units="1",
        long_name="length of the mean unrotated query, divided by q_norm",
        value=formulas.q_coherence,
    ),
    Derived(
        name="k_coherence",
        dims=BY_KEY_PLANE,
        units="1",
        long_name="length of the mean unrotated key, divided by k_norm",
        value=formulas.k_coherence,
    ),
    Derived(
        name="q_mean",
        dims=(*BY_PLANE, "part"),
        units="model units",
        long_name="mean query without rotation: real and imaginary part",
        value=partial(formulas.mean_parts, name="q_still"),
    ),
    Derived(
        name="k_mean",
        dims=(*BY_KEY_PLANE, "part"),
        units="model units",
        long_name="mean key without rotation: real and imaginary part",
        value=partial(formulas.mean_parts, name="k_still"),
    ),
    Statistic(
        name="selectivity",
        dims=BY_COORDINATE,
        units="nat",
        long_name="push of the plane toward the keys that the head attends to",
        values=formulas.selectivity,
    ),
    Statistic(
        name="selectivity_keys",
        dims=BY_COORDINATE,
        units="nat",
        long_name="part of selectivity on keys other than sinks",
        compared="growth",
        values=formulas.selectivity_keys,
    ),
    Derived(
        name="selectivity_sink",
        dims=BY_PLANE,
        units="nat",
        long_name="part of selectivity on sinks",
        value=formulas.selectivity_sink,
    ),
    Derived(
        name="predicted_kernel",
        dims=BY_OFFSET,
        units="nat",
        long_name="score of the mean query and key at the bin's first offset",
        value=formulas.predicted_kernel,
    ),
    Statistic(
        name="offset_mass",
        dims=BY_OFFSET,
        units="1",
        long_name="mean attention on keys at the bin's offsets",
        over="offsets",
        values=formulas.offset_mass,
    ),
    Derived(
        name="offset_share",
        dims=("layer", "offset_bin"),
        units="1",
        long_name="share of rows that see the bin's first offset",
        value=lambda layer: layer.offset_share,
    ),
    Fitted(
        name="kernel",
        dims=("layer", "head", "offset_bin"),
        units="1",
        long_name="fitted weight of one offset of the bin",
    ),
    Fitted(
        name="offset",
        dims=("layer", "head"),
        units="token",
        long_name="offset with the most weight in the kernel",
    ),
    Fitted(
        name="offset_weight",
        dims=("layer", "head"),
        units="1",
        long_name="share of the kernel at that offset",
    ),
    Fitted(
        name="offset_low",
        dims=("layer", "head"),
        units="token",
        long_name="first offset of the middle half of the kernel",
    ),
    Fitted(
        name="offset_high",
        dims=("layer", "head"),
        units="token",
        long_name="last offset of the middle half of the kernel",
    ),
    Fitted(
        name="found_sink",
        dims=("layer", "head"),
        units="token",
        long_name="position of a key that the fits identify as a further sink",
    ),
    Fitted(
        name="total_bits",
        dims=("layer", "head"),
        units="bit",
        long_name="information in the choice of keys",
        column="budget",
        compared="final",
    ),
    Fitted(
        name="sink_bits",
        dims=("layer", "head"),
        units="bit",
        long_name="part of total_bits that sinks explain",
        column="budget",
        compared="final",
    ),
    Fitted(
        name="position_bits",
        dims=("layer", "head"),
        units="bit",
        long_name="part of total_bits that only the offset explains",
        column="budget",
        compared="final",
    ),
    Fitted(
        name="content_bits",
        dims=("layer", "head"),
        units="bit",
        long_name="part of total_bits that the tokens explain",
        column="budget",
        compared="final",
    ),
    Fitted(
        name="interaction_bits",
        dims=("layer", "head"),
        units="bit",
        long_name="part of total_bits that only both together explain",
        column="budget",
        compared="final",
    ),
    Fitted(
        name="follows_position",
        dims=("layer", "head"),
        units="1",
        long_name="attention on exchanged keys that stays at the same positions",
        column="follow",
    ),
    Fitted(
        name="follows_content",
        dims=("layer", "head"),
        units="1",
        long_name="attention on exchanged keys that moves with their contents",
        column="follow",
    ),
    Fitted(
        name="follows_chance",
        dims=("layer", "head"),
        units="1",
        long_name="overlap of the attention with itself after the permutation",
        column="follow",
    ),
    Fitted(
        name="follow_score",
        dims=("layer", "head"),
        units="1",
        long_name="what the head follows: 1 position, -1 content",
        column="follow",
    ),
    Fitted(
        name="shared_bits",
        dims=("layer", "head"),
        units="bit",
        long_name="part of content_bits that the offset explains as well",
        column="follow",
    ),
    Derived(
        name="previous_token",
        dims=BY_HEAD,
        units="1",
        long_name="mean attention on the previous token",
        column="score",
        compared="growth",
        value=formulas.previous_token,
    ),
    Derived(
        name="self_mass",
        dims=BY_HEAD,
        units="1",
        long_name="mean attention on the row's own token",
        column="score",
        compared="final",
        value=formulas.self_mass,
    ),
    Statistic(
        name="sink_mass",
        dims=BY_HEAD,
        units="1",
        long_name="mean attention on sinks",
        column="score",
        compared="final",
        values=formulas.sink_mass,
    ),
    Statistic(
        name="entropy",
        dims=BY_HEAD,
        units="nat",
        long_name="mean entropy of the attention",
        saved=False,
        values=formulas.entropy,
    ),
    Derived(
        name="entropy_bits",
        dims=BY_HEAD,
        units="bit",
        long_name="mean entropy of the attention",
        column="score",
        value=lambda layer: layer["entropy"] * formulas.BITS,
    ),
    Statistic(
        name="learned_sink_mass",
        dims=BY_HEAD,
        units="1",
        long_name="mean attention on a sink logit, which is not a key",
        values=formulas.learned_sink_mass,
    ),
    Statistic(
        name="max_score",
        dims=BY_HEAD,
        units="nat",
        long_name="largest score of all rows",
        column="end",
        pool="max",
        values=formulas.max_score,
    ),
    Statistic(
        name="mean_max_score",
        dims=BY_HEAD,
        units="nat",
        long_name="mean of the largest score of each row",
        values=formulas.max_score,
    ),
    Derived(
        name="group_rows",
        dims=("group",),
        units="1",
        long_name="rows of the group of sequences",
        value=lambda layer: layer.total.row_weight.sum(1),
    ),
    Derived(
        name="group_loss",
        dims=("group",),
        units="nat/token",
        long_name="mean loss of the predicted tokens of the group",
        value=lambda layer: layer.total.group_loss / layer.total.group_predicted,
    ),
    Derived(
        name="group_predicted",
        dims=("group",),
        units="token",
        long_name="predicted tokens of the group",
        value=lambda layer: layer.total.group_predicted,
    ),
    Fitted(
        name="group_scored",
        dims=("group",),
        units="1",
        long_name="rows of the group on which the fits are scored",
    ),
    *(
        Fitted(
            name=f"group_{name}",
            dims=("group", *BY_HEAD),
            units="bit",
            long_name=f"{meaning}, within the group",
        )
        for name, meaning in formulas.GAINS.items()
    ),
    Fitted(
        name="group_follow_position",
        dims=("group", "layer", "head"),
        units="1",
        long_name="sum of follows_position, within the group",
    ),
    Fitted(
        name="group_follow_content",
        dims=("group", "layer", "head"),
        units="1",
        long_name="sum of follows_content, within the group",
    ),
    Fitted(
        name="group_follow_chance",
        dims=("group", "layer", "head"),
        units="1",
        long_name="sum of follows_chance, within the group",
    ),
    Fitted(
        name="group_follow_mass",
        dims=("group", "layer", "head"),
        units="1",
        long_name="attention on exchanged keys, within the group",
    ),
    Fitted(
        name="group_follow_rows",
        dims=("group", "layer", "head"),
        units="1",
        long_name="share of the rows that exchange keys, within the group",
    ),
    Fitted(
        name="surrogate_offset_fraction",
        dims=("draw", "layer", "head"),
        units="1",
        long_name="share the offset explains; draw 0: the model",
    ),
    Fitted(
        name="surrogate_log_wavelength",
        dims=("draw", "layer", "head"),
        units="ln(token)",
        long_name="mean log wavelength; draw 0: the model",
    ),
    Variable(
        name="induction",
        dims=BY_HEAD,
        units="1",
        long_name="mean attention on the token after the earlier occurrence",
        column="score",
        compared="growth",
    ),
    Variable(
        name="trial_induction",
        dims=("trial", *BY_HEAD),
        units="1",
        long_name="induction on each sequence of random tokens",
        compared="growth",
    ),
    Variable(
        name="duplicate_token",
        dims=BY_HEAD,
        units="1",
        long_name="mean attention on the earlier occurrence of the token",
        column="score",
        compared="final",
    ),
)
"""The variables of a profile over layers, heads, planes, offsets and groups.

Plain `Variable` rows come from a pass over repeated random tokens (profiles/tasks.py)."""

NEEDLES = 8  # needles in a prompt that asks for one of them: chance is 1 in 8

STATISTICS = tuple(row for row in MEASURES if isinstance(row, Statistic))

REQUESTED_STATISTICS = (
    Statistic(
        name="reversal",
        dims=("layer", "head", "distance_bin"),
        units="1",
        long_name="share of distances at which two keys change their order",
        column="end",
        pool="ratio",
        values=distances.reversal,
    ),
    Statistic(
        name="uniform_reversal",
        dims=("layer", "head", "distance_bin"),
        units="1",
        long_name="reversal of two keys that are drawn evenly",
        column="end",
        pool="ratio",
        values=distances.uniform_reversal,
    ),
    Statistic(
        name="locality",
        dims=("layer", "head", "distance_bin"),
        units="1",
        long_name="share of distances at which a nearer key scores higher",
        column="end",
        pool="ratio",
        values=distances.locality,
    ),
    Statistic(
        name="position_sensitivity",
        dims=("layer", "head"),
        units="1",
        long_name="relative change of a score if the key moves by one token",
        column="end",
        pool="ratio",
        values=distances.position_sensitivity,
    ),
)
REQUESTED = {row.name: row for row in REQUESTED_STATISTICS}
"""Statistics that a profile has only if they are requested."""


def columns(group: str) -> list[str]:
    """Names of the variables in this group of columns of heads.csv; see `Variable`."""
    return [row.name for row in MEASURES if row.column == group]


def compared(*which: str) -> list[str]:
    """Names of the variables that comparisons show ("final", "growth")."""
    return [row.name for row in MEASURES if row.compared in which]


def find_statistics(given: str | Sequence[Statistic | str]) -> list[Statistic]:
    """The statistics, some by name; raises `BadArgument` for names not in `REQUESTED`."""
    statistics = []
    for statistic in [given] if isinstance(given, str) else given:
        if isinstance(statistic, str):
            if statistic not in REQUESTED:
                raise BadArgument(
                    f"There is no statistic {statistic!r}.", hint=", ".join(REQUESTED)
                )
            statistic = REQUESTED[statistic]
        statistics.append(statistic)
    return statistics


def missing_measures(profile: xr.Dataset) -> list[Variable]:
    """The rows of `MEASURES` that `profile` lacks, except fits if it has no budget at all."""
    missing = [row for row in MEASURES if row.saved and row.name not in profile]
    if "total_bits" in profile:
        return missing
    return [row for row in missing if not isinstance(row, Fitted)]


def open_profile(path: str | Path) -> xr.Dataset:
    """Read a profile that `save` wrote; raises `BadArgument` as `open_results` does."""
    return complete_profile(open_results(path, "profile"), path)


def complete_profile(
    results: xr.Dataset, name: str | Path = "this profile"
) -> xr.Dataset:
    """A profile with NaN and a warning for measures that did not exist when it was saved.

    Every public function that takes a profile completes it first, because it may come from
    `xarray.open_dataset`. Results of another kind are returned unchanged.
    """
    if results.attrs.get("kind") != "profile":
        return results
    missing = missing_measures(results)
    if not missing:
        return results
    names = ", ".join(row.name for row in missing)
    message = f"{name} was saved before ropelens measured {names}: NaN"
    if "shared_bits" in names:
        message += "; without exchanged keys, labels count all shared bits as content"
    warnings.warn(message, stacklevel=3)
    return with_nan(results, missing)


def with_nan(profile: xr.Dataset, rows: Sequence[Variable]) -> xr.Dataset:
    """The profile with NaN for the measures of `rows`."""
    values = {}
    for row in rows:
        shape = [profile.sizes.get(dim, 1) for dim in row.saved_dims]
        values[row.name] = np.full(shape, np.nan)
    return profile.assign(labelled(values, rows))
