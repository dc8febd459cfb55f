"""The passes of an evaluation: fits, sums over the text, and tasks of each entry."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import pairwise
from operator import add

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ropelens.attention.attention_change import attention_change
from ropelens.attention.call import AttentionCall
from ropelens.attention.sums import Sums
from ropelens.attention.visibility import sum_bins
from ropelens.budget.held_out import LayerFit
from ropelens.interventions.entries import NONE, Entry
from ropelens.interventions.token_split import TokenSplit
from ropelens.model.live_model import LiveModel
from ropelens.profiles.layer_fits import LayerFitter
from ropelens.profiles.measurement import Batch, Measurement
from ropelens.profiles.measures import STATISTICS
from ropelens.profiles.passes import BatchPass, Progress
from ropelens.profiles.tasks import Task
from ropelens.runtime.processes import gather, shard
from ropelens.runtime.progress import ProgressOption, Stage, display_of
from ropelens.runtime.savepoint import SavedProgress, resume

OF_TEXT = {"loss", "change", "labels"}  # measures that need passes over the text

Answers = dict[str, dict[str, Tensor]]
"""The numbers of each task, by its name."""


@dataclass(frozen=True)
class EntrySums:
    """Sums (nats) of one entry: losses, and changes of the attention in sets of tokens.

    The columns of `losses` are the bins of positions, then the tokens that occurred before in
    their sequence, then the classes of tokens (see `TokenSplit`).
    """

    sums: Sums
    losses: Float[Tensor, "sequence bin_or_set"]
    change: Float[Tensor, "set layer head"]
    rows: Float[Tensor, " set"]

    def __add__(self, other: "EntrySums") -> "EntrySums":
        return EntrySums(
            sums=self.sums + other.sums,
            losses=torch.cat([self.losses, other.losses]),
            change=self.change + other.change,
            rows=self.rows + other.rows,
        )

    @property
    def sequences(self) -> int:
        """Number of sequences that were summed."""
        return self.sums.sequences


@dataclass
class SweepProgress:
    """What an evaluation has finished, for each entry. It is saved after each step.

    `fits` are the fits of the first entries, by layer; they are empty without labels.
    """

    fits: list[dict[int, LayerFit]]
    sums: list[EntrySums]
    answers: list[Answers]


def run_entries(
    measurement: Measurement,
    entries: Sequence[Entry],
    *,
    measures: Collection[str],
    tasks: Mapping[str, Task],
    split: TokenSplit,
    progress: ProgressOption,
) -> SweepProgress:
    """The fits, the sums over the text and the answers to the tasks, for each entry."""
    runs = EntryRuns(measurement, entries, measures, tasks, split)
    texts = Stage("trying edits", runs.tokens_left)
    budgets = Stage("fitting budgets", runs.layers_left, "layers")
    with display_of(progress)(texts, budgets) as step:
        runs.fit_budgets(partial(step, stage=1))
        runs.sum_text(step)
        runs.run_tasks(step)
    return runs.of_all_processes()


class EntryRuns:
    """Steps of an evaluation, which continue from the saved progress."""

    def __init__(
        self,
        measurement: Measurement,
        entries: Sequence[Entry],
        measures: Collection[str],
        tasks: Mapping[str, Task],
        split: TokenSplit,
    ) -> None:
        self.measurement = measurement
        self.live = measurement.live
        self.entries = entries
        self.measures = measures
        self.tasks = tasks
        self.split = split
        self.saved: SavedProgress = resume(SweepProgress, EntrySums)
        self.done: SweepProgress = self.saved.state or self._nothing()
        # Processes fit together, so a process that saved later than another one fits again.
        del self.done.fits[min(gather(len(self.done.fits))) :]

    def _nothing(self) -> SweepProgress:
        live = self.live
        sets = 1 + len(self.split.classes)
        shape = (sets, live.layers, live.heads)
        change = torch.full(shape, torch.nan, dtype=torch.float64, device="cpu")
        change[:, live.attending_heads] = 0  # heads without attention have NaN
        empty = EntrySums(
            sums=Sums(),
            losses=torch.zeros(
                0, self.split.bins + sets, dtype=torch.float64, device="cpu"
            ),
            change=change,
            rows=torch.zeros(sets, dtype=torch.float64, device="cpu"),
        )
        return SweepProgress(
            fits=[],
            sums=[empty for _ in self.entries],
            answers=[{} for _ in self.entries],
        )

    @property
    def unfitted(self) -> Sequence[Entry]:
        """Entries whose budgets must be fitted."""
        return self.entries[len(self.done.fits) :] if "labels" in self.measures else []

    @property
    def own_sequences(self) -> range:
        """The sequences of the text that this process sums."""
        if OF_TEXT.isdisjoint(self.measures):
            return range(0)
        return shard(len(self.measurement.text))

    @property
    def tasks_left(self) -> list[tuple[int, str]]:
        """Numbers of entries, and the names of the tasks that this process runs on them."""
        left = []
        for name in self.tasks:
            for number in shard(len(self.entries)):
                if name not in self.done.answers[number]:
                    left.append((number, name))
        return left

    @property
    def tokens_left(self) -> int:
        """Tokens that this process reads in all passes over the text and all tasks."""
        real = self.measurement.text.real
        tokens = 0
        for entry in self.done.sums:
            left = self.own_sequences[entry.sequences :]
            tokens += int(real[[*left]].sum())
        for _, name in self.tasks_left:
            tokens += self.tasks[name].tokens
        return tokens

    @property
    def layers_left(self) -> int:
        """Layers that this process fits."""
        return len(self.unfitted) * len(shard(len(self.live.attending)))

    def fit_budgets(self, progress: Progress) -> None:
        """Fit the budget of each entry that has none."""
        for entry in self.unfitted:
            fitter = LayerFitter(
                self.measurement, entry.planes, surrogates=0, progress=progress
            )
            with self.live.intervene(*entry.interventions):
                fits = fitter.fit_layers()
            self.done.fits.append(fits)
            self.saved.save(self.done)

    def sum_text(self, progress: Progress) -> None:
        """Add the sums of each batch of the text to those of each entry."""
        sums = self.done.sums
        for batch in self._batches():
            unmodified: UnmodifiedCalls | None = None
            if "change" in self.measures:
                unmodified = {}
            first = sums[-1].sequences  # the last entry is the last one to be summed
            for number, entry in enumerate(self.entries):
                fits = self.done.fits[number] if self.done.fits else {}
                entry_pass = EntryPass(self.live, batch, entry, self.split, unmodified)
                if sums[number].sequences <= first:
                    sums[number] += entry_pass.run(fits, progress)
                    self.saved.save(self.done)
                elif entry.name == NONE and unmodified is not None:
                    # It was summed before a stop, but later entries need its calls.
                    entry_pass.run(fits, lambda _: None)

    def _batches(self) -> Iterator[Batch]:
        """Batches of the sequences that some entry has not read.

        Before a stop, entries may have read different numbers of sequences. A batch ends at
        each of these numbers, so that an entry has read either all of it or nothing.
        """
        own = self.own_sequences
        read = {entry.sequences for entry in self.done.sums}
        for begin, end in pairwise(sorted({*read, len(own)})):
            yield from self.measurement.batches(own[begin:end])

    def run_tasks(self, progress: Progress) -> None:
        """Run the tasks on the entries of this process."""
        for number, name in self.tasks_left:
            with self.live.intervene(*self.entries[number].interventions):
                self.done.answers[number][name] = self.tasks[name].measure(progress)
            self.saved.save(self.done)

    def of_all_processes(self) -> SweepProgress:
        """The results of all processes together; every process has all fits."""
        sums_of = gather(self.done.sums)
        answers_of = gather(self.done.answers)
        sums = [reduce(add, parts) for parts in zip(*sums_of, strict=True)]
        answers: list[Answers] = []
        for parts in zip(*answers_of, strict=True):
            together: Answers = {}
            for of_process in parts:
                together.update(of_process)
            answers.append(together)
        return SweepProgress(self.done.fits, sums, answers)


UnmodifiedCalls = dict[int, AttentionCall]
"""The attention call of each layer of the unmodified model on a batch."""


class EntryPass:
    """One pass of an entry over a batch, which also compares its attention.

    The unmodified model stores its calls in `unmodified`, with which others are compared; None
    if attention is not compared.
    """

    def __init__(
        self,
        live: LiveModel,
        batch: Batch,
        entry: Entry,
        split: TokenSplit,
        unmodified: UnmodifiedCalls | None,
    ) -> None:
        self.live = live
        self.batch = batch
        self.entry = entry
        self.split = split
        self.unmodified = unmodified
        self.sets: Bool[Tensor, "sequence set position"] = split.sets(batch.text.ids)
        shape = (self.sets.shape[1], live.layers, live.heads)
        self.change = torch.zeros(shape, dtype=torch.float64, device="cpu")

    def run(self, fits: Mapping[int, LayerFit], progress: Progress) -> EntrySums:
        """Run the model once. If attention is compared, the unmodified model must run first."""
        text = self.batch.text
        batch_pass = BatchPass(
            self.live,
            self.batch,
            self.entry.planes,
            statistics=STATISTICS if fits else (),
            progress=progress,
            fits=fits,
            sets=self.sets,
            also=self._compare,
        )
        with self.live.intervene(*self.entry.interventions):
            result = batch_pass.run()
        in_bins = result.losses[:, 1:].where(text.predicted[:, 1:], 0.0)
        by_bin = sum_bins(in_bins, self.split.edges - 1)
        predicted = self.split.predicted(text)
        by_split = result.losses[:, None].where(predicted, 0.0).sum(2)
        rows = self.batch.rows.by_position(self.sets.shape[2])[:, None]
        return EntrySums(
            sums=result.sums,
            losses=torch.cat([by_bin, by_split], dim=1),
            change=self.change,
            rows=rows.where(self.sets, 0.0).sum((0, 2)),
        )

    def _compare(self, call: AttentionCall) -> None:
        """Store the call of the unmodified model, or write the change of the attention."""
        if self.unmodified is None:
            return
        if self.entry.name == NONE:
            self.unmodified[call.layer] = call.without_values()
            return
        before = self.unmodified[call.layer]
        change = attention_change(before, call, self.batch.rows, self.sets)
        self.change[:, call.layer, : change.shape[1]] = change
