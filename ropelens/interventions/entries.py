"""Models that an evaluation compares: unmodified, edited, and with silenced heads."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from ropelens.arguments import check_count
from ropelens.errors import BadArgument
from ropelens.interventions.plane_edits import Edit
from ropelens.interventions.rotation_edit import place_edits
from ropelens.interventions.silence import Silence
from ropelens.model.intervention import Intervention
from ropelens.profiles.measurement import Measurement
from ropelens.rope.planes import Planes
from ropelens.rope.select import ALL_HEADS, HeadMask, heads_by_layer
from ropelens.text.rows import generator_of

NONE = "none"  # name of the unmodified model
ATTEMPTS = 1000  # to draw different sets of random heads

Change = Edit | Silence | str
Edits = Mapping[str, Change | Sequence[Change]]  # by name


@dataclass(frozen=True)
class Entry:
    """A model of an evaluation; controls of `control_of` change random heads."""

    name: str
    planes: list[Planes]
    silenced: HeadMask
    interventions: Sequence[Intervention] = ()
    control_of: str = ""


def entries_of(measurement: Measurement, edits: Edits, *, controls: int) -> list[Entry]:
    """Entries of the unmodified model and of every edit, and `controls` if it names heads."""
    check_count(controls, "controls")
    if NONE in edits:
        what = f'An edit cannot be called "{NONE}", the name of the unmodified model.'
        raise BadArgument(what)
    rotation = measurement.rotation
    able = measurement.live.attending_heads
    no_head = torch.zeros_like(able)
    unmodified = Entry(NONE, rotation.planes(measurement.text.context), no_head)
    entries = [unmodified]
    for name, given in edits.items():
        changes = [given] if isinstance(given, Edit | Silence | str) else given
        entries.append(_entry(measurement, name, changes))
        chosen = _chosen_heads(changes, able, rotation.kind_names)
        drawn = _random_heads(
            changes, chosen, able, draws=controls, seed=measurement.seed
        )
        for number, of_random_heads in enumerate(drawn, start=1):
            control = f"{name}, random {number}"
            entries.append(
                _entry(measurement, control, of_random_heads, control_of=name)
            )
    return entries


def _entry(
    measurement: Measurement,
    name: str,
    changes: Sequence[Change],
    control_of: str = "",
) -> Entry:
    """The model under all `changes`; silences follow the edits."""
    live = measurement.live
    rotation = measurement.rotation
    context = measurement.text.context
    silences = [change for change in changes if isinstance(change, Silence)]
    edits = [change for change in changes if not isinstance(change, Silence)]
    edit = place_edits(rotation, edits)
    planes = [
        edit.planes(number, layer.planes, length=context)
        for number, layer in enumerate(rotation.layers(context))
    ]
    for silence in silences:
        if silence.live.model is not live.model:
            raise BadArgument(f"{name} silences heads of another model.")
    interventions: list[Intervention] = []
    if edit.edits:
        interventions.append(edit)
    silenced = torch.zeros_like(live.attending_heads)
    with ExitStack() as blocks:  # a mean is computed under the changes before it
        blocks.enter_context(live.intervene(edit))
        for silence in silences:
            measured = silence.measured()
            interventions.append(measured)
            blocks.enter_context(live.intervene(measured))
            silenced = silenced | silence.chosen
    return Entry(name, planes, silenced, interventions, control_of)


def _chosen_heads(
    changes: Sequence[Change],
    able: HeadMask,
    layer_types: Callable[[], Sequence[str]],
) -> dict[int, HeadMask]:
    """The heads of each change that names some heads, by the number of the change."""
    chosen = {}
    for number, change in enumerate(changes):
        if not isinstance(change, str) and change.heads != ALL_HEADS:
            chosen[number] = heads_by_layer(change.heads, able, layer_types)
    return chosen


def _random_heads(
    changes: Sequence[Change],
    chosen: Mapping[int, HeadMask],
    able: HeadMask,
    *,
    draws: int,
    seed: int,
) -> list[list[Change]]:
    """`changes` with random heads for the `chosen` heads, `draws` times or less often."""
    if not chosen:
        return []
    sets: dict[tuple[str, ...], list[Change]] = {}
    generator = generator_of(seed)
    masks = torch.stack([*chosen.values()])
    for _ in range(ATTEMPTS):
        if len(sets) == draws:
            break
        moved = _move_heads(masks, able, generator)
        drawn: list[Any] = [*changes]
        names = []
        for number, mask in zip(chosen, moved, strict=True):
            pairs = mask.nonzero().tolist()
            heads = ",".join(f"{layer}.{head}" for layer, head in pairs)
            drawn[number] = replace(drawn[number], heads=heads)
            names.append(heads)
        sets.setdefault(tuple(names), drawn)
    return [*sets.values()]


def _move_heads(
    chosen: Bool[Tensor, "change layer head"],
    attending: HeadMask,
    generator: torch.Generator,
) -> Bool[Tensor, "change layer head"]:
    """Chosen heads, each moved to a random head of its layer that no change chooses."""
    moved = torch.zeros_like(chosen)
    any_chosen = chosen.any(0)
    others = attending & ~any_chosen
    for layer in any_chosen.any(1).nonzero().flatten().tolist():
        heads = any_chosen[layer].nonzero()[:, 0]
        free = others[layer].nonzero()[:, 0]
        if len(free) < len(heads):
            raise BadArgument(
                f"Layer {layer} has too few heads for random controls.",
                seen=f"{len(heads)} of {int(attending[layer].sum())} heads are chosen",
                hint="at most half of the heads of a layer, or controls=0",
            )
        order = torch.randperm(len(free), generator=generator, device="cpu")
        drawn = free[order[: len(heads)]]
        moved[:, layer, drawn] = chosen[:, layer, heads]
    return moved
