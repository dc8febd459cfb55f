"""Running sums become labelled numbers: means, bits, kernels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.rope.planes import Planes, plane_norms
from ropelens.statistics.bins import offset_edges
from ropelens.statistics.budget import Sight, attention_budget
from ropelens.statistics.ragged import stack
from ropelens.statistics.sums import LayerSums, Sums

DESCRIBED = {
    "layer": ("index of the layer", ""),
    "head": ("index of the query head in its layer", ""),
    "kv_head": ("index of the key-value head in its layer", ""),
    "frequency": ("index of the plane, 0 turns fastest", ""),
    "inv_freq": ("angular frequency of the plane", "rad/token"),
    "wavelength": ("tokens per turn of the plane", "token"),
    "offset_start": ("first offset of the bin", "token"),
    "offset_stop": ("first offset beyond the bin", "token"),
    "q_norm": ("mean length of the query in the plane", "1"),
    "k_norm": ("mean length of the key in the plane", "1"),
    "q_coherence": ("length of the mean unrotated query over its mean length", "1"),
    "k_coherence": ("length of the mean unrotated key over its mean length", "1"),
    "selectivity": ("push of the plane toward the keys attended to", "nat"),
    "offset_mass": ("mean attention on keys at the bin's offsets", "1"),
    "offset_share": ("share of rows that see the bin's first offset", "1"),
    "kernel": ("fitted weight of one offset of the bin", "1"),
    "kernel_sink": ("fitted weight of position 0", "1"),
    "predicted_kernel": ("score of the mean query and key at the bin's first offset", "nat"),
    "sink_mass": ("mean attention on position 0", "1"),
    "learned_sink_mass": ("mean attention on a sink logit that is no key", "1"),
    "self_mass": ("mean attention on the row's own token", "1"),
    "previous_token": ("mean attention on the previous token", "1"),
    "entropy_bits": ("mean entropy of the attention", "bit"),
    "total_bits": ("information in the choice of keys", "bit"),
    "sink_bits": ("part of it that position 0 explains", "bit"),
    "position_bits": ("part of it that the offset explains", "bit"),
    "content_bits": ("the rest: what the tokens explain", "bit"),
    "group_rows": ("rows of the group of sequences", "1"),
    "group_loss": ("mean loss of the predicted tokens of the group", "nat/token"),
    "group_predicted": ("predicted tokens of the group", "token"),
    "group_total_bits": ("total_bits within the group", "bit"),
    "group_sink_bits": ("sink_bits within the group", "bit"),
    "group_position_gain": ("gain of the position model over the sink model", "bit"),
    "group_content_gain": ("gain of attention without rotation over the sink model", "bit"),
}
"""long_name and units of every variable of a profile that comes from running sums."""

_PER_LAYER = {
    "q_norm": ("layer", "head", "frequency"),
    "k_norm": ("layer", "kv_head", "frequency"),
    "q_coherence": ("layer", "head", "frequency"),
    "k_coherence": ("layer", "kv_head", "frequency"),
    "selectivity": ("layer", "head", "frequency"),
    "offset_mass": ("layer", "head", "offset_bin"),
    "offset_share": ("layer", "offset_bin"),
    "kernel": ("layer", "head", "offset_bin"),
    "predicted_kernel": ("layer", "head", "offset_bin"),
} | dict.fromkeys(
    [
        "kernel_sink",
        "sink_mass",
        "learned_sink_mass",
        "self_mass",
        "previous_token",
        "entropy_bits",
        "total_bits",
        "sink_bits",
        "position_bits",
        "content_bits",
    ],
    ("layer", "head"),
)
_PER_GROUP = [
    "group_total_bits",
    "group_sink_bits",
    "group_position_gain",
    "group_content_gain",
]


def summarize(sums: Sums, planes: Sequence[Planes]) -> xr.Dataset:
    """The profile of `sums`: everything but what needs the model again.

    Sums of two halves of a corpus, added, give the profile of the whole. Layers, heads
    and planes that a model does not have (kv heads or head dimensions that differ
    between layers) are NaN.
    """
    layers = [sums.layers[layer] for layer in sorted(sums.layers)]
    edges = offset_edges(sums.row_weight.shape[1])
    columns = [
        _by_frequency(layer, sums, plane)
        | _by_head(layer, sums)
        | {"predicted_kernel": _predicted_kernel(layer, sums.tokens, plane, edges[:-1])}
        for layer, plane in zip(layers, planes, strict=True)
    ]
    values: dict[str, tuple[tuple[str, ...], np.ndarray]] = {
        name: (dims, stack([column[name] for column in columns]))
        for name, dims in _PER_LAYER.items()
    }
    group_rows = sums.row_weight.sum(1).numpy()
    used = group_rows > 0
    for name in _PER_GROUP:
        by_group = np.moveaxis(stack([column[name] for column in columns]), 1, 0)[used]
        per_row = by_group / group_rows[used, None, None]
        values[name] = (("group", "layer", "head"), per_row)
    values["group_rows"] = (("group",), group_rows[used])
    group_loss = (sums.group_loss / sums.group_predicted).numpy()
    values["group_loss"] = (("group",), group_loss[used])
    values["group_predicted"] = (("group",), sums.group_predicted.numpy()[used])
    coords = {
        "layer": np.arange(len(layers)),
        "head": np.arange(values["total_bits"][1].shape[1]),
        "kv_head": np.arange(values["k_norm"][1].shape[1]),
        **plane_coordinates(planes),
        "offset_start": ("offset_bin", edges[:-1].numpy()),
        "offset_stop": ("offset_bin", edges[1:].numpy()),
    }
    dataset = xr.Dataset(values, coords=coords)
    for name, (long_name, units) in DESCRIBED.items():
        dataset[name].attrs = {"long_name": long_name, "units": units}
    dataset.attrs = {
        "sequences": sums.sequences,
        "tokens": sums.tokens,
        "rows_measured": float(group_rows.sum()),
        "loss": sums.loss.mean,
        "loss_se": sums.loss.standard_error,
    }
    return dataset


def plane_coordinates(
    planes: Sequence[Planes],
) -> dict[str, tuple[tuple[str, ...], np.ndarray]]:
    """`inv_freq` (rad/token) and `wavelength` (tokens) of each layer; NaN beyond its own."""
    per_plane = ("layer", "frequency")
    inv_freq = stack(layer.term_inv_freq.abs() for layer in planes)
    return {
        "frequency": (("frequency",), np.arange(inv_freq.shape[1])),
        "inv_freq": (per_plane, inv_freq),
        "wavelength": (per_plane, stack(layer.wavelength for layer in planes)),
    }


def _by_frequency(layer: LayerSums, sums: Sums, planes: Planes) -> dict[str, Tensor]:
    """Means over tokens (norms, coherence) and rows (selectivity), [head, term]."""
    q_norm, k_norm = layer.q_norm / sums.tokens, layer.k_norm / sums.tokens
    selectivity = layer.selectivity / sums.row_weight.sum()
    return {
        "q_norm": q_norm,
        "k_norm": k_norm,
        "q_coherence": plane_norms(layer.q_still / sums.tokens, planes) / q_norm,
        "k_coherence": plane_norms(layer.k_still / sums.tokens, planes) / k_norm,
        "selectivity": planes.sum_coordinates(selectivity),
    }


def _by_head(layer: LayerSums, sums: Sums) -> dict[str, Tensor]:
    """Means over rows of what a head does with offsets, and its budget."""
    weight = sums.row_weight.sum(0)
    rows = weight.sum()
    sight = Sight.of(layer.start)
    edges = offset_edges(len(layer.start))
    budget = attention_budget(
        offset_mass=layer.offset_mass,
        sink_mass=layer.sink_mass,
        entropy=layer.entropy,
        content=layer.content,
        row_weight=sums.row_weight,
        sight=sight,
        edges=edges,
    )
    mass = layer.offset_mass.sum(0) / rows
    share = (weight @ (sight.choices[:, None] > edges[:-1]).double()) / rows
    bits = 1 / math.log(2)
    return {
        "offset_mass": mass,
        "offset_share": share,
        "kernel": budget.fit.kernel,
        "kernel_sink": budget.fit.sink,
        "sink_mass": layer.sink_mass.sum(0) / rows,
        "learned_sink_mass": layer.learned_sink.sum(0) / rows,
        "self_mass": mass[:, 0] / share[0],
        "previous_token": mass[:, 1] / share[1],
        "entropy_bits": layer.entropy.sum(0) / rows * bits,
        "total_bits": budget.total,
        "sink_bits": budget.sink,
        "position_bits": budget.position,
        "content_bits": budget.content,
        "group_total_bits": budget.groups["total"],
        "group_sink_bits": budget.groups["sink"],
        "group_position_gain": budget.groups["position"],
        "group_content_gain": budget.groups["still"],
    }


def _predicted_kernel(
    layer: LayerSums, tokens: int, planes: Planes, offsets: Int[Tensor, " bin"]
) -> Float[Tensor, "head bin"]:
    """Score of a head's mean query on its mean key, at any offset, in nats.

    s sum_f Re(E[q~_f] conj(E[k~_f]) exp(i w_f offset)), q~ and k~ without rotation:
    what the head would do if every token were alike.
    """
    group = len(layer.q_still) // len(layer.k_still)
    q = layer.q_still / tokens
    k = (layer.k_still / tokens).repeat_interleave(group, dim=0)
    angle = offsets[:, None].double() * planes.inv_freq.double()
    real = (q * k)[:, planes.first] + (q * k)[:, planes.second]
    imaginary = (
        q[:, planes.second] * k[:, planes.first] - q[:, planes.first] * k[:, planes.second]
    )
    still = (q * k).sum(-1, keepdim=True) - real.sum(-1, keepdim=True)
    return layer.scale * (real @ angle.cos().mT - imaginary @ angle.sin().mT + still)
