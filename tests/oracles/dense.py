"""The sums over tokens and rows that docs/measures.md defines, computed densely in float64.

The code is clear and independent of ropelens: whole row x key matrices are in memory, each
sequence runs by itself and without padding, and the attention comes from transformers' eager
code. The attention budget, which is fitted, is in `logit.py`.
"""

import copy
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .recording import AttentionCall, Floats, LayerRotation, attention_calls

Bins = NDArray[np.int64]  # [bin, 2]: start and stop of each bin in tokens, half-open
BITS = 1 / np.log(2)  # bits per nat
BY_PLANE = ("selectivity", "selectivity_keys", "selectivity_sink")


def token_sums(call: AttentionCall, rotation: LayerRotation) -> dict[str, Tensor]:
    result = {}
    for name, x in (("q", call.query), ("k", call.key), ("v", call.value)):
        lengths = [x[..., part].norm(dim=-1).sum(-1) for part in rotation.parts()]
        result[f"{name}_norm"] = torch.stack(lengths, dim=-1)
        if name != "v":
            result[f"{name}_mean"] = rotation.unrotate(x).sum(1)
    return result


def row_sums(
    call: AttentionCall,
    rotation: LayerRotation,
    sinks: Tensor,
    *,
    context: int,
    head: int,
) -> dict[str, Tensor]:
    """Sums of one head over rows from position 1 on; offsets leave out the first key."""
    query, key = call.query[head], call.key[head // (len(call.query) // len(call.key))]
    visible, attention = call.visible[1:], call.attention[head][1:]
    log_count = visible.sum(1).double().log()
    uniform = visible / visible.sum(1, keepdim=True)
    products = [query[1:, part] @ key[:, part].T for part in rotation.parts()]
    pieces = call.scale * torch.stack(products)
    score = pieces.sum(0)
    if call.softcap is not None:
        score = call.softcap * torch.tanh(score / call.softcap)
    log_a = (
        score.masked_fill(~visible, -torch.inf)
        .log_softmax(-1)
        .masked_fill(~visible, 0.0)
    )
    a = log_a.exp() * visible
    of_keys = attention.sum(1, keepdim=True)  # below 1 if there is a learned sink
    assert (a - attention / of_keys).abs().max() < 1e-5, (
        "scores do not give the attention"
    )
    offset = torch.arange(1, len(query))[:, None] - torch.arange(1, len(query))
    by_offset, sees = torch.zeros(2, context, dtype=torch.float64)
    behind = offset >= 0  # a key ahead of its row has no offset
    by_offset.index_add_(0, offset[behind], a[:, 1:][behind])
    sees.index_add_(0, offset[behind], visible[:, 1:][behind].double())
    negative_entropy = (a * log_a).sum(1)
    largest = pieces.sum(0).masked_fill(~visible, -torch.inf).amax(1)
    others = visible & ~sinks
    even = others / others.sum(1, keepdim=True).clamp(min=1)
    among = a * others - (a * others).sum(1, keepdim=True) * even
    # Compare with keys that are not sinks.
    above = pieces - (even * pieces).sum(2, keepdim=True)
    return {
        "selectivity": ((a - uniform) * pieces).sum((1, 2)),
        "selectivity_keys": (among * pieces).sum((1, 2)),
        "selectivity_sink": ((a - uniform) * sinks * above).sum((1, 2)),
        "selectivity_total": ((a - uniform) * pieces.sum(0)).sum(),
        "offset_mass": by_offset,
        "offset_share": sees,
        "sink_mass": (a * sinks).sum(),
        "entropy_bits": -negative_entropy.sum() * BITS,
        "total_bits": (log_count + negative_entropy).sum() * BITS,
        "learned_sink_mass": (1 - of_keys).sum(),
        "max_score": largest.max(),
        "mean_max_score": largest.sum(),
    }


def dense(
    model, tokens: Tensor, lengths, *, rotations, bins: Bins, sinks
) -> dict[str, Any]:
    """All statistics [layer, head or kv_head, ...] over the first `lengths` of `tokens`.

    The last axis of arrays by frequency has the planes that rotate, and one entry for all other
    coordinates if any layer has them, or NaN. `offset_mass` is by bin (`bins` [bin, 2]).
    `rotations` has one for each layer. `sinks` [sequence, position] marks the keys that are.
    """
    model = copy.deepcopy(model).double().eval()
    model.set_attn_implementation("eager")
    context = tokens.shape[1]
    sums: list[Counter[str]] = [Counter() for _ in rotations]
    loss, scales = 0.0, [1.0] * len(sums)
    for row, length, own in zip(tokens, lengths, sinks, strict=True):
        calls, logits = attention_calls(model, row[:length])
        is_sink = torch.from_numpy(own[:length].copy())
        for layer, (call, rotation) in enumerate(zip(calls, rotations, strict=True)):
            sums_of = partial(row_sums, call, rotation, is_sink, context=context)
            heads = [sums_of(head=n) for n in range(len(call.query))]
            of_rows = {
                name: torch.stack([one[name] for one in heads]) for name in heads[0]
            }
            largest, before = of_rows.pop("max_score").numpy(), sums[layer]["max_score"]
            of_tokens = token_sums(call, rotation)
            for name, x in (of_tokens | of_rows).items():
                sums[layer][name] = sums[layer][name] + x.numpy()
            sums[layer]["max_score"] = (
                np.maximum(largest, before) if np.any(before) else largest
            )
            scales[layer] = call.scale
        loss -= float(logits[:-1].log_softmax(-1).gather(1, row[1:length, None]).sum())
    count, rows = int(np.sum(lengths)), int(np.sum(lengths)) - len(lengths)
    width = max(len(rotation.pairs) for rotation in rotations)
    width += any(len(rotation.rest) for rotation in rotations)
    layers = []
    for of_layer, rotation, scale in zip(sums, rotations, scales, strict=True):
        over = {name: count if name in of_tokens else rows for name in of_layer}
        over["max_score"] = 1
        mean = {name: x / over[name] for name, x in of_layer.items()}
        layers.append(layer_statistics(mean, rotation, scale, bins=bins, width=width))
    result = {
        name: stack_ragged([layer[name] for layer in layers]) for name in layers[0]
    }
    of_all = {"loss": loss / rows, "rows": rows, "tokens": count}
    return result | {name: np.array(x) for name, x in of_all.items()}


def stack_ragged(arrays: list[Floats]) -> Floats:
    """Stack along a new first axis; layers with fewer kv heads are filled with NaN."""
    shape = np.max([array.shape for array in arrays], axis=0).astype(int)
    result = np.full((len(arrays), *shape), np.nan)
    for target, array in zip(result, arrays, strict=True):
        target[tuple(slice(size) for size in array.shape)] = array
    return result


def layer_statistics(
    mean: dict[str, Floats],
    rotation: LayerRotation,
    scale: float,
    *,
    bins: Bins,
    width: int,
) -> dict[str, Floats]:
    def by_frequency(values: Floats) -> Floats:
        """[..., plane + 1] -> [..., width]: planes, NaN, and unrotated coordinates."""
        result = np.full((*values.shape[:-1], width), np.nan)
        result[..., : len(rotation.pairs)] = values[..., :-1]
        if len(rotation.rest):
            result[..., -1] = values[..., -1]
        return result

    result = {name: x for name, x in mean.items() if not name.endswith("_mean")}
    result |= {name: by_frequency(mean[name]) for name in BY_PLANE}
    result["inv_freq"] = by_frequency(np.append(np.abs(rotation.inv_freq), 0.0))
    for name in "qk":
        norm, vector = mean[f"{name}_norm"], mean[f"{name}_mean"]
        lengths = [
            np.linalg.norm(vector[:, part], axis=-1) for part in rotation.parts()
        ]
        length = np.stack(lengths, axis=-1)
        coherence = np.divide(length, norm, out=np.zeros_like(norm), where=norm > 0)
        result[f"{name}_norm"] = by_frequency(norm)
        result[f"{name}_coherence"] = by_frequency(coherence)
        turning = vector[:, rotation.pairs].swapaxes(1, 2)  # [head, part, plane]
        unrotated = np.full((*turning.shape[:2], 1), np.nan)
        parts = by_frequency(np.append(turning, unrotated, axis=-1))
        result[f"{name}_mean"] = parts.swapaxes(1, 2)
    result["v_norm"] = by_frequency(mean["v_norm"])
    for offset, name in enumerate(
        ["self_mass", "previous_token"]
    ):  # over rows that see it
        result[name] = mean["offset_mass"][:, offset] / mean["offset_share"][:, offset]
    masses = [mean["offset_mass"][..., a:b].sum(-1) for a, b in bins]
    result["offset_mass"] = np.stack(masses, axis=-1)
    share = np.append(mean["offset_share"][0], 0)  # the same for all heads
    result["offset_share"] = share[bins[:, 0].clip(max=len(share) - 1)]
    result["predicted_kernel"] = predicted_kernel(mean, rotation, scale, bins)
    return result


def predicted_kernel(
    mean: dict[str, Floats], rotation: LayerRotation, scale: float, bins: Bins
) -> Floats:
    """[head, bin]: score in nats of the mean query and key at the first offset of each bin."""
    q, k = mean["q_mean"], mean["k_mean"]
    k = k.repeat(len(q) // len(k), axis=0)
    first, second = rotation.pairs.T
    planes = (q[:, first] + 1j * q[:, second]) * np.conj(
        k[:, first] + 1j * k[:, second]
    )
    turned = np.exp(1j * rotation.inv_freq[:, None] * bins[:, 0])
    fixed = (q[:, rotation.rest] * k[:, rotation.rest]).sum(1, keepdims=True)
    return scale * ((planes @ turned).real + fixed)
