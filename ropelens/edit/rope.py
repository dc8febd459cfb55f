"""Edits of a live model's rotation: some planes of some heads stop, change speed, or go.

    with rl.edit_rope(model, rl.stop_slowest(0.25)):
        model(tokens)

An edit says which planes (`Slowest`, `Wavelengths`, ...), of which heads, and what becomes of
them (`stop`, `rescale`, `drop`, `mean_ablate`). What edits make of a layer is held as numbers,
one frequency and one gain a plane and head, so that edits compose by changing numbers; the
queries and keys are turned once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.models.doorway import TransformersSubject, by_itself, edit_attention, open_edit
from ropelens.models.rotation import depends_on_length, read_layers, stated_inv_freq
from ropelens.models.subject import Subject, as_subject
from ropelens.models.variants import attention_factor, shape_of
from ropelens.rope.formulas import Rates
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
from ropelens.rope.turn import Side, turn
from ropelens.rope.variants import Variant, parse_variant


@dataclass(frozen=True)
class Layer:
    """What an action may ask of the layer that it changes; `length` in tokens."""

    index: int
    planes: Planes
    length: int


Frequencies = Callable[[Layer], Rates]
"""A layer -> inv_freq of its planes (rad/token), and by how much queries and keys grow."""


@runtime_checkable
class Action(Protocol):
    """What becomes of the chosen planes, on the side of queries and of keys."""

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


def stop(select: Selection, *, heads: str = ALL_HEADS) -> Edit:
    """The planes no longer rotate: what they carry counts whatever the distance."""
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
    return stop(PlaneNumbers(tuple(numbers)), heads=heads)


def drop(select: Selection, *, heads: str = ALL_HEADS) -> Edit:
    """The planes no longer add to the scores: their queries become 0."""
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
    speeds = torch.as_tensor(inv_freq, dtype=torch.float32)
    if speeds.ndim != 1 or not speeds.isfinite().all():
        raise BadArgument(
            "inv_freq is a list of finite frequencies, one for every plane.",
            seen=f"shape {tuple(speeds.shape)}, {speeds.flatten()[:4].tolist()} ...",
        )
    if not 0 < attention_factor < math.inf:
        raise BadArgument("attention_factor is above 0.", seen=str(attention_factor))
    return Edit(select or Every(), Rescale(lambda layer: (speeds, attention_factor)), heads)


def mean_ablate(
    means: xr.Dataset, *, select: Selection | None = None, heads: str = ALL_HEADS
) -> Edit:
    """The planes hold, for every token, the mean query and key of `means` (`plane_means`).

    The mean without rotation, rotated to each token's position: what a plane says of
    the token goes, what it says of the distance stays.
    """
    return Edit(select or Every(), MeanAblate(means), heads)


def as_edit(variant: Variant, model: PreTrainedModel) -> Edit:
    """The edit that makes a live model rotate as `variant`, in every layer that rotates.

    Variants that stop planes leave the others as they are; the rest take the model's base
    and trained context, and replace the frequencies and the attention factor that it has.
    """
    layers = range(model.config.get_text_config().num_hidden_layers)
    if variant.row.stops is not None:
        heads = [f"{layer}.*" for layer in layers if variant.stops_in(layer)]
        nothing = PlaneNumbers(())
        select = variant.row.stops(variant.value) if heads else nothing
        return Edit(select, _stop, ",".join(heads) or ALL_HEADS)
    own_factor = attention_factor(model)

    def frequencies(layer: Layer) -> Rates:
        rotary_dim = layer.planes.rotary_dim
        shape = shape_of(model, layer.index, rotary_dim=rotary_dim, length=layer.length)
        inv_freq, factor = variant.frequencies(shape)
        return inv_freq, factor / own_factor

    return Edit(Every(), Rescale(frequencies))


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


@contextmanager
def edit_rope(model: nn.Module, *edits: Edit | str) -> Iterator[None]:
    """`model` rotates as `edits` say while the block runs; blocks nest, and edits add up.

    An edit may also be the name of a RoPE variant, such as "p-rope:0.75" (`VARIANTS`).
    Everything that runs the model meets the edited one: calls, generation with a cache,
    `profile`, `measure_rope`. Planes that no edit chooses keep every bit. Restored on
    exit, on errors too. `model` is a transformers model.

    Raises `UnsupportedModel` for a model that does not rotate, or whose attention does not
    pass through transformers' attention interface, and `BadArgument` for planes or heads
    that it does not have, or a variant that does not exist.
    """
    subject = as_subject(model)
    with by_itself(subject.model):
        planes = tuple(layer.planes for layer in read_layers(subject))
    with edit_attention(subject.model, stack_edits(subject, planes, edits)):
        yield


def stack_edits(
    subject: Subject, planes: tuple[Planes, ...], edits: Sequence[Edit | str]
) -> ModelEdit:
    """`edits` on those that are open, checked as `edit_rope` does.

    `planes` is how the model rotates by itself, within its trained context.
    """
    if not isinstance(subject, TransformersSubject):
        raise UnsupportedModel(
            f"{type(subject.model).__name__} cannot be edited inside another library's model.",
            means="edits change the attention calls of transformers models",
            attempt="edit the transformers model that it was made from",
        )
    model, outer = subject.model, open_edit(subject.model)
    before = outer.edits if isinstance(outer, ModelEdit) else ()
    heads = model.config.get_text_config().num_attention_heads
    added = tuple(_read(edit, model) for edit in edits)
    for edit in added:
        _check(edit, planes, heads)
    return ModelEdit(model, planes, (*before, *added))


def _read(edit: Edit | str, model: PreTrainedModel) -> Edit:
    """The edit that was meant: itself, or that of a variant by name."""
    if isinstance(edit, str):
        return as_edit(parse_variant(edit), model)
    if not isinstance(edit, Edit):
        raise BadArgument(
            "This is no edit of a rotation.",
            seen=repr(edit)[:80],
            attempt='ropelens.stop_slowest(0.25), another edit, or a variant: "p-rope:0.75"',
        )
    return edit


def _check(edit: Edit, layers: tuple[Planes, ...], heads: int) -> None:
    """Refuse heads and planes that the model does not have, and actions that cannot be."""
    for layer, head in parse_heads(edit.heads):
        if (layer or 0) >= len(layers) or (head or 0) >= heads:
            raise BadArgument(
                f"The model has no head {layer if layer is not None else '*'}."
                f"{head if head is not None else '*'}.",
                seen=f"layers 0 to {len(layers) - 1}, heads 0 to {heads - 1}",
            )
    most = max(len(planes.inv_freq) for planes in layers)
    if isinstance(edit.select, PlaneNumbers):
        missing = [n for n in edit.select.numbers if not 0 <= n < most]
        if missing:
            raise BadArgument(
                f"The model has no plane {missing[0]}.", seen=f"planes 0 to {most - 1}"
            )
    if isinstance(edit.select, Wavelengths) and not any(edit.select(p).any() for p in layers):
        every = torch.cat([planes.wavelength[: len(planes.inv_freq)] for planes in layers])
        raise BadArgument(
            f"No plane has a wavelength of {edit.select.low:g} to {edit.select.high:g} tokens.",
            seen=f"wavelengths of {every.min():.4g} to {every.max():.4g} tokens",
        )
    for index, planes in enumerate(layers):
        _change((edit,), Layer(index, planes, length=1), heads)


def _change(edits: Sequence[Edit], layer: Layer, heads: int) -> tuple[Side, Side]:
    """What the edits, one after the other, make of a layer's queries and keys."""
    query = key = Side.of(layer.planes, heads=heads)
    for edit in edits:
        rows = chosen_heads(parse_heads(edit.heads), layer=layer.index, heads=heads)
        chosen = rows[:, None] & edit.select(layer.planes)
        if chosen.any():
            query, key = edit.action(query, key, chosen, layer)
    return query, key


@dataclass(frozen=True, eq=False)
class ModelEdit:
    """All open edits of a model, standing at its attention; `own` is how it rotates itself."""

    model: PreTrainedModel
    own: tuple[Planes, ...]
    edits: tuple[Edit, ...]

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, rows: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys as the edits have them; see `AttentionEdit`."""
        if not self.edits:
            return query, key
        planes = self._planes_now(layer, continued=query.shape[2] < key.shape[2])
        heads, groups = query.shape[1], key.shape[1]
        about = Layer(layer, planes, length=int(rows.max()) + 1)
        of_query, of_key = _change(self.edits, about, heads)
        if not of_query.leaves(planes):
            query = turn(query, rows, planes, of_query)
        if of_key.leaves(planes):
            return query, key
        shared = of_key.shared(groups=groups)
        if shared is None:  # heads of one group differ: a key for each
            key = key.repeat_interleave(heads // groups, dim=1)
        return query, turn(key, keys, planes, shared or of_key)

    def planes(self, layer: int, planes: Planes, *, length: int) -> Planes:
        """How the layer rotates under the edits; raises `BadArgument` where heads differ."""
        heads = self.model.config.get_text_config().num_attention_heads
        query, _ = _change(self.edits, Layer(layer, planes, length), heads)
        if not (query.inv_freq == query.inv_freq[:1]).all():
            raise BadArgument(
                f"Under this edit the heads of layer {layer} rotate differently.",
                means="a rotation is measured, and a profile made, for all heads of a layer",
                attempt='an edit of whole layers (heads="3.*"), or of no frequencies '
                "(drop, mean_ablate)",
            )
        if torch.equal(query.inv_freq[0], planes.inv_freq.float()):
            return planes
        return replace(planes, inv_freq=query.inv_freq[0])

    def _planes_now(self, layer: int, *, continued: bool) -> Planes:
        """How the model itself rotates in this call: as ever, but for dynamic and longrope."""
        planes = self.own[layer]
        if not depends_on_length(self.model):
            return planes
        count = len(planes.inv_freq)
        stated = [w for w in stated_inv_freq(self.model, layer) if len(w) == count]
        now = -stated[0] if planes.inv_freq.sum() < 0 else stated[0]
        if continued and not torch.equal(now, planes.inv_freq):
            raise UnsupportedModel(
                "An edit cannot tell how the keys in this cache were rotated.",
                seen="a RoPE that changes with the length, past the length it was trained for",
                attempt="call the model with use_cache=False",
            )
        return replace(planes, inv_freq=now)
