"""What docs/measures.md defines as sums over tokens and rows, computed densely in float64.

The attention budget, which is fitted, stands in `logit.py`.

Written for clarity and independence: every row x key matrix stands in memory, every sequence
runs alone and unpadded, and the attention comes from transformers' own eager code.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from .recording import AttentionCall, Floats, LayerRotation, attention_calls

Bins = NDArray[np.int64]  # [bin, 2]: start and stop of each, in tokens, half-open
NATS = np.log(2)  # in one bit
ROW_MEANS = (
    "offset_mass",
    "sink_mass",
    "self_mass",
    "previous_token",
    "entropy",
    "information",
    "learned_sink_mass",
)


def default_bins(context: int) -> Bins:
    """Exact offsets below 64, then eight bins an octave; the last one reaches `context`."""
    edges = list(range(min(context, 64) + 1))
    while edges[-1] < context:
        edges.append(min(context, max(edges[-1] + 1, round(edges[-1] * 2**0.125))))
    return np.stack([edges[:-1], edges[1:]], axis=1)


@dataclass
class LayerSums:
    """Sums of one layer over rows (position 1 on) or tokens, every sequence alike."""

    context: int
    total: dict[str, Any] = field(default_factory=dict)
    rows: int = 0
    tokens: int = 0
    kinds: NDArray[np.int64] = field(init=False)  # rows at each position
    seen: NDArray[np.bool_] = field(init=False)  # [position, key]

    def __post_init__(self) -> None:
        self.kinds = np.zeros(self.context, dtype=np.int64)
        self.seen = np.zeros((self.context, self.context), dtype=bool)

    def add(self, **values: Tensor) -> None:
        for name, value in values.items():
            self.total[name] = self.total.get(name, 0) + value.numpy()

    def add_sequence(
        self, call: AttentionCall, rotation: LayerRotation, sinks: NDArray[np.bool_]
    ) -> None:
        length = call.query.shape[1]
        self.rows += length - 1
        self.tokens += length
        self.kinds[1:length] += 1
        visible = call.visible.numpy()
        both = min(length, int(self.seen.any(1).sum()))
        assert (self.seen[:both, :both] == visible[:both, :both]).all(), "masks differ"
        self.seen[:length, :length] |= visible
        self.add(**vector_sums(call, rotation), **row_sums(call, rotation, self.context, sinks))

    def offset_share(self) -> Floats:
        """Share of rows that see each offset at a key other than position 0."""
        share = np.zeros(self.context)
        for position in np.flatnonzero(self.kinds):
            keys = np.flatnonzero(self.seen[position])
            share[position - keys[keys > 0]] += self.kinds[position] / self.rows
        return share


def vector_sums(call: AttentionCall, rotation: LayerRotation) -> dict[str, Tensor]:
    """Sums over all tokens of queries and keys: lengths per plane, and unrotated vectors."""
    result = {}
    for name, x in (("q", call.query), ("k", call.key)):
        result[f"{name}_norm"] = torch.stack(
            [x[..., part].norm(dim=-1).sum(-1) for part in rotation.parts()], dim=-1
        )
        result[f"{name}_mean"] = rotation.unrotate(x).sum(1)
    return result


def row_sums(
    call: AttentionCall, rotation: LayerRotation, context: int, sinks: NDArray[np.bool_]
) -> dict[str, Tensor]:
    """Sums over the rows from position 1 on, for every head: [head, ...]."""
    key = call.key.repeat_interleave(len(call.query) // len(call.key), dim=0)
    vectors = zip(call.query, key, call.attention, strict=True)
    heads = [
        head_sums(call, rotation, context, torch.from_numpy(sinks), q, k, attention)
        for q, k, attention in vectors
    ]
    return {name: torch.stack([head[name] for head in heads]) for name in heads[0]}


def head_sums(
    call: AttentionCall,
    rotation: LayerRotation,
    context: int,
    sinks: Tensor,
    query: Tensor,
    key: Tensor,
    attention: Tensor,
) -> dict[str, Tensor]:
    """One head's sums over rows: selectivity, attention by offset, entropy, masses.

    `offset_mass` leaves position 0 out; `previous_token` counts it, in the row of position 1.
    """
    visible, length = call.visible[1:], len(query)
    log_count = visible.sum(1).double().log()
    uniform = visible / visible.sum(1, keepdim=True)
    pieces = torch.stack(
        [call.scale * query[1:, part] @ key[:, part].T for part in rotation.parts()]
    )
    log_a = log_attention(pieces.sum(0), visible, softcap=call.softcap)
    a = log_a.exp() * visible
    kept = attention[1:].sum(1, keepdim=True)  # below 1 where a learned sink takes some
    assert (a - attention[1:] / kept).abs().max() < 1e-5, "scores do not give the attention"
    offset = torch.arange(1, length)[:, None] - torch.arange(length)
    other = a[:, 1:]
    by_offset = torch.zeros(context, dtype=torch.float64)
    by_offset.index_add_(0, offset[:, 1:].clamp_min(0).flatten(), other.flatten())
    negative_entropy = (a * log_a).sum(1)
    others = visible & ~sinks
    even = others / others.sum(1, keepdim=True).clamp(min=1)
    among = a * others - (a * others).sum(1, keepdim=True) * even
    above = pieces - (even * pieces).sum(2, keepdim=True)  # what keys are otherwise
    return {
        "selectivity": ((a - uniform) * pieces).sum((1, 2)),
        "selectivity_keys": (among * pieces).sum((1, 2)),
        "selectivity_sink": ((a - uniform) * sinks * above).sum((1, 2)),
        "selectivity_total": ((a - uniform) * pieces.sum(0)).sum(),
        "offset_mass": by_offset,
        "sink_mass": (a * sinks).sum(),
        "self_mass": a.diagonal(1).sum(),
        "previous_token": a.diagonal(0).sum(),
        "entropy": -negative_entropy.sum(),
        "information": (log_count + negative_entropy).sum(),
        "learned_sink_mass": (1 - kept).sum(),
    }


def log_attention(score: Tensor, visible: Tensor, *, softcap: float | None) -> Tensor:
    """Log of the softmax over visible keys (0 where hidden: the weight there is 0)."""
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    score = score.masked_fill(~visible, -torch.inf)
    return torch.log_softmax(score, dim=-1).masked_fill(~visible, 0.0)


def dense(
    model: transformers.PreTrainedModel,
    tokens: NDArray[np.int64],
    lengths: Sequence[int] | NDArray[np.int64],
    *,
    rotations: Sequence[LayerRotation],
    bins: Bins | None = None,
    sinks: NDArray[np.bool_] | None = None,
) -> dict[str, NDArray[Any]]:
    """All statistics of `model` over `tokens` [sequence, position], of which only the first
    `lengths` [sequence] of each count.

    Arrays are [layer, head or kv_head, ...]; the last axis of per-frequency ones holds the
    planes that turn, in the order of `rotations`, then one entry for the coordinates that
    stay put if any layer has some. NaN where a layer has fewer. `offset_mass_exact` is by
    offset, `offset_mass` by bin, `bins` [bin, 2]. Bits are log2; selectivity is in nats.
    `sinks` [sequence, position] says which keys are sinks; without it position 0 alone.
    """
    model = copy.deepcopy(model).double().eval()
    model.set_attn_implementation("eager")
    context = tokens.shape[1]
    sums = [LayerSums(context) for _ in rotations]
    if sinks is None:
        sinks = np.broadcast_to(np.arange(context) == 0, tokens.shape).copy()
    loss, predicted, scales = 0.0, 0, [1.0] * len(sums)
    for row, length, own in zip(tokens, lengths, sinks, strict=True):
        calls, logits = attention_calls(model, row[:length])
        for layer, call in enumerate(calls):
            sums[layer].add_sequence(call, rotations[layer], own[:length])
            scales[layer] = call.scale
        target = torch.from_numpy(row[1:length])
        loss -= float(logits[:-1].log_softmax(-1).gather(1, target[:, None]).sum())
        predicted += length - 1
    bins = default_bins(context) if bins is None else bins
    planes = max(len(rotation.pairs) for rotation in rotations)
    remainder = int(any(len(rotation.rest) for rotation in rotations))
    layers = [
        {
            **frequency_statistics(layer, rotation, planes + remainder),
            **head_statistics(layer, bins),
            "predicted_kernel": predicted_kernel(layer, rotation, scale, bins),
        }
        for layer, rotation, scale in zip(sums, rotations, scales, strict=True)
    ]
    result: dict[str, NDArray[Any]] = {
        name: stack_ragged([layer[name] for layer in layers]) for name in layers[0]
    }
    result |= {
        "loss": np.array(loss / predicted),
        "rows": np.array(sums[0].rows),
        "tokens": np.array(sums[0].tokens),
        "bins": bins,
    }
    return result


def stack_ragged(arrays: list[Floats]) -> Floats:
    """Stack along a new first axis; layers with fewer kv heads are filled with NaN."""
    shape = np.max([array.shape for array in arrays], axis=0).astype(int)
    result = np.full((len(arrays), *shape), np.nan)
    for target, array in zip(result, arrays, strict=True):
        target[tuple(slice(size) for size in array.shape)] = array
    return result


def by_frequency(values: Floats, rotation: LayerRotation, width: int) -> Floats:
    """[..., plane + 1] -> [..., width]: planes first, what stays put last, NaN between."""
    result = np.full((*values.shape[:-1], width), np.nan)
    result[..., : len(rotation.pairs)] = values[..., :-1]
    if len(rotation.rest):
        result[..., -1] = values[..., -1]
    return result


def frequency_statistics(
    sums: LayerSums, rotation: LayerRotation, width: int
) -> dict[str, Floats]:
    """Norms and coherences (means over tokens) and selectivity (mean over rows)."""
    frequency = np.append(np.abs(rotation.inv_freq), 0.0)
    result = {
        "inv_freq": by_frequency(frequency, rotation, width),
        "selectivity_total": sums.total["selectivity_total"] / sums.rows,
    }
    for name in ("selectivity", "selectivity_keys", "selectivity_sink"):
        result[name] = by_frequency(sums.total[name] / sums.rows, rotation, width)
    for name in "qk":
        norm = sums.total[f"{name}_norm"] / sums.tokens
        mean = sums.total[f"{name}_mean"] / sums.tokens
        length = np.stack(
            [np.linalg.norm(mean[:, part], axis=-1) for part in rotation.parts()], axis=-1
        )
        coherence = np.divide(length, norm, out=np.zeros_like(norm), where=norm > 0)
        result[f"{name}_norm"] = by_frequency(norm, rotation, width)
        result[f"{name}_coherence"] = by_frequency(coherence, rotation, width)
    return result


def predicted_kernel(
    sums: LayerSums, rotation: LayerRotation, scale: float, bins: Bins
) -> Floats:
    """[head, bin]: score in nats of the mean query and key, turned apart by the bin's start."""
    q = sums.total["q_mean"] / sums.tokens
    k = sums.total["k_mean"] / sums.tokens
    k = k.repeat(len(q) // len(k), axis=0)
    first, second = rotation.pairs.T
    planes = (q[:, first] + 1j * q[:, second]) * np.conj(k[:, first] + 1j * k[:, second])
    turned = np.exp(1j * rotation.inv_freq[:, None] * bins[:, 0])
    fixed = (q[:, rotation.rest] * k[:, rotation.rest]).sum(1, keepdims=True)
    return scale * ((planes @ turned).real + fixed)


def bin_offsets(mass: Floats, bins: Bins) -> Floats:
    """[..., offset] -> [..., bin]: the sum over each bin's offsets [start, stop)."""
    return np.stack([mass[..., a:b].sum(-1) for a, b in bins], axis=-1)


def head_statistics(sums: LayerSums, bins: Bins) -> dict[str, Floats]:
    """Masses and entropies per head."""
    mean = {name: sums.total[name] / sums.rows for name in ROW_MEANS}
    return {
        "offset_mass_exact": mean["offset_mass"],
        "offset_mass": bin_offsets(mean["offset_mass"], bins),
        "offset_share": np.append(sums.offset_share(), 0)[bins[:, 0].clip(max=sums.context)],
        "sink_mass": mean["sink_mass"],
        "self_mass": mean["self_mass"],
        "previous_token": mean["previous_token"],
        "learned_sink_mass": mean["learned_sink_mass"],
        "entropy_bits": mean["entropy"] / NATS,
        "total_bits": mean["information"] / NATS,
    }
