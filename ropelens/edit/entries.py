"""A model as it is and under edits, each ready to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from ropelens.edit.actions import Edit
from ropelens.edit.rope import stack_edits
from ropelens.errors import BadArgument
from ropelens.models.doorway import AttentionEdit
from ropelens.models.rotation import edited_planes
from ropelens.models.subject import Subject
from ropelens.rope.planes import Planes

NONE = "none"
"""The entry that is the model as it is."""


@dataclass(frozen=True)
class Entry:
    """The model as it is, or under an edit, and how each layer rotates."""

    name: str
    edit: AttentionEdit | None
    planes: list[Planes]

    def open(self, subject: Subject) -> AbstractContextManager[None]:
        """The model runs as this entry while the block runs."""
        return nullcontext() if self.edit is None else subject.edit(self.edit)


def entries_of(
    subject: Subject,
    edits: Mapping[str, Edit | str | Sequence[Edit | str]],
    *,
    context: int,
) -> tuple[list[Planes], list[Entry]]:
    """How the model itself rotates, and an entry for it and for every edit, all checked."""
    _check_names(edits)
    own = [layer.planes for layer in subject.rotations(context)]
    within = [layer.planes for layer in subject.rotations()]  # where edits start from
    around = subject.open_edit
    entries = [Entry(NONE, None, _planes_under(around, own, context))]
    for name, given in edits.items():
        together = (
            tuple(given)
            if isinstance(given, Sequence) and not isinstance(given, str)
            else (given,)
        )
        edit = stack_edits(subject, tuple(within), together)
        entries.append(Entry(name, edit, _planes_under(edit, own, context)))
    return own, entries


def _check_names(edits: Mapping[str, object]) -> None:
    """Refuse edits without names, and the name that the model as it is has."""
    if not isinstance(edits, Mapping) or not all(isinstance(name, str) for name in edits):
        raise BadArgument(
            "Edits that are measured have names.",
            seen=repr(edits)[:80],
            attempt='edits={"p = 0.75": ropelens.stop_slowest(0.25), "none at all": "nope"}',
        )
    if NONE in edits:
        raise BadArgument(
            f'An edit cannot be called "{NONE}": that is the model as it is.',
            attempt="another name for the edit",
        )


def _planes_under(edit: AttentionEdit | None, own: list[Planes], context: int) -> list[Planes]:
    """How each layer rotates under `edit`."""
    if edit is None:
        return own
    return [edited_planes(edit, layer, p, length=context) for layer, p in enumerate(own)]
