"""The models of a layer's budget: fitted to a sample of rows, scored on rows of other text.

Groups of sequences belong to two folds (see `Text`). The models that are fitted to one fold
are scored on all sequences of the second fold, and the reverse, so more weights are not an
advantage. If a text has a single long sequence, its rows belong to the two folds in turn.
"""

from collections import Counter
from dataclasses import dataclass, replace
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ropelens.attention.block import blocks_of
from ropelens.attention.call import AttentionCall
from ropelens.attention.exchange import follow_sums
from ropelens.attention.formulas import FOLLOW
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.sums import by_group
from ropelens.attention.visibility import offset_edges
from ropelens.budget.fits import fit_models
from ropelens.budget.labels import HeadBudget
from ropelens.budget.logit import MODELS, SCORES, gains, score_models
from ropelens.budget.offsets import split_weights
from ropelens.budget.surrogates import draw_surrogates
from ropelens.caches import kept, on_device
from ropelens.rope.planes import Planes
from ropelens.text.rows import Rows, generator_of, sample_rows
from ropelens.text.text import SINKS, Text

FOLD_ROWS = 256  # rows to which the models of a fold are fitted
FOLD_SEQUENCES = 8  # largest number of sequences with these rows
FOLD_TOKENS = 8192  # largest number of tokens in these sequences, unless one is longer
SCORED_ROWS = (
    2048  # least number of rows on which models are scored, if the text has enough
)
LEAST_SCORED = 32  # least number of such rows in each sequence
SINK_SHARE = 0.3  # a key is a sink above this mean attention of all later rows
SINK_ROWS = 16  # least number of rows in this mean
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
        context, longest = sampled.k.shape[2], self.found_sinks.shape[1]
        parts = split_weights(self.weights, self.terms, longest)
        kappa = parts.kappa[..., :context]
        tau = parts.tau[..., : len(offset_edges(context)) - 1]
        weights = torch.cat([parts.beta, parts.sigma, kappa, tau], dim=-1)
        weights = weights.to(sampled.k.device)
        sets = _all_rows(sampled.rows, context) if sets is None else sets
        if text.single_long_sequence:  # it is in both folds, with every second row
            first, second = (
                sampled.with_rows(_every(sampled.rows, 2, x)) for x in (0, 1)
            )
            scores = score_models(first, weights[:, 1:], sets)
            scores += score_models(second, weights[:, :1], sets)
        else:
            scores = score_models(
                sampled, weights[:, 1 - on_device(text.fold, weights.device)], sets
            )
        follow = follow_sums(sampled, sets, single=text.single_long_sequence)
        return by_group(torch.cat([scores.cpu(), follow], dim=-1), text.group)

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
        if text.single_long_sequence:
            chosen = [int(text.lengths.argmax())]
            per_sequence, numbers = scored_rows(text), chosen
        else:
            count = _sequences_per_fold(text.context)
            folds = [_draw_sequences(text, fold, count, seed=seed) for fold in (0, 1)]
            chosen = [
                sequence for pair in zip(*folds, strict=False) for sequence in pair
            ]
            per_sequence, numbers = (
                2 * FOLD_ROWS // len(chosen),
                list(range(len(chosen))),
            )
        text = text.part(chosen, width=text.context)
        rows = sample_rows(text.lengths, count=per_sequence, seed=seed, numbers=numbers)
        few = text.part(slice(SURROGATE_SEQUENCES), width=text.context)
        compared = sample_rows(few.lengths, count=SURROGATE_ROWS // len(few), seed=seed)
        rows, compared = rows.zero_hidden(text.hidden), compared.zero_hidden(few.hidden)
        return cls(chosen, text, rows, compared)

    def fit(
        self, call: AttentionCall, planes: Planes, *, surrogates: int, seed: int
    ) -> LayerFit:
        """Fit the models of one layer to its attention on the sample, and draw surrogates."""
        sample = partial(SampledCall, call, self.rows, planes)
        found_sinks = find_sinks(sample(sinks=self.text.sinks))
        sampled = sample(sinks=add_found_sinks(self.text.sinks, found_sinks))
        compared = sampled.of_sequences(slice(len(self.surrogate_rows.length)))
        compared = compared.with_rows(self.surrogate_rows)
        drawn = draw_surrogates(compared, draws=surrogates, seed=seed)
        if self.text.single_long_sequence:  # it is in both folds, with every second row
            twice = sampled.of_sequences(torch.zeros(2, dtype=torch.long))
            sampled = twice.with_rows(_in_turn(self.rows, range(2), 2))
        weights = fit_models(sampled, folds=2).float().cpu()
        return LayerFit(weights, planes.terms, found_sinks, drawn)


@torch.no_grad()
def find_sinks(sampled: SampledCall) -> Bool[Tensor, "head position"]:
    """Keys that are not known as sinks and take more than 0.3 of the attention of later rows.

    They do so in more than half of the sequences that have later rows, and in at least 16 rows.
    Of a single sequence, the earlier and the later rows must each show this, in 16 rows each.
    """
    rows, single = sampled.rows, len(sampled.q) == 1
    rank = torch.arange(rows.position.shape[1])
    early = rank < len(rank) // 2
    parts = [early, ~early] if single else [rank >= 0]
    weighted = (replace(rows, weight=rows.weight * part) for part in parts)
    tests = [exceeds_sink_share(sampled.with_rows(rows)) for rows in weighted]
    exceeds, count = (torch.cat(x) for x in zip(*tests, strict=True))
    often = exceeds.sum(0) > (count > 0).sum(0) / 2
    return often & ((count.amin(0) if single else count.sum(0)) >= SINK_ROWS)


def exceeds_sink_share(
    sampled: SampledCall,
) -> tuple[Bool[Tensor, "batch head position"], Float[Tensor, "batch position"]]:
    """Unknown sinks by the attention of all later rows, and the number of these rows."""
    batch, heads, context = *sampled.q.shape[:2], sampled.k.shape[2]
    # Of each head, and the weight and the number of later rows as two more heads.
    mass = sampled.k.new_zeros(batch, heads + 2, context, dtype=torch.float64)
    for block in blocks_of(sampled):
        keys, row_weight = block.columns, block.weight[:, None]
        own_key = block.self_column[..., None]
        if block.heads.start == 0:
            behind = (
                block.device_visibility.sees()
                .to(block.weight.dtype)
                .scatter(-1, own_key, 0.0)
            )
            rows = torch.cat([row_weight, (row_weight > 0).to(behind)], dim=1)
            mass[:, heads:, keys] += rows @ behind
        own_key = own_key[:, None, None].expand(*block.q.shape[:4], 1)
        attention = block.attention.scatter_(-1, own_key, 0.0)
        on_keys = (row_weight[:, :, None, None] @ attention)[..., 0, :].flatten(1, 2)
        mass[:, block.query_heads, keys] += on_keys
    mass, weight, count = mass.cpu().split((heads, 1, 1), dim=1)
    return (mass > SINK_SHARE * weight) & (sampled.sinks == 0), count[:, 0]


def add_found_sinks(
    sinks: Int[Tensor, "batch 1 position"], found_sinks: Bool[Tensor, "head longest"]
) -> Int[Tensor, "batch shared position"]:
    """The table of sinks with the `found_sinks`, by head if there are any."""
    if not found_sinks.any():
        return sinks
    kind = found_sinks[:, : sinks.shape[-1]] * (1 + SINKS.index("found"))
    return torch.where(sinks > 0, sinks, kind)


_every, _in_turn = kept()(Rows.every), kept()(Rows.in_turn)


@kept()
def _all_rows(rows: Rows, context: int) -> Bool[Tensor, "batch 1 position"]:
    return torch.ones(len(rows.position), 1, context, dtype=torch.bool)


def _sequences_per_fold(context: int) -> int:
    return max(1, min(FOLD_SEQUENCES, FOLD_TOKENS // context))


def _draw_sequences(text: Text, fold: int, count: int, *, seed: int) -> list[int]:
    """Draw up to `count` long sequences of a fold, from different groups where possible."""
    order = torch.randperm(len(text), generator=generator_of(seed))
    drawn: Counter[int] = Counter()
    rank: dict[int, int] = {}  # rank of each sequence within its group
    for sequence in order[(text.long & (text.fold == fold))[order]].tolist():
        group = int(text.group[sequence])
        rank[sequence] = drawn[group]
        drawn[group] += 1
    return sorted(rank, key=rank.__getitem__)[:count]
