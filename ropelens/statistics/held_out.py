"""The models of a layer's budget: fitted to a sample of rows, scored on rows of other text.

Groups of sequences belong to two folds (see `Corpus`). The models that are fitted to sequences
of one fold are scored on those of the other, all of them, so that what a model has too much of
parameters is no advantage. Where one sequence is alone in its length, every other of its rows
belongs to a fold.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.rope.planes import Planes
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.corpus import Corpus
from ropelens.statistics.gains import Scores, score
from ropelens.statistics.generator import generator_of
from ropelens.statistics.groups import GROUPS
from ropelens.statistics.logit import Fits, fit
from ropelens.statistics.rows import Rows, sample_rows
from ropelens.statistics.sinks import find_sinks, with_found
from ropelens.statistics.surrogates import LayerSurrogates, draw_surrogates

FOLD_ROWS = 256
"""Rows that the models of a fold are fitted to."""

FOLD_SEQUENCES = 8
"""Sequences that they are of, at most."""

FOLD_TOKENS = 8192
"""Tokens of these sequences, at most, if two sequences are not longer: they run together."""

SCORED_ROWS = 2048
"""Rows that models are scored on, at least, where there are so many."""

LEAST_SCORED = 32
"""Rows of each sequence that models are scored on, at least."""

SURROGATE_SEQUENCES = 8
SURROGATE_ROWS = 256
"""Rows of so many sequences that surrogates are compared on."""

BATCHED = ("query", "key", "value", "output")
"""The tensors of a call, all over its sequences."""


def scored_rows(text: Corpus) -> int:
    """Rows of each sequence that models are scored on; alone, those that it is fitted to."""
    return 2 * FOLD_ROWS if text.alone else max(LEAST_SCORED, -(-SCORED_ROWS // len(text)))


@dataclass(frozen=True)
class LayerFit:
    """The models of a layer by fold, the sinks that were found, and its surrogates.

    `alone` says that rows are folded in place of sequences.
    """

    fits: Fits
    found: Bool[Tensor, "head position"]
    surrogates: LayerSurrogates
    alone: bool

    def sinks(
        self, known: Int[Tensor, "batch 1 position"]
    ) -> Int[Tensor, "batch shared position"]:
        """The sinks of a batch, those included that were found."""
        return with_found(known, self.found)

    def score(
        self,
        call: AttentionCall,
        rows: Rows,
        planes: Planes,
        sinks: Int[Tensor, "batch shared position"],
        *,
        group: Int[Tensor, " batch"],
        fold: Int[Tensor, " batch"],
    ) -> Scores:
        """The likelihood of the rows of each group under the models of the other fold."""
        if self.alone:
            call, rows, sinks = _in_halves(call, rows, sinks)
            fold, group = torch.arange(2).repeat(len(group)), group.repeat_interleave(2)
        fits = self.fits.upto(len(call.start))
        return score(call, rows, planes, sinks, fits, by=1 - fold, slot=group, slots=GROUPS)

    @property
    def kappa(self) -> Float[Tensor, "head offset"]:
        """Log weight of every offset in the position model, the mean of both folds."""
        return self.fits.weights["position"].offset.double().mean(0).flatten(0, 1)


@dataclass(frozen=True)
class Sample:
    """The sequences that models are fitted to, of both folds in turn, and rows of theirs."""

    text: Corpus
    rows: Rows
    surrogate_rows: Rows

    @classmethod
    def draw(cls, text: Corpus, *, seed: int) -> Sample:
        """Sequences of many groups, drawn with `seed`, and rows of theirs."""
        context = text.context
        if text.alone:
            both = [int(text.lengths.argmax())]
            per_sequence, first = scored_rows(text), both[0]
        else:
            count = _of_a_fold(context)
            folds = [_spread(text, fold, count, seed=seed) for fold in (0, 1)]
            both = [sequence for pair in zip(*folds, strict=False) for sequence in pair]
            per_sequence, first = 2 * FOLD_ROWS // len(both), 0
        compared = text.lengths[both[:SURROGATE_SEQUENCES]]
        return cls(
            text=text.part(both, width=context),
            rows=sample_rows(text.lengths[both], count=per_sequence, seed=seed, first=first),
            surrogate_rows=sample_rows(
                compared, count=SURROGATE_ROWS // len(compared), seed=seed
            ),
        )

    def fit(
        self, call: AttentionCall, planes: Planes, *, surrogates: int, seed: int
    ) -> LayerFit:
        """The models of one layer, from its attention on the sample; and its surrogates."""
        found = find_sinks(call, self.rows, planes, self.text.sinks)
        sinks, rows, fold = with_found(self.text.sinks, found), self.rows, self.text.fold
        some = len(self.surrogate_rows.length)
        drawn = draw_surrogates(
            _of_sequences(call, some),
            self.surrogate_rows,
            planes,
            sinks[:some],
            draws=surrogates,
            seed=seed,
        )
        if self.text.alone:
            call, rows, sinks = _in_halves(call, rows, sinks)
            fold = torch.arange(2)
        fits = fit(call, rows, planes, sinks, part=fold).in_float32
        return LayerFit(fits, found, drawn, self.text.alone)


def fitted_sequences(count: int, context: int) -> int:
    """Sequences of `count` that models are fitted to, at most, in one pass."""
    return min(count, 2 * _of_a_fold(context))


def _of_a_fold(context: int) -> int:
    return max(1, min(FOLD_SEQUENCES, FOLD_TOKENS // context))


def _spread(text: Corpus, fold: int, count: int, *, seed: int) -> list[int]:
    """Up to `count` long sequences of a fold, in random order, of as many groups as can be."""
    order = torch.randperm(len(text), generator=generator_of(seed))
    taken: Counter[int] = Counter()
    ranked: list[tuple[int, int, int]] = []
    for sequence in order[(text.long & (text.fold == fold))[order]].tolist():
        own = int(text.group[sequence])
        ranked.append((taken[own], len(ranked), sequence))
        taken[own] += 1
    return [sequence for *_, sequence in sorted(ranked)[:count]]


def _of_sequences(call: AttentionCall, count: int) -> AttentionCall:
    """The call on the first sequences of its batch."""
    return replace(call, **{name: getattr(call, name)[:count] for name in BATCHED})


def _in_halves(
    call: AttentionCall, rows: Rows, sinks: Int[Tensor, "batch shared position"]
) -> tuple[AttentionCall, Rows, Int[Tensor, "twice shared position"]]:
    """A call on twice the sequences, of which each has every other of the rows of one."""

    def twice(x: Tensor) -> Tensor:
        return x[:, None].expand(-1, 2, *x.shape[1:]).flatten(0, 1)

    def halved(x: Tensor, filling: Tensor) -> Tensor:
        both = torch.cat([x, filling], dim=1) if x.shape[1] % 2 else x
        return both.unflatten(1, (-1, 2)).mT.flatten(0, 1)

    # A row without weight makes both halves as long.
    position = halved(rows.position, rows.position[:, -1:])
    weight = halved(rows.weight, torch.zeros_like(rows.weight[:, :1]))
    halves = Rows(position, weight, twice(rows.length), dense=False)
    tensors: dict[str, Any] = {name: twice(getattr(call, name)) for name in BATCHED}
    return replace(call, **tensors), halves, twice(sinks)
