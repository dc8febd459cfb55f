"""Passes of an evaluation: the model runs under each edit, on the text and on the tasks."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.attention.attention_change import attention_change
from ropelens.attention.call import AttentionCall
from ropelens.attention.offset_bins import sum_bins
from ropelens.attention.sums import Sums, no_sums
from ropelens.budget.held_out import LayerFit, Sample
from ropelens.interventions.entries import NONE, Entry
from ropelens.model.live_model import LiveModel
from ropelens.profiles.capture import TokenNames
from ropelens.profiles.induction import Task
from ropelens.profiles.measurement import Batch, Measurement
from ropelens.profiles.measures import STATISTICS
from ropelens.profiles.passes import OBSERVED, Progress, fit_cost, fit_layers, sum_batch
from ropelens.profiles.token_sets import CLASSES, ids_of
from ropelens.runtime.processes import gather, shard
from ropelens.runtime.progress import ShowProgress, Stage, silent
from ropelens.runtime.savepoint import begin_stage
from ropelens.text.text import Text

Answers = dict[str, dict[str, Tensor]]
"""The numbers of each task, by the name of the task."""


@dataclass(frozen=True)
class TokenSplit:
    """Bins of positions (`edges`) and `classes` of tokens (ids) that split the losses."""

    edges: Int[Tensor, " edge"]
    classes: Mapping[str, Int[Tensor, " id"]]

    @classmethod
    def plan(
        cls,
        ids: Int[Tensor, "sequence position"],
        *,
        context: int,
        trained: int | None,
        tokenizer: TokenNames | None,
    ) -> "TokenSplit":
        """Two bins per octave, with a further edge at the trained context."""
        edges = {round(2 ** (half / 2)) for half in range(2 * context.bit_length() + 1)}
        edges.add(trained or context)
        inner = [edge for edge in sorted(edges) if edge < context]
        classes = {n: ids_of(ids, n, tokenizer) for n in CLASSES if tokenizer is not None}
        return cls(torch.tensor([*inner, context]), classes)

    def sets(
        self, ids: Int[Tensor, "sequence position"]
    ) -> Bool[Tensor, "sequence set position"]:
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
    """Sums of one entry over some sequences. Sums over different sequences can be added.

    `losses` (nats) are summed over bins of positions, over repeated tokens, and over classes
    of tokens. `change` (nats) is summed over rows, whose number is `rows`: all rows, and the
    rows of each class.
    """

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
    progress: ShowProgress | None,
) -> tuple[list[dict[int, LayerFit]], list[EntrySums], list[Answers]]:
    """Return the fits, the sums over the text and the answers to the tasks, for each entry.

    Processes share the text and the tasks. An open savepoint saves the finished parts.
    """
    live, text = measurement.live, measurement.text
    stage = begin_stage(EntrySums)
    sets = 1 + len(split.classes)
    change = torch.full((sets, live.layers, live.heads), torch.nan).double()
    change[:, live.attending] = 0  # layers without attention have NaN
    losses = torch.zeros(0, len(split.edges) - 1 + sets, dtype=torch.float64)
    nothing = EntrySums(no_sums(), losses, change, torch.zeros(sets).double())
    state = stage.state or [[], [nothing for _ in entries], [{} for _ in entries]]
    fits, sums, answers = state
    # Processes fit together, so a process that saved later than another one fits again.
    del fits[min(gather(len(fits))) :]
    unfitted = entries[len(fits) :] if "labels" in measures else []
    done = sums[0].sums.sequences
    unseen = shard(len(text))[done:] if {"loss", "change", "labels"} & {*measures} else range(0)
    runs = [(n, name) for name in tasks for n in shard(len(entries)) if name not in answers[n]]
    tokens = len(entries) * int(text.real[unseen.start : unseen.stop].sum())
    tokens += sum(tasks[name].tokens for _, name in runs)
    layers = len(unfitted) * len(shard(len(live.attending)))
    sample = Sample.draw(text, seed=measurement.seed)
    parameters, terms = live.model.num_parameters(), max(x.terms for x in entries[0].planes)
    cost = fit_cost(parameters, live.heads, terms, text.context, surrogates=0)
    stages = (
        Stage("trying edits", tokens, cost=OBSERVED if fits or unfitted else 1.0),
        Stage("fitting budgets", layers, "layers", cost=cost),
    )
    with (progress or silent)(*stages) as step:
        for entry in unfitted:
            show = partial(step, stage=1)
            with live.changed(entry.edit, entry.silences):
                fit, _ = fit_layers(
                    measurement, sample, entry.planes, surrogates=0, progress=show
                )
            fits.append(fit)
            stage.save(state)
        for batch in measurement.batches(unseen):
            unedited: dict[int, AttentionCall] | None = {} if "change" in measures else None
            for number, entry in enumerate(entries):
                fit = fits[number] if fits else {}
                sums[number] += _sum_entry(live, batch, entry, split, fit, unedited, step)
            stage.save(state)
        for number, name in runs:
            with live.changed(entries[number].edit, entries[number].silences):
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
    """Sums of an entry over a batch, from one forward pass.

    If there are `fits`, attention budgets are measured. If `unedited` is a dict, the entry
    "none" stores its attention calls there, and each later entry is compared with these calls.
    """
    text = batch.text
    sets = split.sets(text.ids)
    change = torch.zeros(sets.shape[1], live.layers, live.heads, dtype=torch.float64)

    def compare(call: AttentionCall) -> None:
        if unedited is None:
            return
        if entry.name == NONE:
            empty = call.query[..., :0].transpose(1, 2)  # free the values and the output
            unedited[call.layer] = replace(call, value=call.key[..., :0], output=empty)
        else:
            before = unedited[call.layer]
            change[:, call.layer] = attention_change(before, call, batch.rows, sets)

    with live.changed(entry.edit, entry.silences):
        sums, losses = sum_batch(
            live,
            batch,
            entry.planes,
            statistics=STATISTICS if fits else (),
            fits=fits,
            progress=progress,
            sets=sets,
            also=compare,
        )
    in_bins = losses[:, 1:].where(text.predicted[:, 1:], 0.0)
    by_bin = sum_bins(in_bins, split.edges - 1)
    by_split = losses[:, None].where(split.predicted(text), 0.0).sum(2)
    rows = batch.rows.by_position(sets.shape[2])[:, None].where(sets, 0.0).sum((0, 2))
    return EntrySums(sums, torch.cat([by_bin, by_split], dim=1), change, rows)
