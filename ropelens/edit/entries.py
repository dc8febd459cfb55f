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
    subject: Subject, edits: Mapping[str, Edit | str | Sequence[Edit | str]], *, context: int
) -> list[Entry]:
    """An entry for the model as it is and for every edit, all checked."""
    if NONE in edits:
        raise BadArgument(
            f'An edit cannot be called "{NONE}": that is the model as it is.',
            attempt="another name for the edit",
        )
    by_itself = [layer.planes for layer in subject.rotations(context)]
    entries = [Entry(NONE, None, subject.planes(context))]
    for name, given in edits.items():
        edit = stack_edits(subject, [given] if isinstance(given, Edit | str) else given)
        turned = [edited_planes(edit, *one, length=context) for one in enumerate(by_itself)]
        entries.append(Entry(name, edit, turned))
    return entries
