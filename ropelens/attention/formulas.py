"""The formulas of docs/measures.md for the numbers of a profile, in the order of that page.

The formula of a statistic reads a `SampledCall` (all tokens) or a `Block` (some rows and their
attention). A formula for the means over a text reads the `LayerMeans` of a layer. The rows of
profiles/measures.py name the formula of each variable. Figures import that table and do without
torch, so formulas call methods of their arrays only.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Shaped

if TYPE_CHECKING:
    from torch import Tensor

    from ropelens.attention.block import Block
    from ropelens.attention.sampled_call import SampledCall
    from ropelens.attention.sums import LayerMeans
else:
    Tensor = Block = SampledCall = LayerMeans = Any

BITS = 1 / math.log(2)  # bits in a nat

FOLLOW = ("position", "content", "chance", "mass", "rows")
"""Sums over rows of attention after keys exchanged their contents: three overlaps weighted by
the attention on the exchanged keys, this attention, and the weight of the rows."""

GAINS = {
    "total": "information in the choice of keys",
    "sink_gain": "information that sinks explain",
    "position_gain": "information that sinks and the offset explain",
    "content_gain": "information that sinks and the tokens explain",
    "both_gain": "information that sinks, the offset and the tokens explain together",
}
"""Gains of the budget's models, in bits per row over uniform attention. On rows to which a
model was not fitted, a gain may be negative."""

SEEN_BY = 0.05  # least share of the rows that must see an offset of a head's kernel


def q_norm(call: SampledCall) -> Float[Tensor, "batch head row term"]:
    """|q_f|."""
    return call.planes.norms(call.q)


def k_norm(call: SampledCall) -> Float[Tensor, "batch kv_head key term"]:
    """|k_f|."""
    return call.planes.norms(call.k)


def v_norm(call: SampledCall) -> Float[Tensor, "batch kv_head key term"]:
    """|v_f| in the planes of the key; NaN if values and keys differ in size."""
    keys = call.k
    values = call.call.value.to(keys.dtype)
    if keys.shape[-1] != values.shape[-1]:
        return keys.new_full((*keys.shape[:3], call.planes.terms), math.nan)
    heads_per_value = keys.shape[1] // values.shape[1]
    return call.planes.norms(values.repeat_interleave(heads_per_value, dim=1))


def q_coherence(layer: LayerMeans) -> Float[Tensor, "head term"]:
    """|mean of q~_f| / mean of |q_f|."""
    return layer.planes.norms(layer["q_still"]) / layer["q_norm"]


def k_coherence(layer: LayerMeans) -> Float[Tensor, "kv_head term"]:
    """|mean of k~_f| / mean of |k_f|."""
    return layer.planes.norms(layer["k_still"]) / layer["k_norm"]


def mean_parts(layer: LayerMeans, name: str) -> Float[Tensor, "head term 2"]:
    """Real and imaginary parts of the mean of q~_f or k~_f; NaN for unrotated coordinates."""
    still = layer[name]
    planes = layer.planes
    count = planes.rotary_dim // 2
    parts = still.new_full((len(still), planes.terms, 2), math.nan)
    parts[:, :count, 0] = still[:, planes.first]
    parts[:, :count, 1] = still[:, planes.second]
    return parts


def selectivity(block: Block) -> Float[Tensor, "batch kv_head group row coordinate"]:
    """sum_j (A_ij - U_ij) q_i k_j by coordinate: q_i ((A K)_i - (U K)_i)."""
    return block.q * (block.attended_key - block.sum_of_keys / block.count[..., None])


def predicted_kernel(layer: LayerMeans) -> Float[Tensor, "head bin"]:
    """s sum_f Re(E[q~_f] conj(E[k~_f]) exp(i w_f d)) at the first offset d of each bin."""
    q = layer["q_still"]
    k = layer["k_still"]
    k_by_head = k.repeat_interleave(len(q) // len(k), dim=0)
    products = layer.planes.products(q, k_by_head)
    return layer.scale * layer.planes.moved_scores(products, layer.edges[:-1])


def sink_mass(block: Block) -> Float[Tensor, "batch kv_head group row"]:
    """A0 = sum_j A_ij over sinks."""
    return block.sink_attention.sum(-1)


def selectivity_keys(
    block: Block,
) -> Float[Tensor, "batch kv_head group row coordinate"]:
    """(1 - A0) (E_a c - E_u c) by coordinate.

    E_a and E_u are means over the keys that are not sinks, under A and evenly. (1 - A0) E_a k
    is A K without the sinks.
    """
    sink_keys = block.k[:, :, block.sinks]
    on_sinks = (block.sink_attention.flatten(2, 3) @ sink_keys).view_as(block.q)
    evenly = (1 - sink_mass(block))[..., None] * mean_other_key(block)
    return block.q * (block.attended_key - on_sinks - evenly)


def mean_other_key(
    block: Block,
) -> Float[Tensor, "batch kv_head shared_group row coordinate"]:
    """E_u k: the mean of the keys that each row sees and that are not sinks; 0 without any."""
    sinks = block.visible_sinks
    others = block.sum_of_keys - sinks @ block.k[:, :, None, block.sinks]
    count = (block.count - sinks.sum(-1))[..., None]
    return others.masked_fill_(count == 0, 0) / count.clamp(min=1)


def selectivity_sink(layer: LayerMeans) -> Float[Tensor, "head term"]:
    """selectivity - selectivity_keys."""
    on_sinks = layer["selectivity"] - layer["selectivity_keys"]
    return layer.planes.sum_coordinates(on_sinks)


def information(block: Block) -> Float[Tensor, "batch kv_head group row"]:
    """KL(A_i || U_i): the logarithm of the number of keys, minus the entropy of A_i."""
    scores = block.scores  # read before A, which would overwrite them
    expected = block.expect(scores)
    return block.count.log() - (block.log_norm - expected)


def attention_budget(
    *gains: Float[np.ndarray, "*shape"],
) -> dict[str, Float[np.ndarray, "*shape"]]:
    """Bits in a head's choice of keys by their source, from the `GAINS` of its models.

    "sink", "position", "content" and "interaction" are not negative and sum to "total".
    "shared" is the part of "content" that position by itself explains as well. On text to which
    it was not fitted, a model may gain less than a model that it contains. The larger gain then
    counts for both.
    """
    total, sink_gain, position_gain, content_gain, both_gain = gains
    sink = np.maximum(sink_gain, 0)
    position = np.maximum(position_gain, sink)
    content = np.maximum(content_gain, sink)
    both = np.maximum(both_gain, np.maximum(position, content))
    total = np.maximum(total, both)  # a model gains more only by rounding
    return {
        "total": total,
        "sink": sink,
        "position": both - content,
        "content": content - sink,
        "interaction": total - both,
        "shared": np.maximum(position + content - both - sink, 0),
    }


def describe_kernel(
    kappa: Float[Tensor, "*head offset"], seen_by: Float[Tensor, " offset"]
) -> dict[str, Shaped[Tensor, "*head_and_offset"]]:
    """The kernel exp(kappa) of each head over offsets, its peak, and its middle half.

    The kernel sums to one and leaves out offsets that less than 5 % of the rows see; `seen_by`
    is this share. `offset_low` to `offset_high` (tokens, both included) holds the middle half.
    """
    kernel = kappa.masked_fill(seen_by < SEEN_BY, -math.inf).softmax(-1)
    weight, offset = kernel.max(-1)
    last = kernel.shape[-1] - 1
    up_to = kernel.cumsum(-1)
    return {
        "kernel": kernel,
        "offset": offset,
        "offset_weight": weight,
        "offset_low": (up_to < 0.25).sum(-1).clamp(max=last),
        "offset_high": (up_to < 0.75).sum(-1).clamp(max=last),
    }


def describe_wavelengths(
    selectivity_keys: Float[np.ndarray, "*head term"],
    wavelength: Float[np.ndarray, "*head_or_1 term"],
) -> dict[str, Shaped[np.ndarray, "*head"]]:
    """The wavelengths (tokens) through which a head picks keys, by the columns of heads.csv.

    The weight of a plane is the positive part of `selectivity_keys`, because a negative part
    pushes attention away from the keys that are picked. A head without a positive part has 0
    planes and NaN.
    """
    push = np.nan_to_num(selectivity_keys).clip(min=0)
    wavelength = np.broadcast_to(wavelength, push.shape)
    total = push.sum(-1)
    pushes = total > 0
    share = -np.sort(-push, axis=-1)
    short_of_half = share.cumsum(-1) < total[..., None] / 2
    top = push.argmax(-1, keepdims=True)
    strongest = np.take_along_axis(wavelength, top, -1)
    rotates = np.isfinite(wavelength)
    weight = push * rotates
    log = np.log(np.where(rotates, wavelength, 1.0))
    with np.errstate(invalid="ignore", divide="ignore"):  # NaN without rotation or push
        mean = np.exp((weight * log).sum(-1) / weight.sum(-1))
        top_share = np.where(pushes, share[..., 0] / total, np.nan)
    return {
        "top_wavelength": np.where(pushes, strongest[..., 0], np.nan),
        "top_share": top_share,
        "planes_to_half": np.where(pushes, short_of_half.sum(-1) + 1, 0),
        "mean_wavelength": mean,
    }


def offset_mass(block: Block) -> Float[Tensor, "batch kv_head group row key"]:
    """A_ij, which is summed by offset."""
    return block.attention


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
    """exp(sink) / (exp(sink) + sum_j exp(L_ij)): the attention on a sink logit."""
    logits = block.call.sink_logits
    if logits is None:
        return block.log_norm.new_zeros(block.log_norm.shape)
    of_heads = logits.to(block.q.dtype)[block.query_heads]
    by_head = of_heads.unflatten(0, block.q.shape[1:3])
    return (by_head[..., None] - block.log_norm).sigmoid()


def max_score(block: Block) -> Float[Tensor, "batch kv_head group row"]:
    """max_j L_ij over the keys that row i sees, before a soft-cap."""
    if block.call.softcap is None:
        return block.log_norm + block.attention.amax(-1).log()
    scores = block.call.scale * (block.q.flatten(2, 3) @ block.k.mT)
    return block.hide(scores.unflatten(2, block.q.shape[2:4])).amax(-1)


def contrasts(
    contribution: Float[Tensor, "term query key"],
    attention: Float[Tensor, "query key"],
    *,
    runner_up: int | None = None,
) -> Float[Tensor, "term query key"]:
    """c_ijf - sum_(k != j) A_ik c_ikf / sum_(k != j) A_ik; c_ijf - c_irf for a `runner_up` r.

    A contrast is the push of a term toward a key, compared with all other keys of the row. Like
    softmax, it ignores a number that is added to all keys of a row. Against a runner-up,
    contrasts sum to the log-odds of both keys. NaN if no other key of the row has attention.
    """
    if runner_up is not None:
        return contribution - contribution[..., runner_up, None]
    terms = contribution.nan_to_num()
    ones = attention.new_ones(attention.shape)
    others = _sum_over_others(terms, attention) / _sum_over_others(ones, attention)
    return contribution - others


def _sum_over_others(
    x: Float[Tensor, "*shape query key"], attention: Float[Tensor, "query key"]
) -> Float[Tensor, "*shape query key"]:
    """sum_(k != j) A_ik x_ik for every key j."""
    others = (attention * x).sum(-1, keepdim=True) - attention * x
    # A direct sum for the top key, because 1 - A of this key would be mostly rounding.
    top = attention == attention.amax(-1, keepdim=True)
    rest = attention.masked_fill(top, 0.0)
    return others.where(~top, (rest * x).sum(-1, keepdim=True))
