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


def selectivity(block: Block) -> Float[Tensor, "batch kv_head group row coordinate"]:
    """sum_j (A_ij - U_ij) q_i k_j by coordinate: sum_j A_ij k_j less the mean of the keys."""
    return block.q * (block.read - block.mean_key)


def entropy(block: Block) -> Float[Tensor, "batch kv_head group row"]:
    """H(A_i) = log sum_j exp(L_ij) - sum_j A_ij L_ij, in nats."""
    return block.log_norm - block.expected_score


def still_likelihood(block: Block) -> Float[Tensor, "batch kv_head group row"]:
    """sum_j A_ij log A~_ij in nats, A~ the softmax of the scores without rotation."""
    return block.expected_still_score - block.log_still_norm


def sink_mass(block: Block) -> Float[Tensor, "batch kv_head group row"]:
    """A_i0: the first key of a block is position 0, or one that no row sees."""
    return block.attention[..., 0]


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
    angle = layer.edges[:-1, None].double() * layer.planes.inv_freq.double()
    stays = (q * k).sum(-1, keepdim=True) - turns.sum(-1, keepdim=True)
    return layer.scale * (turns @ angle.cos().mT - across @ angle.sin().mT + stays)


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
        "push of the plane toward the keys attended to",
        compared="growth", of=selectivity),
    Derived("predicted_kernel", BY_OFFSET, "nat",
        "score of the mean query and key at the bin's first offset",
        of=predicted_kernel),
    Statistic("offset_mass", BY_OFFSET, "1", "mean attention on keys at the bin's offsets",
        over="offsets", by_group=True, of=lambda block: block.attention),
    Derived("offset_share", ("layer", "offset_bin"), "1",
        "share of rows that see the bin's first offset",
        of=lambda layer: layer.offset_share),
    Derived("kernel", BY_OFFSET, "1", "fitted weight of one offset of the bin",
        of=lambda layer: layer.budget.fit.kernel),
    Derived("kernel_sink", BY_HEAD, "1", "fitted weight of position 0",
        of=lambda layer: layer.budget.fit.sink),
    Derived("total_bits", BY_HEAD, "bit", "information in the choice of keys",
        column="budget", compared="final", of=lambda layer: layer.budget.total),
    Derived("sink_bits", BY_HEAD, "bit", "part of it that position 0 explains",
        column="budget", compared="final", of=lambda layer: layer.budget.sink),
    Derived("position_bits", BY_HEAD, "bit", "part of it that the offset explains",
        column="budget", compared="final", of=lambda layer: layer.budget.position),
    Derived("content_bits", BY_HEAD, "bit", "the rest: what the tokens explain",
        column="budget", compared="final", of=lambda layer: layer.budget.content),
    Derived("previous_token", BY_HEAD, "1", "mean attention on the previous token",
        column="score", compared="growth",
        of=lambda layer: layer["offset_mass"][:, 1] / layer.offset_share[1]),
    Derived("self_mass", BY_HEAD, "1", "mean attention on the row's own token",
        column="score", compared="final",
        of=lambda layer: layer["offset_mass"][:, 0] / layer.offset_share[0]),
    Statistic("sink_mass", BY_HEAD, "1", "mean attention on position 0",
        column="score", compared="final", by_group=True, of=sink_mass),
    Statistic("entropy", BY_HEAD, "nat", "mean entropy of the attention",
        by_group=True, saved=False, of=entropy),
    Derived("entropy_bits", BY_HEAD, "bit", "mean entropy of the attention",
        column="score", of=lambda layer: layer["entropy"] * BITS),
    Statistic("still_likelihood", BY_HEAD, "nat",
        "mean log likelihood of the attention without rotation",
        by_group=True, saved=False, of=still_likelihood),
    Statistic("learned_sink_mass", BY_HEAD, "1",
        "mean attention on a sink logit that is no key",
        by_group=True, of=learned_sink_mass),
    Derived("group_rows", ("group",), "1", "rows of the group of sequences",
        of=lambda layer: layer.group_rows),
    Derived("group_loss", ("group",), "nat/token",
        "mean loss of the predicted tokens of the group",
        of=lambda layer: layer.whole.group_loss / layer.whole.group_predicted),
    Derived("group_predicted", ("group",), "token", "predicted tokens of the group",
        of=lambda layer: layer.whole.group_predicted),
    Derived("group_total_bits", BY_GROUP, "bit", "total_bits within the group",
        of=lambda layer: layer.group_mean(layer.budget.groups["total"])),
    Derived("group_sink_bits", BY_GROUP, "bit", "sink_bits within the group",
        of=lambda layer: layer.group_mean(layer.budget.groups["sink"])),
    Derived("group_position_gain", BY_GROUP, "bit",
        "gain of the position model over the sink model",
        of=lambda layer: layer.group_mean(layer.budget.groups["position"])),
    Derived("group_content_gain", BY_GROUP, "bit",
        "gain of attention without rotation over the sink model",
        of=lambda layer: layer.group_mean(layer.budget.groups["still"])),
    Variable("induction", BY_HEAD, "1",
        "mean attention on the token after the earlier occurrence",
        column="score", compared="growth"),
    Variable("duplicate_token", BY_HEAD, "1",
        "mean attention on the earlier occurrence of the token",
        column="score", compared="final"),
)
# fmt: on
"""All variables that a profile has of layers, heads, planes, offsets and groups. The last two
come from a pass over repeated random tokens (measure/repeats.py)."""

STATISTICS = tuple(row for row in MEASURES if isinstance(row, Statistic))


def named(*names: str) -> list[Any]:
    """The rows of these names, in this order."""
    by_name = {row.name: row for row in MEASURES}
    return [by_name[name] for name in names]


def check_new(statistics: Sequence[Variable]) -> None:
    """Raise `BadArgument` for a statistic whose name another has, in a profile or beside it."""
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
