"""Passes of a model over batches of sequences, with running sums at its attention calls.

Sequences too long for one pass run in chunks with a key-value cache. Statistics over tokens
are summed chunk by chunk. Of the queries only the rows that are looked at are kept: with the
last chunk the cache holds all keys, and each layer has one call of these rows and all keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedConfig

from ropelens.models.device import devices_of
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
"""Logits in memory at a time, where a model can be asked for some of them."""

LOSS_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
"""Logits whose loss is taken at once: a vocabulary is wide, and caches are not."""

ONE_PASS = 2**16
"""Tokens of the longest sequences that run in one pass."""

MASK_ELEMENTS = 2**25
"""Keys times rows of a chunk: a model makes a mask of both, which takes about 40 bytes each."""

Progress = Callable[[int], None]
"""Called with the number of tokens done since its last call."""


# how many run together


def quick_batch(subject: Subject, length: int) -> int:
    """Sequences of `length` that run together where memory does not matter."""
    return max(1, TOKENS_PER_BATCH[subject.device.type] // length)


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
    """Sequences that run together: `TOKENS_PER_BATCH`, or fewer where memory is short.

    A batch takes at most half of the `free` bytes; see `batch_bytes`.
    """
    size = max(1, min(sequences, TOKENS_PER_BATCH[device] // context))
    given: dict[str, Any] = {
        "context": context,
        "width": width,
        "device": device,
        "scores": scores,
    }
    while size > 1 and free < 2 * batch_bytes(config, sequences=size, **given):
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


def chunk_of(subject: Subject, context: int) -> int | None:
    """Tokens that run at a time of sequences of `context` tokens; None: all in one pass.

    RoPE that changes with the length runs in one pass: a cache keeps keys as they were
    rotated when the sequence was shorter.
    """
    if context <= ONE_PASS or subject.depends_on_length or not subject.in_chunks:
        return None
    return max(1, min(ONE_PASS, MASK_ELEMENTS // context))


# batches


@dataclass(frozen=True)
class Batch:
    """Sequences that run together, the rows looked at, and those that budgets are scored on."""

    text: Corpus
    rows: Rows
    scored: Rows


def batches(
    subject: Subject,
    text: Corpus,
    *,
    rows: int | Literal["all"] = "all",
    seed: int = 0,
    chosen: range | None = None,
    batch_size: int | None = None,
) -> Iterator[Batch]:
    """The `chosen` sequences in batches of `batch_size`, or of as many as memory takes.

    `rows` is "all" or the number sampled from each sequence with `seed`. The rows of a
    sequence do not depend on its batch. A batch is as wide as its longest sequence.
    """
    size = batch_size or sequences_at_once(
        subject.model.config,
        sequences=len(text),
        context=text.tokens.shape[1],
        width=subject.model.dtype.itemsize,
        device=subject.device.type,
        free=min(map(free_bytes, devices_of(subject.model))),
    )
    # RoPE that changes with the length must meet the length that planes were measured at.
    width = text.context if subject.depends_on_length else None
    chosen = range(len(text)) if chosen is None else chosen
    for begin in range(chosen.start, chosen.stop, size):
        part = text.part(slice(begin, min(begin + size, chosen.stop)), width=width)
        lengths = part.lengths
        if rows == "all" or rows >= int(lengths.max()) - 1:
            looked_at = all_rows(lengths)
        else:
            looked_at = sample_rows(lengths, count=rows, seed=seed, first=begin)
        scored = sample_rows(lengths, count=scored_rows(text), seed=seed, first=begin)
        yield Batch(part, looked_at, scored)


# one pass


@contextmanager
def observing(
    subject: Subject,
    batch: Batch,
    whole: Callable[[AttentionCall], None],
    part: Callable[[AttentionCall, int], None],
    *,
    progress: Progress,
) -> Iterator[int | None]:
    """One pass over a batch runs in the block; gives the tokens to run at a time (None: all).

    `whole` is called with the call of each layer. In a pass in chunks `part` is called with
    each chunk, and `whole` with the rows that are looked at; see `Chunks`.
    """
    width = batch.text.tokens.shape[1]
    chunk = chunk_of(subject, width)
    calls = subject.layers * -(-width // (chunk or width))
    shares = _shares(progress, int(batch.text.lengths.sum()), calls + 1)

    def see(call: AttentionCall) -> None:
        whole(call)
        if chunk is None:
            next(shares, None)

    def see_part(call: AttentionCall, first: int) -> None:
        part(call, first)
        next(shares, None)

    rows = (batch.rows, batch.scored)
    observer = see if chunk is None else Chunks.of_rows(*rows, width, part=see_part, whole=see)
    with torch.no_grad(), subject.observe(observer):
        yield chunk
    for _ in shares:
        pass


def _shares(progress: Progress, tokens: int, steps: int) -> Iterator[None]:
    """Tell `progress` an equal share of the tokens at each step."""
    for step in range(steps):
        share = tokens * (step + 1) // steps - tokens * step // steps
        if share:
            progress(share)
        yield


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
    device = subject.device.type
    for first, logits in subject.logits(tokens, at_once=LOGITS_AT_ONCE[device], chunk=chunk):
        rows = max(1, LOSS_ELEMENTS[device] // logits.shape[-1])
        for sequence, length in enumerate(lengths.tolist()):
            last = min(length - 1, first + logits.shape[1])
            for begin in range(first, last, rows):
                end = min(begin + rows, last)
                target = tokens[sequence, begin + 1 : end + 1].to(logits.device, torch.long)
                scores = logits[sequence, begin - first : end - first].float()
                loss = cross_entropy(scores, target, reduction="none")
                losses[sequence, begin + 1 : end + 1] = loss.double().cpu()
    return losses


@dataclass(frozen=True)
class _Kept:
    """One layer before its last chunk: queries and outputs of some rows, all row starts.

    Allocated whole at the first chunk: pieces would leave holes between masks that grow.
    """

    query: Tensor
    output: Tensor
    start: Tensor


@dataclass(frozen=True)
class Chunks:
    """An observer of chunks: `part` sees the tokens of each, `whole` the rows of all.

    `part` is given a call of a chunk's own queries and keys, and the position of its first
    token. `whole` is given one call a layer, of the rows `at` and all `context` keys.
    """

    at: Int[Tensor, " row"]
    context: int
    part: Callable[[AttentionCall, int], None]
    whole: Callable[[AttentionCall], None]
    kept: dict[int, _Kept] = field(default_factory=dict)

    @classmethod
    def of_rows(
        cls,
        one: Rows,
        other: Rows,
        context: int,
        *,
        part: Callable[[AttentionCall, int], None] = lambda call, first: None,
        whole: Callable[[AttentionCall], None],
    ) -> Chunks:
        """The observer of both choices of rows."""
        at = torch.cat([one.position.flatten(), other.position.flatten()]).unique()
        return cls(at, context, part, whole)

    def __call__(self, call: AttentionCall) -> None:
        """See one layer's call of one chunk."""
        first, end = call.past, call.key.shape[2]
        here = (self.at >= first) & (self.at < end)
        rows = (self.at[here] - first).to(call.query.device)
        if first == 0:
            query, output, count = call.query, call.output, len(self.at)
            self.kept[call.layer] = _Kept(
                query.new_empty((*query.shape[:2], count, query.shape[3])),
                output.new_empty((len(output), count, *output.shape[2:])),
                call.start.new_empty((*call.start.shape[:-1], self.context)),
            )
        kept = self.kept[call.layer]
        kept.query[:, :, here] = call.query[:, :, rows]
        kept.output[:, here] = call.output[:, rows]
        kept.start[..., first:end] = call.start
        chunk: dict[str, Any] = {
            "key": call.key[:, :, first:],
            "value": call.value[:, :, first:],
            "past": 0,
        }
        self.part(replace(call, **chunk), first)
        if end == self.context:
            del self.kept[call.layer]
            self.whole(replace(call, **vars(kept), past=0, at=self.at))


# running sums


@dataclass
class Passed:
    """The sums of one pass over a batch, by layer."""

    batch: Batch
    statistics: Sequence[Statistic] = STATISTICS
    layers: dict[int, LayerSums] = field(default_factory=dict)
    scores: dict[int, Float[Tensor, "group head score"]] = field(default_factory=dict)
    chunks: dict[int, SequenceSums] = field(default_factory=dict)

    def see_chunk(self, call: AttentionCall, first: int, planes: Planes) -> None:
        """Add the statistics over tokens of a chunk whose first token is at `first`."""
        here, batch = slice(first, first + call.key.shape[2]), self.batch
        sums = sum_attention(
            call,
            batch.rows,
            planes,
            tokens=batch.text.tokens[:, here],
            sinks=batch.text.sinks[..., here],
            statistics=[row for row in self.statistics if row.over == "tokens"],
            first=first,
        )
        before = self.chunks.setdefault(call.layer, {})
        for name, x in sums.items():
            before[name] = before[name] + x if name in before else x

    def see(self, call: AttentionCall, planes: Planes, fit: LayerFit | None) -> None:
        """Add a call, and score the models of the budget on it; tokens in chunks are added."""
        text, sinks = self.batch.text, self.batch.text.sinks
        if fit is not None:
            sinks = fit.sinks(sinks)
            self.scores[call.layer] = fit.score(
                call, self.batch.scored, planes, sinks, group=text.group, fold=text.fold
            )
        chunks = self.chunks.pop(call.layer, {})
        sums = chunks | sum_attention(
            call,
            self.batch.rows,
            planes,
            tokens=text.tokens,
            sinks=sinks,
            statistics=[row for row in self.statistics if row.name not in chunks],
        )
        self.layers[call.layer] = LayerSums.of(sums, call, self.statistics)

    def sums(self, losses: Float[Tensor, "sequence position"]) -> Sums:
        """The sums of all layers, and of the losses (nats) of each token."""
        text = self.batch.text
        row_weight = self.batch.rows.by_position(text.tokens.shape[1])
        return Sums(
            row_weight=by_group(row_weight, text.group),
            tokens=int(text.lengths.sum()),
            sequences=len(text),
            group_loss=by_group(losses.nansum(1), text.group),
            group_predicted=by_group(text.lengths - 1, text.group),
            layers=self.layers,
            scores=self.scores,
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
    progress: Progress = lambda _: None,
    sums: Sums | None = None,
    save: Callable[[Sums], None] = lambda _: None,
) -> Sums:
    """Sums of the statistics of every layer over the `chosen` sequences.

    `planes` says how each layer rotates, `fits` are the models of its budget, to be scored;
    other options are those of `batches`. `sums` are those of the first sequences, where they
    are known; `save` is called after each batch. Memory grows with the layers and the
    context, not with the number of sequences.
    """
    sums, chosen = sums or no_sums(), range(len(text)) if chosen is None else chosen
    left = chosen[sums.sequences :]
    for batch in batches(
        subject, text, rows=rows, seed=seed, chosen=left, batch_size=batch_size
    ):
        passed = Passed(batch, statistics)

        def see(call: AttentionCall, passed: Passed = passed) -> None:
            passed.see(call, planes[call.layer], fits[call.layer] if fits else None)

        def see_part(call: AttentionCall, first: int, passed: Passed = passed) -> None:
            passed.see_chunk(call, first, planes[call.layer])

        with observing(subject, batch, see, see_part, progress=progress) as chunk:
            losses = token_losses(subject, batch.text.tokens, batch.text.lengths, chunk)
        subject.check_layers(set(passed.layers))
        sums = sums + passed.sums(losses)
        save(sums)
    return sums
