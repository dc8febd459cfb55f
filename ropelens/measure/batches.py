"""Passes of a model over batches of sequences, with running sums at its attention calls.

Sequences too long for one pass run in chunks with a key-value cache. Statistics over tokens
are summed chunk by chunk. Of the queries only the rows that are looked at are kept: with the
last chunk the cache holds all keys, and each layer has one call of these rows and all keys.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import PreTrainedConfig

from ropelens.models.device import devices_of, free_bytes, pass_bytes
from ropelens.models.doorway import Observer
from ropelens.models.subject import Subject
from ropelens.rope.planes import Planes
from ropelens.statistics.attention import SequenceSums, sum_attention
from ropelens.statistics.block import CallRows
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
    kind: Any = {"context": context, "width": width, "device": device, "scores": scores}
    while size > 1 and free < 2 * batch_bytes(config, sequences=size, **kind):
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
    tokens: Int[Tensor, "sequence position"],
    rows: Sequence[Rows],
    whole: Observer,
    part: Callable[[AttentionCall, int], None] = lambda call, first: None,
) -> Iterator[int | None]:
    """One pass over `tokens` runs in the block; gives the tokens to run at a time (None: all).

    `whole` is called with the call of each layer. In chunks, `part` is called with each
    chunk's queries and keys and the position of its first token, and `whole` with one call of
    the `rows` and all keys.
    """
    context = tokens.shape[1]
    chunk = chunk_of(subject, context)
    observer = whole if chunk is None else _in_chunks(rows, context, whole, part)
    with torch.no_grad(), subject.observe(observer):
        yield chunk


def _in_chunks(
    rows: Sequence[Rows],
    context: int,
    whole: Observer,
    part: Callable[[AttentionCall, int], None],
) -> Observer:
    """An observer of chunks, for `observing`."""
    at = torch.cat([each.position.flatten() for each in rows]).unique()
    earlier: dict[int, dict[str, Any]] = {}

    def see(call: AttentionCall) -> None:
        first, end = call.past, call.key.shape[2]
        here = (at >= first) & (at < end)
        taken = (at[here] - first).to(call.query.device)
        if first == 0:  # pieces would leave holes between masks that grow
            query, output = call.query, call.output
            earlier[call.layer] = {
                "query": query.new_empty((*query.shape[:2], len(at), query.shape[3])),
                "output": output.new_empty((len(output), len(at), *output.shape[2:])),
                "start": call.start.new_empty((*call.start.shape[:-1], context)),
            }
        layer = earlier[call.layer]
        layer["query"][:, :, here] = call.query[:, :, taken]
        layer["output"][:, here] = call.output[:, taken]
        layer["start"][..., first:end] = call.start
        key, value = call.key[:, :, first:], call.value[:, :, first:]
        part(replace(call, key=key, value=value, past=0), first)
        if end == context:
            del earlier[call.layer]
            whole(replace(call, **layer, past=0, at=at))

    return see


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


def sum_batch(
    subject: Subject,
    batch: Batch,
    planes: Sequence[Planes],
    *,
    statistics: Sequence[Statistic],
    fits: Sequence[LayerFit],
    progress: Progress,
    also: Observer = lambda call: None,
) -> tuple[Sums, Float[Tensor, "sequence position"]]:
    """One pass over a batch: the sums of its statistics, and the loss of each token.

    `planes` says how each layer rotates, `fits` are the models of its budget, to be scored;
    `also` is called with the call of each layer.
    """
    text, tokens = batch.text, batch.text.tokens
    over_tokens = [row for row in statistics if row.over == "tokens"]
    in_chunks: dict[int, SequenceSums] = {}
    layers: dict[int, LayerSums] = {}
    scores: dict[int, Float[Tensor, "group head score"]] = {}
    width = tokens.shape[1]
    calls = subject.layers * -(-width // (chunk_of(subject, width) or width))
    shares = _shares(progress, int(text.lengths.sum()), calls + 1)

    def see_part(call: AttentionCall, first: int) -> None:
        next(shares, None)
        if not over_tokens:
            return
        here = slice(first, first + call.key.shape[2])
        ids, sinks = tokens[:, here], text.sinks[..., here]
        rows = CallRows(
            call, batch.rows, planes[call.layer], sinks=sinks, tokens=ids, first=first
        )
        sums = sum_attention(rows, over_tokens)
        before = in_chunks.setdefault(call.layer, {})
        for name, x in sums.items():
            before[name] = before[name] + x if name in before else x

    def see(call: AttentionCall) -> None:
        turning, sinks = planes[call.layer], text.sinks
        if fits:
            fit = fits[call.layer]
            sinks = fit.sinks(text)
            scored = CallRows(call, batch.scored, turning, sinks=sinks)
            scores[call.layer] = fit.score(scored, text)
        sums = in_chunks.pop(call.layer, {})
        rest = [row for row in statistics if row.name not in sums]
        if rest:
            rows = CallRows(call, batch.rows, turning, sinks=sinks, tokens=tokens)
            sums |= sum_attention(rows, rest)
        layers[call.layer] = LayerSums.of(sums, call, statistics)
        also(call)
        if call.at is None:  # else its chunks were counted
            next(shares, None)

    with observing(subject, tokens, (batch.rows, batch.scored), see, see_part) as chunk:
        losses = token_losses(subject, tokens, text.lengths, chunk)
    for _ in shares:
        pass
    subject.check_layers(set(layers))
    sums = Sums(
        row_weight=by_group(batch.rows.by_position(width), text.group),
        tokens=int(text.lengths.sum()),
        sequences=len(text),
        group_loss=by_group(losses.nansum(1), text.group),
        group_predicted=by_group(text.lengths - 1, text.group),
        layers=layers,
        scores=scores,
    )
    return sums, losses


def _shares(progress: Progress, tokens: int, steps: int) -> Iterator[None]:
    """Tell `progress` an equal share of the tokens at each step."""
    for step in range(steps):
        share = tokens * (step + 1) // steps - tokens * step // steps
        if share:
            progress(share)
        yield


def collect(
    subject: Subject,
    text: Corpus,
    *,
    planes: Sequence[Planes],
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

    Options are those of `batches` and `sum_batch`. `sums` are those of the first sequences,
    where they are known; `save` is called after each batch. Memory grows with the layers and
    the context, not with the number of sequences.
    """
    sums, chosen = sums or no_sums(), range(len(text)) if chosen is None else chosen
    left = chosen[sums.sequences :]
    for batch in batches(
        subject, text, rows=rows, seed=seed, chosen=left, batch_size=batch_size
    ):
        part, _ = sum_batch(
            subject, batch, planes, statistics=statistics, fits=fits, progress=progress
        )
        sums = sums + part
        save(sums)
    return sums
