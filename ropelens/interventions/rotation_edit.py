"""Edits on a live model: one intervention that rotates queries and keys under all of them."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from jaxtyping import Float
from torch import Tensor

from ropelens.errors import BadArgument, explained
from ropelens.interventions.plane_edits import Edit, HeadRotations, Stop, VariantEdit
from ropelens.measured_rotation.probe import RotationProbe
from ropelens.measured_rotation.stated import sharpening
from ropelens.model.intervention import HeadInputs, Intervention
from ropelens.rope.planes import Planes
from ropelens.rope.select import (
    ALL_PLANES,
    HeadMask,
    PlaneNumbers,
    Selection,
    heads_by_layer,
)
from ropelens.rope.turn import rotate_to
from ropelens.rope.variants import Variant, parse_variant


@dataclass(frozen=True)
class PlacedEdit:
    """An edit, and the heads of a model that it changes."""

    edit: Edit
    heads: HeadMask


@dataclass(frozen=True, eq=False)
class RotationEdit(Intervention):
    """The edits of the open blocks, applied in their order to the rotation of a model."""

    rotates: ClassVar[bool] = True

    rotation: RotationProbe
    edits: tuple[PlacedEdit, ...]

    def change_input(self, inputs: HeadInputs) -> Float[Tensor, "batch _ slot _"]:
        """Queries or keys in their new rotation; heads that differ get a key for each head."""
        x = inputs.vectors
        if inputs.name == "value":
            return x
        planes = self.rotation.planes_now(inputs.layer, continued=inputs.continued)
        of_tokens = inputs.positions[:, : inputs.tokens.shape[1]]
        length = int(of_tokens.max()) + 1
        rotations = self.rotations(inputs.layer, planes, length=length)
        if inputs.name == "query":
            return rotate_to(x, inputs.positions, planes, rotations.of_queries)
        target = rotations.of_keys
        shared = target.shared(groups=x.shape[1])
        if shared is not None:
            return rotate_to(x, inputs.positions, planes, shared)
        x = x.repeat_interleave(len(target.gain) // x.shape[1], dim=1)
        return rotate_to(x, inputs.positions, planes, target)

    def planes(self, layer: int, unedited: Planes, *, length: int) -> Planes:
        """Planes under the edits, with one row per head if heads differ.

        `unedited` itself is returned if no edit changes a head of the layer.
        """
        if not any(placed.heads[layer].any() for placed in self.edits):
            return unedited
        inv_freq = self.rotations(layer, unedited, length=length).inv_freq
        if not len(inv_freq):  # a layer without attention
            return unedited
        alike = bool((inv_freq == inv_freq[:1]).all())
        return replace(unedited, inv_freq=inv_freq[0] if alike else inv_freq)

    def rotations(self, layer: int, planes: Planes, *, length: int) -> HeadRotations:
        """How the heads of a layer rotate whose planes without edits are `planes`."""
        attending = self.rotation.live.attending_heads[layer]
        rotations = HeadRotations.unedited(layer, length, planes, attending)
        for placed in self.edits:
            rotations = placed.edit.apply(rotations, placed.heads[layer][attending])
        return rotations


def place_edits(rotation: RotationProbe, edits: Sequence[Edit | str]) -> RotationEdit:
    """Check `edits` or names of variants, and add them to the edits of the open blocks."""
    live = rotation.live
    rotation.layers()  # before the block, because this may raise an error
    if any(type(x).__name__.endswith("Indexer") for x in live.model.modules()):
        warnings.warn(
            f"{live.class_name}'s indexer picks keys without the edit", stacklevel=5
        )
    placed: list[PlacedEdit] = []
    for intervention in live.interventions:
        if isinstance(intervention, RotationEdit):
            placed += intervention.edits
    for edit in edits:
        if isinstance(edit, str):
            edit = _edit_of_variant(parse_variant(edit), rotation)
        placed.append(_place_edit(rotation, edit))
    return RotationEdit(rotation, tuple(placed))


def place_planes(rotation: RotationProbe, select: Selection, heads: str) -> HeadMask:
    """The heads of a list; raises `BadArgument` if the model lacks these heads or planes."""
    chosen = heads_by_layer(heads, rotation.live.attending_heads, rotation.kind_names)
    most = max(len(layer.planes.inv_freq) for layer in rotation.layers())
    numbers = select.numbers if isinstance(select, PlaneNumbers) else ()
    if not all(0 <= number < most for number in numbers):
        what = f"The model has no plane for {select}."
        raise BadArgument(what, seen=f"planes 0 to {most - 1}")
    return chosen


def _place_edit(rotation: RotationProbe, edit: Edit) -> PlacedEdit:
    """Raise `BadArgument` if the model lacks heads or planes of an edit."""
    placed = PlacedEdit(edit, place_planes(rotation, edit.select, edit.heads))
    alone = RotationEdit(rotation, (placed,))
    for layer, measured in enumerate(rotation.layers()):
        if edit.select(measured.planes).any():
            with explained("The edit was made for another model.", error=BadArgument):
                alone.rotations(layer, measured.planes, length=1)
    return placed


def _edit_of_variant(variant: Variant, rotation: RotationProbe) -> Edit:
    """Edit that makes a live model rotate as `variant`, from its own base and context."""
    heads = f"{variant.layers or '*'}.*"
    if variant.stops is not None:
        return Stop(select=variant.stops(variant.value), heads=heads)
    return VariantEdit(
        heads=heads,
        select=ALL_PLANES,
        variant=variant,
        live=rotation.live,
        model_factor=rotation.attention_factor,
        query_scale=1 / sharpening(rotation.live),
    )
