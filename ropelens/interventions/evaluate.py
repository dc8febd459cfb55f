"""Evaluation of edits: the same measures on the same tokens, without and under each edit."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float

from ropelens.arguments import Count, Positive, Whole, public
from ropelens.attention.sums import by_group, mean_loss
from ropelens.attention.visibility import sum_bins
from ropelens.interventions.class_labels import class_label_values
from ropelens.interventions.entries import Edits, Entry, entries_of
from ropelens.interventions.entry_runs import (
    OF_TEXT,
    SweepProgress,
    run_entries,
)
from ropelens.interventions.measure_names import DEFAULT_MEASURES, wanted_measures
from ropelens.interventions.token_split import TokenSplit
from ropelens.interventions.variables import EVALUATED
from ropelens.profiles import summary
from ropelens.profiles.finite import warn_unless_finite
from ropelens.profiles.heads import head_values
from ropelens.profiles.label_changes import ResampledLabels
from ropelens.profiles.measurement import Measured, Measurement
from ropelens.profiles.measures import columns
from ropelens.profiles.needles import TRIALS, Needles
from ropelens.profiles.tasks import Copies, Repeats, Task
from ropelens.rope.planes import Planes
from ropelens.runtime.progress import ProgressOption
from ropelens.schema.rows import labelled
from ropelens.text.prompts import TokenNames
from ropelens.text.rows import HowMany
from ropelens.text.tokenize import TextInput

COORDINATES = {
    "control_of",
    "group",
    "position_start",
    "position_stop",
    "token_class",
}


@public
def evaluate(
    model: Measured,
    text: TextInput,
    *,
    tokenizer: TokenNames | None = None,
    edits: Edits | None = None,
    controls: Count = 0,
    measures: str | Sequence[str] = DEFAULT_MEASURES,
    rows: HowMany = "auto",
    prompt_lengths: Sequence[Whole] | None = None,
    prompts: Positive = TRIALS,
    distances: Sequence[Whole] | None = None,
    seed: Whole = 0,
    batch_size: Positive | None = None,
    progress: ProgressOption = None,
) -> xr.Dataset:
    """Measure `model` without edits and under each of `edits`, on the same text.

    `edits` maps names to an edit, a variant such as "p-rope:0.75", a block of `silence_heads`,
    or a list of these. All edits have the same sequences, rows and random tokens, so
    differences are paired (`ropelens.paired_changes`). After each edit that names heads,
    `controls` (8 or more are useful) have random other heads of the same layers; the coordinate
    `control_of` names the edit. The other options are as for `profile`.

    Returns a dataset over `edit`, which starts with "none": the model under only the blocks
    that are open around the call. `inv_freq` (rad/token) and `wavelength` (tokens) describe its
    rotation (layer, frequency). docs/measures.md defines the variables of each of `measures`;
    with `tokenizer`, some of them also exist for each class of `attention_on` (`class_`):

    - "loss": `loss` (edit, sequence) in nats/token, also for tokens that occurred earlier in
      their sequence (`seen_`) and for the second half of the context (`far_`). `mean_loss`
      (edit) and `position_loss` (edit, position_bin) have standard errors (`_se`) over the
      groups of sequences in the coordinate `group`.
    - "induction": `induction` and `duplicate_token` (edit, layer, head), as in a profile;
      `trial_induction` (edit, trial, layer, head) for each sequence of random tokens; and the
      loss of these tokens at first and when repeated (edit, trial). They show the attention of
      silenced heads before it is replaced; `silenced` (edit, layer, head) is 1 for these heads.
    - "retrieval": `retrieval` (edit, retrieval_length, depth), the share of needles in the text
      that the model finds (chance is 1 in 8; no instruction tuning is needed).
      `prompt_lengths` are in tokens, by default a quarter, a half and all of the context, with
      `prompts` per length and depth.
    - "copying" (only on request): `copy_loss` (edit, copy_distance, trial), the loss of random
      tokens that are repeated after `distances` tokens (by default 8, 16, 32, ..., as far as
      both copies fit into the context). It is 0 for a model that copies, and ln(vocabulary) for
      a model that cannot copy.
    - "change": `attention_change` (edit, layer, head) in bits, the mean over rows of KL(A
      without the edit || A under the edit).
    - "labels": the attention budget and `label` (edit, layer, head). The groups of sequences
      are drawn again 400 times: `label_change_confidence` is the share of draws in which the
      label differs from the label without the edit, and `labels_changed_resampled` is the
      number of such heads in each draw. `ropelens.paired_changes(results, by="head")` tells
      which labels changed by more than their uncertainty.

    Raises `BadArgument` for unknown measures, and the errors of `profile` and `edit_rope`.
    Warns if a loss or a change is not finite.
    """
    measurement = Measurement.of(
        model, text, tokenizer=tokenizer, rows=rows, seed=seed, batch_size=batch_size
    )
    selected = wanted_measures(measures)
    measurement.live.check_observation_is_exact(measurement.text)
    entries = entries_of(measurement, edits or {}, controls=controls)
    tasks: dict[str, Task] = {}
    if "induction" in selected:
        tasks["induction"] = Repeats(measurement, entries[0].planes)
    if "copying" in selected:
        tasks["copying"] = Copies(measurement, distances)
    if "retrieval" in selected:
        tasks["retrieval"] = Needles(measurement, prompt_lengths, prompts)
    split = TokenSplit.plan(
        measurement.text, trained=measurement.live.trained, tokenizer=tokenizer
    )
    done = run_entries(
        measurement,
        entries,
        measures=selected,
        tasks=tasks,
        split=split,
        progress=progress,
    )
    evaluation = Evaluation(measurement, entries, split, done)
    values = evaluation.entry_values()
    if controls:
        values["control_of"] = _objects([entry.control_of for entry in entries])
    if "loss" in selected:
        values |= evaluation.loss_values()
    if "change" in selected:
        values |= evaluation.change_values()
    if "labels" in selected:
        values |= evaluation.label_values()
    if split.classes and not OF_TEXT.isdisjoint(selected):
        values["token_class"] = np.array(list(split.classes), dtype=object)
    values |= evaluation.task_values(tasks)
    finite = evaluation.finite_values(values)
    warn_unless_finite(measurement.runs(), measurement.live.model, finite)
    return evaluation.dataset(values)


Values = dict[str, np.ndarray]
"""Variables of an evaluation by name; the dims are in `EVALUATED`."""


@dataclass(frozen=True)
class Evaluation:
    """What was measured of the `entries`, from which the variables follow."""

    measurement: Measurement
    entries: Sequence[Entry]
    split: TokenSplit
    done: SweepProgress

    @property
    def planes(self) -> list[list[Planes]]:
        """The planes of each layer, for each entry."""
        return [entry.planes for entry in self.entries]

    def entry_values(self) -> Values:
        """Names of the entries, and silenced heads."""
        values = {"edit": _objects([entry.name for entry in self.entries])}
        silenced = torch.stack([entry.silenced for entry in self.entries])
        if silenced.any():
            values["silenced"] = silenced.double().numpy()
        return values

    def loss_values(self) -> Values:
        """Losses of sequences, of bins of positions, and of classes of tokens."""
        text = self.measurement.text
        bins = self.split.bins
        losses = np.stack([entry.losses.numpy() for entry in self.done.sums])
        bin_loss = losses[..., :bins]
        predicted = text.predicted.sum(1).numpy()
        values = {
            "loss": bin_loss.sum(-1) / predicted,
            "predicted_tokens": predicted,
            "group": text.group.numpy(),
        }
        values |= self._split_losses(losses[..., bins:])
        values |= self._bin_losses()
        return values

    def _split_losses(self, sums: Float[np.ndarray, "edit sequence split"]) -> Values:
        """Mean losses of tokens that occurred before, and of each class of tokens."""
        split = self.split
        tokens = split.predicted(self.measurement.text).sum(2).numpy()
        with np.errstate(invalid="ignore"):  # NaN if a sequence has no such token
            losses = sums / tokens
        values = {"seen_loss": losses[..., 0], "seen_tokens": tokens[:, 0]}
        if split.classes:
            values["class_loss"] = losses[..., 1:]
            values["class_tokens"] = tokens[:, 1:]
        return values

    def _bin_losses(self) -> Values:
        """Mean losses of all positions, of each bin, and of the second half of the context."""
        text = self.measurement.text
        edges = self.split.edges
        bin_tokens = sum_bins(text.predicted[:, 1 : text.context].long(), edges - 1)
        is_far = (edges[:-1] >= text.context / 2).numpy()
        far_tokens = bin_tokens.numpy()[:, is_far].sum(1)
        group_tokens = by_group(bin_tokens, text.group)
        far_losses = []
        means = []  # of all positions, then of each bin
        errors = []
        for entry in self.done.sums:
            bin_losses = entry.losses[:, : self.split.bins]
            far_losses.append(bin_losses.numpy()[:, is_far].sum(-1))
            group_losses = by_group(bin_losses, text.group)
            pairs = [mean_loss(group_losses.sum(1), group_tokens.sum(1))]
            for losses, tokens in zip(group_losses.T, group_tokens.T, strict=True):
                pairs.append(mean_loss(losses, tokens))
            means.append([mean for mean, _ in pairs])
            errors.append([error for _, error in pairs])
        mean = np.array(means)
        error = np.array(errors)
        with np.errstate(invalid="ignore"):  # NaN if a sequence has no such token
            far_loss = np.stack(far_losses) / far_tokens
        return {
            "far_loss": far_loss,
            "far_tokens": far_tokens,
            "mean_loss": mean[:, 0],
            "mean_loss_se": error[:, 0],
            "position_loss": mean[:, 1:],
            "position_loss_se": error[:, 1:],
            "position_start": edges[:-1].numpy(),
            "position_stop": edges[1:].numpy(),
        }

    def change_values(self) -> Values:
        """Change of the attention in bits, on all rows and on the rows of each class."""
        changes = []
        for entry in self.done.sums:
            nats = entry.change / entry.rows[:, None, None]
            changes.append((nats / math.log(2)).numpy())
        by_set = np.stack(changes, axis=1)
        values = {"attention_change": by_set[0]}
        if len(by_set) > 1:
            values["class_change"] = np.moveaxis(by_set[1:], 0, -1)
        return values

    def label_values(self) -> Values:
        """Budget and label of every head of every entry, and labels by class of tokens."""
        profiles = []
        for sums, planes, fits in zip(
            self.done.sums, self.planes, self.done.fits, strict=True
        ):
            profiles.append(summary.summarize(sums.sums, planes, fits))
        heads = [head_values(profile) for profile in profiles]
        values = {}
        for name in (*columns("budget"), "positional_fraction", "label"):
            values[name] = np.stack([of_entry[name] for of_entry in heads])
        values |= _resampled_changes(profiles)
        if self.split.classes:
            values |= class_label_values(self.done.sums, self.measurement.live.layers)
        return values

    def task_values(self, tasks: Mapping[str, Task]) -> Values:
        """The numbers of the tasks, and their coordinates."""
        values: Values = {}
        for name, task in tasks.items():
            answers = [answer[name] for answer in self.done.answers]
            for key in answers[0]:
                values[key] = np.stack([answer[key].numpy() for answer in answers])
            values |= task.coordinates
        return values

    def finite_values(self, values: Values) -> Values:
        """Those of the `values` that a sound model never makes NaN, by name."""
        finite: Values = {}
        for name in ("mean_loss", "copy_loss", "first_loss", "repeat_loss"):
            if name in values:
                finite[name] = values[name]
        if "attention_change" in values:
            attending = self.measurement.live.attending_heads.numpy()
            changes = values["attention_change"]
            finite["attention_change"] = changes[:, attending]
        return finite

    def dataset(self, values: Values) -> xr.Dataset:
        """The `values` as a labelled dataset, with the planes of the unmodified model."""
        measurement = self.measurement
        coordinates = summary.plane_coordinates(
            self.planes[0], heads=measurement.live.heads
        )
        coordinates |= summary.kind_coordinates(measurement.rotation.kinds)
        dataset = xr.Dataset(labelled(values, EVALUATED), coordinates)
        dataset = dataset.set_coords(COORDINATES & values.keys())
        attrs = {"kind": "evaluation"} | measurement.result_attributes()
        return summary.number_dims(dataset).assign_attrs(attrs)


def _objects(names: Sequence[str]) -> np.ndarray:
    return np.array(names, dtype=object)


def _resampled_changes(profiles: Sequence[xr.Dataset]) -> Values:
    """How often labels differ from the first profile, in the same resamples of groups."""
    unmodified = ResampledLabels(profiles[0])
    confidences = []
    counts = []
    for profile in profiles:
        changes = unmodified.changes(profile)
        confidences.append(changes.confidence)
        counts.append(changes.count)
    return {
        "label_change_confidence": np.stack(confidences),
        "labels_changed_resampled": np.stack(counts),
    }
