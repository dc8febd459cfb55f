"""Models that an evaluation compares (unmodified, edited, silenced heads), and their passes."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import chain, pairwise
from operator import add
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.arguments import check_count
from ropelens.attention.attention_change import attention_change
from ropelens.attention.call import AttentionCall
from ropelens.attention.sums import Sums
from ropelens.attention.visibility import sum_bins
from ropelens.budget.held_out import LayerFit
from ropelens.errors import BadArgument
from ropelens.interventions.plane_edits import Edit
from ropelens.interventions.rotation_edit import place_edits
from ropelens.interventions.silence import Silence
from ropelens.model.intervention import Intervention
from ropelens.model.live_model import LiveModel
from ropelens.profiles.layer_fits import LayerFitter
from ropelens.profiles.measurement import Batch, Measurement
from ropelens.profiles.measures import STATISTICS
from ropelens.profiles.passes import BatchPass, Progress
from ropelens.profiles.tasks import Task
from ropelens.profiles.token_sets import CLASSES, ids_of
from ropelens.rope.planes import Planes
from ropelens.rope.select import ALL_HEADS, HeadMask, heads_by_layer
from ropelens.runtime.processes import gather, shard
from ropelens.runtime.progress import ProgressOption, Stage, display_of
from ropelens.runtime.savepoint import resume
from ropelens.text.prompts import TokenNames
from ropelens.text.rows import Ids, generator_of
from ropelens.text.text import Text

NONE = "none"  # name of the unmodified model

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
    live, rotation, context = (
        measurement.live,
        measurement.rotation,
        measurement.text.context,
    )
    layers, able = rotation.layers(context), live.attending_heads
    no_head = torch.zeros_like(able)

    def entry(name: str, changes: Sequence[Change], control_of: str = "") -> Entry:
        silences = [change for change in changes if isinstance(change, Silence)]
        edits = [x for x in changes if not isinstance(x, Silence)]
        edit = place_edits(rotation, edits)
        planes = [
            edit.planes(n, x.planes, length=context) for n, x in enumerate(layers)
        ]
        if any(silence.live.model is not live.model for silence in silences):
            raise BadArgument(f"{name} silences heads of another model.")
        interventions: list[Intervention] = [edit] if edit.edits else []
        silenced = no_head
        with ExitStack() as blocks:  # a mean is computed under the changes before it
            blocks.enter_context(live.intervene(edit))
            for silence in silences:
                interventions.append(silence.measured())
                blocks.enter_context(live.intervene(interventions[-1]))
                silenced = silenced | silence.chosen
        return Entry(name, planes, silenced, interventions, control_of)

    entries = [Entry(NONE, rotation.planes(context), no_head)]
    for name, changes in edits.items():
        changes = [changes] if isinstance(changes, Edit | Silence | str) else changes
        entries.append(entry(name, changes))
        chosen = {
            index: heads_by_layer(change.heads, able, rotation.kind_names)
            for index, change in enumerate(changes)
            if not isinstance(change, str) and change.heads != ALL_HEADS
        }
        sets = _random_heads(changes, chosen, able, controls, measurement.seed)
        for number, drawn in enumerate(sets, start=1):
            entries.append(entry(f"{name}, random {number}", drawn, name))
    return entries


def _random_heads(
    changes: Sequence[Change],
    chosen: Mapping[int, HeadMask],
    able: HeadMask,
    draws: int,
    seed: int,
) -> list[list[Change]]:
    """`changes` with random heads for the `chosen` heads, `draws` times or less often."""
    sets: dict[tuple[str, ...], list[Change]] = {}
    generator = generator_of(seed)
    for _ in range(1000 if chosen else 0):
        if len(sets) == draws:
            break
        moved = _move_heads(torch.stack([*chosen.values()]), able, generator)
        drawn: list[Any] = [*changes]
        for index, mask in zip(chosen, moved, strict=True):
            heads = ",".join(
                f"{layer}.{head}" for layer, head in mask.nonzero().tolist()
            )
            drawn[index] = replace(drawn[index], heads=heads)
        sets.setdefault(tuple(drawn[index].heads for index in chosen), drawn)
    return [*sets.values()]


def _move_heads(
    chosen: Bool[Tensor, "change layer head"],
    attending: HeadMask,
    generator: torch.Generator,
) -> Bool[Tensor, "change layer head"]:
    """Chosen heads, each moved to a random head of its layer that no change chooses."""
    moved, any_chosen = torch.zeros_like(chosen), chosen.any(0)
    others = attending & ~any_chosen
    for layer in any_chosen.any(1).nonzero().flatten().tolist():
        heads, free = (x[layer].nonzero()[:, 0] for x in (any_chosen, others))
        if len(free) < len(heads):
            what = f"Layer {layer} has too few heads for random controls."
            seen = f"{len(heads)} of {int(attending[layer].sum())} heads are chosen"
            hint = "at most half of the heads of a layer, or controls=0"
            raise BadArgument(what, seen=seen, hint=hint)
        drawn = free[torch.randperm(len(free), generator=generator)[: len(heads)]]
        moved[:, layer, drawn] = chosen[:, layer, heads]
    return moved


Answers = dict[str, dict[str, Tensor]]  # the numbers of each task, by its name


@dataclass(frozen=True)
class TokenSplit:
    """Bins of positions (`edges`) and `classes` of tokens (ids) that split the losses."""

    edges: Int[Tensor, " edge"]
    classes: Mapping[str, Int[Tensor, " id"]]

    @classmethod
    def plan(
        cls, text: Text, *, trained: int | None, tokenizer: TokenNames | None
    ) -> "TokenSplit":
        """Two bins per octave, with a further edge at the trained context."""
        context = text.context
        edges = {round(2 ** (half / 2)) for half in range(2 * context.bit_length() + 1)}
        edges.add(trained or context)
        inner = [edge for edge in sorted(edges) if edge < context]
        classes = {
            n: ids_of(text.ids, n, tokenizer) for n in CLASSES if tokenizer is not None
        }
        return cls(torch.tensor([*inner, context]), classes)

    def sets(self, ids: Ids) -> Bool[Tensor, "sequence set position"]:
        """All tokens, and the tokens of each class."""
        ids = ids.cpu()
        classes = [torch.isin(ids, class_ids) for class_ids in self.classes.values()]
        return torch.stack([torch.ones_like(ids, dtype=torch.bool), *classes], dim=1)

    def predicted(self, text: Text) -> Bool[Tensor, "sequence split position"]:
        """Predicted tokens that occurred before in their sequence, then those in each class."""
        classes = self.sets(text.ids)[:, 1:] & text.predicted[:, None]
        return torch.cat([text.seen_before[:, None], classes], dim=1)


@dataclass(frozen=True)
class EntrySums:
    """Sums (nats) of one entry: losses of bins, repeats and classes, and changes of classes."""

    sums: Sums
    losses: Float[Tensor, "sequence bin"]
    change: Float[Tensor, "set layer head"]
    rows: Float[Tensor, " set"]

    def __add__(self, other: "EntrySums") -> "EntrySums":
        losses = torch.cat([self.losses, other.losses])
        change, rows = self.change + other.change, self.rows + other.rows
        return EntrySums(self.sums + other.sums, losses, change, rows)


def run_entries(
    measurement: Measurement,
    entries: Sequence[Entry],
    measures: Collection[str],
    tasks: Mapping[str, Task],
    split: TokenSplit,
    progress: ProgressOption,
) -> tuple[list[dict[int, LayerFit]], list[EntrySums], list[Answers]]:
    """The fits, the sums over the text and the answers to the tasks, for each entry."""
    live, text = measurement.live, measurement.text
    stage = resume(EntrySums)
    sets = 1 + len(split.classes)
    change = torch.full((sets, live.layers, live.heads), torch.nan).double()
    change[:, live.attending_heads] = 0  # heads without attention have NaN
    losses = torch.zeros(0, len(split.edges) - 1 + sets, dtype=torch.float64)
    nothing = EntrySums(Sums(), losses, change, torch.zeros(sets).double())
    state = stage.state or [[], [nothing for _ in entries], [{} for _ in entries]]
    fits, sums, answers = state
    # Processes fit together, so a process that saved later than another one fits again.
    del fits[min(gather(len(fits))) :]
    unfitted = entries[len(fits) :] if "labels" in measures else []
    measured = [entry.sums.sequences for entry in sums]  # earlier entries may be ahead
    own = shard(len(text)) if {"loss", "change", "labels"} & {*measures} else range(0)
    parts = (own[a:b] for a, b in pairwise(sorted({*measured, len(own)})))
    runs = [
        (n, name)
        for name in tasks
        for n in shard(len(entries))
        if name not in answers[n]
    ]
    tokens = sum(int(text.real[[*own[done:]]].sum()) for done in measured)
    tokens += sum(tasks[name].tokens for _, name in runs)
    layers = len(unfitted) * len(shard(len(live.attending)))
    stages = Stage("trying edits", tokens), Stage("fitting budgets", layers, "layers")
    with display_of(progress)(*stages) as step:
        for entry in unfitted:
            options: dict[str, Any] = {
                "surrogates": 0,
                "progress": partial(step, stage=1),
            }
            with live.intervene(*entry.interventions):
                fit = LayerFitter(measurement, entry.planes, **options).fit_layers()
            fits.append(fit)
            stage.save(state)
        for batch in chain.from_iterable(map(measurement.batches, parts)):
            unedited: dict[int, AttentionCall] | None = (
                {} if "change" in measures else None
            )
            before = sums[-1].sums.sequences
            for number, entry in enumerate(entries):
                again = sums[number].sums.sequences > before
                if again and (number or unedited is None):
                    continue
                fit, show = (
                    fits[number] if fits else {},
                    (lambda _: None) if again else step,
                )
                added = _sum_entry(live, batch, entry, split, fit, unedited, show)
                if not again:
                    sums[number] += added
                    stage.save(state)
        for number, name in runs:
            with live.intervene(*entries[number].interventions):
                answers[number][name] = tasks[name].measure(step)
            stage.save(state)
    all_sums, all_answers = zip(*gather((sums, answers)), strict=True)
    sums = [reduce(add, parts) for parts in zip(*all_sums, strict=True)]
    answers = [reduce(dict.__or__, parts) for parts in zip(*all_answers, strict=True)]
    return fits, sums, answers


def _sum_entry(
    live: LiveModel,
    batch: Batch,
    entry: Entry,
    split: TokenSplit,
    fits: Mapping[int, LayerFit],
    unedited: dict[int, AttentionCall] | None,
    progress: Progress,
) -> EntrySums:
    """Sums of an entry over a batch, from one pass. "none" stores its calls in `unedited`."""
    text, sets = batch.text, split.sets(batch.text.ids)
    change = torch.zeros(sets.shape[1], live.layers, live.heads, dtype=torch.float64)

    def compare(call: AttentionCall) -> None:
        if unedited is None:
            return
        if entry.name == NONE:
            empty = call.query[..., :0].transpose(
                1, 2
            )  # free the values and the output
            unedited[call.layer] = replace(call, value=call.key[..., :0], output=empty)
        else:
            before = unedited[call.layer]
            changes = attention_change(before, call, batch.rows, sets)
            change[:, call.layer, : changes.shape[1]] = changes

    options: dict[str, Any] = {"fits": fits, "statistics": STATISTICS if fits else ()}
    options |= {"progress": progress, "sets": sets, "also": compare}
    with live.intervene(*entry.interventions):
        result = BatchPass(live, batch, entry.planes, **options).run()
    losses = result.losses
    in_bins = losses[:, 1:].where(text.predicted[:, 1:], 0.0)
    by_bin = sum_bins(in_bins, split.edges - 1)
    by_split = losses[:, None].where(split.predicted(text), 0.0).sum(2)
    rows = batch.rows.by_position(sets.shape[2])[:, None].where(sets, 0.0).sum((0, 2))
    split_losses = torch.cat([by_bin, by_split], dim=1)
    return EntrySums(result.sums, split_losses, change, rows)
