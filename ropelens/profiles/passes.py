"""Passes of a model over batches of sequences, with running sums at its attention calls."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ropelens.attention.call import AttentionCall
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.sums import (
    LayerSums,
    SequenceSums,
    Sums,
    by_group,
    sum_attention,
)
from ropelens.budget.found_sinks import add_found_sinks
from ropelens.budget.held_out import LayerFit
from ropelens.model.hook_blocks import Observer
from ropelens.model.live_model import LiveModel
from ropelens.profiles.chunks import ignore_call, observer_of_chunks
from ropelens.profiles.costs import OBSERVED
from ropelens.profiles.measurement import Batch, Measurement
from ropelens.profiles.measures import STATISTICS
from ropelens.rope.planes import Planes
from ropelens.schema.rows import Statistic
from ropelens.text.rows import Rows

Progress = Callable[[int], None]  # called with the tokens processed since the last call


@dataclass(frozen=True)
class BatchSums:
    """The sums of a batch, and the loss of each predicted token (nats; NaN for others)."""

    sums: Sums
    losses: Float[Tensor, "sequence position"]


class PassProgress:
    """Reports the tokens of a pass at its attention calls, and the rest at its end."""

    def __init__(
        self, report: Progress, *, tokens: int, calls: int, logits_cost: float
    ) -> None:
        # Logits and losses take the rest of the time.
        share_of_calls = OBSERVED / (OBSERVED + logits_cost)
        self.tokens_per_call = int(tokens * share_of_calls / calls)
        self.left = tokens
        self.report = report

    def calls_ended(self, count: int) -> None:
        tokens = self.tokens_per_call * count
        self.left -= tokens
        self.report(tokens)

    def pass_ended(self) -> None:
        self.report(self.left)


class BatchPass:
    """One pass of a model over a batch. It sums statistics at every attention call.

    The `fits` of the budget, by layer, are scored on the rows of each set in `sets` (default:
    all rows). `also` receives the call of each layer first.
    """

    def __init__(
        self,
        live: LiveModel,
        batch: Batch,
        planes: Sequence[Planes],
        *,
        statistics: Sequence[Statistic],
        progress: Progress,
        fits: Mapping[int, LayerFit],
        sets: Bool[Tensor, "sequence set position"] | None = None,
        also: Observer = ignore_call,
    ) -> None:
        self.live = live
        self.batch = batch
        self.planes = planes
        self.statistics = statistics
        self.over_tokens = [row for row in statistics if row.over == "tokens"]
        self.fits = fits
        self.sets = sets
        self.also = also
        self.tokens = int(batch.text.real.sum())
        width = batch.text.ids.shape[1]
        self.chunk = live.chunk_length(width)
        chunks = -(-width // (self.chunk or width))
        self.progress = PassProgress(
            progress,
            tokens=self.tokens,
            calls=len(live.attending) * chunks,
            logits_cost=live.logits_cost,
        )
        # Sums by layer, which the attention calls fill
        self.layers: dict[int, LayerSums] = {}
        self.scores: dict[int, Float[Tensor, "group set head score"]] = {}
        self.chunk_sums: dict[int, SequenceSums] = {}
        self.farthest: Counter[int] = Counter()

    def run(self) -> BatchSums:
        """Run the model once. Attention calls go to `see_layer` and `see_chunk`."""
        text = self.batch.text
        observer = observer_of_chunks(
            self.chunk,
            self.kept_rows(),
            text.ids.shape[1],
            whole=self.see_layer,
            part=self.see_chunk,
        )
        with self.live.observe(observer):
            losses = self.live.losses(text.ids, text.lengths, text.hidden)
        losses.masked_fill_(~text.predicted, torch.nan)
        self.progress.pass_ended()
        self.live.check_layers(set(self.layers))
        return BatchSums(self.total(losses), losses)

    def kept_rows(self) -> Sequence[Rows]:
        """The rows that are measured after the last chunk of a sequence."""
        return (self.batch.rows, self.batch.scored)

    def fit_of(self, call: AttentionCall) -> LayerFit | None:
        return self.fits.get(call.layer)

    def see_chunk(self, call: AttentionCall) -> None:
        """Add the sums over the tokens of a chunk."""
        layer = call.layer
        self.farthest[layer] = max(self.farthest[layer], call.visibility.farthest)
        if self.over_tokens:
            text = self.batch.text
            keys = slice(call.visibility.keys.start, call.visibility.keys.stop)
            sampled = SampledCall(
                call,
                self.batch.rows,
                self.planes[layer],
                sinks=text.sinks[..., keys],
                tokens=text.ids[:, keys],
            )
            sums = self.chunk_sums.setdefault(layer, {})
            for name, added in sum_attention(sampled, self.over_tokens).items():
                sums[name] = sums[name] + added if name in sums else added
        self.progress.calls_ended(1)

    def see_layer(self, call: AttentionCall) -> None:
        """Score the fits of a layer, and add the sums over its rows."""
        layer = call.layer
        text = self.batch.text
        if self.chunk is None:  # otherwise its chunks were counted
            calls_before = 1 if self.layers else 0
            self.progress.calls_ended(calls_before)
        self.also(call)
        fit = self.fit_of(call)
        sinks = text.sinks
        if fit is not None:
            sinks = add_found_sinks(text.sinks, fit.found_sinks)
        scored = SampledCall(
            call, self.batch.scored, self.planes[layer], sinks=sinks, tokens=text.ids
        )
        if fit is not None:
            self.scores[layer] = fit.score(scored, text, self.sets)
        measured = scored.with_rows(self.batch.rows)
        sums = self.chunk_sums.pop(layer, {})
        unsummed = [row for row in self.statistics if row.name not in sums]
        sums.update(sum_attention(measured, unsummed))
        farthest = max(self.farthest[layer], call.visibility.farthest)
        self.layers[layer] = LayerSums.of(sums, measured, self.statistics, farthest)

    def total(self, losses: Float[Tensor, "sequence position"]) -> Sums:
        """The sums of all layers, by group of sequences."""
        text = self.batch.text
        row_weight = self.batch.rows.by_position(text.ids.shape[1])
        return Sums(
            row_weight=by_group(row_weight, text.group),
            group_loss=by_group(losses.where(text.predicted, 0.0).sum(1), text.group),
            group_predicted=by_group(text.predicted.sum(1), text.group),
            tokens=self.tokens,
            sequences=len(text),
            layers=self.layers,
            scores=self.scores,
        )


def collect(
    measurement: Measurement,
    planes: Sequence[Planes],
    *,
    statistics: Sequence[Statistic] = STATISTICS,
    fits: Mapping[int, LayerFit] | None = None,
    chosen: Sequence[int] | None = None,
    progress: Progress = lambda _: None,
) -> Sums:
    """The sums of the `chosen` sequences (default: all)."""
    sums = Sums()
    for batch in measurement.batches(chosen):
        batch_pass = BatchPass(
            measurement.live,
            batch,
            planes,
            statistics=statistics,
            fits=fits or {},
            progress=progress,
        )
        sums += batch_pass.run().sums
    return sums
