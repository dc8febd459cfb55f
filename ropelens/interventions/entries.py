"""What an evaluation compares: the model as it is, under edits, and with heads silenced."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool
from torch import Tensor

from ropelens.errors import BadArgument
from ropelens.interventions.edit import Edit, ModelEdit, stack_edits
from ropelens.interventions.silence import Silence
from ropelens.model.attention_hooks import HeadSilence
from ropelens.model.live_model import LiveModel
from ropelens.rope.planes import Planes
from ropelens.rope.select import ALL_HEADS
from ropelens.rotation.probe import RotationProbe, edited_planes
from ropelens.text.rows import generator_of

NONE = "none"
"""The entry that is the model as it is."""

Intervention = Edit | Silence | str
"""An edit, the name of a variant, or a block of `silence_heads`."""


@dataclass(frozen=True)
class Entry:
    """The model as it is, or changed, and how each layer rotates.

    `control_of` names the entry whose heads this one has replaced by random ones.
    """

    name: str
    planes: list[Planes]
    edit: ModelEdit | None = None
    silences: Sequence[HeadSilence] = ()
    control_of: str = ""

    @contextmanager
    def open(self, live: LiveModel) -> Iterator[None]:
        """The model runs as this entry while the block runs."""
        with ExitStack() as blocks:
            if self.edit is not None:
                blocks.enter_context(live.edit(self.edit))
            for silence in self.silences:
                blocks.enter_context(live.silence(silence))
            yield


def entries_of(
    rotation: RotationProbe,
    edits: Mapping[str, Intervention | Sequence[Intervention]],
    *,
    context: int,
    controls: int = 0,
    seed: int = 0,
) -> list[Entry]:
    """An entry for the model as it is and for every edit, all checked.

    After each that names heads come `controls` with random other heads of the same layers.
    """
    if NONE in edits:
        raise BadArgument(f'An edit cannot be called "{NONE}": that is the model as it is.')
    live, unedited = rotation.live, rotation.unedited_planes(context)

    def entry(name: str, changes: Sequence[Intervention], control_of: str = "") -> Entry:
        edit = stack_edits(rotation, [one for one in changes if not isinstance(one, Silence)])
        turned = [edited_planes(edit, *one, length=context) for one in enumerate(unedited)]
        silences = [one for one in changes if isinstance(one, Silence)]
        if any(one.live.model is not live.model for one in silences):
            raise BadArgument(f"The heads that {name} silences are of another model.")
        outputs: list[HeadSilence] = []
        with ExitStack() as blocks:  # a mean is taken under what is open before it
            blocks.enter_context(live.edit(edit))
            for one in silences:
                outputs.append(one.outputs())
                blocks.enter_context(live.silence(outputs[-1]))
        return Entry(name, turned, edit if edit.edits else None, outputs, control_of)

    entries = [Entry(NONE, rotation.planes(context))]
    for name, given in edits.items():
        changes = [given] if isinstance(given, Edit | Silence | str) else given
        entries.append(entry(name, changes))
        for number, drawn in enumerate(random_heads(live, changes, controls, seed), start=1):
            entries.append(entry(f"{name}, random {number}", drawn, name))
    return entries


def random_heads(
    live: LiveModel, changes: Sequence[Intervention], draws: int, seed: int
) -> list[list[Intervention]]:
    """`changes` with as many other heads of each layer, `draws` times, or all sets there are.

    A head stands for the same one in all of them. Changes of all heads stay as they are.
    """
    named = {
        at: live.heads_of(one.heads)
        for at, one in enumerate(changes)
        if not isinstance(one, str) and one.heads != ALL_HEADS
    }
    sets: dict[tuple[str, ...], list[Intervention]] = {}
    generator = generator_of(seed)
    for _ in range(1000 if named else 0):  # there may be fewer sets than are asked for
        if len(sets) == draws:
            break
        moved = _moved(torch.stack([*named.values()]), generator)
        pairs = [[f"{layer}.{head}" for layer, head in one.nonzero().tolist()] for one in moved]
        lists = dict(zip(named, map(",".join, pairs), strict=True))
        drawn = [
            one if isinstance(one, str) or at not in lists else replace(one, heads=lists[at])
            for at, one in enumerate(changes)
        ]
        sets.setdefault(tuple(lists.values()), drawn)
    return [*sets.values()]


def _moved(
    chosen: Bool[Tensor, "change layer head"], generator: torch.Generator
) -> Bool[Tensor, "change layer head"]:
    """The heads that are chosen, each in the place of a random one that none chooses."""
    moved, any_chosen = torch.zeros_like(chosen), chosen.any(0)
    for layer in any_chosen.any(1).nonzero().flatten().tolist():
        mine, free = (of.nonzero().flatten() for of in (any_chosen[layer], ~any_chosen[layer]))
        if len(free) < len(mine):
            raise BadArgument(
                f"Layer {layer} has too few heads for random controls.",
                seen=f"{len(mine)} named of {chosen.shape[2]}",
                hint="at most half of the heads of a layer, or controls=0",
            )
        others = free[torch.randperm(len(free), generator=generator)[: len(mine)]]
        moved[:, layer, others] = chosen[:, layer, mine]
    return moved
