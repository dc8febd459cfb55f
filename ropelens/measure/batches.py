"""One pass of a model over tokens, with the running sums standing at its attention."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from ropelens.errors import UnsupportedModel
from ropelens.measure.tasks import repeated_tokens
from ropelens.models.doorway import device_of
from ropelens.models.rotation import depends_on_length
from ropelens.models.subject import Subject, check_layers
from ropelens.rope.planes import Planes
from ropelens.statistics.attention import sum_attention
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.maps import attention_map, output_residual
from ropelens.statistics.rows import Rows, all_rows, sample_rows
from ropelens.statistics.sums import (
    GROUPS,
    LayerSums,
    LossSums,
    Sums,
    by_group,
    no_sums,
    row_weight_by_group,
)

TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 16384}

LOSS_ELEMENTS = {"cpu": 2**20, "cuda": 2**26}
"""Logits whose loss is taken at once: a vocabulary is wide, and caches are not."""

LARGEST_RESIDUAL = 1e-3
"""Largest relative difference between attention as observed and as the model computed it."""

Progress = Callable[[int], None]
"""Told, after every batch, how many tokens it had."""


@dataclass(frozen=True)
class Batch:
    """Some sequences that run together, and the rows of theirs that are looked at.

    `first` is the number of the first sequence among all; `group` what they are dealt to.
    """

    tokens: Int[Tensor, "sequence position"]
    lengths: Int[Tensor, " sequence"]
    rows: Rows
    first: int

    @property
    def group(self) -> Int[Tensor, " sequence"]:
        """The group of each sequence, for the bootstrap."""
        return (self.first + torch.arange(len(self.tokens))) % GROUPS

    def add_up(self, call: AttentionCall, planes: Planes) -> LayerSums:
        """The sums of one layer, from its attention on this batch."""
        return LayerSums.of(*sum_attention(call, self.rows, planes), call, self.group)

    def sums(self, layers: dict[int, LayerSums], losses: Float[Tensor, " sequence"]) -> Sums:
        """The sums of all layers with each sequence's summed loss (nats)."""
        return Sums(
            row_weight=row_weight_by_group(self.rows, self.group, self.tokens.shape[1]),
            tokens=int(self.lengths.sum()),
            sequences=len(self.tokens),
            loss=LossSums.of(losses, self.lengths - 1),
            group_loss=by_group(losses, self.group),
            group_predicted=by_group(self.lengths - 1, self.group),
            layers=layers,
        )


def batches(
    subject: Subject,
    tokens: Int[Tensor, "sequence position"],
    lengths: Int[Tensor, " sequence"],
    *,
    rows: int | Literal["all"] = "all",
    seed: int = 0,
    first: int = 0,
    batch_size: int | None = None,
) -> Iterator[Batch]:
    """The sequences in batches of `batch_size`, or of as many as a device likes at once.

    `rows` is "all" or the number sampled from each sequence with `seed`; `first` numbers the
    first sequence. Batches end with their longest sequence.
    """
    size = batch_size or max(
        1, TOKENS_PER_BATCH[device_of(subject.model).type] // tokens.shape[1]
    )
    longest, whole = int(lengths.max()), depends_on_length(subject.model)
    for begin in range(0, len(tokens), size):
        length = lengths[begin : begin + size]
        # A RoPE that changes with the length must see the one that planes were read at.
        batch = tokens[begin : begin + size, : longest if whole else int(length.max())]
        number = first + begin
        looked_at = (
            all_rows(length)
            if rows == "all"
            else sample_rows(length, count=rows, seed=seed, first=number)
        )
        yield Batch(batch, length, looked_at, number)


def collect(
    subject: Subject,
    tokens: Int[Tensor, "sequence position"],
    lengths: Int[Tensor, " sequence"],
    *,
    planes: list[Planes],
    rows: int | Literal["all"] = "all",
    seed: int = 0,
    first: int = 0,
    batch_size: int | None = None,
    progress: Progress | None = None,
) -> Sums:
    """Running sums of every layer over all sequences.

    `planes` says how each layer rotates; `rows` is "all" or the number sampled from each
    sequence; `first` numbers the first sequence, for shards that are added later. Memory
    grows with the layers and the context, not with the number of sequences.
    """
    sums = no_sums()
    for batch in batches(
        subject, tokens, lengths, rows=rows, seed=seed, first=first, batch_size=batch_size
    ):
        sums = sums + _sum_batch(subject, batch, planes)
        if progress is not None:
            progress(int(batch.lengths.sum()))
    return sums


def _sum_batch(subject: Subject, batch: Batch, planes: list[Planes]) -> Sums:
    """The sums of one batch: one forward pass, every statistic beside it."""
    layers: dict[int, LayerSums] = {}

    def observe(call: AttentionCall) -> None:
        layers[call.layer] = batch.add_up(call, planes[call.layer])

    with torch.no_grad(), subject.observe(observe):
        logits = subject.forward(batch.tokens)
        losses = _sequence_losses(logits, batch.tokens, batch.lengths)
    check_layers(subject.model, set(layers))
    return batch.sums(layers, losses)


def token_losses(
    logits: Float[Tensor, "sequence position token"],
    tokens: Int[Tensor, "sequence position"],
    lengths: Int[Tensor, " sequence"],
) -> Float[Tensor, "sequence position"]:
    """Loss of the token at each position, in nats; NaN at position 0 and in padding."""
    losses = torch.full(tokens.shape, torch.nan, dtype=torch.float64)
    for sequence, part, own, target in _predictions(logits, tokens, lengths):
        losses[sequence, part] = cross_entropy(own, target, reduction="none").double().cpu()
    return losses


def _sequence_losses(
    logits: Float[Tensor, "sequence position token"],
    tokens: Int[Tensor, "sequence position"],
    lengths: Int[Tensor, " sequence"],
) -> Float[Tensor, " sequence"]:
    """Summed loss of each sequence's predicted tokens, in nats."""
    losses = torch.zeros(len(tokens), dtype=torch.float64)
    for sequence, _, own, target in _predictions(logits, tokens, lengths):
        losses[sequence] += float(cross_entropy(own, target, reduction="sum"))
    return losses


def _predictions(
    logits: Float[Tensor, "sequence position token"],
    tokens: Int[Tensor, "sequence position"],
    lengths: Int[Tensor, " sequence"],
) -> Iterator[tuple[int, slice, Tensor, Tensor]]:
    """A sequence's number, the positions of some tokens, the logits for them, and they."""
    rows = max(1, LOSS_ELEMENTS[logits.device.type] // logits.shape[-1])
    for sequence, length in enumerate(lengths.tolist()):
        for begin in range(0, length - 1, rows):
            end = min(begin + rows, length - 1)
            target = tokens[sequence, begin + 1 : end + 1].to(logits.device, torch.long)
            own = logits[sequence, begin:end].float()
            yield sequence, slice(begin + 1, end + 1), own, target


def attention_of(
    subject: Subject, tokens: Int[Tensor, " position"]
) -> list[Float[Tensor, "head row key"]]:
    """The attention matrices of every layer on one short sequence.

    What the doorway shows is held against what the model computes: weights from the
    observed queries, keys, scale, soft-cap, mask and sinks, times the values, must give
    the model's own output. Raises `UnsupportedModel` where they do not, as for a model
    that also looks ahead.
    """
    maps: dict[int, Tensor] = {}
    residuals: dict[int, float] = {}

    def observe(call: AttentionCall) -> None:
        weights = attention_map(call)
        maps[call.layer] = weights[0].float().cpu()
        residuals[call.layer] = output_residual(call, weights)

    with torch.no_grad(), subject.observe(observe):
        subject.forward(tokens[None])
    check_layers(subject.model, set(maps))
    limit = max(LARGEST_RESIDUAL, 16 * torch.finfo(subject.model.dtype).eps)
    for layer, residual in sorted(residuals.items()):
        if not residual <= limit:
            raise UnsupportedModel(
                f"{type(subject.model).__name__} attends in a way that ropelens does not know.",
                seen=f"layer {layer}: attention recomputed from its queries and keys misses "
                f"the model's own output by {residual:.2g} (allowed {limit:.0e})",
                means="the model is not causal, or changes its scores or weights in a way "
                "that it does not tell the attention interface",
                attempt="a causal language model of a tested family (see README)",
            )
    return [maps[layer] for layer in sorted(maps)]


@dataclass(frozen=True)
class RepeatScores:
    """Attention on repeated random tokens, a sequence each, mean over rows of the repetition.

    `induction`: on the token after the earlier occurrence (Olsson et al. 2022, arXiv
    2209.11895, the prefix-matching score). `duplicate_token`: on that occurrence itself.
    `losses`: of the token at each position, in nats; NaN at position 0.
    """

    induction: list[Float[Tensor, "sequence head"]]
    duplicate_token: list[Float[Tensor, "sequence head"]]
    losses: Float[Tensor, "sequence position"]

    @property
    def means(self) -> dict[str, list[Float[Tensor, " head"]]]:
        """Both scores as means over the sequences, by name."""
        return {
            "induction": [scores.mean(0) for scores in self.induction],
            "duplicate_token": [scores.mean(0) for scores in self.duplicate_token],
        }


REPEATS = 8
"""Sequences of repeated random tokens that scores are means of."""


def repeat_scores(
    subject: Subject,
    *,
    first_token: int,
    planes: list[Planes],
    length: int = 64,
    sequences: int = REPEATS,
    seed: int = 0,
) -> RepeatScores:
    """Scores on sequences of `length` random tokens, twice, after `first_token`.

    Tokens of one sequence differ where the vocabulary allows, so that each has one
    earlier occurrence. NaN where a sliding window hides that occurrence.
    """
    config = subject.model.config.get_text_config()
    tokens = repeated_tokens(
        first_token=first_token,
        vocabulary=config.vocab_size,
        length=length,
        sequences=sequences,
        seed=seed,
    )
    second = torch.arange(length + 1, 2 * length + 1).expand(sequences, -1)
    weight = torch.full(second.shape, 1 / length)
    whole = torch.full((sequences,), tokens.shape[1])
    rows = Rows(second, weight, whole, dense=False)
    mass: dict[int, Tensor] = {}

    def observe(call: AttentionCall) -> None:
        sums = sum_attention(call, rows, planes[call.layer])[1].offset_mass
        hidden = bool((call.start[second[0]] > second[0] - length).any())
        mass[call.layer] = torch.full_like(sums, torch.nan) if hidden else sums

    with torch.no_grad(), subject.observe(observe):
        losses = token_losses(subject.forward(tokens), tokens, whole)
    layers = [mass[layer] for layer in sorted(mass)]
    return RepeatScores(
        induction=[m[..., length - 1] for m in layers],
        duplicate_token=[m[..., length] for m in layers],
        losses=losses,
    )
