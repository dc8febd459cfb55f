"""The formulas of a profile, in the order of docs/measures.md.

A formula reads a `Block` of rows and their softmax, or all `SampledCall` of an attention call
(block.py); what follows from their sums reads the `LayerMeans` of a layer (layer.py). The table
in variables.py has a row for each.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from jaxtyping import Float

if TYPE_CHECKING:  # figures read the table of variables, and they do without torch
    from torch import Tensor

    from ropelens.attention.block import Block, SampledCall
    from ropelens.attention.sums import LayerMeans
else:
    Tensor = Block = SampledCall = LayerMeans = Any

BITS = 1 / math.log(2)  # bits in a nat


# Per plane


def q_norm(call: SampledCall) -> Float[Tensor, "batch head row term"]:
    """|q_f|."""
    return call.planes.norms(call.q)


def k_norm(call: SampledCall) -> Float[Tensor, "batch kv_head position term"]:
    """|k_f|."""
    return call.planes.norms(call.k)


def v_norm(call: SampledCall) -> Float[Tensor, "batch kv_head position term"]:
    """|v_f|: values in the planes of the keys beside them; NaN where they have other sizes."""
    keys, values = call.k, call.call.value.to(call.k.dtype)
    if keys.shape[-1] != values.shape[-1]:
        return keys.new_full((*keys.shape[:3], call.planes.terms), math.nan)
    return call.planes.norms(values.repeat_interleave(keys.shape[1] // values.shape[1], dim=1))


def q_coherence(layer: LayerMeans) -> Float[Tensor, "head term"]:
    """|mean of q~_f| / mean of |q_f|."""
    return layer.planes.norms(layer["q_still"]) / layer["q_norm"]


def k_coherence(layer: LayerMeans) -> Float[Tensor, "kv_head term"]:
    """|mean of k~_f| / mean of |k_f|."""
    return layer.planes.norms(layer["k_still"]) / layer["k_norm"]


def selectivity(block: Block) -> Float[Tensor, "batch kv_head group row coordinate"]:
    """sum_j (A_ij - U_ij) q_i k_j by coordinate: q_i ((A K)_i - (U K)_i)."""
    return block.q * (block.attended_key - block.mean_key)


def predicted_kernel(layer: LayerMeans) -> Float[Tensor, "head bin"]:
    """s sum_f Re(E[q~_f] conj(E[k~_f]) exp(i w_f d)) at the first offset d of each bin."""
    q, k = layer["q_still"], layer["k_still"]
    products = layer.planes.products(q, k.repeat_interleave(len(q) // len(k), dim=0))
    return layer.scale * layer.planes.moved_scores(products, layer.edges[:-1])


# Sinks


def sink_mass(block: Block) -> Float[Tensor, "batch kv_head group row"]:
    """A0 = sum_j A_ij over sinks."""
    return block.sink_attention.sum(-1)


def selectivity_keys(block: Block) -> Float[Tensor, "batch kv_head group row coordinate"]:
    """(1 - A0) (E_a c - E_u c) by coordinate.

    E_a and E_u are means over the keys that are no sinks, under A and evenly.
    """
    evenly = (1 - sink_mass(block))[..., None] * block.mean_other_key
    return block.q * (block.attended_key - block.sink_read - evenly)


def selectivity_sink(layer: LayerMeans) -> Float[Tensor, "head term"]:
    """selectivity - selectivity_keys."""
    on_sinks = layer["selectivity"] - layer["selectivity_keys"]
    return layer.planes.sum_coordinates(on_sinks)


# Other scores


def previous_token(layer: LayerMeans) -> Float[Tensor, " head"]:
    """Mean attention at offset 1, over rows that see it."""
    return layer["offset_mass"][:, 1] / layer.offset_share[1]


def self_mass(layer: LayerMeans) -> Float[Tensor, " head"]:
    """Mean attention at offset 0, over rows that see it."""
    return layer["offset_mass"][:, 0] / layer.offset_share[0]


def entropy(block: Block) -> Float[Tensor, "batch kv_head group row"]:
    """H(A_i) = log sum_j exp(L_ij) - sum_j A_ij L_ij, in nats."""
    return block.log_norm - block.expected_score


def learned_sink_mass(block: Block) -> Float[Tensor, "batch kv_head group row"]:
    """exp(sink) / (exp(sink) + sum_j exp(L_ij)): the share of a sink logit."""
    logits = block.call.sink_logits
    if logits is None:
        return block.log_norm.new_zeros(block.log_norm.shape)
    by_head = logits.to(block.q.dtype)[block.query_heads].unflatten(0, block.q.shape[1:3])
    return (by_head[..., None] - block.log_norm).sigmoid()
