"""A live model rotates otherwise while a block runs.

with rl.edit_rope(model, rl.stop_slowest(0.25)):
    model(tokens)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ropelens.edit.actions import EVERY, Edit, Layer, change_layer, stop, turning_at
from ropelens.errors import BadArgument, public
from ropelens.models.rotation import edited_planes, planes_now
from ropelens.models.subject import Model, Subject, as_subject
from ropelens.models.variants import attention_factor, shape_of
from ropelens.rope.formulas import Rates
from ropelens.rope.planes import Planes
from ropelens.rope.select import ALL_HEADS, PlaneNumbers, Wavelengths, heads_by_layer
from ropelens.rope.turn import turn
from ropelens.rope.variants import Variant, parse_variant

NONE = "none"
"""The entry of an evaluation that is the model as it is."""


@public
@contextmanager
def edit_rope(model: Model, *edits: Edit | str) -> Iterator[None]:
    """`model` rotates as `edits` say while the block runs; blocks nest, and edits add up.

    An edit may also be the name of a RoPE variant, such as "p-rope:0.75" (`VARIANTS`).
    Everything that runs the model meets the edited one: calls, generation with a cache,
    `profile`, `measure_rope`. Planes that no edit chooses keep every bit. Restored on
    exit, on errors too. `model` is a transformers model or a TransformerLens
    `TransformerBridge`.

    Raises `UnsupportedModel` for a model that does not rotate, whose attention does not pass
    through transformers' attention interface, or whose bridge does not fire its hooks; and
    `BadArgument` for planes or heads that it does not have, or a variant that does not exist.
    A bridge also raises `UnsupportedModel` when it runs with a key-value cache, or under
    an edit that makes heads of one key-value head differ.
    """
    subject = as_subject(model)
    with subject.edit(stack_edits(subject, edits)):
        yield


def stack_edits(subject: Subject, edits: Sequence[Edit | str]) -> ModelEdit:
    """`edits`, checked, after those that are open."""
    planes, outer = [layer.planes for layer in subject.rotations()], subject.open_edit
    before = outer.edits if isinstance(outer, ModelEdit) else ()
    added = tuple(
        as_edit(parse_variant(edit), subject) if isinstance(edit, str) else edit
        for edit in edits
    )
    for edit in added:
        _check(edit, planes, subject.heads)
    return ModelEdit(subject, planes, (*before, *added))


def _check(edit: Edit, layers: Sequence[Planes], heads: int) -> None:
    """Refuse heads and planes that the model does not have, and actions that do not fit it."""
    heads_by_layer(edit.heads, layers=len(layers), heads_of_layer=heads)
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
        change_layer((edit,), Layer(index, planes, length=1), heads)


def as_edit(variant: Variant, subject: Subject) -> Edit:
    """The edit that makes a live model rotate as `variant`, in every layer that rotates.

    Variants that stop planes leave the others as they are; the rest take the model's base
    and trained context, and replace the frequencies and the attention factor that it has.
    """
    if variant.row.stops is not None:
        heads = [f"{n}.*" for n in range(subject.layers) if variant.stops_in(n)]
        select = variant.row.stops(variant.value) if heads else PlaneNumbers(())
        return stop(select, heads=",".join(heads) or ALL_HEADS)
    factor_now = attention_factor(subject)

    def frequencies(layer: Layer) -> Rates:
        options = {"rotary_dim": layer.planes.rotary_dim, "length": layer.length}
        shape = shape_of(subject, layer.index, **options)
        inv_freq, factor = variant.frequencies(shape)
        return inv_freq, factor / factor_now

    return Edit(EVERY, turning_at(frequencies))


@dataclass(frozen=True, eq=False)
class ModelEdit:
    """All open edits of a model, applied at its attention; `planes` are those without edits."""

    subject: Subject
    planes: Sequence[Planes]
    edits: tuple[Edit, ...]

    def __call__(
        self, layer: int, query: Tensor, key: Tensor, rows: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Queries and keys as the edits change them; see `AttentionEdit`."""
        if not self.edits:
            return query, key
        continued = query.shape[2] < key.shape[2]
        planes = planes_now(self.subject, layer, self.planes[layer], continued=continued)
        heads, groups = query.shape[1], key.shape[1]
        about = Layer(layer, planes, length=int(rows.max()) + 1)
        of_query, of_key = change_layer(self.edits, about, heads)
        if not of_query.leaves(planes):
            query = turn(query, rows, planes, of_query)
        if of_key.leaves(planes):
            return query, key
        shared = of_key.shared(groups=groups)
        if shared is None:  # heads of one group differ: a key for each
            key = key.repeat_interleave(heads // groups, dim=1)
        return query, turn(key, keys, planes, shared or of_key)

    def inv_freq(
        self, layer: int, planes: Planes, *, length: int
    ) -> Float[Tensor, "head frequency"]:
        """How each head rotates under the edits, in rad/token; see `AttentionEdit`."""
        about = Layer(layer, planes, length)
        return change_layer(self.edits, about, self.subject.heads)[0].inv_freq


@dataclass(frozen=True)
class Entry:
    """The model as it is, or under an edit, and how each layer rotates."""

    name: str
    edit: ModelEdit | None
    planes: list[Planes]

    def open(self, subject: Subject) -> AbstractContextManager[None]:
        """The model runs as this entry while the block runs."""
        return nullcontext() if self.edit is None else subject.edit(self.edit)


def entries_of(
    subject: Subject, edits: Mapping[str, Edit | str | Sequence[Edit | str]], *, context: int
) -> list[Entry]:
    """An entry for the model as it is and for every edit, all checked."""
    if NONE in edits:
        raise BadArgument(f'An edit cannot be called "{NONE}": that is the model as it is.')
    by_itself = [layer.planes for layer in subject.rotations(context)]
    entries = [Entry(NONE, None, subject.planes(context))]
    for name, given in edits.items():
        edit = stack_edits(subject, [given] if isinstance(given, Edit | str) else given)
        turned = [edited_planes(edit, *one, length=context) for one in enumerate(by_itself)]
        entries.append(Entry(name, edit, turned))
    return entries
