"""Evaluation of edits: the same measures on the same tokens, without and under each edit."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import xarray as xr

from ropelens.arguments import Count, Positive, Whole, public
from ropelens.attention.sums import by_group, by_layer, mean_loss
from ropelens.attention.visibility import sum_bins
from ropelens.budget.held_out import LayerFit, head_budget
from ropelens.budget.logit import SCORES
from ropelens.interventions.entries import (
    Edits,
    EntrySums,
    TokenSplit,
    entries_of,
    run_entries,
)
from ropelens.interventions.measure_names import DEFAULT_MEASURES, wanted_measures
from ropelens.interventions.variables import EVALUATED
from ropelens.profiles import summary
from ropelens.profiles.heads import head_values, resample_labels
from ropelens.profiles.measurement import Measured, Measurement
from ropelens.profiles.measures import columns
from ropelens.profiles.needles import TRIALS, Needles
from ropelens.profiles.tasks import Copies, Repeats, Task
from ropelens.rope.planes import Planes
from ropelens.runtime.progress import ProgressOption
from ropelens.schema import labelled
from ropelens.text.prompts import TokenNames
from ropelens.text.rows import HowMany
from ropelens.text.text import Text
from ropelens.text.tokenize import TextInput

RESAMPLES = 400  # bootstrap draws for the intervals of label changes


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
    - "labels": the attention budget and `label` (edit, layer, head), and the number of changed
      labels if groups of sequences are drawn again (`labels_changed_resampled`).

    Raises `BadArgument` for unknown measures, and the errors of `profile` and `edit_rope`.
    """
    options: dict[str, Any] = {"rows": rows, "seed": seed, "batch_size": batch_size}
    measurement = Measurement.of(model, text, tokenizer=tokenizer, **options)
    text, live, selected = measurement.text, measurement.live, wanted_measures(measures)
    live.check_observation_is_exact(text)
    entries = entries_of(measurement, edits or {}, controls=controls)
    planes = [entry.planes for entry in entries]
    tasks_of: dict[str, Callable[[], Task]] = {
        "induction": lambda: Repeats(measurement, planes[0]),
        "copying": lambda: Copies(measurement, distances),
        "retrieval": lambda: Needles(measurement, prompt_lengths, prompts),
    }
    tasks = {name: plan() for name, plan in tasks_of.items() if name in selected}
    split = TokenSplit.plan(text, trained=live.trained, tokenizer=tokenizer)
    fits, sums, answers = run_entries(
        measurement, entries, selected, tasks, split, progress
    )

    values = {"edit": np.array([entry.name for entry in entries], dtype=object)}
    if controls:
        values["control_of"] = np.array(
            [entry.control_of for entry in entries], dtype=object
        )
    if any(entry.silenced.any() for entry in entries):
        values["silenced"] = torch.stack([x.silenced for x in entries]).double().numpy()
    if "loss" in selected:
        values |= _loss_values(text, split, sums)
    if "change" in selected:
        nats = torch.stack([entry.change / entry.rows[:, None, None] for entry in sums])
        values["attention_change"], *changes = (
            (nats / math.log(2)).numpy().swapaxes(0, 1)
        )
        values |= {"class_change": np.stack(changes, -1)} if changes else {}
    if "labels" in selected:
        values |= _label_values(planes, fits, sums)
        if split.classes:
            values["class_label"] = _class_labels(sums, live.layers)
    if split.classes and selected & {"loss", "change", "labels"}:
        values["token_class"] = np.array(list(split.classes), dtype=object)
    for name, task in tasks.items():
        for key in answers[0][name]:
            values[key] = np.stack([answer[name][key].numpy() for answer in answers])
        values |= task.coordinates
    coordinates = summary.plane_coordinates(planes[0], heads=live.heads)
    coordinates |= summary.kind_coordinates(measurement.rotation.kinds)
    dataset = xr.Dataset(labelled(values, EVALUATED), coordinates)
    names = {"control_of", "group", "position_start", "position_stop", "token_class"}
    dataset = summary.number_dims(dataset.set_coords(names & values.keys()))
    return dataset.assign_attrs({"kind": "evaluation"} | measurement.attributes)


def _loss_values(
    text: Text, split: TokenSplit, sums: Sequence[EntrySums]
) -> dict[str, np.ndarray]:
    edges = split.edges
    bins, far = len(edges) - 1, (edges[:-1] >= text.context / 2).numpy()
    bin_tokens = sum_bins(text.predicted[:, 1 : text.context].long(), edges - 1)
    far_tokens = bin_tokens.numpy()[:, far].sum(1)
    predicted = text.predicted.sum(1).numpy()
    tokens = split.predicted(text).sum(2).numpy()
    losses = np.stack([entry.losses.numpy() for entry in sums])
    bin_loss, split_sum = losses[..., :bins], losses[..., bins:]
    group_tokens = by_group(bin_tokens, text.group)
    all_and_bins = []  # means and errors of all positions, and of each bin
    for entry in sums:
        group_loss = by_group(entry.losses[:, :bins], text.group)
        columns_of = ([x.sum(1), *x.T] for x in (group_loss, group_tokens))
        all_and_bins.append(
            [mean_loss(*pair) for pair in zip(*columns_of, strict=True)]
        )
    means, errors = np.moveaxis(np.array(all_and_bins), -1, 0)
    with np.errstate(invalid="ignore"):  # NaN if a sequence has no such token
        split_loss = split_sum / tokens
        far_loss = bin_loss[..., far].sum(-1) / far_tokens
    classes = {"class_loss": split_loss[..., 1:], "class_tokens": tokens[:, 1:]}
    return (classes if split.classes else {}) | {
        "loss": bin_loss.sum(-1) / predicted,
        "predicted_tokens": predicted,
        "group": text.group.numpy(),
        "seen_loss": split_loss[..., 0],
        "seen_tokens": tokens[:, 0],
        "far_loss": far_loss,
        "far_tokens": far_tokens,
        "mean_loss": means[:, 0],
        "mean_loss_se": errors[:, 0],
        "position_loss": means[:, 1:],
        "position_loss_se": errors[:, 1:],
        "position_start": edges[:-1].numpy(),
        "position_stop": edges[1:].numpy(),
    }


def _label_values(
    planes: Sequence[Sequence[Planes]],
    fits: Sequence[dict[int, LayerFit]],
    sums: Sequence[EntrySums],
) -> dict[str, np.ndarray]:
    """Budget and label of every head of every entry; resamples are the same in all entries."""
    parts = zip([entry.sums for entry in sums], planes, fits, strict=True)
    profiles = [summary.summarize(*part) for part in parts]
    names = (*columns("budget"), "positional_fraction", "label")
    heads = [head_values(profile) for profile in profiles]
    values = {name: np.stack([entry[name] for entry in heads]) for name in names}
    changed = np.full((len(profiles), RESAMPLES), np.nan)
    if profiles[0].sizes["group"] > 1:
        draws = [resample_labels(p, resamples=RESAMPLES, seed=0) for p in profiles]
        changed = np.stack([(labels != draws[0]).sum(axis=(1, 2)) for labels in draws])
    values["labels_changed_resampled"] = changed.astype(float)
    return values


def _class_labels(sums: Sequence[EntrySums], layers: int) -> np.ndarray:
    """Label [edit, layer, head, class] of each head over the rows of each class."""
    labels = []
    for entry in sums:
        classes = {
            layer: scores[:, 1:].sum(0) for layer, scores in entry.sums.scores.items()
        }
        scores = by_layer(classes, layers).transpose(1, 2)
        rows = scores[..., SCORES.index("weight")].numpy()
        labels.append(head_budget(scores).labels(rows=rows))
    return np.stack(labels)
