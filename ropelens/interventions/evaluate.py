"""What edits of the rotation do to a model: the same measures, on the same tokens, for each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from operator import add
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.attention.attention_change import attention_change
from ropelens.attention.call import AttentionCall
from ropelens.attention.offset_bins import sum_bins
from ropelens.attention.sums import Sums, by_group, by_layer, mean_loss, no_sums
from ropelens.attention.variables import labelled
from ropelens.budget.held_out import LayerFit
from ropelens.budget.labels import label_heads
from ropelens.budget.logit import SCORES
from ropelens.errors import Count, Positive, Whole, public
from ropelens.interventions.entries import NONE, Entry, Intervention, entries_of
from ropelens.interventions.tasks import TRIALS, copies, needles
from ropelens.interventions.truncation_table import DEFAULT_MEASURES, wanted_measures
from ropelens.interventions.variables import EVALUATED
from ropelens.model.as_live_model import Model
from ropelens.model.live_model import LiveModel
from ropelens.profiles.capture import TokenNames
from ropelens.profiles.heads import head_values, resample_labels
from ropelens.profiles.induction import Task, repeats
from ropelens.profiles.measurement import Batch, Measurement
from ropelens.profiles.measures import STATISTICS, columns
from ropelens.profiles.passes import OBSERVED, Progress, cost_of_fit, fit_layers, sum_batch
from ropelens.profiles.summary import bits_of, number_dims, plane_coordinates, summarize
from ropelens.profiles.token_sets import CLASSES, ids_of
from ropelens.runtime.processes import gather, shard
from ropelens.runtime.progress import ShowProgress, Stage, silent
from ropelens.runtime.savepoint import begin_stage
from ropelens.text.rows import HowMany
from ropelens.text.text import Text
from ropelens.text.tokenize import TextInput

RESAMPLES = 400  # draws of the sequences that intervals of label changes come from


@public
def evaluate(
    model: Model,
    text: TextInput,
    *,
    tokenizer: TokenNames | None = None,
    edits: Mapping[str, Intervention | Sequence[Intervention]] | None = None,
    controls: Count = 0,
    measures: str | Sequence[str] = DEFAULT_MEASURES,
    rows: HowMany = "auto",
    prompt_lengths: Sequence[Whole] | None = None,
    prompts: Positive = TRIALS,
    distances: Sequence[Whole] | None = None,
    seed: Whole = 0,
    batch_size: Positive | None = None,
    progress: ShowProgress | None = None,
) -> xr.Dataset:
    """Measure `model` as it is and under each of `edits`, on the same tokens.

    `edits` names changes of the model: an edit, the name of a variant such as "p-rope:0.75", a
    block of `silence_heads`, or several together. The result's `edit` starts with "none", the
    model as it is (under what is open around the call). Sequences, rows and random tokens are
    the same for all, so differences are paired; `ropelens.paired_changes` gives their table.
    After each edit that names heads come `controls` (8 or more tell much) with as many random
    other heads of the same layers in their place; the coordinate `control_of` names that edit.
    The other options are as for `profile`; sequences may be longer than
    the trained context, and of more than 65,536 tokens run in chunks.

    `measures` is any of:

    - "loss": `loss` (edit, sequence) in nats/token, `predicted_tokens` (sequence); the same of
      tokens that the sequence had before, `seen_loss` and `seen_tokens`; with `tokenizer` of
      each class of `attention_on`, `class_loss` and `class_tokens` (token_class); `mean_loss`
      (edit) over all predicted tokens and `position_loss` (edit, position_bin), each with
      its standard error (`_se`) over the groups of sequences in the coordinate `group`;
      `far_loss` and `far_tokens`, of the bins of positions in the second half of the context.
    - "induction": `induction` and `duplicate_token` (edit, layer, head), as in a profile,
      `trial_induction` (edit, trial, layer, head) of each sequence of random tokens, and the
      loss of these the first time and when repeated (edit, trial).
    - "retrieval": `retrieval` (edit, retrieval_length, depth), the share of needles hidden in
      the text that are found, which asks for no instruction tuning (chance is 1 in 8), and
      `retrieval_hit`, 1 or 0 for each `retrieval_trial`. `prompt_lengths` are in tokens, by
      default a quarter, a half and all of the context, `prompts` of each length and depth.
    - "copying", on request: `copy_loss` (edit, copy_distance, trial), the loss of random tokens
      that come again after `distances` tokens (by default 8, 16, 32, ..., as far as both
      copies are in the context; more is allowed): 0 for a model that copies, ln(vocabulary)
      for one that cannot.
    - "change": `attention_change` (edit, layer, head) in bits, the mean over rows of
      KL(A of the model as it is || A under the edit); with `tokenizer` also over the rows of
      each class of tokens, `class_change` (edit, layer, head, token_class).
    - "labels": the attention budget and `label` (edit, layer, head);
      `labels_changed_resampled` (edit, resample), how many heads change their label when groups
      of sequences are drawn again; with `tokenizer` also `class_label` (edit, layer, head,
      token_class), the labels over the rows of each class of tokens.

    Coordinates `inv_freq` (rad/token) and `wavelength` (tokens) say how the model rotates as
    it is (layer, frequency). docs/measures.md defines all variables. Raises `BadArgument` for
    measures that do not exist, and otherwise what `profile` and `edit_rope` do.
    """
    options: dict[str, Any] = {"rows": rows, "seed": seed, "batch_size": batch_size}
    return evaluate_edits(
        Measurement.of(model, text, tokenizer=tokenizer, **options),
        tokenizer=tokenizer,
        edits=edits,
        controls=controls,
        measures=measures,
        prompt_lengths=prompt_lengths,
        prompts=prompts,
        distances=distances,
        progress=progress,
    )


def evaluate_edits(
    measurement: Measurement,
    *,
    tokenizer: TokenNames | None = None,
    edits: Mapping[str, Intervention | Sequence[Intervention]] | None = None,
    controls: int = 0,
    measures: str | Sequence[str] = DEFAULT_MEASURES,
    prompt_lengths: Sequence[int] | None = None,
    prompts: int = TRIALS,
    distances: Sequence[int] | None = None,
    progress: ShowProgress | None = None,
) -> xr.Dataset:
    """Return the evaluation of a measurement; `evaluate` explains the arguments."""
    live, text = measurement.live, measurement.text
    wanted = wanted_measures(measures)
    measurement.check_observation_is_exact()
    drawn: dict[str, Any] = {"controls": controls, "seed": measurement.seed}
    entries = entries_of(measurement.rotation, edits or {}, context=text.context, **drawn)
    tasks: dict[str, Task] = {}
    if "induction" in wanted:
        tasks["induction"] = repeats(measurement, entries[0].planes)  # any do for attention
    if "copying" in wanted:
        tasks["copying"] = copies(measurement, distances)
    if "retrieval" in wanted:
        tasks["retrieval"] = needles(measurement, prompt_lengths, prompts)
    edges = _position_edges(text.context, live.trained)
    classes = {n: ids_of(text.ids, n, tokenizer) for n in CLASSES if tokenizer is not None}
    fits, measured, scores = _run(measurement, entries, wanted, tasks, edges, classes, progress)

    values = {"edit": np.array([entry.name for entry in entries], dtype=object)}
    if controls:
        values["control_of"] = np.array([entry.control_of for entry in entries], dtype=object)
    if "loss" in wanted:
        values |= _loss_values(text, edges, classes, measured)
    if "change" in wanted:
        values |= _change_values(measured)
    if "labels" in wanted:
        values |= _label_values(entries, fits, measured)
    if classes and "labels" in wanted:
        values["class_label"] = _class_labels(measured, live.layers)
    if classes and wanted & {"loss", "change", "labels"}:
        values["token_class"] = np.array(list(classes), dtype=object)
    for name, task in tasks.items():
        each = [of[name] for of in scores]
        values |= {key: np.stack([of[key].numpy() for of in each]) for key in each[0]}
        values |= task.coordinates
    dataset = xr.Dataset(labelled(values, EVALUATED), plane_coordinates(entries[0].planes))
    names = {"control_of", "group", "position_start", "position_stop", "token_class"}
    dataset = number_dims(dataset.set_coords(names & values.keys()))
    return dataset.assign_attrs(measurement.facts)


# one pass of each entry, and its tasks


def _run(
    measurement: Measurement,
    entries: Sequence[Entry],
    wanted: set[str],
    tasks: Mapping[str, Task],
    edges: Int[Tensor, " edge"],
    classes: Mapping[str, Int[Tensor, " id"]],
    progress: ShowProgress | None,
) -> tuple[list[dict[int, LayerFit]], list[Measured], list[dict[str, dict[str, Tensor]]]]:
    """Of each entry the models of its budget, its numbers on the text, and on the tasks.

    Processes share the text and the tasks; what is done is saved.
    """
    live, text = measurement.live, measurement.text
    sets = 1 + len(classes)
    unmoved = torch.full((sets, live.layers, live.heads), torch.nan).double()
    unmoved[:, live.attending] = 0
    losses = torch.zeros(0, len(edges) + len(classes), dtype=torch.float64)
    nothing = Measured(no_sums(), losses, unmoved, torch.zeros(sets).double())
    stage = begin_stage(Measured)
    state = stage.state or [[], [nothing for _ in entries], [{} for _ in entries]]
    fits, measured, answers = state
    # Processes fit together, so one that saved later than another fits again.
    del fits[min(gather(len(fits))) :]
    unfitted = entries[len(fits) :] if "labels" in wanted else []
    layers = len(unfitted) * len(shard(len(live.attending)))
    done = measured[0].sums.sequences
    unseen = shard(len(text))[done:] if wanted & {"loss", "change", "labels"} else range(0)
    mine = [(n, name) for name in tasks for n in shard(len(entries)) if name not in answers[n]]
    left = len(entries) * int(text.real[unseen.start : unseen.stop].sum())
    left += sum(tasks[name].tokens for _, name in mine)
    tried = Stage("trying edits", left, cost=OBSERVED if fits or unfitted else 1.0)
    of_fits = Stage("fitting budgets", layers, "layers", cost=cost_of_fit(measurement, 0))
    with (progress or silent)(tried, of_fits) as step:
        for entry in unfitted:
            with entry.open(live):
                of = partial(step, stage=1)
                found, _ = fit_layers(measurement, entry.planes, surrogates=0, progress=of)
            fits.append(found)
            stage.save(state)
        for batch in measurement.batches(unseen):
            as_is: dict[int, AttentionCall] = {}
            for n, entry in enumerate(entries):
                budget = fits[n] if fits else {}
                change = as_is if "change" in wanted else None
                more = _on_text(live, batch, entry, budget, change, edges, classes, step)
                measured[n] += more
            stage.save(state)
        for n, name in mine:
            with entries[n].open(live):
                answers[n][name] = tasks[name].measure(step)
            stage.save(state)
    parts = gather((measured, answers))
    measured = [reduce(add, of) for of in zip(*(part[0] for part in parts), strict=True)]
    answers = [reduce(dict.__or__, of) for of in zip(*(part[1] for part in parts), strict=True)]
    return fits, measured, answers


@dataclass(frozen=True)
class Measured:
    """The numbers of one entry on some sequences; those of others add.

    `losses` are summed over bins of positions, over tokens that their sequence had before, and
    over classes of tokens; `change` (nats) over `rows`: all, and those of each class.
    """

    sums: Sums
    losses: Float[Tensor, "sequence bin"]
    change: Float[Tensor, "set layer head"]
    rows: Float[Tensor, " set"]

    def __add__(self, other: Measured) -> Measured:
        losses = torch.cat([self.losses, other.losses])
        change, rows = self.change + other.change, self.rows + other.rows
        return Measured(self.sums + other.sums, losses, change, rows)


def _on_text(
    live: LiveModel,
    batch: Batch,
    entry: Entry,
    fits: Mapping[int, LayerFit],
    as_is: dict[int, AttentionCall] | None,
    edges: Int[Tensor, " edge"],
    classes: Mapping[str, Int[Tensor, " id"]],
    progress: Progress,
) -> Measured:
    """One forward pass of an entry over a batch, every measure beside it.

    With `fits` attention budgets are measured. `as_is` holds the calls of the model as it is,
    which the first entry fills and others are compared with; None where they are not.
    """
    text = batch.text
    sets = _sets(text, classes)
    change = torch.zeros(sets.shape[1], live.layers, live.heads, dtype=torch.float64)

    def compare(call: AttentionCall) -> None:
        if as_is is None:
            return
        if entry.name == NONE:
            none = call.query[..., :0].transpose(1, 2)  # values and output may go
            as_is[call.layer] = replace(call, value=call.key[..., :0], output=none)
        else:
            change[:, call.layer] = attention_change(as_is[call.layer], call, batch.rows, sets)

    with entry.open(live):
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
    by_bin = sum_bins(losses[:, 1:].where(text.predicted[:, 1:], 0.0), edges - 1)
    splits = _splits(text, sets)
    by_split = losses[:, None].where(splits, 0.0).sum(2)
    rows = batch.rows.by_position(sets.shape[2])[:, None].where(sets, 0.0).sum((0, 2))
    return Measured(sums, torch.cat([by_bin, by_split], dim=1), change, rows)


def _sets(
    text: Text, classes: Mapping[str, Int[Tensor, " id"]]
) -> Bool[Tensor, "sequence set position"]:
    """All tokens, and those of each class."""
    tokens = text.ids.cpu()
    of_classes = [torch.isin(tokens, ids) for ids in classes.values()]
    return torch.stack([torch.ones_like(tokens, dtype=torch.bool), *of_classes], dim=1)


def _splits(
    text: Text, sets: Bool[Tensor, "sequence set position"]
) -> Bool[Tensor, "sequence split position"]:
    """Predicted tokens that their sequence had before, and those of each class: see `_sets`."""
    of_classes = sets[:, 1:] & text.predicted[:, None]
    return torch.cat([text.seen_before[:, None], of_classes], dim=1)


def _position_edges(longest: int, stated: int | None) -> Int[Tensor, " edge"]:
    """Edges of the bins of positions: two an octave, and the `stated` context."""
    edges = {round(2 ** (half / 2)) for half in range(2 * longest.bit_length() + 1)}
    edges.add(stated or longest)
    return torch.tensor([*(edge for edge in sorted(edges) if edge < longest), longest])


# numbers of all entries


def _loss_values(
    text: Text,
    edges: Int[Tensor, " edge"],
    classes: Mapping[str, Int[Tensor, " id"]],
    measured: Sequence[Measured],
) -> dict[str, np.ndarray]:
    of_sequences = sum_bins(text.predicted[:, 1 : text.context].long(), edges - 1)
    in_bins, far = by_group(of_sequences, text.group), (edges[:-1] >= text.context / 2).numpy()
    far_tokens = of_sequences.numpy()[:, far].sum(1)
    predicted = text.predicted.sum(1).numpy()
    tokens = _splits(text, _sets(text, classes)).sum(2).numpy()
    losses, of_splits = np.split(
        np.stack([of.losses.numpy() for of in measured]), [len(edges) - 1], axis=-1
    )
    means, by_bin = [], []
    for of in measured:
        sums = by_group(of.losses[:, : len(edges) - 1], text.group)
        means.append(mean_loss(sums.sum(1), in_bins.sum(1)))
        by_bin.append([mean_loss(*of_bin) for of_bin in zip(sums.T, in_bins.T, strict=True)])
    mean, error = np.array(means).T
    position, position_error = np.moveaxis(np.array(by_bin), -1, 0)
    with np.errstate(invalid="ignore"):  # NaN where a sequence has no such token
        split_loss = of_splits / tokens
        far_loss = losses[..., far].sum(-1) / far_tokens
    of_classes = {"class_loss": split_loss[..., 1:], "class_tokens": tokens[:, 1:]}
    return (of_classes if classes else {}) | {
        "loss": losses.sum(-1) / predicted,
        "predicted_tokens": predicted,
        "group": text.group.numpy(),
        "seen_loss": split_loss[..., 0],
        "seen_tokens": tokens[:, 0],
        "far_loss": far_loss,
        "far_tokens": far_tokens,
        "mean_loss": mean,
        "mean_loss_se": error,
        "position_loss": position,
        "position_loss_se": position_error,
        "position_start": edges[:-1].numpy(),
        "position_stop": edges[1:].numpy(),
    }


def _change_values(measured: Sequence[Measured]) -> dict[str, np.ndarray]:
    """Bits by which attention of all rows changes, and of those of each class."""
    nats = torch.stack([of.change / of.rows[:, None, None] for of in measured])
    of_all, *of_classes = (nats / math.log(2)).numpy().swapaxes(0, 1)
    classes = {"class_change": np.stack(of_classes, -1)} if of_classes else {}
    return {"attention_change": of_all} | classes


def _label_values(
    entries: Sequence[Entry], fits: Sequence[dict[int, LayerFit]], measured: Sequence[Measured]
) -> dict[str, np.ndarray]:
    """The budget and label of every head of every entry.

    `labels_changed_resampled` draws the same sequences of all entries; it is NaN where all of
    them are one group.
    """
    profiles = [
        summarize(of.sums, entry.planes, fit)
        for entry, of, fit in zip(entries, measured, fits, strict=True)
    ]
    names = (*columns("budget"), "positional_fraction", "label")
    each = [head_values(profile) for profile in profiles]
    values = {name: np.stack([one[name] for one in each]) for name in names}
    again = np.full((len(profiles), RESAMPLES), np.nan)
    if profiles[0].sizes["group"] > 1:
        drawn = [resample_labels(p, resamples=RESAMPLES, seed=0) for p in profiles]
        again = np.stack([(now != drawn[0]).sum(axis=(1, 2)) for now in drawn]).astype(float)
    values["labels_changed_resampled"] = again
    return values


def _class_labels(measured: Sequence[Measured], layers: int) -> np.ndarray:
    """The label [edit, layer, head, class] of each head over the rows of each class."""
    labels = []
    for of in measured:
        classes = {layer: scores[:, 1:].sum(0) for layer, scores in of.sums.scores.items()}
        scores = by_layer(classes, layers).transpose(1, 2)
        rows = scores[..., SCORES.index("weight")].numpy()
        labels.append(label_heads(bits_of(scores), rows=rows))
    return np.stack(labels)
