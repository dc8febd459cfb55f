"""The rows of a profile: what ropelens measures, in the order of docs/measures.md.

A formula here reads a `Block` of rows (block.py), the `Vectors` of a call, or the `LayerMeans`
of a layer (layer.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jaxtyping import Float

from ropelens.errors import BadArgument
from ropelens.statistics.budget import GAINS
from ropelens.statistics.schema import Derived, Statistic, Variable

if TYPE_CHECKING:  # figures read names and columns from the rows, and they do without torch
    from torch import Tensor

    from ropelens.statistics.block import Block
    from ropelens.statistics.layer import LayerMeans
else:
    Tensor = Block = LayerMeans = Any

BITS = 1 / math.log(2)
"""Bits in a nat."""

BY_HEAD = ("layer", "head")
BY_PLANE = ("layer", "head", "frequency")
BY_KEY_PLANE = ("layer", "kv_head", "frequency")
BY_COORDINATE = ("layer", "head", "coordinate")
BY_OFFSET = ("layer", "head", "offset_bin")
BY_GROUP = ("group", "layer", "head")
BY_DRAW = ("draw", "layer", "head")


def selectivity(block: Block) -> Float[Tensor, "batch kv_head group row coordinate"]:
    """sum_j (A_ij - U_ij) q_i k_j by coordinate: sum_j A_ij k_j less the mean of the keys."""
    return block.q * (block.read - block.mean_key)


def entropy(block: Block) -> Float[Tensor, "batch kv_head group row"]:
    """H(A_i) = log sum_j exp(L_ij) - sum_j A_ij L_ij, in nats."""
    return block.log_norm - block.expected_score


def selectivity_keys(block: Block) -> Float[Tensor, "batch kv_head group row coordinate"]:
    """The part of selectivity on keys that are no sinks.

    (1 - A0) (E_a c - E_u c) by coordinate: A0 is the attention on sinks, E_a and E_u the means
    over the other keys under A and evenly.
    """
    others = (1 - sink_mass(block))[..., None] * block.mean_other_key
    return block.q * (block.read - block.sink_read - others)


def sink_mass(block: Block) -> Float[Tensor, "batch kv_head group row"]:
    """sum_j A_ij over sinks."""
    return block.sink_attention.sum(-1)


def learned_sink_mass(block: Block) -> Float[Tensor, "batch kv_head group row"]:
    """exp(sink) / (exp(sink) + sum_j exp(L_ij)): what a sink logit takes from the keys."""
    if block.sink_logits is None:
        return block.log_norm.new_zeros(block.log_norm.shape)
    return (block.sink_logits - block.log_norm).sigmoid()


def predicted_kernel(layer: LayerMeans) -> Float[Tensor, "head bin"]:
    """s sum_f Re(E[q~_f] conj(E[k~_f]) exp(i w_f d)) at the first offset d of each bin."""
    q, k = layer["q_still"], layer["k_still"]
    k = k.repeat_interleave(len(q) // len(k), dim=0)
    real, imaginary = layer.planes.first, layer.planes.second
    turns = (q * k)[:, real] + (q * k)[:, imaginary]
    across = q[:, imaginary] * k[:, real] - q[:, real] * k[:, imaginary]
    inv_freq = layer.planes.inv_freq.double().expand(turns.shape)
    angle = layer.edges[:-1, None].double() * inv_freq[:, None]
    stays = (q * k).sum(-1, keepdim=True) - turns.sum(-1, keepdim=True)
    moved = turns[:, None] * angle.cos() - across[:, None] * angle.sin()
    return layer.scale * (moved.sum(-1) + stays)


# fmt: off
MEASURES: tuple[Variable, ...] = (
    Statistic("q_norm", BY_PLANE, "1", "mean length of the query in the plane",
        compared="growth", over="tokens", of=lambda vectors: vectors.plane_norms(vectors.q)),
    Statistic("k_norm", BY_KEY_PLANE, "1", "mean length of the key in the plane",
        compared="growth", over="tokens", of=lambda vectors: vectors.plane_norms(vectors.k)),
    Statistic("q_still", BY_COORDINATE, "model units", "mean query without rotation",
        over="tokens", saved=False, of=lambda vectors: vectors.q_still),
    Statistic("k_still", ("layer", "kv_head", "coordinate"), "model units",
        "mean key without rotation",
        over="tokens", saved=False, of=lambda vectors: vectors.k_still),
    Derived("q_coherence", BY_PLANE, "1",
        "length of the mean unrotated query over its mean length",
        of=lambda layer: layer.plane_norms(layer["q_still"]) / layer["q_norm"]),
    Derived("k_coherence", BY_KEY_PLANE, "1",
        "length of the mean unrotated key over its mean length",
        of=lambda layer: layer.plane_norms(layer["k_still"]) / layer["k_norm"]),
    Statistic("selectivity", BY_COORDINATE, "nat",
        "push of the plane toward the keys attended to", of=selectivity),
    Statistic("selectivity_keys", BY_COORDINATE, "nat",
        "the part of selectivity on keys that are no sinks",
        compared="growth", of=selectivity_keys),
    Derived("selectivity_sink", BY_PLANE, "nat", "the part of selectivity on sinks",
        of=lambda layer: layer.planes.sum_coordinates(
            layer["selectivity"] - layer["selectivity_keys"])),
    Derived("predicted_kernel", BY_OFFSET, "nat",
        "score of the mean query and key at the bin's first offset",
        of=predicted_kernel),
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
        of=lambda layer: layer["offset_mass"][:, 1] / layer.offset_share[1]),
    Derived("self_mass", BY_HEAD, "1", "mean attention on the row's own token",
        column="score", compared="final",
        of=lambda layer: layer["offset_mass"][:, 0] / layer.offset_share[0]),
    Statistic("sink_mass", BY_HEAD, "1", "mean attention on sinks",
        column="score", compared="final", of=sink_mass),
    Statistic("entropy", BY_HEAD, "nat", "mean entropy of the attention",
        saved=False, of=entropy),
    Derived("entropy_bits", BY_HEAD, "bit", "mean entropy of the attention",
        column="score", of=lambda layer: layer["entropy"] * BITS),
    Statistic("learned_sink_mass", BY_HEAD, "1",
        "mean attention on a sink logit that is no key",
        of=learned_sink_mass),
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
"""All variables that a profile has of layers, heads, planes, offsets and groups.

What is no sum over the text comes from models fitted to some of it (measure/budget.py), and
the last three from a pass over repeated random tokens (measure/repeats.py)."""

STATISTICS = tuple(row for row in MEASURES if isinstance(row, Statistic))


def named(*names: str) -> list[Any]:
    """The rows of these names, in this order."""
    by_name = {row.name: row for row in MEASURES}
    return [by_name[name] for name in names]


def check_new(statistics: Sequence[Variable]) -> None:
    """Raise `BadArgument` for a statistic whose name another has, in a profile or beside it."""
    if not isinstance(statistics, Sequence) or not all(
        isinstance(row, Variable) for row in statistics
    ):
        raise BadArgument(
            "statistics lists statistics.",
            seen=repr(statistics),
            attempt="[ropelens.Statistic(...)]",
        )
    names = [row.name for row in (*MEASURES, *statistics)]
    for row in statistics:
        if names.count(row.name) > 1:
            raise BadArgument(
                f"There is a variable {row.name!r} already.",
                attempt="a name of its own for every statistic",
            )


def columns(place: str) -> list[str]:
    """Names of the variables that stand at this place of heads.csv ("budget", "score")."""
    return [row.name for row in MEASURES if row.column == place]


def compared(*how: str) -> list[str]:
    """Names of the variables that comparisons show ("final", "growth")."""
    return [row.name for row in MEASURES if row.compared in how]


def of_planes() -> list[str]:
    """Names of the variables that comparisons show plane by plane."""
    return [row.name for row in MEASURES if row.compared and "frequency" in row.saved_dims]
