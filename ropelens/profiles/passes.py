"""Passes of a model over batches of sequences, with running sums at its attention calls.

Sequences that are too long for one pass run in chunks with a key-value cache. Statistics over
tokens are summed chunk by chunk, and queries are kept for the measured rows. With the last
chunk each layer gets one call of these rows and all keys.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

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
from ropelens.budget.held_out import FOLD_ROWS, LayerFit, Sample, add_found_sinks
from ropelens.errors import UnsupportedModel
from ropelens.model.attention_hooks import Observer
from ropelens.model.live_model import NO_KEY, LiveModel
from ropelens.profiles.measurement import Batch, Measurement
from ropelens.profiles.measures import STATISTICS
from ropelens.rope.planes import Planes
from ropelens.runtime.processes import gather, shard
from ropelens.schema import Statistic
from ropelens.text.rows import Rows

EXCHANGED = 1000.0  # operations per scored row and key
OBSERVED = 2.0  # time of a layer with all statistics, compared with an unobserved layer

Progress = Callable[[int], None]  # called with the tokens processed since the last call


def observer_of_chunks(
    chunk: int | None,
    rows: Sequence[Rows],
    context: int,
    whole: Observer,
    part: Observer = lambda call: None,
) -> Observer:
    """Observer of a pass over sequences of `context` tokens in chunks of `chunk` tokens.

    `part` receives the calls of each chunk, and `whole` one call of the `rows` and all keys for
    each layer. If `chunk` is None, the observer is `whole`.
    """
    if chunk is None:
        return whole
    positions = torch.cat(
        [batch_rows.position.flatten() for batch_rows in rows]
    ).unique()
    earlier: dict[int, dict[str, Any]] = {}

    def keep_rows(call: AttentionCall) -> None:
        first, end = call.past, call.key.shape[2]
        here = (positions >= first) & (positions < end)
        indices = positions[here] - first
        if first == 0:  # pieces would leave holes between masks that grow
            query, output = call.query, call.output
            earlier[call.layer] = {
                "query": query.new_empty(
                    (*query.shape[:2], len(positions), query.shape[3])
                ),
                "output": output.new_empty(
                    (len(output), len(positions), *output.shape[2:])
                ),
                "visibility": call.visibility.rows(indices[None]),
            }
        layer, sampled = earlier[call.layer], call.of_rows(indices)
        layer["query"][:, :, here], layer["output"][:, here] = (
            sampled.query,
            sampled.output,
        )
        if first > 0:
            layer["visibility"] = layer["visibility"].append(sampled.visibility)
        key, value = call.key[:, :, first:], call.value[:, :, first:]
        visibility = replace(call.visibility, keys=range(first, end))
        part(replace(call, key=key, value=value, visibility=visibility))
        if end == context:
            whole(replace(call, **earlier.pop(call.layer)))

    return keep_rows


def fit_cost(
    parameters: int, heads: int, terms: int, context: int, surrogates: int
) -> float:
    """Approximate number of tokens that pass the model in the time of the fits of a layer."""
    # Half of the rows of both folds is visible; small operations cost as much as 4,000 tokens.
    cells = heads * FOLD_ROWS * (context + 4_000)
    # 93 operations per cell and plane weight, of which 40 surrogates take half
    return 93.0 * ((1 + surrogates / 40) / 2) * cells * terms / parameters


def exchange_cost(parameters: int, heads: int, rows: int, context: int) -> float:
    """Approximate number of tokens that pass the model while a layer exchanges its keys."""
    return EXCHANGED * heads * rows * context / parameters


def fit_layers(
    measurement: Measurement,
    planes: Sequence[Planes],
    *,
    surrogates: int,
    progress: Progress = lambda _: None,
    statistics: Sequence[Statistic] | None = None,
    summed: Progress = lambda _: None,
) -> tuple[dict[int, LayerFit], Sums]:
    """Fit the budget of every layer in one pass over a sample; sum `statistics` on the way."""
    live, sample = (
        measurement.live,
        Sample.draw(measurement.text, seed=measurement.seed),
    )
    own_layers = [live.attending[n] for n in shard(len(live.attending))]
    fits: dict[int, LayerFit] = {}
    options = {"surrogates": surrogates, "seed": measurement.seed}

    def fit(call: AttentionCall) -> None:
        if call.layer not in own_layers:
            return
        fits[call.layer] = layer_fit = sample.fit(call, planes[call.layer], **options)
        if not layer_fit.weights.isfinite().all():
            query, key = (f"{float(x.abs().max()):.0e}" for x in (call.query, call.key))
            seen = (
                f"queries up to {query}, keys up to {key}; their squares are not finite"
            )
            what = f"The attention budget of layer {call.layer} cannot be fitted."
            raise UnsupportedModel(what, seen=seen, hint=NO_KEY)
        progress(1)
        if statistics is None and len(fits) == len(own_layers):
            raise _AllFitted

    width, rows = sample.text.ids.shape[1], (sample.rows, sample.surrogate_rows)
    sums = Sums()
    if statistics is not None:
        batch = measurement.batch(sample.chosen, width=width, fitted=rows)
        given: dict[str, Any] = {
            "statistics": statistics,
            "fits": fits,
            "progress": summed,
        }
        sums, _ = sum_batch(live, batch, planes, also=fit, **given)
    elif own_layers:
        observer = observer_of_chunks(live.chunk_length(width), rows, width, fit)
        with suppress(_AllFitted), torch.no_grad(), live.observe(observer):
            for _ in live.logits(sample.text.ids, hidden=sample.text.hidden):
                pass
    fits = {layer: fit for part in gather(fits) for layer, fit in part.items()}
    live.check_layers(set(fits))
    return {layer: fits[layer] for layer in sorted(fits)}, sums


class _AllFitted(Exception):
    """Ends a pass before its logits, which are its largest part and are not needed."""


def collect(
    measurement: Measurement,
    planes: Sequence[Planes],
    *,
    statistics: Sequence[Statistic] = STATISTICS,
    fits: Mapping[int, LayerFit] | None = None,
    chosen: Sequence[int] | None = None,
    progress: Progress = lambda _: None,
    sums: Sums | None = None,
    save: Callable[[Sums], None] = lambda _: None,
) -> Sums:
    """Add the statistics over the `chosen` sequences (default: all) to the first `sums`."""
    sums = sums or Sums()
    chosen = range(len(measurement.text)) if chosen is None else chosen
    options: Any = {"statistics": statistics, "fits": fits or {}, "progress": progress}
    for batch in measurement.batches(chosen[sums.sequences :]):
        sums += sum_batch(measurement.live, batch, planes, **options)[0]
        save(sums)
    return sums


def sum_batch(
    live: LiveModel,
    batch: Batch,
    planes: Sequence[Planes],
    *,
    statistics: Sequence[Statistic],
    fits: Mapping[int, LayerFit],
    progress: Progress,
    sets: Bool[Tensor, "sequence set position"] | None = None,
    also: Observer = lambda call: None,
) -> tuple[Sums, Float[Tensor, "sequence position"]]:
    """Run one pass over a batch; return the sums of its statistics and the loss of each token.

    The `fits` of the budget are scored on the rows of each set in `sets` (default: all rows).
    `also` receives the call of each layer first.
    """
    text, width = batch.text, batch.text.ids.shape[1]
    chunk = live.chunk_length(width)
    calls = len(live.attending) * -(-width // (chunk or width))
    tokens = int(text.real.sum())
    # Tokens of progress for each call; logits and losses take the rest of the time.
    share = int(tokens * OBSERVED / (OBSERVED + live.logits_cost) / calls)
    over_tokens = [row for row in statistics if row.over == "tokens"]
    layers: dict[int, LayerSums] = {}
    scores: dict[int, Float[Tensor, "group set head score"]] = {}
    chunk_sums: dict[int, SequenceSums] = {}
    farthest: Counter[int] = Counter()

    def see_part(call: AttentionCall) -> None:
        turning, keys = planes[call.layer], call.visibility.keys
        farthest[call.layer] = max(farthest[call.layer], call.visibility.farthest)
        if over_tokens:
            here = slice(keys.start, keys.stop)
            of_part = {"sinks": text.sinks[..., here], "tokens": text.ids[:, here]}
            rows = SampledCall(call, batch.rows, turning, **of_part)
            before = chunk_sums.setdefault(call.layer, {})
            for name, x in sum_attention(rows, over_tokens).items():
                before[name] = before[name] + x if name in before else x
        progress(share)

    def see(call: AttentionCall) -> None:
        turning, sinks = planes[call.layer], text.sinks
        if chunk is None:  # otherwise its chunks were counted
            progress(share if layers else 0)  # for the layer before, which ends here
        also(call)
        if fits:
            sinks = add_found_sinks(text.sinks, fits[call.layer].found_sinks)
        scored = SampledCall(call, batch.scored, turning, sinks=sinks, tokens=text.ids)
        if fits:
            scores[call.layer] = fits[call.layer].score(scored, text, sets)
        sums, rows = chunk_sums.pop(call.layer, {}), scored.with_rows(batch.rows)
        sums |= sum_attention(rows, [row for row in statistics if row.name not in sums])
        far = max(farthest[call.layer], call.visibility.farthest)
        layers[call.layer] = LayerSums.of(sums, rows, statistics, far)

    rows = (batch.rows, batch.scored, *batch.fitted)
    observer = observer_of_chunks(chunk, rows, width, see, see_part)
    with live.observe(observer):
        losses = live.losses(text.ids, text.lengths, text.hidden)
    losses.masked_fill_(~text.predicted, torch.nan)
    progress(tokens - share * (calls - (chunk is None)))
    live.check_layers(set(layers))
    values = batch.rows.by_position(width), losses.nansum(1), text.predicted.sum(1)
    row_weight, loss, predicted = (by_group(x, text.group) for x in values)
    facts: Any = {
        "tokens": tokens,
        "sequences": len(text),
        "layers": layers,
        "scores": scores,
    }
    return Sums(row_weight, loss, predicted, **facts), losses
