"""The table of measures: each variable of a profile, with its dims, unit and formula."""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import xarray as xr

from ropelens.attention import distances, formulas
from ropelens.attention.variables import (
    Derived,
    Fitted,
    Statistic,
    Variable,
    labelled,
    table,
)
from ropelens.errors import BadArgument
from ropelens.runtime.results import open_results

BY_HEAD = ("layer", "head")
BY_PLANE = ("layer", "head", "frequency")
BY_KEY_PLANE = ("layer", "kv_head", "frequency")
BY_COORDINATE = ("layer", "head", "coordinate")
BY_KEY_COORDINATE = ("layer", "kv_head", "coordinate")
BY_OFFSET = ("layer", "head", "offset_bin")

# fmt: off
MEASURES: tuple[Variable, ...] = (
    Statistic("q_norm", BY_PLANE, "1", "mean length of the query in the plane",
        compared="growth", over="tokens", values=formulas.q_norm),
    Statistic("k_norm", BY_KEY_PLANE, "1", "mean length of the key in the plane",
        compared="growth", over="tokens", values=formulas.k_norm),
    Statistic("v_norm", BY_KEY_PLANE, "1", "mean length of the value in the plane of its key",
        over="tokens", values=formulas.v_norm),
    Statistic("q_still", BY_COORDINATE, "model units", "mean query without rotation",
        over="tokens", saved=False, values=lambda call: call.q_still),
    Statistic("k_still", BY_KEY_COORDINATE, "model units", "mean key without rotation",
        over="tokens", saved=False, values=lambda call: call.k_still),
    Derived("q_coherence", BY_PLANE, "1",
        "length of the mean unrotated query, divided by q_norm", value=formulas.q_coherence),
    Derived("k_coherence", BY_KEY_PLANE, "1",
        "length of the mean unrotated key, divided by k_norm", value=formulas.k_coherence),
    Derived("q_mean", (*BY_PLANE, "part"), "model units",
        "mean query without rotation: real and imaginary part",
        value=partial(formulas.mean_parts, name="q_still")),
    Derived("k_mean", (*BY_KEY_PLANE, "part"), "model units",
        "mean key without rotation: real and imaginary part",
        value=partial(formulas.mean_parts, name="k_still")),
    Statistic("selectivity", BY_COORDINATE, "nat",
        "push of the plane toward the keys that the head attends to",
        values=formulas.selectivity),
    Statistic("selectivity_keys", BY_COORDINATE, "nat",
        "part of selectivity on keys other than sinks",
        compared="growth", values=formulas.selectivity_keys),
    Derived("selectivity_sink", BY_PLANE, "nat",
        "part of selectivity on sinks", value=formulas.selectivity_sink),
    Derived("predicted_kernel", BY_OFFSET, "nat",
        "score of the mean query and key at the bin's first offset",
        value=formulas.predicted_kernel),
    Statistic("offset_mass", BY_OFFSET, "1", "mean attention on keys at the bin's offsets",
        over="offsets", values=formulas.offset_mass),
    Derived("offset_share", ("layer", "offset_bin"), "1",
        "share of rows that see the bin's first offset",
        value=lambda layer: layer.offset_share),
    *table("""
kernel (layer, head, offset_bin) 1: fitted weight of one offset of the bin
offset (layer, head) token: offset with the most weight in the kernel
offset_weight (layer, head) 1: share of the kernel at that offset
offset_low (layer, head) token: first offset of the middle half of the kernel
offset_high (layer, head) token: last offset of the middle half of the kernel
found_sink (layer, head) token: position of a key that the fits identify as a further sink
""", row=Fitted),
    *(replace(row, column="budget", compared="final") for row in table("""
total_bits (layer, head) bit: information in the choice of keys
sink_bits (layer, head) bit: part of total_bits that sinks explain
position_bits (layer, head) bit: part of total_bits that only the offset explains
content_bits (layer, head) bit: part of total_bits that the tokens explain
interaction_bits (layer, head) bit: part of total_bits that only both together explain
""", row=Fitted)),
    *(replace(row, column="follow") for row in table("""
follows_position (layer, head) 1: attention on exchanged keys that stays at the same positions
follows_content (layer, head) 1: attention on exchanged keys that moves with their contents
follows_chance (layer, head) 1: overlap of the attention with itself after the permutation
follow_score (layer, head) 1: what the head follows: 1 position, -1 content
shared_bits (layer, head) bit: part of content_bits that the offset explains as well
""", row=Fitted)),
    Derived("previous_token", BY_HEAD, "1", "mean attention on the previous token",
        column="score", compared="growth", value=formulas.previous_token),
    Derived("self_mass", BY_HEAD, "1", "mean attention on the row's own token",
        column="score", compared="final", value=formulas.self_mass),
    Statistic("sink_mass", BY_HEAD, "1", "mean attention on sinks",
        column="score", compared="final", values=formulas.sink_mass),
    Statistic("entropy", BY_HEAD, "nat", "mean entropy of the attention",
        saved=False, values=formulas.entropy),
    Derived("entropy_bits", BY_HEAD, "bit", "mean entropy of the attention",
        column="score", value=lambda layer: layer["entropy"] * formulas.BITS),
    Statistic("learned_sink_mass", BY_HEAD, "1",
        "mean attention on a sink logit, which is not a key",
        values=formulas.learned_sink_mass),
    Statistic("max_score", BY_HEAD, "nat", "largest score of all rows",
        column="end", pool="max", values=formulas.max_score),
    Statistic("mean_max_score", BY_HEAD, "nat", "mean of the largest score of each row",
        values=formulas.max_score),
    Derived("group_rows", ("group",), "1", "rows of the group of sequences",
        value=lambda layer: layer.total.row_weight.sum(1)),
    Derived("group_loss", ("group",), "nat/token",
        "mean loss of the predicted tokens of the group",
        value=lambda layer: layer.total.group_loss / layer.total.group_predicted),
    Derived("group_predicted", ("group",), "token", "predicted tokens of the group",
        value=lambda layer: layer.total.group_predicted),
    Fitted("group_scored", ("group",), "1", "rows of the group on which the fits are scored"),
    *(Fitted(f"group_{name}", ("group", *BY_HEAD), "bit", f"{meaning}, within the group")
        for name, meaning in formulas.GAINS.items()),
    *table("""
group_follow_position (group, layer, head) 1: sum of follows_position, within the group
group_follow_content (group, layer, head) 1: sum of follows_content, within the group
group_follow_chance (group, layer, head) 1: sum of follows_chance, within the group
group_follow_mass (group, layer, head) 1: attention on exchanged keys, within the group
group_follow_rows (group, layer, head) 1: share of the rows that exchange keys, within the group
""", row=Fitted),
    *table("""
surrogate_offset_fraction (draw, layer, head) 1: share the offset explains; draw 0: the model
surrogate_log_wavelength (draw, layer, head) ln(token): mean log wavelength; draw 0: the model
""", row=Fitted),
    Variable("induction", BY_HEAD, "1",
        "mean attention on the token after the earlier occurrence",
        column="score", compared="growth"),
    Variable("trial_induction", ("trial", *BY_HEAD), "1",
        "induction on each sequence of random tokens", compared="growth"),
    Variable("duplicate_token", BY_HEAD, "1",
        "mean attention on the earlier occurrence of the token",
        column="score", compared="final"),
)
"""The variables of a profile over layers, heads, planes, offsets and groups.

Plain `Variable` rows come from a pass over repeated random tokens (profiles/tasks.py)."""

NEEDLES = 8  # needles in a prompt that asks for one of them: chance is 1 in 8

STATISTICS = tuple(row for row in MEASURES if isinstance(row, Statistic))

RATIO = {"column": "end", "pool": "ratio"}
REQUESTED = {  # statistics that a profile has only if they are requested
    row.name: Statistic(**vars(row) | RATIO, values=getattr(distances, row.name))
    for row in table("""
reversal (layer, head, distance_bin) 1: share of distances at which two keys change their order
uniform_reversal (layer, head, distance_bin) 1: reversal of two keys that are drawn evenly
locality (layer, head, distance_bin) 1: share of distances at which a nearer key scores higher
position_sensitivity (layer, head) 1: relative change of a score if the key moves by one token
""")
}

AXES = table("""
layer (layer): index of the layer
head (head): index of the query head in its layer
kv_head (kv_head): index of the key-value head in its layer
frequency (frequency): index of the plane; plane 0 rotates fastest
inv_freq (layer, frequency) rad/token: angular frequency of the plane
wavelength (layer, frequency) token: tokens per turn of the plane
head_wavelength (layer, head, frequency) token: tokens per turn of the plane in the head
offset_start (offset_bin) token: first offset of the bin
offset_stop (offset_bin) token: first offset beyond the bin
distance_start (distance_bin) token: first distance of the bin
distance_stop (distance_bin) token: first distance beyond the bin
farthest_offset (layer) token: farthest offset that a row of the layer sees
excerpt_token (excerpt, excerpt_key): token of the excerpt
excerpt_length (excerpt) token: number of tokens
excerpt_attention (excerpt, layer, head, excerpt_query, excerpt_key) 1: attention on the excerpt
excerpt_query_still (excerpt, layer, head, excerpt_query, coordinate) 1: query without its
    rotation: real parts, imaginary parts, and coordinates that do not rotate
excerpt_key_still (excerpt, layer, kv_head, excerpt_key, coordinate) 1: key without its
    rotation: real parts, imaginary parts, and coordinates that do not rotate
excerpt_score_gradient (excerpt, layer, head, excerpt_query, excerpt_key) 1: change of the lead
    if the score grows by one nat
excerpt_answer (excerpt, excerpt_rank): the two tokens that are most likely to come next
excerpt_lead (excerpt) nat: lead of the first of the two tokens
excerpt_scale (layer) 1: scale of the scores
excerpt_planes (layer): number of planes
layer_type (layer): kind of the layer: sliding, full, chunked, none (no rotation) or recurrent
base (layer) 1: base of the rotation
scaling (layer): type and factor of the scaling of the rotation
reach (layer) token: window or chunk of the layer, or the trained context
""")
"""The coordinates of a profile, and the variables of the excerpts of its text."""
# fmt: on


def columns(place: str) -> list[str]:
    """Names of the variables at this place of heads.csv; see `Variable`."""
    return [row.name for row in MEASURES if row.column == place]


def compared(*which: str) -> list[str]:
    """Names of the variables that comparisons show ("final", "growth")."""
    return [row.name for row in MEASURES if row.compared in which]


def find_statistics(given: str | Sequence[Statistic | str]) -> list[Statistic]:
    """The statistics, some by name; raises `BadArgument` for names not in `REQUESTED`."""
    rows = [given] if isinstance(given, str) else given
    if unknown := [
        row for row in rows if isinstance(row, str) and row not in REQUESTED
    ]:
        raise BadArgument(
            f"There is no statistic {unknown[0]!r}.", hint=", ".join(REQUESTED)
        )
    return [REQUESTED[row] if isinstance(row, str) else row for row in rows]


def missing_measures(profile: xr.Dataset) -> list[Variable]:
    """The rows of `MEASURES` that `profile` lacks, except fits if it has no budget at all."""
    rows = [row for row in MEASURES if row.saved and row.name not in profile]
    return [
        row for row in rows if "total_bits" in profile or not isinstance(row, Fitted)
    ]


def open_profile(path: str | Path) -> xr.Dataset:
    """Read a profile that `save` wrote; raises `BadArgument` as `open_results` does."""
    return complete_profile(open_results(path, "profile"), path)


def complete_profile(profile: xr.Dataset, path: str | Path) -> xr.Dataset:
    """`profile`, with NaN and a warning for measures that did not exist when it was saved."""
    rows = missing_measures(profile)
    if names := ", ".join(row.name for row in rows):
        words = f"{path} was saved before ropelens measured {names}: NaN"
        if "shared_bits" in names:
            words += "; without exchanged keys, labels count all shared bits as content"
        warnings.warn(words, stacklevel=3)
    shapes = {
        row.name: [profile.sizes.get(dim, 1) for dim in row.saved_dims] for row in rows
    }
    values = {name: np.full(shape, np.nan) for name, shape in shapes.items()}
    return profile.assign(labelled(values, rows))
