"""What is measured on a text: losses, attention budgets, and how far edits move attention."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import reduce
from operator import add
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.edit.entries import NONE, Entry
from ropelens.measure.batches import Batch, Passed, Progress, observing, token_losses
from ropelens.measure.budget import budget_variables, fit_layers
from ropelens.measure.heads import head_values, resample_labels
from ropelens.measure.summary import summarize
from ropelens.models.subject import Subject
from ropelens.statistics.bins import sum_bins
from ropelens.statistics.budget.held_out import LayerFit
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.change import attention_change, without_values
from ropelens.statistics.corpus import Corpus
from ropelens.statistics.labels import Thresholds
from ropelens.statistics.ragged import stack
from ropelens.statistics.sums import Sums, by_group, mean_loss, no_sums
from ropelens.statistics.variables import STATISTICS, columns

RESAMPLES = 400
"""Draws of the sequences that intervals of label changes are read from."""


BY_BATCH = ("losses", "predicted", "seen_losses")
FOUND = ("sums", "fits", "change", "heads", "rows", *BY_BATCH)
"""What of `TextFindings` is found; the rest says of what."""


@dataclass
class TextFindings:
    """What is found on the text for one entry; grows with every batch.

    `text` is what it is found on, `context` what the model was made for, if stated.
    """

    entry: Entry
    wanted: set[str]
    text: Corpus
    context: int | None
    sums: Sums = field(default_factory=no_sums)
    fits: list[LayerFit] = field(default_factory=list)
    losses: list[Float[Tensor, "sequence bin"]] = field(default_factory=list)
    predicted: list[Int[Tensor, "sequence bin"]] = field(default_factory=list)
    seen_losses: list[Float[Tensor, " sequence"]] = field(default_factory=list)
    change: dict[int, Float[Tensor, " head"]] = field(default_factory=dict)
    heads: dict[int, int] = field(default_factory=dict)
    rows: float = 0.0

    @property
    def state(self) -> dict[str, Any]:
        """All that is found so far, by name, to begin others with."""
        state = {name: getattr(self, name) for name in FOUND}
        if self.losses:
            state |= {name: [torch.cat(state[name])] for name in BY_BATCH}
        return state

    def with_parts(self, states: list[dict[str, Any]]) -> TextFindings:
        """What several processes found of this entry, each on its part of the sequences."""
        whole: dict[str, Any] = {n: [x for one in states for x in one[n]] for n in BY_BATCH}
        whole["sums"] = reduce(add, [one["sums"] for one in states])
        whole["rows"] = sum(one["rows"] for one in states)
        whole["heads"], whole["change"] = {}, {}
        for one in states:
            whole["heads"] |= one["heads"]
            for layer, change in one["change"].items():
                whole["change"][layer] = whole["change"].get(layer, 0) + change
        return replace(self, **whole)

    @property
    def sequences(self) -> int:
        """Sequences that are measured."""
        return sum(map(len, self.losses))

    @property
    def edges(self) -> Int[Tensor, " edge"]:
        """Edges of the bins of positions, two an octave, and the context: no bin mixes what
        lies within it and past it."""
        longest = self.text.context
        edges = {round(2 ** (half / 2)) for half in range(2 * longest.bit_length() + 1)}
        edges.add(self.context or longest)
        inner = [edge for edge in sorted(edges) if edge < longest]
        return torch.tensor([*inner, longest])

    def fit(self, subject: Subject, *, seed: int, progress: Progress | None) -> None:
        """Fit the models of the budget; `progress` is told after each layer."""
        with self.entry.open(subject):
            self.fits = fit_layers(
                subject,
                self.text,
                planes=self.entry.planes,
                surrogates=0,
                seed=seed,
                progress=progress,
            )

    @property
    def profile(self) -> xr.Dataset:
        """The profile of the entry."""
        return summarize(self.sums, self.entry.planes).assign(
            budget_variables(self.sums, self.fits)
        )

    @property
    def loss(self) -> tuple[float, float]:
        """Loss per predicted token (nats), and its standard error over groups."""
        losses, predicted = self._by_group
        return mean_loss(losses.sum(1), predicted.sum(1))

    @property
    def loss_by_bin(self) -> list[tuple[float, float]]:
        """The same of the tokens at the positions of each bin."""
        losses, predicted = self._by_group
        return [mean_loss(*in_bin) for in_bin in zip(losses.T, predicted.T, strict=True)]

    @property
    def _by_group(self) -> tuple[Float[Tensor, "group bin"], Float[Tensor, "group bin"]]:
        """Summed losses and number of predicted tokens of each group of sequences."""
        sums = (torch.cat(self.losses), torch.cat(self.predicted))
        losses, predicted = (by_group(values, self.text.group) for values in sums)
        return losses, predicted

    def add_losses(self, losses: Float[Tensor, "sequence position"], text: Corpus) -> None:
        """Add the losses of a batch, summed over the bins of positions."""
        self.seen_losses.append(losses.where(text.seen_before, 0.0).sum(1))
        edges, losses = self.edges - 1, losses[:, 1:]  # position 0 is not predicted
        counts = 1 + torch.arange(losses.shape[1]) < text.lengths[:, None]
        self.losses.append(sum_bins(losses.where(counts, 0.0), edges))
        self.predicted.append(sum_bins(counts.long(), edges))


def measure_batch(
    subject: Subject, batch: Batch, text: list[TextFindings], progress: Progress
) -> None:
    """One forward pass of each entry over a batch, every measure beside it."""
    kept: dict[int, AttentionCall] = {}
    for found in text:
        with found.entry.open(subject):
            _measure_entry(subject, batch, found, kept, progress)


def _measure_entry(
    subject: Subject,
    batch: Batch,
    found: TextFindings,
    kept: dict[int, AttentionCall],
    progress: Progress,
) -> None:
    """The measures of one entry on a batch; `kept` is the attention of the model as it is."""
    passed = Passed(batch)
    planes = found.entry.planes if "labels" in found.wanted else None

    def see(call: AttentionCall) -> None:
        found.heads[call.layer] = call.query.shape[1]
        if planes is not None:
            passed.see(call, planes[call.layer], found.fits[call.layer])
        if "change" in found.wanted:
            if found.entry.name == NONE:
                kept[call.layer] = without_values(call)
                change = torch.zeros(call.query.shape[1], dtype=torch.float64)
            else:
                change = attention_change(kept[call.layer], call, batch.rows).sum(0)
            found.change[call.layer] = found.change.get(call.layer, 0) + change

    def see_chunk(call: AttentionCall, first: int) -> None:
        if planes is not None:
            passed.see_chunk(call, first, planes[call.layer], STATISTICS)

    layers, text = len(found.entry.planes), batch.text
    with observing(subject, batch, see, see_chunk, layers=layers, progress=progress) as chunk:
        losses = token_losses(subject, text.tokens, text.lengths, chunk)
    subject.check_layers(set(found.heads))
    found.add_losses(losses, text)
    found.rows += float(batch.rows.weight.sum())
    if planes is not None:
        found.sums = found.sums + passed.sums(losses.nansum(1))


def text_values(text: list[TextFindings], wanted: set[str]) -> dict[str, np.ndarray]:
    """What was found on the text, by the names of `EVALUATED`."""
    of = text[0].text
    values: dict[str, np.ndarray] = {}
    if "loss" in wanted:
        edges, predicted = text[0].edges.numpy(), of.lengths.numpy() - 1
        by_bin = np.array([entry.loss_by_bin for entry in text])
        values["loss"] = np.stack(
            [torch.cat(entry.losses).sum(1).numpy() / predicted for entry in text]
        )
        values["predicted_tokens"], values["group"] = predicted, of.group.numpy()
        seen = of.seen_before.sum(1).numpy()
        sums = np.stack([torch.cat(entry.seen_losses).numpy() for entry in text])
        with np.errstate(invalid="ignore"):  # NaN where a sequence repeats nothing
            values["seen_loss"], values["seen_tokens"] = sums / seen, seen
        values["mean_loss"], values["mean_loss_se"] = np.array([e.loss for e in text]).T
        values["position_loss"], values["position_loss_se"] = np.moveaxis(by_bin, -1, 0)
        values["position_start"], values["position_stop"] = edges[:-1], edges[1:]
    if "change" in wanted:
        nats = [stack(e.change[layer] for layer in sorted(e.change)) / e.rows for e in text]
        values["attention_change"] = np.stack(nats) / np.log(2)
    return values


def _resampled_changes(profiles: list[xr.Dataset]) -> Float[np.ndarray, "edit resample"]:
    """How many heads have another label than in the first profile, sequences drawn again.

    Each draw is of the same sequences for all; NaN where all of them are one group.
    """
    if profiles[0].sizes["group"] < 2:
        return np.full((len(profiles), RESAMPLES), np.nan)
    labels = [resample_labels(p, Thresholds(), resamples=RESAMPLES, seed=0) for p in profiles]
    return np.stack([(now != labels[0]).sum(axis=(1, 2)) for now in labels]).astype(float)


def label_values(text: list[TextFindings]) -> tuple[dict[str, np.ndarray], xr.Dataset]:
    """The budget and label of every head of every entry, by the names of `EVALUATED`.

    With the profile of the model as it is.
    """
    profiles = [found.profile for found in text]
    names = (*columns("budget"), "positional_fraction", "label")
    each = [head_values(p, Thresholds()) for p in profiles]
    values = {name: np.stack([one[name] for one in each]) for name in names}
    labels, missing = values["label"], np.isnan(values["total_bits"])
    changed = np.where(missing | missing[0], np.nan, (labels != labels[0]).astype(float))
    more = {
        "label_changed": changed,
        "labels_changed_resampled": _resampled_changes(profiles),
    }
    return values | more, profiles[0]
