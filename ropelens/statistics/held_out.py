"""The models of a layer's budget: fitted to a sample of rows, scored on rows of other text.

Groups of sequences belong to two folds in turn. The models that are fitted to sequences of one
fold are scored on those of the other, all of them, so that what a model has too much of
parameters is no advantage. A text of one sequence is folded by its rows, every other of them.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.rope.planes import Planes
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.corpus import Corpus
from ropelens.statistics.gains import Scores, score
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


def scored_rows(sequences: int) -> int:
    """Rows of each sequence that models are scored on."""
    if sequences == 1:
        return 2 * FOLD_ROWS
    return max(LEAST_SCORED, -(-SCORED_ROWS // sequences))


@dataclass(frozen=True)
class LayerFit:
    """The models of a layer by fold, the sinks that were found, and its surrogates.

    `alone` says that there is one sequence, folded by its rows.
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
    ) -> Scores:
        """The likelihood of the rows of each group under the models of the other fold."""
        fold = group % 2
        if self.alone:
            call, rows, sinks = _in_halves(call, rows, sinks)
            fold, group = torch.arange(2), group.expand(2)
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
    alone: bool

    @classmethod
    def draw(cls, text: Corpus, *, seed: int) -> Sample:
        """Sequences of many groups, drawn with `seed`, and rows of theirs."""
        context = text.context
        count = max(1, min(FOLD_SEQUENCES, FOLD_TOKENS // context))
        folds = [_spread(text.group, fold, count, seed=seed) for fold in (0, 1)]
        fewest, alone = min(map(len, folds)), len(text) == 1
        both = [0] if alone else [s for pair in zip(*folds, strict=False) for s in pair]
        per_sequence = 2 * FOLD_ROWS if alone else FOLD_ROWS // fewest
        compared = text.lengths[both[:SURROGATE_SEQUENCES]]
        return cls(
            text=text.part(both, width=context),
            rows=sample_rows(text.lengths[both], count=per_sequence, seed=seed),
            surrogate_rows=sample_rows(
                compared, count=SURROGATE_ROWS // len(compared), seed=seed
            ),
            alone=alone,
        )

    def fit(
        self, call: AttentionCall, planes: Planes, *, surrogates: int, seed: int
    ) -> LayerFit:
        """The models of one layer, from its attention on the sample; and its surrogates."""
        found = find_sinks(call, self.rows, planes, self.text.sinks)
        sinks, rows, fold = with_found(self.text.sinks, found), self.rows, self.text.group % 2
        some = len(self.surrogate_rows.length)
        drawn = draw_surrogates(
            _of_sequences(call, some),
            self.surrogate_rows,
            planes,
            sinks[:some],
            draws=surrogates,
            seed=seed,
        )
        if self.alone:
            call, rows, sinks = _in_halves(call, rows, sinks)
            fold = torch.arange(2)
        fits = fit(call, rows, planes, sinks, part=fold).in_float32
        return LayerFit(fits, found, drawn, self.alone)


def _spread(group: Int[Tensor, " sequence"], fold: int, count: int, *, seed: int) -> list[int]:
    """Up to `count` sequences of a fold, in random order, of as many groups as there are."""
    order = torch.randperm(len(group), generator=torch.Generator().manual_seed(seed % 2**63))
    taken: Counter[int] = Counter()
    ranked: list[tuple[int, int, int]] = []
    for sequence in order[group[order] % 2 == fold].tolist():
        own = int(group[sequence])
        ranked.append((taken[own], len(ranked), sequence))
        taken[own] += 1
    return [sequence for *_, sequence in sorted(ranked)[:count]]


def _of_sequences(call: AttentionCall, count: int) -> AttentionCall:
    """The call on the first sequences of its batch."""
    return replace(call, **{name: getattr(call, name)[:count] for name in BATCHED})


def _in_halves(
    call: AttentionCall, rows: Rows, sinks: Int[Tensor, "1 shared position"]
) -> tuple[AttentionCall, Rows, Int[Tensor, "2 shared position"]]:
    """A call on one sequence as one on two, of which each has every other of the rows."""
    tensors = {name: getattr(call, name) for name in BATCHED}
    twice = {name: x.expand(2, *x.shape[1:]) for name, x in tensors.items()}
    position, weight = rows.position[0], rows.weight[0]
    if len(position) % 2:  # a row without weight makes both halves as long
        position = torch.cat([position, position[-1:]])
        weight = torch.cat([weight, weight.new_zeros(1)])
    halves = Rows(
        position.view(-1, 2).T, weight.view(-1, 2).T, rows.length.expand(2), dense=False
    )
    return replace(call, **twice), halves, sinks.expand(2, -1, -1)
