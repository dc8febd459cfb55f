"""What is measured on a text: losses, attention budgets, and how far edits move attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.edit.entries import NONE, Entry
from ropelens.measure.batches import Batch, Passed, Progress, observing, token_losses
from ropelens.measure.budget import budget_variables
from ropelens.measure.heads import head_values, resample_labels
from ropelens.measure.summary import summarize
from ropelens.models.subject import Subject
from ropelens.statistics.budget.held_out import LayerFit
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.change import attention_change, without_values
from ropelens.statistics.corpus import Corpus
from ropelens.statistics.kernel import sum_bins
from ropelens.statistics.labels import Thresholds
from ropelens.statistics.sums import Sums, by_group, mean_loss, no_sums
from ropelens.statistics.variables import columns, stack

RESAMPLES = 400
"""Draws of the sequences that intervals of label changes come from."""


@dataclass
class Measured:
    """The numbers of one entry, which grow with every batch and every task.

    `losses` are summed over bins of positions, `seen_losses` over tokens that their sequence
    had before; `change` (by layer) over `rows`. `tasks` are by the names of measures.
    """

    losses: Float[Tensor, "sequence bin"]
    seen_losses: Float[Tensor, " sequence"]
    sums: Sums = field(default_factory=no_sums)
    fits: list[LayerFit] = field(default_factory=list)
    change: dict[int, Float[Tensor, " head"]] = field(default_factory=dict)
    rows: float = 0.0
    tasks: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    @classmethod
    def nothing(cls, bins: int) -> Measured:
        """Before the first batch."""
        nothing = torch.zeros(0, bins, dtype=torch.float64)
        return cls(nothing, nothing.sum(1))

    @classmethod
    def together(cls, parts: Sequence[Measured]) -> Measured:
        """The parts of several processes, each of its own sequences and tasks."""
        layers = {layer for part in parts for layer in part.change}
        return cls(
            losses=torch.cat([part.losses for part in parts]),
            seen_losses=torch.cat([part.seen_losses for part in parts]),
            sums=reduce(add, [part.sums for part in parts]),
            fits=parts[0].fits,
            change={
                layer: reduce(add, [p.change[layer] for p in parts if layer in p.change])
                for layer in layers
            },
            rows=sum(part.rows for part in parts),
            tasks={name: task for part in parts for name, task in part.tasks.items()},
        )


@dataclass(frozen=True)
class OnText:
    """The text that entries are measured on, and the measures that are `wanted`.

    `stated` is the context that the model was made for, where it says.
    """

    text: Corpus
    wanted: set[str]
    stated: int | None

    @property
    def edges(self) -> Int[Tensor, " edge"]:
        """Edges of the bins of positions: two an octave, and the stated context."""
        longest = self.text.context
        edges = {round(2 ** (half / 2)) for half in range(2 * longest.bit_length() + 1)}
        edges.add(self.stated or longest)
        inner = [edge for edge in sorted(edges) if edge < longest]
        return torch.tensor([*inner, longest])

    def measure(
        self,
        subject: Subject,
        batch: Batch,
        entries: Sequence[Entry],
        measured: Sequence[Measured],
        progress: Progress,
    ) -> None:
        """One forward pass of each entry over a batch, every measure beside it."""
        as_is: dict[int, AttentionCall] = {}
        for entry, of_entry in zip(entries, measured, strict=True):
            with entry.open(subject):
                self._measure_entry(subject, batch, entry, of_entry, as_is, progress)

    def _measure_entry(
        self,
        subject: Subject,
        batch: Batch,
        entry: Entry,
        measured: Measured,
        as_is: dict[int, AttentionCall],
        progress: Progress,
    ) -> None:
        """The measures of one entry; `as_is` holds the calls of the model as it is."""
        passed, text, seen = Passed(batch), batch.text, set()
        change, labels = "change" in self.wanted, "labels" in self.wanted

        def see(call: AttentionCall) -> None:
            seen.add(call.layer)
            if labels:
                passed.see(call, entry.planes[call.layer], measured.fits[call.layer])
            if not change:
                return
            if entry.name == NONE:
                as_is[call.layer] = without_values(call)
                moved = torch.zeros(call.query.shape[1], dtype=torch.float64)
            else:
                moved = attention_change(as_is[call.layer], call, batch.rows).sum(0)
            measured.change[call.layer] = measured.change.get(call.layer, 0) + moved

        def see_part(call: AttentionCall, first: int) -> None:
            if labels:
                passed.see_chunk(call, first, entry.planes[call.layer])

        with observing(subject, batch, see, see_part, progress=progress) as chunk:
            losses = token_losses(subject, text.tokens, text.lengths, chunk)
        subject.check_layers(seen)
        of_seen = losses.where(text.seen_before, 0.0).sum(1)
        counts = 1 + torch.arange(losses.shape[1] - 1) < text.lengths[:, None]
        by_bin = sum_bins(losses[:, 1:].where(counts, 0.0), self.edges - 1)
        measured.seen_losses = torch.cat([measured.seen_losses, of_seen])
        measured.losses = torch.cat([measured.losses, by_bin])
        measured.rows += float(batch.rows.weight.sum())
        if labels:
            measured.sums = measured.sums + passed.sums(losses)

    def loss_values(self, measured: Sequence[Measured]) -> dict[str, np.ndarray]:
        """Losses of every entry, by sequence, in all, and by position."""
        text, edges = self.text, self.edges
        counts = 1 + torch.arange(text.context - 1) < text.lengths[:, None]
        in_bins = by_group(sum_bins(counts.long(), edges - 1), text.group)
        predicted, seen = text.lengths.numpy() - 1, text.seen_before.sum(1).numpy()
        losses = np.stack([of.losses.sum(1).numpy() for of in measured])
        of_seen = np.stack([of.seen_losses.numpy() for of in measured])
        means, by_bin = [], []
        for of in measured:
            sums = by_group(of.losses, text.group)
            means.append(mean_loss(sums.sum(1), in_bins.sum(1)))
            by_bin.append(
                [mean_loss(*of_bin) for of_bin in zip(sums.T, in_bins.T, strict=True)]
            )
        mean, error = np.array(means).T
        position, position_error = np.moveaxis(np.array(by_bin), -1, 0)
        with np.errstate(invalid="ignore"):  # NaN where a sequence repeats nothing
            seen_loss = of_seen / seen
        return {
            "loss": losses / predicted,
            "predicted_tokens": predicted,
            "group": text.group.numpy(),
            "seen_loss": seen_loss,
            "seen_tokens": seen,
            "mean_loss": mean,
            "mean_loss_se": error,
            "position_loss": position,
            "position_loss_se": position_error,
            "position_start": edges[:-1].numpy(),
            "position_stop": edges[1:].numpy(),
        }


def change_values(measured: Sequence[Measured]) -> dict[str, np.ndarray]:
    """How far the attention of every head moved in every entry."""
    nats = [stack(of.change[layer] for layer in sorted(of.change)) / of.rows for of in measured]
    return {"attention_change": np.stack(nats) / np.log(2)}


def label_values(
    entries: Sequence[Entry], measured: Sequence[Measured]
) -> tuple[dict[str, np.ndarray], xr.Dataset]:
    """The budget and label of every head of every entry; the profile of the model as it is."""
    profiles = [
        summarize(of.sums, entry.planes).assign(budget_variables(of.sums, of.fits))
        for entry, of in zip(entries, measured, strict=True)
    ]
    names = (*columns("budget"), "positional_fraction", "label")
    each = [head_values(profile, Thresholds()) for profile in profiles]
    values = {name: np.stack([one[name] for one in each]) for name in names}
    labels, missing = values["label"], np.isnan(values["total_bits"])
    differs = np.where(missing | missing[0], np.nan, (labels != labels[0]).astype(float))
    changes = {
        "label_changed": differs,
        "labels_changed_resampled": _resampled_changes(profiles),
    }
    return values | changes, profiles[0]


def _resampled_changes(profiles: list[xr.Dataset]) -> Float[np.ndarray, "edit resample"]:
    """How many heads have another label than in the first profile, sequences drawn again.

    Each draw is of the same sequences for all; NaN where all of them are one group.
    """
    if profiles[0].sizes["group"] < 2:
        return np.full((len(profiles), RESAMPLES), np.nan)
    labels = [resample_labels(p, Thresholds(), resamples=RESAMPLES, seed=0) for p in profiles]
    return np.stack([(now != labels[0]).sum(axis=(1, 2)) for now in labels]).astype(float)
