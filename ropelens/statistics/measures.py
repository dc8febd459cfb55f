"""The formulas of a profile, in the order of docs/measures.md.

A formula reads a `Block` of rows (block.py) or the `LayerMeans` of a layer (layer.py); the
row in variables.py that names it says what its number is.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from jaxtyping import Float

if TYPE_CHECKING:  # figures read the table of variables, and they do without torch
    from torch import Tensor

    from ropelens.statistics.block import Block
    from ropelens.statistics.layer import LayerMeans
else:
    Tensor = Block = LayerMeans = Any

BITS = 1 / math.log(2)
"""Bits in a nat."""


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
