"""Edits that give planes of heads of a live model a new frequency or a gain in a block."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import pad

from ropelens.arguments import Number, check_value, public
from ropelens.errors import BadArgument, explained
from ropelens.measured_rotation.probe import RotationProbe
from ropelens.measured_rotation.stated import shape_of, sharpening
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.rope.planes import Planes
from ropelens.rope.select import (
    ALL_HEADS,
    ALL_PLANES,
    PlaneNumbers,
    Selection,
    Slowest,
    heads_by_layer,
    heads_of_layers,
)
from ropelens.rope.turn import TargetRotation, rotate_to
from ropelens.rope.variant_config import frequencies
from ropelens.rope.variants import Variant, parse_variant


class PlaneChange(NamedTuple):
    """New frequencies of planes, gain of queries and keys, and factors on terms of scores.

    A gain replaces the gain of an earlier edit, and factors multiply.
    """

    inv_freq: Float[Tensor, " frequency"] | None = None
    gain: float | None = None
    factor: Float[Tensor, "*head term"] | None = None


@dataclass(frozen=True)
class Edit:
    """A change (`action`) of chosen planes (`select`) of some heads, such as "3.5,4.*".

    Planes are chosen by their frequencies without edits. `action` gets the unedited planes, the
    number of the layer and the length of the sequence. Scores are multiplied by `scale`.
    """

    select: Selection
    action: Callable[[Planes, int, int], PlaneChange]
    heads: str = ALL_HEADS
    scale: float = 1.0


PlacedEdit = tuple[
    Edit, Bool[Tensor, "layer head"]
]  # an edit, and the heads that it changes


@public
def stop(select: Selection, *, heads: str = ALL_HEADS, layers: str = "*") -> Edit:
    """The planes stop rotating: they add the same amount to a score at every distance.

    `heads` is a list such as "3.5,4.*". Instead of heads, `layers` names kinds of layers
    (`layer_type` of a profile) or numbers, such as "full" or "0-3,7".
    """
    heads = heads_of_layers(layers, heads)
    return Edit(
        select, lambda planes, *_: PlaneChange(torch.zeros_like(planes.inv_freq)), heads
    )


@public
def stop_slowest(
    fraction: Number, *, heads: str = ALL_HEADS, layers: str = "*"
) -> Edit:
    """Stop the slowest `fraction` of the planes: p-RoPE with p = 1 - fraction.

    With all heads, a model of `rope_type` "default" then equals the same weights loaded as
    `rope_type` "proportional" with p (Barbero et al. 2024, arXiv 2410.06205).
    """
    return stop(Slowest(fraction), heads=heads, layers=layers)


@public
def drop(select: Selection, *, heads: str = ALL_HEADS, layers: str = "*") -> Edit:
    """The planes add nothing to the scores, because their queries become 0.

    A head without any plane (and without coordinates that never rotate) attends evenly.
    """
    return scale(select, by=0, heads=heads, layers=layers)


@public
def scale(
    select: Selection,
    *,
    by: Number,
    keep_length: xr.Dataset | None = None,
    heads: str = ALL_HEADS,
    layers: str = "*",
) -> Edit:
    """Multiply the terms that the planes add to the scores by `by` (arXiv 2609.39929).

    0 is `drop`, and 1 changes nothing. If a plane is scaled twice, its factors multiply.

    With a profile of the model as `keep_length`, all terms of a head get one more factor. It
    keeps the length sqrt(sum_f |c_f|^2) of the coefficients of a score, for |c_f| = `q_norm` *
    `k_norm` of the profile, which are means over its text.
    """

    check_value("scale: by", by, Number, bounds=(None, None))

    def act(planes: Planes, layer: int, _: int) -> PlaneChange:
        chosen = torch.arange(planes.terms) < 0
        chosen[: len(planes.inv_freq)] = select(planes)
        factor = torch.where(chosen, float(by), 1.0)
        if keep_length is None:
            return PlaneChange(factor=factor)
        norms = keep_length.isel(layer=layer, frequency=slice(planes.terms))
        query, key = (norms[name].values for name in ("q_norm", "k_norm"))
        length = torch.tensor(query * key.repeat(len(query) // len(key), axis=0))
        change = length.norm(dim=1) / (length * factor).norm(dim=1)
        return PlaneChange(factor=factor * change.nan_to_num(1, 1)[:, None])

    return Edit(select, act, heads_of_layers(layers, heads))


@public
def rescale(
    inv_freq: Sequence[Number]
    | Float[Tensor, " frequency"]
    | Float[np.ndarray, " frequency"],
    *,
    attention_factor: Number = 1.0,
    select: Selection = ALL_PLANES,
    heads: str = ALL_HEADS,
    layers: str = "*",
) -> Edit:
    """The planes rotate at `inv_freq` (rad/token, one frequency for every plane of a layer).

    Queries and keys in these planes are multiplied by `attention_factor`, as in YaRN.
    """
    new = torch.as_tensor(inv_freq, dtype=torch.float32), float(attention_factor)
    heads = heads_of_layers(layers, heads)
    return Edit(select, lambda planes, layer, _: _rotate_at(planes, layer, *new), heads)


def _rotate_at(
    planes: Planes, layer: int, inv_freq: Tensor, gain: float
) -> PlaneChange:
    """Rotate the planes at `inv_freq`, in the direction in which the model rotates them."""
    count = len(planes.inv_freq)
    if len(inv_freq) != count:
        seen = f"{len(inv_freq)} frequencies; layer {layer} has {count} planes"
        raise BadArgument(
            "A new rotation needs a frequency for every plane.", seen=seen
        )
    backward = planes.inv_freq.sum() < 0
    return PlaneChange(-inv_freq if backward else inv_freq, gain)


@public
@contextmanager
def edit_rope(model: Model, *edits: Edit | str) -> Iterator[None]:
    """Change the rotation of `model` by `edits` while the block runs.

    An edit may also be the name of a RoPE variant, such as "p-rope:0.75". Blocks nest, and
    their edits add up. Everything that runs the model uses the edited model: calls, generation
    with a cache, `profile`, `measure_rope`. Planes that no edit chooses keep every bit. The
    model is restored on exit, also after an error. The block belongs to the thread or task that
    opened it, and other threads and tasks cannot call the model.

    Raises `UnsupportedModel` for a model that does not rotate or hides its attention, and
    `BadArgument` for planes, heads or a variant that do not exist. When the model runs, a cache
    that drops keys raises `UnsupportedModel`, as does a bridge with a key-value cache, or with
    edits that make query heads differ that share a key-value head.
    """
    live = as_live_model(model)
    with live.edit(stack_edits(RotationProbe(live), edits)):
        yield


def stack_edits(rotation: RotationProbe, edits: Sequence[Edit | str]) -> "ModelEdit":
    """Check `edits`, and append them to the edits of the open blocks."""
    live, outer = rotation.live, rotation.live.open_edit
    rotation.layers()  # before the block, because this may raise an error
    if any(
        type(module).__name__.endswith("Indexer") for module in live.model.modules()
    ):
        warnings.warn(
            f"{live.class_name}'s indexer picks keys without the edit", stacklevel=5
        )
    before = outer.edits if isinstance(outer, ModelEdit) else ()
    placed = [place_edit(rotation, edit) for edit in edits]
    return ModelEdit(rotation, (*before, *placed))


def place_edit(rotation: RotationProbe, edit: Edit | str) -> PlacedEdit:
    """Raise `BadArgument` if the model lacks heads or planes of an edit."""
    edit = _as_edit(parse_variant(edit), rotation) if isinstance(edit, str) else edit
    heads = heads_by_layer(
        edit.heads, rotation.live.attending_heads, rotation.kind_names
    )
    layers = [layer.planes for layer in rotation.layers()]
    most = max(len(planes.inv_freq) for planes in layers)
    numbers = edit.select.numbers if isinstance(edit.select, PlaneNumbers) else ()
    if not all(0 <= number < most for number in numbers):
        what = f"The model has no plane for {edit.select}."
        raise BadArgument(what, seen=f"planes 0 to {most - 1}")
    for layer, planes in enumerate(layers):
        if edit.select(planes).any():
            with explained("The edit was made for another model.", error=BadArgument):
                able = rotation.live.attending_heads[layer]
                target_rotations([(edit, heads)], planes, able, (layer, 1))
    return edit, heads


def _as_edit(variant: Variant, rotation: RotationProbe) -> Edit:
    """Edit that makes a live model rotate as `variant`, from its own base and context."""
    if variant.stops is not None:
        return stop(variant.stops(variant.value))
    live, model_factor = rotation.live, rotation.attention_factor

    def act(planes: Planes, layer: int, length: int) -> PlaneChange:
        shape = shape_of(live, layer, rotary_dim=planes.rotary_dim, length=length)
        inv_freq, factor = frequencies(variant, shape)
        gain = factor / model_factor if model_factor else 1.0
        return _rotate_at(planes, layer, inv_freq, gain)

    return Edit(ALL_PLANES, act, scale=1 / sharpening(live))


@dataclass(frozen=True, eq=False)
class ModelEdit:
    """Edits of a model, applied in their order in its attention; see `AttentionEdit`."""

    rotation: RotationProbe
    edits: tuple[PlacedEdit, ...]

    def __call__(
        self, layer: int, name: str, x: Tensor, tokens: Tensor, positions: Tensor
    ) -> Tensor:
        if name == "value":
            return x
        continued = bool(tokens[:, 0].any())
        length = int(positions[:, : tokens.shape[1]].max()) + 1
        planes = self.rotation.planes_now(layer, continued=continued)
        heads = self.rotation.live.attending_heads[layer]
        of_query, of_key = target_rotations(self.edits, planes, heads, (layer, length))
        if name == "query":
            return rotate_to(x, positions, planes, of_query)
        shared = of_key.shared(groups=x.shape[1])
        if shared is None:  # heads of one group differ, and each gets its own key
            x = x.repeat_interleave(len(of_key.gain) // x.shape[1], dim=1)
        return rotate_to(x, positions, planes, shared or of_key)

    def planes(self, layer: int, unedited: Planes, *, length: int) -> Planes:
        """Planes under the edits, with one row per head if heads differ."""
        heads = self.rotation.live.attending_heads[layer]
        inv_freq = target_rotations(self.edits, unedited, heads, (layer, length))[
            0
        ].inv_freq
        if not len(inv_freq):  # a layer without attention
            return unedited
        alike = (inv_freq == inv_freq[:1]).all()
        return replace(unedited, inv_freq=inv_freq[0] if alike else inv_freq)


def target_rotations(
    edits: Sequence[PlacedEdit],
    planes: Planes,
    heads: Bool[Tensor, " head"],
    place: tuple[int, int],
) -> list[TargetRotation]:
    """The rotations of the queries and the keys of a layer at a `place` (layer, length)."""
    layer, length = place
    rates, scale = planes.inv_freq.float().expand(int(heads.sum()), -1), 1.0
    gain = factor = torch.ones(len(rates), planes.terms)
    for edit, heads_of_edit in edits:
        in_heads = heads_of_edit[layer][heads, None]
        chosen = in_heads & edit.select(planes)
        scale = edit.scale if edit.scale != 1 else scale
        if chosen.any():
            change = edit.action(planes, layer, length)
            if change.inv_freq is not None:
                rates = torch.where(chosen, change.inv_freq.float(), rates)
            if change.gain is not None:
                chosen = pad(chosen, (0, planes.terms - rates.shape[1]))
                gain = torch.where(chosen, change.gain, gain)
            if change.factor is not None:
                by_head = change.factor.float().expand(len(heads), -1)[heads]
                factor = torch.where(in_heads, factor * by_head, factor)
    return [TargetRotation(rates, gain * factor * scale), TargetRotation(rates, gain)]
