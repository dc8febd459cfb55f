"""Models that an evaluation compares: unmodified, edited, or with silenced heads."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from ropelens.errors import BadArgument
from ropelens.interventions.edit import Edit, ModelEdit, stack_edits
from ropelens.interventions.silence import Silence
from ropelens.model.attention_hooks import HeadSilence
from ropelens.rope.planes import Planes
from ropelens.rope.select import ALL_HEADS
from ropelens.rotation.probe import RotationProbe
from ropelens.text.rows import generator_of

NONE = "none"
"""Name of the unmodified model."""

Intervention = Edit | Silence | str
"""An edit, the name of a variant, or a block of `silence_heads`."""


@dataclass(frozen=True)
class Entry:
    """One model of an evaluation, unmodified or changed, and the planes of each layer.

    A control changes random heads. `control_of` is the name of the entry that it controls for.
    """

    name: str
    planes: list[Planes]
    edit: ModelEdit | None = None
    silences: Sequence[HeadSilence] = ()
    control_of: str = ""


def entries_of(
    rotation: RotationProbe,
    edits: Mapping[str, Intervention | Sequence[Intervention]],
    *,
    context: int,
    controls: int = 0,
    seed: int = 0,
) -> list[Entry]:
    """Entries for the unmodified model and every edit, after a check of all edits.

    An edit that names heads is followed by `controls` entries with random other heads of the
    same layers.
    """
    if NONE in edits:
        raise BadArgument(
            f'An edit cannot be called "{NONE}", the name of the unmodified model.'
        )
    live, layers = rotation.live, rotation.layers(context)

    def entry(name: str, changes: Sequence[Intervention], control_of: str = "") -> Entry:
        silences = [change for change in changes if isinstance(change, Silence)]
        edit = stack_edits(rotation, [x for x in changes if not isinstance(x, Silence)])
        planes = [edit.planes(n, x.planes, length=context) for n, x in enumerate(layers)]
        if any(silence.live.model is not live.model for silence in silences):
            raise BadArgument(f"{name} silences heads of another model.")
        outputs: list[HeadSilence] = []
        with ExitStack() as blocks:  # a mean is computed under the changes before it
            blocks.enter_context(live.edit(edit))
            for silence in silences:
                outputs.append(silence.outputs())
                blocks.enter_context(live.silence(outputs[-1]))
        return Entry(name, planes, edit if edit.edits else None, outputs, control_of)

    entries = [Entry(NONE, rotation.planes(context))]
    for name, changes in edits.items():
        changes = [changes] if isinstance(changes, Edit | Silence | str) else changes
        entries.append(entry(name, changes))
        chosen = {
            index: live.heads_of(change.heads)
            for index, change in enumerate(changes)
            if not isinstance(change, str) and change.heads != ALL_HEADS
        }
        controlled = random_heads(changes, chosen, controls, seed) if chosen else []
        for number, drawn in enumerate(controlled, start=1):
            entries.append(entry(f"{name}, random {number}", drawn, name))
    return entries


def random_heads(
    changes: Sequence[Intervention],
    chosen: Mapping[int, Bool[Tensor, "layer head"]],
    draws: int,
    seed: int,
) -> list[list[Intervention]]:
    """`changes` with random other heads of the same layers, `draws` times.

    `chosen` has the heads of the changes that name heads; other changes stay the same. All
    changes replace a given head by the same random head. The list is shorter if fewer sets of
    heads exist.
    """
    sets: dict[tuple[str, ...], list[Intervention]] = {}
    generator = generator_of(seed)
    for _ in range(1000):
        if len(sets) == draws:
            break
        moved = _move_heads(torch.stack([*chosen.values()]), generator)
        lists = dict(zip(chosen, map(_head_list, moved), strict=True))
        drawn: list[Any] = [*changes]
        for index, heads in lists.items():
            drawn[index] = replace(drawn[index], heads=heads)
        sets.setdefault(tuple(lists.values()), drawn)
    return [*sets.values()]


def _head_list(heads: Bool[Tensor, "layer head"]) -> str:
    return ",".join(f"{layer}.{head}" for layer, head in heads.nonzero().tolist())


def _move_heads(
    chosen: Bool[Tensor, "change layer head"], generator: torch.Generator
) -> Bool[Tensor, "change layer head"]:
    """Chosen heads, each moved to a random head of its layer that no change chooses."""
    moved, any_chosen = torch.zeros_like(chosen), chosen.any(0)
    for layer in any_chosen.any(1).nonzero().flatten().tolist():
        heads, free = any_chosen[layer].nonzero()[:, 0], (~any_chosen[layer]).nonzero()[:, 0]
        if len(free) < len(heads):
            raise BadArgument(
                f"Layer {layer} has too few heads for random controls.",
                seen=f"{len(heads)} of {chosen.shape[2]} heads are chosen",
                hint="at most half of the heads of a layer, or controls=0",
            )
        others = free[torch.randperm(len(free), generator=generator)[: len(heads)]]
        moved[:, layer, others] = chosen[:, layer, heads]
    return moved
