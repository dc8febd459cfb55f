"""The models of a layer's budget: fitted to a sample of rows, scored on rows of other text.

Groups of sequences belong to two folds (see `Text`). The models that are fitted to one fold
are scored on all sequences of the other, so that more weights are no advantage. Where one
sequence is alone in its length, every other of its rows belongs to a fold.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.attention.block import SampledCall
from ropelens.attention.call import AttentionCall
from ropelens.attention.offset_bins import offset_edges
from ropelens.budget.logit import MODELS, SCORES, fit, score
from ropelens.budget.offsets import split
from ropelens.budget.surrogates import draw_surrogates
from ropelens.rope.planes import Planes
from ropelens.text.rows import Rows, generator_of, sample_rows
from ropelens.text.text import GROUPS, SINKS, Text

FOLD_ROWS = 256  # rows that the models of a fold are fitted to
FOLD_SEQUENCES = 8  # sequences that these rows are taken from, at most

FOLD_TOKENS = 8192  # tokens of these, at most, but two sequences at least: they run together
SCORED_ROWS = 2048  # rows that models are scored on, at least, where there are so many
LEAST_SCORED = 32  # rows of each sequence that models are scored on, at least
LEAST_SHARE = 0.3  # mean attention of the rows behind a key above which it is a sink
LEAST_ROWS = 16  # rows that such a mean is over, at least
SURROGATE_SEQUENCES = 8
SURROGATE_ROWS = 256  # rows of so many sequences that surrogates are compared on


def scored_rows(text: Text) -> int:
    """Rows of each sequence that models are scored on; alone, those that it is fitted to."""
    return (
        2 * FOLD_ROWS
        if text.single_long_sequence
        else max(LEAST_SCORED, -(-SCORED_ROWS // len(text)))
    )


def fitted_sequences(count: int, context: int) -> int:
    """Sequences of `count` that models are fitted to, at most, in one pass."""
    return min(count, 2 * _of_a_fold(context))


@dataclass(frozen=True)
class LayerFit:
    """The models of a layer by fold, the sinks that were found, and the surrogates' numbers.

    `terms` counts those of a score.
    """

    weights: Float[Tensor, "model fold head variable"]
    terms: int
    found: Bool[Tensor, "head position"]
    surrogates: dict[str, Float[Tensor, "draw head"]]

    def score(
        self,
        rows: SampledCall,
        text: Text,
        sets: Bool[Tensor, "batch set position"] | None = None,
    ) -> Float[Tensor, "group set head score"]:
        """The `SCORES` of the rows of each group and set under the other fold's models."""
        context = rows.k.shape[2]
        beta, sigma, kappa, tau = split(self.weights, self.terms, self.found.shape[1])
        tau = tau[..., : len(offset_edges(context)) - 1]
        weights = torch.cat([beta, sigma, kappa[..., :context], tau], dim=-1)
        shape = (GROUPS, 1 if sets is None else sets.shape[1], rows.q.shape[1], len(SCORES))
        by_group = torch.zeros(shape, dtype=torch.float64)
        for fold in (0, 1):
            mine, of_fold = _of_fold(rows, text, fold)
            if mine.any():
                of_sets = None if sets is None else sets[mine]
                scores = score(of_fold, weights[:, 1 - fold], of_sets)
                by_group.index_add_(0, text.group[mine], scores)
        return by_group

    @property
    def kappa(self) -> Float[Tensor, "head offset"]:
        """Log weight of every offset in the position model, the mean of both folds."""
        position = self.weights[MODELS.index("position")].double().mean(0)
        return split(position, self.terms, self.found.shape[1])[2]


@dataclass(frozen=True)
class Sample:
    """The sequences that models are fitted to, of both folds in turn, and rows of theirs."""

    chosen: list[int]
    text: Text
    rows: Rows
    surrogate_rows: Rows

    @classmethod
    def draw(cls, text: Text, *, seed: int) -> Sample:
        """Sequences of many groups, drawn with `seed`, and rows of theirs."""
        if text.single_long_sequence:
            both = [int(text.lengths.argmax())]
            per_sequence, numbers = scored_rows(text), both
        else:
            count = _of_a_fold(text.context)
            folds = [_spread(text, fold, count, seed=seed) for fold in (0, 1)]
            both = [sequence for pair in zip(*folds, strict=False) for sequence in pair]
            per_sequence, numbers = 2 * FOLD_ROWS // len(both), list(range(len(both)))
        text = text.part(both, width=text.context)
        rows = sample_rows(text.lengths, count=per_sequence, seed=seed, numbers=numbers)
        some = text.part(slice(SURROGATE_SEQUENCES), width=text.context)
        compared = sample_rows(some.lengths, count=SURROGATE_ROWS // len(some), seed=seed)
        return cls(both, text, rows.zero_hidden(text.hidden), compared.zero_hidden(some.hidden))

    def fit(
        self, call: AttentionCall, planes: Planes, *, surrogates: int, seed: int
    ) -> LayerFit:
        """The models of one layer, from its attention on the sample; and its surrogates."""
        found = find_sinks(SampledCall(call, self.rows, planes, sinks=self.text.sinks))
        sinks = with_found(self.text.sinks, found)
        rows = SampledCall(call, self.rows, planes, sinks=sinks)
        compared = rows.of_sequences(slice(len(self.surrogate_rows.length)))
        compared = compared.with_rows(self.surrogate_rows)
        drawn = draw_surrogates(compared, draws=surrogates, seed=seed)
        folds = [fit(_of_fold(rows, self.text, fold)[1], fold=fold) for fold in (0, 1)]
        weights = torch.stack(folds, dim=1).float()
        return LayerFit(weights, planes.terms, found, drawn)


@torch.no_grad()
def find_sinks(rows: SampledCall) -> Bool[Tensor, "head position"]:
    """The keys, beside the sinks known, that the rows of most sequences attend to.

    Such a key takes more than 0.3 of the attention of the rows behind it, 16 or more in all,
    in more than half of the sequences that have such rows. A single sequence counts as two, its
    earlier and its later rows: both take so much, and are 16 or more.
    """
    alone, rank = len(rows.q) == 1, torch.arange(rows.rows.position.shape[1])
    early = rank < len(rank) // 2
    parts = [early, ~early] if alone else [rank >= 0]
    weights = (rows.rows.weight * part for part in parts)
    each = [_taken(rows.with_rows(replace(rows.rows, weight=weight))) for weight in weights]
    takes, count = (torch.cat(x) for x in zip(*each, strict=True))
    often = takes.sum(0) > (count > 0).sum(0) / 2
    return often & ((count.amin(0) if alone else count.sum(0)) >= LEAST_ROWS)


def _taken(
    rows: SampledCall,
) -> tuple[Bool[Tensor, "batch head position"], Float[Tensor, "batch position"]]:
    """Where a key that is no known sink takes much of the rows behind it, and their number."""
    batch, heads, context = *rows.q.shape[:2], rows.k.shape[2]
    count, weight = torch.zeros(2, batch, context, dtype=torch.float64)
    mass = torch.zeros(batch, heads, context, dtype=torch.float64)
    for block in rows.blocks():
        keys, row_weight = slice(block.keys.start, block.keys.stop), block.weight[:, None]
        own = block.self_column[..., None]
        if block.heads.start == 0:
            behind = block.seen.to(block.weight.dtype).scatter(-1, own, 0.0)
            count[:, keys] += ((row_weight > 0).to(behind) @ behind)[:, 0].cpu()
            weight[:, keys] += (row_weight @ behind)[:, 0].cpu()
        own = own[:, None, None].expand(*block.q.shape[:4], 1)
        attention = block.attention.scatter_(-1, own, 0.0)
        taken = (row_weight[:, :, None, None] @ attention)[..., 0, :].flatten(1, 2)
        mass[:, block.query_heads, keys] += taken.to("cpu", torch.float64)
    return (mass > LEAST_SHARE * weight[:, None]) & (rows.sinks.cpu() == 0), count


def with_found(
    sinks: Int[Tensor, "batch 1 position"], found: Bool[Tensor, "head longest"]
) -> Int[Tensor, "batch shared position"]:
    """The table of sinks with the found ones, a row for each head where there are any."""
    if not found.any():
        return sinks
    kind = found[:, : sinks.shape[-1]] * (1 + SINKS.index("found"))
    return torch.where(sinks > 0, sinks, kind)


def _of_fold(
    rows: SampledCall, text: Text, fold: int
) -> tuple[Bool[Tensor, " batch"], SampledCall]:
    """The sequences of a fold and their rows; alone, every other row of the sequence."""
    if text.single_long_sequence:
        return text.fold >= 0, rows.with_rows(rows.rows.every_other(fold))
    mine = text.fold == fold
    return mine, rows.of_sequences(mine)


def _of_a_fold(context: int) -> int:
    return max(1, min(FOLD_SEQUENCES, FOLD_TOKENS // context))


def _spread(text: Text, fold: int, count: int, *, seed: int) -> list[int]:
    """Up to `count` long sequences of a fold, in random order, of as many groups as can be."""
    order = torch.randperm(len(text), generator=generator_of(seed))
    taken: Counter[int] = Counter()
    rank: dict[int, int] = {}  # of each sequence in its group
    for sequence in order[(text.long & (text.fold == fold))[order]].tolist():
        group = int(text.group[sequence])
        rank[sequence] = taken[group]
        taken[group] += 1
    return sorted(rank, key=rank.__getitem__)[:count]
