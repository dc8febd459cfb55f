"""One pass of a model over tokens, with the running sums standing at its attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedConfig

from ropelens.measure.chunks import Chunks, chunk_of
from ropelens.models.device import device_of, devices_of
from ropelens.models.doorway import Observer
from ropelens.models.memory import free_bytes, pass_bytes
from ropelens.models.subject import Subject
from ropelens.rope.planes import Planes
from ropelens.statistics.attention import SequenceSums, sum_attention
from ropelens.statistics.budget.held_out import LayerFit, scored_rows
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.corpus import Corpus
from ropelens.statistics.rows import Rows, all_rows, sample_rows
from ropelens.statistics.sums import LayerSums, Sums, by_group, no_sums
from ropelens.statistics.variables import STATISTICS, Statistic

TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 16384}

LOGITS_AT_ONCE = {"cpu": 2**24, "cuda": 2**28}
"""Logits that are held at a time, where a model can be asked for some of them."""

LOSS_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
"""Logits whose loss is taken at once: a vocabulary is wide, and caches are not."""

Progress = Callable[[int], None]
"""Told how many tokens are done since it was told last; a layer is a share of its batch."""


@dataclass
class ByLayer:
    """Tells `progress` the tokens of one batch, a share of them after each layer of a pass."""

    progress: Progress | None
    tokens: int
    layers: int
    told: int = 0
    seen: int = 0

    def step(self) -> None:
        """One more layer is done."""
        self.seen += 1
        self._tell(self.tokens * self.seen // (self.layers + 1))

    def finish(self) -> None:
        """The whole batch is done."""
        self._tell(self.tokens)

    def _tell(self, done: int) -> None:
        if self.progress is not None and done > self.told:
            self.progress(done - self.told)
            self.told = done


@dataclass(frozen=True)
class Batch:
    """Some sequences that run together, and the rows of theirs that are looked at.

    `scored` are those that the models of the budget are scored on.
    """

    text: Corpus
    rows: Rows
    scored: Rows


@dataclass
class Passed:
    """What the observers of one pass over a batch saw of each layer."""

    batch: Batch
    layers: dict[int, LayerSums] = field(default_factory=dict)
    scores: dict[int, Float[Tensor, "group head score"]] = field(default_factory=dict)
    chunks: dict[int, SequenceSums] = field(default_factory=dict)

    def see_chunk(
        self, call: AttentionCall, first: int, planes: Planes, statistics: Sequence[Statistic]
    ) -> None:
        """Add up what is over tokens in a chunk, whose first token stands at `first`."""
        here, batch = slice(first, first + call.key.shape[2]), self.batch
        sums = sum_attention(
            call,
            batch.rows,
            planes,
            tokens=batch.text.tokens[:, here],
            sinks=batch.text.sinks[..., here],
            statistics=[row for row in statistics if row.over == "tokens"],
            first=first,
        )
        before = self.chunks.setdefault(call.layer, {})
        for name, x in sums.items():
            before[name] = before[name] + x if name in before else x

    def see(
        self,
        call: AttentionCall,
        planes: Planes,
        fit: LayerFit | None,
        statistics: Sequence[Statistic] = STATISTICS,
    ) -> None:
        """Add a call up, and score the models of the budget on it where there are any.

        What is over tokens, too, unless their chunks were seen.
        """
        batch, text, sinks = self.batch, self.batch.text, self.batch.text.sinks
        if fit is not None:
            sinks = fit.sinks(sinks)
            self.scores[call.layer] = fit.score(
                call, batch.scored, planes, sinks, group=text.group, fold=text.fold
            )
        chunks = self.chunks.pop(call.layer, {})
        left = [row for row in statistics if row.name not in chunks]
        sums = chunks | sum_attention(
            call,
            batch.rows,
            planes,
            tokens=text.tokens,
            sinks=sinks,
            statistics=left,
        )
        self.layers[call.layer] = LayerSums.of(sums, call, statistics)

    def sums(self, losses: Float[Tensor, " sequence"]) -> Sums:
        """The sums of all layers, with each sequence's summed loss (nats)."""
        text = self.batch.text
        row_weight = self.batch.rows.by_position(text.tokens.shape[1])
        return Sums(
            row_weight=by_group(row_weight, text.group),
            tokens=int(text.lengths.sum()),
            sequences=len(text),
            group_loss=by_group(losses, text.group),
            group_predicted=by_group(text.lengths - 1, text.group),
            layers=self.layers,
            scores=self.scores,
        )


def batches(
    subject: Subject,
    text: Corpus,
    *,
    rows: int | Literal["all"] = "all",
    seed: int = 0,
    chosen: range | None = None,
    batch_size: int | None = None,
) -> Iterator[Batch]:
    """The sequences in batches of `batch_size`, or of as many as a device likes at once.

    `rows` is "all" or the number sampled from each sequence with `seed`, which is no more than
    all; `chosen` are the numbers of the sequences that run, all without it. What is drawn for a
    sequence does not depend on the others that run. Batches end with their longest sequence.
    """
    scored, size = scored_rows(text), batch_size or batch_that_fits(subject, text)
    # A RoPE that changes with the length must see the one that planes were read at.
    width = text.context if subject.depends_on_length else None
    chosen = range(len(text)) if chosen is None else chosen
    for begin in range(chosen.start, chosen.stop, size):
        part = text.part(slice(begin, min(begin + size, chosen.stop)), width=width)
        sampled = partial(sample_rows, part.lengths, seed=seed, first=begin)
        if rows == "all" or rows >= int(part.lengths.max()) - 1:
            looked_at = all_rows(part.lengths)
        else:
            looked_at = sampled(count=rows)
        yield Batch(text=part, rows=looked_at, scored=sampled(count=scored))


def quick_batch(subject: Subject, length: int) -> int:
    """Sequences of `length` that run together where memory is no question; see
    `TOKENS_PER_BATCH`."""
    return max(1, TOKENS_PER_BATCH[subject.device.type] // length)


def batch_that_fits(subject: Subject, text: Corpus) -> int:
    """Sequences that a device likes at once, or as many as its memory takes."""
    model = subject.model
    return sequences_at_once(
        model.config,
        sequences=len(text),
        context=text.tokens.shape[1],
        width=model.dtype.itemsize,
        device=device_of(model).type,
        free=min(map(free_bytes, devices_of(model))),
    )


def sequences_at_once(
    config: PreTrainedConfig,
    *,
    sequences: int,
    context: int,
    width: int,
    device: str,
    free: int,
    scores: bool = False,
) -> int:
    """How many sequences run together: `TOKENS_PER_BATCH`, fewer where memory is short.

    A batch, with its logits, takes half of the `free` bytes at most; see `batch_bytes`.
    """
    size = max(1, min(sequences, TOKENS_PER_BATCH[device] // context))
    while size > 1 and free < 2 * batch_bytes(
        config,
        sequences=size,
        context=context,
        width=width,
        device=device,
        scores=scores,
    ):
        size = (size + 1) // 2
    return size


def batch_bytes(
    config: PreTrainedConfig,
    *,
    sequences: int,
    context: int,
    width: int,
    device: str,
    scores: bool = False,
) -> int:
    """About the bytes that a batch takes beside the weights; see `pass_bytes`."""
    logits = sequences * context * config.get_text_config().vocab_size
    return pass_bytes(
        config,
        sequences=sequences,
        context=context,
        logits=logits if scores else min(logits, LOGITS_AT_ONCE[device]),
        width=width,
        device=device,
        scores=scores,
    )


def collect(
    subject: Subject,
    text: Corpus,
    *,
    planes: list[Planes],
    statistics: Sequence[Statistic] = STATISTICS,
    rows: int | Literal["all"] = "all",
    fits: Sequence[LayerFit] = (),
    seed: int = 0,
    chosen: range | None = None,
    batch_size: int | None = None,
    progress: Progress | None = None,
    sums: Sums | None = None,
    save: Callable[[Sums], None] = lambda _: None,
) -> Sums:
    """Sums of the statistics of every layer over all sequences, or those that are `chosen`.

    `planes` says how each layer rotates, `fits` has the models of its budget, which are
    scored; the others are as for `batches`. Sums of sequences that
    run apart add. Those of the first of the chosen may be had already, as `sums`; `save` gets
    what there is after each batch. Memory grows with the layers and the context, not with the
    number of sequences.
    """
    sums, chosen = sums or no_sums(), range(len(text)) if chosen is None else chosen
    left = chosen[sums.sequences :]
    for batch in batches(
        subject, text, rows=rows, seed=seed, chosen=left, batch_size=batch_size
    ):
        passed = Passed(batch)

        def see(call: AttentionCall, passed: Passed = passed) -> None:
            fit = fits[call.layer] if fits else None
            passed.see(call, planes[call.layer], fit, statistics)

        def see_chunk(call: AttentionCall, first: int, passed: Passed = passed) -> None:
            passed.see_chunk(call, first, planes[call.layer], statistics)

        with observing(
            subject, batch, see, see_chunk, layers=len(planes), progress=progress
        ) as chunk:
            losses = _sequence_losses(subject, batch.text.tokens, batch.text.lengths, chunk)
        subject.check_layers(set(passed.layers))
        sums = sums + passed.sums(losses)
        save(sums)
    return sums


@contextmanager
def observing(
    subject: Subject,
    batch: Batch,
    whole: Observer,
    part: Callable[[AttentionCall, int], None],
    *,
    layers: int,
    progress: Progress | None,
) -> Iterator[int | None]:
    """One pass over a batch runs in the block: `whole` sees each layer, `progress` is told.

    Gives the tokens that are to run at a time, None for all. Of a pass in chunks `part` sees
    each of them, and `whole` the rows that are looked at, as `Chunks` has them.
    """
    width = batch.text.tokens.shape[1]
    chunk = chunk_of(subject, width)
    runs = layers * -(-width // (chunk or width))
    done = ByLayer(progress, int(batch.text.lengths.sum()), runs)

    def see(call: AttentionCall) -> None:
        whole(call)
        if call.at is None:
            done.step()

    def see_part(call: AttentionCall, first: int) -> None:
        part(call, first)
        done.step()

    observer: Observer = see
    if chunk is not None:
        observer = Chunks.of_rows(
            batch.rows, batch.scored, context=width, part=see_part, whole=see
        )
    with torch.no_grad(), subject.observe(observer):
        yield chunk
    done.finish()


def token_losses(
    subject: Subject,
    tokens: Int[Tensor, "sequence position"],
    lengths: Int[Tensor, " sequence"],
    chunk: int | None = None,
) -> Float[Tensor, "sequence position"]:
    """Loss of the token at each position, in nats; NaN at position 0 and in padding.

    With `chunk` so many tokens run at a time.
    """
    losses = torch.full(tokens.shape, torch.nan, dtype=torch.float64)
    for sequence, part, own, target in _predictions(subject, tokens, lengths, chunk):
        losses[sequence, part] = cross_entropy(own, target, reduction="none").double().cpu()
    return losses


def _sequence_losses(
    subject: Subject,
    tokens: Int[Tensor, "sequence position"],
    lengths: Int[Tensor, " sequence"],
    chunk: int | None,
) -> Float[Tensor, " sequence"]:
    """Summed loss of each sequence's predicted tokens, in nats."""
    losses = torch.zeros(len(tokens), dtype=torch.float64)
    for sequence, _, own, target in _predictions(subject, tokens, lengths, chunk):
        losses[sequence] += float(cross_entropy(own, target, reduction="sum"))
    return losses


def _predictions(
    subject: Subject,
    tokens: Int[Tensor, "sequence position"],
    lengths: Int[Tensor, " sequence"],
    chunk: int | None = None,
) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """A sequence's number, the positions of some tokens, the logits for them, and they."""
    device = subject.device
    at_once = LOGITS_AT_ONCE[device.type]
    for first, logits in subject.logits(tokens, at_once=at_once, chunk=chunk):
        rows = max(1, LOSS_ELEMENTS[device.type] // logits.shape[-1])
        for sequence, length in enumerate(lengths.tolist()):
            last = min(length - 1, first + logits.shape[1])
            for begin in range(first, last, rows):
                end = min(begin + rows, last)
                target = tokens[sequence, begin + 1 : end + 1].to(logits.device, torch.long)
                own = logits[sequence, begin - first : end - first].float()
                yield sequence, slice(begin + 1, end + 1), own, target
