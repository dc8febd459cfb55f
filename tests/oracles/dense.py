"""The sums over tokens and rows that docs/measures.md defines, computed densely in float64.

The code is clear and independent of ropelens: whole row x key matrices are in memory, each
sequence runs by itself and without padding, and the attention comes from transformers' eager
code. The attention budget, which is fitted, is in `logit.py`.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .recording import AttentionCall, Floats, LayerRotation, attention_calls

Bins = NDArray[np.int64]  # [bin, 2]: start and stop of each bin in tokens, half-open
BITS = 1 / np.log(2)  # bits per nat
BY_PLANE = ("selectivity", "selectivity_keys", "selectivity_sink")
DISTANCES = {"self_mass": 0, "previous_token": 1}


@dataclass(frozen=True)
class DenseRows:
    """Rows of one head from position 1 on.

    - visible [row, key]: whether the row sees the key
    - pieces [plane + 1, row, key]: scores of each part in nats, before any soft-cap
    - log_attention [row, key]: log of the softmax over visible keys; 0 at other keys
    - attention [row, key]: the softmax, which sums to 1 over the keys
    - key_mass [row, 1]: attention of the model on all keys, below 1 with a learned sink
    """

    visible: Tensor
    pieces: Tensor
    log_attention: Tensor
    attention: Tensor
    key_mass: Tensor

    @property
    def excess(self) -> Tensor:
        """Attention beyond a uniform attention to the visible keys, [row, key]."""
        uniform = self.visible / self.visible.sum(1, keepdim=True)
        return self.attention - uniform

    @property
    def max_scores(self) -> Tensor:
        """The largest score of each row before any soft-cap, [row]."""
        score = self.pieces.sum(0)
        return score.masked_fill(~self.visible, -torch.inf).amax(1)


def dense_rows(call: AttentionCall, rotation: LayerRotation, *, head: int) -> DenseRows:
    group = len(call.query) // len(call.key)
    query = call.query[head][1:]
    key = call.key[head // group]
    visible = call.visible[1:]
    products = []
    for part in rotation.parts():
        product = query[:, part] @ key[:, part].T
        products.append(product)
    pieces = call.scale * torch.stack(products)
    score = pieces.sum(0)
    if call.softcap is not None:
        score = call.softcap * torch.tanh(score / call.softcap)
    seen_score = score.masked_fill(~visible, -torch.inf)
    log_attention = seen_score.log_softmax(-1).masked_fill(~visible, 0.0)
    attention = log_attention.exp() * visible
    of_model = call.attention[head][1:]
    key_mass = of_model.sum(1, keepdim=True)
    difference = (attention - of_model / key_mass).abs().max()
    assert difference < 1e-5, "scores do not give the attention"
    return DenseRows(visible, pieces, log_attention, attention, key_mass)


def token_sums(call: AttentionCall, rotation: LayerRotation) -> dict[str, Tensor]:
    unrotated_query = rotation.unrotate(call.query)
    unrotated_key = rotation.unrotate(call.key)
    return {
        "q_norm": length_sums(call.query, rotation),
        "k_norm": length_sums(call.key, rotation),
        "v_norm": length_sums(call.value, rotation),
        "q_mean": unrotated_query.sum(1),
        "k_mean": unrotated_key.sum(1),
    }


def length_sums(x: Tensor, rotation: LayerRotation) -> Tensor:
    """Sums over positions of the lengths of each part, [head, plane + 1]."""
    sums = []
    for part in rotation.parts():
        lengths = x[..., part].norm(dim=-1)
        sums.append(lengths.sum(-1))
    return torch.stack(sums, dim=-1)


def row_sums(rows: DenseRows, sinks: Tensor, *, context: int) -> dict[str, Tensor]:
    """Sums of one head over its rows; offsets leave out the first key."""
    negative_entropy = (rows.attention * rows.log_attention).sum(1)
    log_count = rows.visible.sum(1).double().log()
    sums = {
        "sink_mass": (rows.attention * sinks).sum(),
        "entropy_bits": -negative_entropy.sum() * BITS,
        "total_bits": (log_count + negative_entropy).sum() * BITS,
        "learned_sink_mass": (1 - rows.key_mass).sum(),
        "mean_max_score": rows.max_scores.sum(),
    }
    return sums | selectivity_sums(rows, sinks) | offset_sums(rows, context=context)


def selectivity_sums(rows: DenseRows, sinks: Tensor) -> dict[str, Tensor]:
    pieces = rows.pieces
    others = rows.visible & ~sinks
    count = others.sum(1, keepdim=True)
    even = others / count.clamp(min=1)
    on_others = rows.attention * others
    mass = on_others.sum(1, keepdim=True)
    among = on_others - mass * even
    # Compare sinks with keys that are not sinks.
    mean_of_others = (even * pieces).sum(2, keepdim=True)
    above = pieces - mean_of_others
    on_sinks = rows.excess * sinks
    score = pieces.sum(0)
    return {
        "selectivity": (rows.excess * pieces).sum((1, 2)),
        "selectivity_keys": (among * pieces).sum((1, 2)),
        "selectivity_sink": (on_sinks * above).sum((1, 2)),
        "selectivity_total": (rows.excess * score).sum(),
    }


def offset_sums(rows: DenseRows, *, context: int) -> dict[str, Tensor]:
    """Attention and number of rows that see a key, by offset, [context]."""
    count = len(rows.visible) + 1
    position = torch.arange(1, count)
    offset = position[:, None] - position
    behind = offset >= 0  # a key ahead of its row has no offset
    attention = rows.attention[:, 1:][behind]
    sees = rows.visible[:, 1:][behind].double()
    mass_by_offset = torch.zeros(context, dtype=torch.float64)
    rows_by_offset = torch.zeros(context, dtype=torch.float64)
    mass_by_offset.index_add_(0, offset[behind], attention)
    rows_by_offset.index_add_(0, offset[behind], sees)
    return {"offset_mass": mass_by_offset, "offset_share": rows_by_offset}


@dataclass
class LayerSums:
    """Sums of one layer over the tokens and rows of all sequences so far."""

    rotation: LayerRotation
    scale: float = 1.0
    max_score: Floats | float = -np.inf
    over_tokens: dict[str, Floats] = field(default_factory=dict)
    over_rows: dict[str, Floats] = field(default_factory=dict)

    def add(self, call: AttentionCall, sinks: Tensor, *, context: int) -> None:
        self.scale = call.scale
        largest = []
        by_head = []
        for head in range(len(call.query)):
            rows = dense_rows(call, self.rotation, head=head)
            largest.append(rows.max_scores.max())
            by_head.append(row_sums(rows, sinks, context=context))
        self.max_score = np.maximum(self.max_score, torch.stack(largest).numpy())
        of_rows = {}
        for name in by_head[0]:
            of_heads = [sums[name] for sums in by_head]
            of_rows[name] = torch.stack(of_heads)
        add_to(self.over_rows, of_rows)
        add_to(self.over_tokens, token_sums(call, self.rotation))

    def means(self, *, tokens: int, rows: int) -> dict[str, Floats]:
        of_tokens = {name: x / tokens for name, x in self.over_tokens.items()}
        of_rows = {name: x / rows for name, x in self.over_rows.items()}
        return of_tokens | of_rows


def add_to(sums: dict[str, Floats], more: dict[str, Tensor]) -> None:
    for name, x in more.items():
        before = sums.get(name, 0.0)
        sums[name] = before + x.numpy()


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
    layers = [LayerSums(rotation) for rotation in rotations]
    loss = 0.0
    for row, length, row_sinks in zip(tokens, lengths, sinks, strict=True):
        calls, logits = attention_calls(model, row[:length])
        is_sink = torch.from_numpy(row_sinks[:length].copy())
        for layer, call in zip(layers, calls, strict=True):
            layer.add(call, is_sink, context=tokens.shape[1])
        loss += summed_loss(logits, row[:length])
    token_count = int(np.sum(lengths))
    row_count = token_count - len(lengths)
    width = max(len(rotation.pairs) for rotation in rotations)
    if any(len(rotation.rest) for rotation in rotations):
        width += 1
    by_layer = []
    for layer in layers:
        mean = layer.means(tokens=token_count, rows=row_count)
        of_layer = frequency_statistics(mean, layer.rotation, width=width)
        of_layer |= offset_statistics(mean, layer.rotation, layer.scale, bins)
        of_layer["max_score"] = np.asarray(layer.max_score)
        by_layer.append(of_layer)
    result = {}
    for name in by_layer[0]:
        arrays = [of_layer[name] for of_layer in by_layer]
        result[name] = stack_ragged(arrays)
    result["loss"] = np.array(loss / row_count)
    result["rows"] = np.array(row_count)
    result["tokens"] = np.array(token_count)
    return result


def summed_loss(logits: Tensor, tokens: Tensor) -> float:
    """The loss of all predictions of a sequence, in nats."""
    log_chances = logits[:-1].log_softmax(-1)
    of_following = log_chances.gather(1, tokens[1:, None])
    return -float(of_following.sum())


def stack_ragged(arrays: list[Floats]) -> Floats:
    """Stack along a new first axis; layers with fewer kv heads are filled with NaN."""
    shape = np.max([array.shape for array in arrays], axis=0).astype(int)
    result = np.full((len(arrays), *shape), np.nan)
    for target, array in zip(result, arrays, strict=True):
        filled = tuple(slice(size) for size in array.shape)
        target[filled] = array
    return result


def by_frequency(values: Floats, rotation: LayerRotation, *, width: int) -> Floats:
    """[..., plane + 1] -> [..., width]: planes, NaN, and unrotated coordinates."""
    result = np.full((*values.shape[:-1], width), np.nan)
    result[..., : len(rotation.pairs)] = values[..., :-1]
    if len(rotation.rest):
        result[..., -1] = values[..., -1]
    return result


def frequency_statistics(
    mean: dict[str, Floats], rotation: LayerRotation, *, width: int
) -> dict[str, Floats]:
    """All means, and the means by plane are placed by frequency."""
    result = dict(mean)
    for name in (*BY_PLANE, "q_norm", "k_norm", "v_norm"):
        result[name] = by_frequency(mean[name], rotation, width=width)
    inv_freq = np.append(np.abs(rotation.inv_freq), 0.0)
    result["inv_freq"] = by_frequency(inv_freq, rotation, width=width)
    for side in "qk":
        vector = mean[f"{side}_mean"]
        coherence = coherences(vector, mean[f"{side}_norm"], rotation)
        result[f"{side}_coherence"] = by_frequency(coherence, rotation, width=width)
        turning = vector[:, rotation.pairs].swapaxes(1, 2)  # [head, part, plane]
        unrotated = np.full((*turning.shape[:2], 1), np.nan)
        parts = np.append(turning, unrotated, axis=-1)
        parts = by_frequency(parts, rotation, width=width)
        result[f"{side}_mean"] = parts.swapaxes(1, 2)
    return result


def coherences(vector: Floats, norm: Floats, rotation: LayerRotation) -> Floats:
    """Length of the mean vector of each part over its mean length, [head, plane + 1]."""
    lengths = []
    for part in rotation.parts():
        length = np.linalg.norm(vector[:, part], axis=-1)
        lengths.append(length)
    nothing = np.zeros_like(norm)
    return np.divide(np.stack(lengths, axis=-1), norm, out=nothing, where=norm > 0)


def offset_statistics(
    mean: dict[str, Floats], rotation: LayerRotation, scale: float, bins: Bins
) -> dict[str, Floats]:
    result = {}
    mass = mean["offset_mass"]
    seen = mean["offset_share"]
    for name, offset in DISTANCES.items():  # over rows that see it
        result[name] = mass[:, offset] / seen[:, offset]
    masses = [mass[..., start:stop].sum(-1) for start, stop in bins]
    result["offset_mass"] = np.stack(masses, axis=-1)
    share = np.append(seen[0], 0)  # the same for all heads
    first = bins[:, 0].clip(max=len(share) - 1)
    result["offset_share"] = share[first]
    result["predicted_kernel"] = predicted_kernel(mean, rotation, scale, bins)
    return result


def predicted_kernel(
    mean: dict[str, Floats], rotation: LayerRotation, scale: float, bins: Bins
) -> Floats:
    """[head, bin]: score in nats of the mean query and key at the first offset of each bin."""
    q = mean["q_mean"]
    k = mean["k_mean"]
    k = k.repeat(len(q) // len(k), axis=0)
    planes = complex_planes(q, rotation) * np.conj(complex_planes(k, rotation))
    angles = rotation.inv_freq[:, None] * bins[:, 0]
    turning = (planes @ np.exp(1j * angles)).real
    products = q[:, rotation.rest] * k[:, rotation.rest]
    fixed = products.sum(1, keepdims=True)
    return scale * (turning + fixed)


def complex_planes(x: Floats, rotation: LayerRotation) -> NDArray[np.complex128]:
    """[head, coordinate] -> [head, plane]"""
    first, second = rotation.pairs.T
    return x[:, first] + 1j * x[:, second]
