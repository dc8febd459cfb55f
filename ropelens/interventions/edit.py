"""A live model rotates otherwise while a block runs.

with rl.edit_rope(model, rl.stop_slowest(0.25)):
    model(tokens)

An edit gives chosen planes of chosen heads one frequency or gain, so that edits add up: queries
and keys are turned once.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ropelens.errors import BadArgument, Number, public
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.rope.planes import Planes
from ropelens.rope.select import ALL_HEADS, EVERY, PlaneNumbers, Selection, Slowest
from ropelens.rope.turn import Side, turn
from ropelens.rope.variants import Variant, parse_variant
from ropelens.rotation.configured import shape_of, sharpening
from ropelens.rotation.probe import RotationProbe
from ropelens.rotation.variant_config import frequencies


@dataclass(frozen=True)
class Layer:
    """A layer that is edited, as it rotates by itself; `length` is that of the sequence."""

    index: int
    planes: Planes
    length: int = 1


class Change(NamedTuple):
    """What becomes of planes: how they turn, how long queries and keys get; see `Side.at`."""

    inv_freq: Float[Tensor, " frequency"] | None = None
    query_gain: float | None = None
    key_gain: float | None = None


@dataclass(frozen=True)
class Edit:
    """Some planes (`select`) of some heads (a list such as "3.5,4.*") and what becomes of them.

    Planes are chosen among those that the model has by itself, whatever other edits do. The
    scores as a whole are multiplied by `scale`.
    """

    select: Selection
    action: Callable[[Layer], Change]
    heads: str = ALL_HEADS
    scale: float = 1.0


PlacedEdit = tuple[Edit, Bool[Tensor, "layer head"]]
"""An edit of a model, and the heads that it names."""


@public
def stop(select: Selection, *, heads: str = ALL_HEADS) -> Edit:
    """The planes no longer rotate: what they add to a score is the same at any distance."""
    return Edit(select, lambda layer: Change(torch.zeros_like(layer.planes.inv_freq)), heads)


@public
def stop_slowest(fraction: Number, *, heads: str = ALL_HEADS) -> Edit:
    """Stop the slowest `fraction` of the planes: p-RoPE with p = 1 - fraction.

    In all heads, it makes of a model of `rope_type` "default" the one that transformers loads
    from the same weights as "proportional", with p (Barbero et al. 2024, arXiv 2410.06205).
    """
    return stop(Slowest(fraction), heads=heads)


@public
def drop(select: Selection, *, heads: str = ALL_HEADS) -> Edit:
    """The planes no longer add to the scores: their queries become 0.

    A head without all its planes attends evenly to all keys that it sees (but for coordinates
    that never rotate), and passes on the mean of their values.
    """
    return Edit(select, lambda layer: Change(query_gain=0.0), heads)


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
    return Edit(select, lambda layer: _turning(layer, speeds, float(attention_factor)), heads)


def _turning(layer: Layer, inv_freq: Tensor, gain: float) -> Change:
    """Planes turn at `inv_freq`, in the direction in which the model turns."""
    count = len(layer.planes.inv_freq)
    if len(inv_freq) != count:
        raise BadArgument(
            "A new rotation needs a frequency for every plane.",
            seen=f"{len(inv_freq)} frequencies; layer {layer.index} has {count} planes",
        )
    return Change(-inv_freq if layer.planes.inv_freq.sum() < 0 else inv_freq, gain, gain)


@public
@contextmanager
def edit_rope(model: Model, *edits: Edit | str) -> Iterator[None]:
    """`model` rotates as `edits` say while the block runs; blocks nest, and edits add up.

    An edit may also be the name of a RoPE variant, such as "p-rope:0.75". Everything that runs
    the model meets the edited one: calls, generation with a cache, `profile`, `measure_rope`.
    Planes that no edit chooses keep every bit. Restored on exit, on errors too.

    Raises `UnsupportedModel` for a model that does not rotate or hides its attention, and
    `BadArgument` for planes or heads that it does not have, or a variant that does not exist.
    A bridge also raises `UnsupportedModel` when it runs with a key-value cache, or under
    an edit that makes heads of one key-value head differ.
    """
    live = as_live_model(model)
    with live.edit(stack_edits(RotationProbe(live), edits)):
        yield


def stack_edits(rotation: RotationProbe, edits: Sequence[Edit | str]) -> ModelEdit:
    """`edits`, checked, after those that are open."""
    live = rotation.live
    rotation.layers()  # before the block, because this may raise an error
    if any(type(module).__name__.endswith("Indexer") for module in live.model.modules()):
        warnings.warn(f"{live.class_name}'s indexer picks keys without the edit", stacklevel=5)
    outer = live.open_edit
    before = outer.edits if isinstance(outer, ModelEdit) else ()
    return ModelEdit(rotation, (*before, *(placed(rotation, edit) for edit in edits)))


def placed(rotation: RotationProbe, edit: Edit | str) -> PlacedEdit:
    """An edit and the heads that it names.

    Raises `BadArgument` for heads and planes that the model does not have.
    """
    edit = as_edit(parse_variant(edit), rotation) if isinstance(edit, str) else edit
    heads = rotation.live.heads_of(edit.heads)
    layers = [Layer(index, planes) for index, planes in enumerate(rotation.unedited_planes())]
    most = max(len(layer.planes.inv_freq) for layer in layers)
    numbers = edit.select.numbers if isinstance(edit.select, PlaneNumbers) else ()
    if not all(0 <= number < most for number in numbers):
        what = f"The model has no plane for {edit.select}."
        raise BadArgument(what, seen=f"planes 0 to {most - 1}")
    for layer in layers:
        if edit.select(layer.planes).any():
            edit.action(layer)
    return edit, heads


def as_edit(variant: Variant, rotation: RotationProbe) -> Edit:
    """The edit that makes a live model rotate as `variant`, in every layer that rotates.

    Variants that stop planes leave the others as they are; the rest take the model's base
    and trained context, and replace the frequencies, attention factor and sharpening of the
    scores that it has.
    """
    if variant.stops is not None:
        return stop(variant.stops(variant.value))
    live, factor_now = rotation.live, rotation.attention_factor

    def act(layer: Layer) -> Change:
        options = {"rotary_dim": layer.planes.rotary_dim, "length": layer.length}
        inv_freq, factor = frequencies(variant, shape_of(live, layer.index, **options))
        return _turning(layer, inv_freq, factor / factor_now if factor_now else 1.0)

    return Edit(EVERY, act, scale=1 / sharpening(live))


@dataclass(frozen=True, eq=False)
class ModelEdit:
    """Edits of a model, one after the other, applied at its attention; see `AttentionEdit`."""

    rotation: RotationProbe
    edits: tuple[PlacedEdit, ...]

    def sides(self, layer: Layer) -> tuple[Side, Side]:
        """How the edits change a layer's queries and keys."""
        own = layer.planes.inv_freq.float().expand(self.rotation.live.heads, -1)
        query = key = Side(own, torch.ones(own.shape))
        for edit, heads in self.edits:
            chosen = heads[layer.index][:, None] & edit.select(layer.planes)
            if chosen.any():
                inv_freq, query_gain, key_gain = edit.action(layer)
                query = query.at(chosen, inv_freq, query_gain)
                key = key.at(chosen, inv_freq, key_gain)
        return query, key

    def __call__(
        self, layer: int, side: str, x: Tensor, places: range, positions: Tensor
    ) -> Tensor:
        """Queries or keys as the edits change them."""
        if side == "value":
            return x
        continued, length = places.start > 0, int(positions[:, : len(places)].max()) + 1
        planes = self.rotation.planes_now(layer, continued=continued)
        of_query, of_key = self.sides(Layer(layer, planes, length))
        if side == "query":
            scales = [edit.scale for edit, _ in self.edits if edit.scale != 1]
            x = turn(x, positions, planes, of_query)
            return x * scales[-1] if scales else x
        shared = of_key.shared(groups=x.shape[1])
        if shared is None:  # heads of one group differ: a key for each
            x = x.repeat_interleave(self.rotation.live.heads // x.shape[1], dim=1)
        return turn(x, positions, planes, shared or of_key)

    def inv_freq(
        self, layer: int, planes: Planes, *, length: int
    ) -> Float[Tensor, "head frequency"]:
        """How each head rotates under the edits, in rad/token."""
        return self.sides(Layer(layer, planes, length))[0].inv_freq
