"""The models of a layer's budget: fitted to a sample of rows, scored on rows of other text.

Groups of sequences belong to two folds (see `Text`). The models that are fitted to one fold
are scored on all sequences of the second fold, and the reverse, so more weights are not an
advantage. If a text has a single long sequence, its rows belong to the two folds in turn.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.attention.call import AttentionCall
from ropelens.attention.exchange import follow_sums
from ropelens.attention.formulas import FOLLOW
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.sums import by_group
from ropelens.attention.visibility import offset_edges
from ropelens.budget.fits import fit_models
from ropelens.budget.found_sinks import add_found_sinks, find_sinks
from ropelens.budget.labels import HeadBudget
from ropelens.budget.logit import MODELS, SCORES, gains, score_models
from ropelens.budget.offsets import split_weights
from ropelens.budget.surrogates import draw_surrogates
from ropelens.caches import kept, on_device
from ropelens.rope.planes import Planes
from ropelens.text.rows import Rows, generator_of, sample_rows
from ropelens.text.text import Text

FOLD_ROWS = 256  # rows to which the models of a fold are fitted
FOLD_SEQUENCES = 8  # largest number of sequences with these rows
FOLD_TOKENS = 8192  # largest number of tokens in these sequences, unless one is longer
SCORED_ROWS = 2048  # least number of scored rows, if the text has enough
LEAST_SCORED = 32  # least number of such rows in each sequence
SURROGATE_SEQUENCES = 8
SURROGATE_ROWS = 256  # rows of these sequences on which surrogates are compared


def scored_rows(text: Text) -> int:
    """Rows of each sequence on which models are scored; all fitted rows if one is long."""
    if text.single_long_sequence:
        return 2 * FOLD_ROWS
    return max(LEAST_SCORED, -(-SCORED_ROWS // len(text)))


def fitted_sequences(count: int, context: int) -> int:
    """Largest number of the `count` sequences to which models are fitted in one pass."""
    return min(count, 2 * _sequences_per_fold(context))


def head_budget(scores: Float[Tensor, "*head score"]) -> HeadBudget:
    """The budget of each head, from the sums `SCORES` and `FOLLOW`; NaN without rows."""
    follow = (scores[..., len(SCORES) :] / scores[..., :1]).numpy()
    return HeadBudget(
        gains={name: gain.numpy() for name, gain in gains(scores).items()},
        follow={name: follow[..., index] for index, name in enumerate(FOLLOW)},
    )


@dataclass(frozen=True)
class LayerFit:
    """The models of a layer by fold, the sinks that were found, and the surrogates' numbers."""

    weights: Float[Tensor, "model fold head variable"]
    terms: int
    found_sinks: Bool[Tensor, "head position"]
    surrogates: dict[str, Float[Tensor, "draw head"]]

    def score(
        self,
        sampled: SampledCall,
        text: Text,
        sets: Bool[Tensor, "batch set position"] | None,
    ) -> Float[Tensor, "group set head score"]:
        """`SCORES` and `FOLLOW` of each group and set; models belong to the opposite fold."""
        context = sampled.k.shape[2]
        is_single = text.single_long_sequence
        weights = self._weights_of(context).to(sampled.k.device)
        if sets is None:
            sets = _all_rows(sampled.rows, context)
        if is_single:  # it is in both folds, with every second row
            first = sampled.with_rows(_every(sampled.rows, 2, 0))
            second = sampled.with_rows(_every(sampled.rows, 2, 1))
            scores = score_models(first, weights[:, 1:], sets)
            scores += score_models(second, weights[:, :1], sets)
        else:
            opposite_fold = 1 - on_device(text.fold, weights.device)
            scores = score_models(sampled, weights[:, opposite_fold], sets)
        follow = follow_sums(sampled, sets, single=is_single)
        return by_group(torch.cat([scores.cpu(), follow], dim=-1), text.group)

    def _weights_of(self, context: int) -> Float[Tensor, "model fold head some"]:
        """The weights for a context, which may be shorter than the sample was."""
        longest = self.found_sinks.shape[1]
        parts = split_weights(self.weights, self.terms, longest)
        kappa = parts.kappa[..., :context]
        tau = parts.tau[..., : len(offset_edges(context)) - 1]
        return torch.cat([parts.beta, parts.sigma, kappa, tau], dim=-1)

    @property
    def kappa(self) -> Float[Tensor, "head offset"]:
        """Log weight of every offset in the position model, the mean of both folds."""
        position = self.weights[MODELS.index("position")].double().mean(0)
        return split_weights(position, self.terms, self.found_sinks.shape[1]).kappa


@dataclass(frozen=True)
class Sample:
    """The sequences to which models are fitted, from both folds in turn, and their rows."""

    chosen: list[int]
    text: Text
    rows: Rows
    surrogate_rows: Rows

    @classmethod
    def draw(cls, text: Text, *, seed: int) -> "Sample":
        """Draw sequences from many groups, and rows of the sequences."""
        chosen = _choose_sequences(text, seed=seed)
        numbers: Sequence[int] = range(len(chosen))
        per_sequence = 2 * FOLD_ROWS // len(chosen)
        if text.single_long_sequence:
            numbers = chosen
            per_sequence = scored_rows(text)
        part = text.part(chosen, width=text.context)
        rows = sample_rows(part.lengths, count=per_sequence, seed=seed, numbers=numbers)
        few = part.part(slice(SURROGATE_SEQUENCES), width=part.context)
        compared = sample_rows(few.lengths, count=SURROGATE_ROWS // len(few), seed=seed)
        return cls(
            chosen=chosen,
            text=part,
            rows=rows.zero_hidden(part.hidden),
            surrogate_rows=compared.zero_hidden(few.hidden),
        )

    def fit(
        self, call: AttentionCall, planes: Planes, *, surrogates: int, seed: int
    ) -> LayerFit:
        """Fit the models of one layer to its attention on the sample, and draw surrogates."""
        known = self.text.sinks
        found_sinks = find_sinks(SampledCall(call, self.rows, planes, sinks=known))
        sinks = add_found_sinks(known, found_sinks)
        sampled = SampledCall(call, self.rows, planes, sinks=sinks)
        compared = sampled.of_sequences(slice(len(self.surrogate_rows.length)))
        compared = compared.with_rows(self.surrogate_rows)
        drawn = draw_surrogates(compared, draws=surrogates, seed=seed)
        if self.text.single_long_sequence:  # it is in both folds, with every second row
            twice = sampled.of_sequences(torch.zeros(2, dtype=torch.long, device="cpu"))
            sampled = twice.with_rows(_in_turn(self.rows, range(2), 2))
        weights = fit_models(sampled, folds=2).float().cpu()
        return LayerFit(weights, planes.terms, found_sinks, drawn)


_every = kept()(Rows.every)
_in_turn = kept()(Rows.in_turn)


@kept()
def _all_rows(rows: Rows, context: int) -> Bool[Tensor, "batch 1 position"]:
    return torch.ones(len(rows.position), 1, context, dtype=torch.bool, device="cpu")


def _sequences_per_fold(context: int) -> int:
    return max(1, min(FOLD_SEQUENCES, FOLD_TOKENS // context))


def _choose_sequences(text: Text, *, seed: int) -> list[int]:
    """The sequences of a sample: of both folds in turn, or the single long sequence."""
    if text.single_long_sequence:
        return [int(text.lengths.argmax())]
    count = _sequences_per_fold(text.context)
    in_first = text.long & (text.fold == 0)
    in_second = text.long & (text.fold == 1)
    first_fold = _draw_sequences(text.group, in_first, count, seed=seed)
    second_fold = _draw_sequences(text.group, in_second, count, seed=seed)
    chosen: list[int] = []
    for pair in zip(first_fold, second_fold, strict=False):
        chosen += pair
    return chosen


def _draw_sequences(
    group: Int[Tensor, " sequence"],
    is_candidate: Bool[Tensor, " sequence"],
    count: int,
    *,
    seed: int,
) -> list[int]:
    """Draw up to `count` of the candidates, from different groups where possible."""
    order = torch.randperm(len(group), generator=generator_of(seed), device="cpu")
    drawn: Counter[int] = Counter()
    rank_in_group: dict[int, int] = {}
    for sequence in order[is_candidate[order]].tolist():
        own_group = int(group[sequence])
        rank_in_group[sequence] = drawn[own_group]
        drawn[own_group] += 1
    return sorted(rank_in_group, key=rank_in_group.__getitem__)[:count]
