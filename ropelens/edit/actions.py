"""Edits as values: which planes of which heads, and what becomes of them.

An edit says which planes (`Slowest`, `Wavelengths`, ...), of which heads, and what becomes of
them (`stop`, `rescale`, `drop`, `mean_ablate`). An action changes numbers, one frequency and
one gain a plane and head, so edits add up; queries and keys are turned once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor

from ropelens.errors import BadArgument
from ropelens.rope.formulas import Rates
from ropelens.rope.plain import plain_number
from ropelens.rope.planes import Planes
from ropelens.rope.select import (
    ALL_HEADS,
    Every,
    Fastest,
    PlaneNumbers,
    Selection,
    Slowest,
    Wavelengths,
    chosen_heads,
    parse_heads,
)
from ropelens.rope.turn import Side


@dataclass(frozen=True)
class Layer:
    """What an action knows of the layer that it changes; `length` is that of the sequence."""

    index: int
    planes: Planes
    length: int


Frequencies = Callable[[Layer], Rates]
"""A layer -> inv_freq of its planes (rad/token), and by how much queries and keys grow."""


@runtime_checkable
class Action(Protocol):
    """Changes the chosen planes of a layer's queries and keys."""

    def __call__(
        self, query: Side, key: Side, chosen: Bool[Tensor, "head frequency"], layer: Layer
    ) -> tuple[Side, Side]: ...


@dataclass(frozen=True)
class Edit:
    """Some planes (`select`) of some heads (a list such as "3.5,4.*") and what becomes of them.

    Planes are chosen among those that the model has by itself, whatever other edits do.
    """

    select: Selection
    action: Action
    heads: str = ALL_HEADS

    def __post_init__(self) -> None:
        parse_heads(self.heads)
        if isinstance(self.select, type) or not isinstance(self.select, Selection):
            raise BadArgument(
                "An edit is of planes.",
                seen=repr(self.select)[:80],
                attempt="ropelens.Slowest(0.25), or another selection",
            )


def stop(select: Selection, *, heads: str = ALL_HEADS) -> Edit:
    """The planes no longer rotate: what they add to a score is the same at any distance."""
    return Edit(select, _stop, heads)


def stop_slowest(fraction: float, *, heads: str = ALL_HEADS) -> Edit:
    """Stop the slowest `fraction` of the planes: p-RoPE with p = 1 - fraction.

    Everywhere, it makes of a model the one that transformers loads from the same weights with
    `rope_type` "proportional" and that p (Barbero et al. 2024, arXiv 2410.06205).
    """
    return stop(Slowest(fraction), heads=heads)


def stop_fastest(fraction: float, *, heads: str = ALL_HEADS) -> Edit:
    """Stop the fastest `fraction` of the planes, the paper's "reversed" variant."""
    return stop(Fastest(fraction), heads=heads)


def stop_wavelengths(low: float, high: float, *, heads: str = ALL_HEADS) -> Edit:
    """Stop the planes with a wavelength of `low` tokens or more, and less than `high`."""
    return stop(Wavelengths(low, high), heads=heads)


def stop_planes(numbers: Sequence[int], *, heads: str = ALL_HEADS) -> Edit:
    """Stop the planes of these numbers; 0 is the fastest."""
    return stop(PlaneNumbers(numbers), heads=heads)


def drop(select: Selection, *, heads: str = ALL_HEADS) -> Edit:
    """The planes no longer add to the scores: their queries become 0.

    With all planes of a head gone its scores are equal (but for coordinates that never
    rotate), so it attends evenly to all keys that it sees. That is no ablation of the head,
    which still passes on the mean of the values: `silence_heads` takes its output away.
    """
    return Edit(select, _drop, heads)


def rescale(
    inv_freq: Sequence[float] | Float[Tensor, " frequency"],
    *,
    attention_factor: float = 1.0,
    select: Selection | None = None,
    heads: str = ALL_HEADS,
) -> Edit:
    """The planes turn at `inv_freq` (rad/token, one for every plane of a layer).

    Their queries and keys also become `attention_factor` times as long, as YaRN has it.
    Layers without rotation stay without.
    """
    try:
        speeds = torch.as_tensor(inv_freq, dtype=torch.float32)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        speeds = torch.tensor(math.nan)
    if speeds.ndim != 1 or speeds.is_meta or not speeds.isfinite().all():
        raise BadArgument(
            "inv_freq is a list of finite frequencies, one for every plane.",
            seen=f"{repr(inv_freq)[:80]}, shape {tuple(speeds.shape)}",
        )
    factor = plain_number(attention_factor)
    if not 0 < factor < math.inf:
        raise BadArgument(
            "attention_factor is a number above 0.", seen=repr(attention_factor)[:80]
        )
    return Edit(_every(select), Rescale(lambda layer: (speeds, factor)), heads)


def mean_ablate(
    means: xr.Dataset, *, select: Selection | None = None, heads: str = ALL_HEADS
) -> Edit:
    """The planes hold, for every token, the mean query and key of `means` (`plane_means`).

    The mean without rotation, rotated to each token's position: what a plane says of
    the token goes, what it says of the distance stays.
    """
    known = means if isinstance(means, xr.Dataset) else ()
    if not {"q_mean", "k_mean"} <= set(known):
        raise BadArgument(
            "These are no means of queries and keys.",
            seen=repr(means)[:80],
            attempt="ropelens.plane_means(model, tokens)",
        )
    return Edit(_every(select), MeanAblate(means), heads)


def _every(select: Selection | None) -> Selection:
    return Every() if select is None else select


def _stop(query: Side, key: Side, chosen: Tensor, layer: Layer) -> tuple[Side, Side]:
    still = torch.zeros(chosen.shape[1])
    return query.at(chosen, inv_freq=still), key.at(chosen, inv_freq=still)


def _drop(query: Side, key: Side, chosen: Tensor, layer: Layer) -> tuple[Side, Side]:
    return query.at(chosen, gain=0.0), key


@dataclass(frozen=True)
class Rescale:
    """The action of `rescale`, for frequencies that may depend on the layer and the length."""

    frequencies: Frequencies

    def __call__(
        self, query: Side, key: Side, chosen: Tensor, layer: Layer
    ) -> tuple[Side, Side]:
        inv_freq, factor = self.frequencies(layer)
        count = len(layer.planes.inv_freq)
        if len(inv_freq) != count:
            raise BadArgument(
                "Planes that are to turn anew need a frequency each.",
                seen=f"{len(inv_freq)} frequencies; layer {layer.index} has {count} planes",
            )
        turned = -inv_freq if layer.planes.inv_freq.sum() < 0 else inv_freq
        return (
            query.at(chosen, inv_freq=turned, gain=factor),
            key.at(chosen, inv_freq=turned, gain=factor),
        )


@dataclass(frozen=True, eq=False)
class MeanAblate:
    """The action of `mean_ablate`."""

    means: xr.Dataset

    def __call__(
        self, query: Side, key: Side, chosen: Tensor, layer: Layer
    ) -> tuple[Side, Side]:
        heads, count = chosen.shape
        known = self.means.sizes
        wanted = {"layer": layer.index + 1, "head": heads, "frequency": count}
        if heads != known["head"] or any(known[name] < size for name, size in wanted.items()):
            raise BadArgument(
                "These means belong to another model.",
                seen=f"layer {layer.index}: {heads} heads of {count} planes; means of "
                f"{known['layer']} layers, {known['head']} heads, {known['frequency']} planes",
                attempt="ropelens.plane_means(model, tokens) with the model that is edited",
            )
        q_mean, k_mean = (
            torch.from_numpy(self.means[name].values[layer.index, :, :count]).float()
            for name in ("q_mean", "k_mean")
        )
        k_mean = k_mean[~k_mean.flatten(1).isnan().all(1)]  # layers may have fewer of them
        k_mean = k_mean.repeat_interleave(heads // len(k_mean), dim=0)
        return query.at(chosen, mean=q_mean), key.at(chosen, mean=k_mean)


def change_layer(edits: Sequence[Edit], layer: Layer, heads: int) -> tuple[Side, Side]:
    """How the edits, one after the other, change a layer's queries and keys."""
    query = key = Side.of(layer.planes, heads=heads)
    for edit in edits:
        rows = chosen_heads(parse_heads(edit.heads), layer=layer.index, heads=heads)
        chosen = rows[:, None] & edit.select(layer.planes)
        if chosen.any():
            query, key = edit.action(query, key, chosen, layer)
    return query, key
