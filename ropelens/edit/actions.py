"""Edits as values: which planes of which heads, and what becomes of them.

An action changes numbers, one frequency and one gain a plane and head, so edits add up;
queries and keys are turned once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ropelens.errors import BadArgument, Number, public
from ropelens.rope.formulas import Rates
from ropelens.rope.planes import Planes
from ropelens.rope.select import (
    ALL_HEADS,
    Every,
    Fastest,
    Selection,
    Slowest,
    chosen_heads,
    parse_heads,
)
from ropelens.rope.turn import Side

EVERY = Every()


@dataclass(frozen=True)
class Layer:
    """What an action knows of the layer that it changes; `length` is that of the sequence."""

    index: int
    planes: Planes
    length: int


Frequencies = Callable[[Layer], Rates]
"""A layer -> inv_freq of its planes (rad/token), and the factor on queries and keys."""


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


@public
def stop(select: Selection, *, heads: str = ALL_HEADS) -> Edit:
    """The planes no longer rotate: what they add to a score is the same at any distance."""
    return Edit(select, _stop, heads)


@public
def stop_slowest(fraction: Number, *, heads: str = ALL_HEADS) -> Edit:
    """Stop the slowest `fraction` of the planes: p-RoPE with p = 1 - fraction.

    In all heads, it makes of a model the one that transformers loads from the same weights with
    `rope_type` "proportional" and that p (Barbero et al. 2024, arXiv 2410.06205).
    """
    return stop(Slowest(fraction), heads=heads)


@public
def stop_fastest(fraction: Number, *, heads: str = ALL_HEADS) -> Edit:
    """Stop the fastest `fraction` of the planes, the paper's "reversed" variant."""
    return stop(Fastest(fraction), heads=heads)


@public
def drop(select: Selection, *, heads: str = ALL_HEADS) -> Edit:
    """The planes no longer add to the scores: their queries become 0.

    With all planes of a head gone its scores are equal (but for coordinates that never
    rotate), so it attends evenly to all keys that it sees. That is no ablation of the head,
    which still passes on the mean of the values: `silence_heads` takes its output away.
    """
    return Edit(select, _drop, heads)


@public
def rescale(
    inv_freq: Sequence[Number] | Float[Tensor, " frequency"] | Float[np.ndarray, " frequency"],
    *,
    attention_factor: Number = 1.0,
    select: Selection = EVERY,
    heads: str = ALL_HEADS,
) -> Edit:
    """The planes turn at `inv_freq` (rad/token, one for every plane of a layer).

    Their queries and keys also become `attention_factor` times as long, as YaRN has it.
    Layers without rotation stay without.
    """
    speeds = torch.as_tensor(inv_freq, dtype=torch.float32)
    if not speeds.isfinite().all() or not 0 < attention_factor < math.inf:
        raise BadArgument(
            "inv_freq lists finite frequencies, and attention_factor is above 0.",
        )
    return Edit(select, turning_at(lambda layer: (speeds, float(attention_factor))), heads)


def _stop(query: Side, key: Side, chosen: Tensor, layer: Layer) -> tuple[Side, Side]:
    still = torch.zeros(chosen.shape[1])
    return query.at(chosen, inv_freq=still), key.at(chosen, inv_freq=still)


def _drop(query: Side, key: Side, chosen: Tensor, layer: Layer) -> tuple[Side, Side]:
    return query.at(chosen, gain=0.0), key


def turning_at(frequencies: Frequencies) -> Action:
    """The action of `rescale`, for frequencies that may depend on the layer and the length."""

    def act(query: Side, key: Side, chosen: Tensor, layer: Layer) -> tuple[Side, Side]:
        inv_freq, factor = frequencies(layer)
        count = len(layer.planes.inv_freq)
        if len(inv_freq) != count:
            raise BadArgument(
                "A new rotation needs a frequency for every plane.",
                seen=f"{len(inv_freq)} frequencies; layer {layer.index} has {count} planes",
            )
        turned = -inv_freq if layer.planes.inv_freq.sum() < 0 else inv_freq
        return (
            query.at(chosen, inv_freq=turned, gain=factor),
            key.at(chosen, inv_freq=turned, gain=factor),
        )

    return act


@dataclass(frozen=True, eq=False)
class MeanAblate:
    """The action of `mean_ablate`: the mean query and key of every plane, by layer."""

    query: Sequence[Float[Tensor, "head frequency 2"]]
    key: Sequence[Float[Tensor, "kv_head frequency 2"]]

    def __call__(
        self, query: Side, key: Side, chosen: Tensor, layer: Layer
    ) -> tuple[Side, Side]:
        means = [
            side[layer.index] for side in (self.query, self.key) if layer.index < len(side)
        ]
        if not means or means[0].shape[:2] != chosen.shape:
            raise BadArgument(
                "These means belong to another model.",
                seen=f"layer {layer.index}, heads and planes: {tuple(chosen.shape)}",
                attempt="ropelens.mean_ablate with the model that is edited",
            )
        q_mean, k_mean = means
        k_mean = k_mean.repeat_interleave(len(q_mean) // len(k_mean), dim=0)
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
