"""The attention budget: its models are fitted in a pass of their own, and become variables."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from ropelens.measure.batches import LOGITS_AT_ONCE, Progress, observing
from ropelens.models.processes import gather, shard
from ropelens.models.subject import Subject
from ropelens.rope.planes import Planes
from ropelens.statistics.budget.held_out import LayerFit, Sample
from ropelens.statistics.budget.logit import SCORES, gains
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.corpus import Corpus
from ropelens.statistics.kernel import describe_kernel, offset_edges, sum_bins
from ropelens.statistics.labels import attention_budget
from ropelens.statistics.sums import Sums
from ropelens.statistics.variables import MEASURES, labelled, stack


def fit_layers(
    subject: Subject,
    text: Corpus,
    planes: Sequence[Planes],
    *,
    surrogates: int,
    seed: int,
    progress: Progress = lambda _: None,
) -> list[LayerFit]:
    """The models of every layer, from one pass over a sample of the sequences.

    They are fitted at each layer's attention call, of which only weights are kept; then
    `progress` is called. Processes that share the measurement share the layers.
    """
    sample, mine = Sample.draw(text, seed=seed), shard(len(planes))
    fits: dict[int, LayerFit] = {}

    def fit(call: AttentionCall) -> None:
        if call.layer not in mine:
            return
        of_layer = planes[call.layer]
        fits[call.layer] = sample.fit(call, of_layer, surrogates=surrogates, seed=seed)
        progress(1)
        if len(fits) == len(mine):
            raise _AllFitted

    tokens, rows = sample.text.tokens, (sample.rows, sample.surrogate_rows)
    if mine:
        with suppress(_AllFitted), observing(subject, tokens, rows, fit) as chunk:
            at_once = LOGITS_AT_ONCE[subject.device.type]
            for _ in subject.logits(tokens, at_once=at_once, chunk=chunk):
                pass
    fits = {layer: fit for part in gather(fits) for layer, fit in part.items()}
    subject.check_layers(set(fits))
    return [fits[layer] for layer in sorted(fits)]


class _AllFitted(Exception):
    """Ends a pass before its logits, the largest part of it, which nobody needs."""


def budget_variables(sums: Sums, fits: Sequence[LayerFit]) -> dict[str, xr.Variable]:
    """The variables of a profile that come from the models of the budget."""
    layers = sorted(sums.scores)
    scores = [sums.scores[layer] for layer in layers]
    whole = [gains(score.sum(0)) for score in scores]
    bits = attention_budget(*(stack(each[name] for each in whole) for name in whole[0]))
    rows = scores[0][:, 0, SCORES.index("weight")]
    by_group = [gains(score[rows > 0]) for score in scores]
    group_gains = {
        f"group_{name}": np.moveaxis(stack(each[name] for each in by_group), 0, 1)
        for name in by_group[0]
    }
    kernels = [_kernel(sums, layer, fit) for layer, fit in zip(layers, fits, strict=True)]
    drawn = [fit.surrogates for fit in fits]
    values = {
        **{f"{name}_bits": values for name, values in bits.items()},
        **{name: stack(kernel[name] for kernel in kernels) for name in kernels[0]},
        "found_sink": stack(_first_found(fit) for fit in fits),
        "group_scored": rows[rows > 0].numpy(),
        **group_gains,
        **{name: np.moveaxis(stack(x[name] for x in drawn), 0, 1) for name in drawn[0]},
    }
    return labelled(values, MEASURES)


def _kernel(sums: Sums, layer: int, fit: LayerFit) -> dict[str, Tensor]:
    """The kernel of every head by bin of offsets, and its peak."""
    start, row_weight = sums.layers[layer].start, sums.row_weight.sum(0)
    farthest = torch.arange(len(start)) - start
    ends_at = torch.zeros_like(row_weight).index_add_(0, farthest, row_weight)
    seen_by = ends_at.flip(0).cumsum(0).flip(0) / row_weight.sum()
    found = describe_kernel(fit.kappa, seen_by)
    edges = offset_edges(len(start))
    return {
        "kernel": sum_bins(found.kernel, edges) / edges.diff(),
        "offset": found.offset,
        "offset_weight": found.weight,
        "offset_low": found.low,
        "offset_high": found.high,
    }


def _first_found(fit: LayerFit) -> Tensor:
    """The position of the first key found to be a sink of each head; NaN without."""
    position = fit.found.int().argmax(-1).double()
    return torch.where(fit.found.any(-1), position, torch.nan)
