"""The table of measures: each variable of a profile, with its dims, unit and formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ropelens.attention import formulas
from ropelens.attention.variables import Derived, Statistic, Variable, table
from ropelens.errors import BadArgument

BY_HEAD = ("layer", "head")
BY_PLANE = ("layer", "head", "frequency")
BY_KEY_PLANE = ("layer", "kv_head", "frequency")
BY_COORDINATE = ("layer", "head", "coordinate")
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
    Statistic("k_still", ("layer", "kv_head", "coordinate"), "model units",
        "mean key without rotation", over="tokens", saved=False,
        values=lambda call: call.k_still),
    Derived("q_coherence", BY_PLANE, "1",
        "length of the mean unrotated query over its mean length", value=formulas.q_coherence),
    Derived("k_coherence", BY_KEY_PLANE, "1",
        "length of the mean unrotated key over its mean length", value=formulas.k_coherence),
    Statistic("selectivity", BY_COORDINATE, "nat",
        "push of the plane toward the keys attended to", values=formulas.selectivity),
    Statistic("selectivity_keys", BY_COORDINATE, "nat",
        "the part of selectivity on keys that are no sinks",
        compared="growth", values=formulas.selectivity_keys),
    Derived("selectivity_sink", BY_PLANE, "nat", "the part of selectivity on sinks",
        value=formulas.selectivity_sink),
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
        "mean attention on a sink logit that is no key", values=formulas.learned_sink_mass),
    Derived("group_rows", ("group",), "1", "rows of the group of sequences",
        value=lambda layer: layer.total.row_weight.sum(1)),
    Derived("group_loss", ("group",), "nat/token",
        "mean loss of the predicted tokens of the group",
        value=lambda layer: layer.total.group_loss / layer.total.group_predicted),
    Derived("group_predicted", ("group",), "token", "predicted tokens of the group",
        value=lambda layer: layer.total.group_predicted),
    Variable("group_scored", ("group",), "1", "rows of the group that models are scored on"),
    *(Variable(f"group_{name}", ("group", *BY_HEAD), "bit", f"{what}, within the group")
        for name, what in formulas.GAINS.items()),
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
(profiles/summary.py); the last three from a pass over repeated random tokens
(interventions/tasks.py)."""

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
# fmt: on


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
