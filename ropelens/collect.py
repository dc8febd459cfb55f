"""One pass of a model over tokens, with the running sums standing at its attention."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from ropelens.errors import UnsupportedModel
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
    no_sums,
    row_weight_by_group,
)

TOKENS_PER_BATCH = {"cpu": 4096, "cuda": 16384}

LOSS_ROWS = 512
"""Rows of logits turned to float32 at a time: a vocabulary is wide."""

LARGEST_RESIDUAL = 1e-3
"""Largest relative difference between attention as observed and as the model computed it."""

Progress = Callable[[int], None]
"""Told, after every batch, how many tokens it had."""


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
    size = batch_size or max(
        1, TOKENS_PER_BATCH[device_of(subject.model).type] // tokens.shape[1]
    )
    sums = no_sums()
    longest, whole = int(lengths.max()), depends_on_length(subject.model)
    for begin in range(0, len(tokens), size):
        length = lengths[begin : begin + size]
        # A RoPE that changes with the length must see the one that `planes` were read at.
        batch = tokens[begin : begin + size, : longest if whole else int(length.max())]
        sums = sums + _sum_batch(subject, batch, length, planes, rows, seed, first + begin)
        if progress is not None:
            progress(int(length.sum()))
    return sums


def _sum_batch(
    subject: Subject,
    tokens: Int[Tensor, "sequence position"],
    lengths: Int[Tensor, " sequence"],
    planes: list[Planes],
    count: int | Literal["all"],
    seed: int,
    first: int,
) -> Sums:
    """The sums of one batch: one forward pass, every statistic beside it."""
    rows = (
        all_rows(lengths)
        if count == "all"
        else sample_rows(lengths, count=count, seed=seed, first=first)
    )
    group = (first + torch.arange(len(tokens))) % GROUPS
    layers: dict[int, LayerSums] = {}

    def observe(call: AttentionCall) -> None:
        sums = sum_attention(call, rows, planes[call.layer])
        layers[call.layer] = LayerSums.of(*sums, call, group)

    with torch.no_grad(), subject.observe(observe):
        logits = subject.forward(tokens)
        losses = _sequence_losses(logits, tokens, lengths)
    check_layers(subject.model, set(layers))
    return Sums(
        row_weight=row_weight_by_group(rows, group, tokens.shape[1]),
        tokens=int(lengths.sum()),
        sequences=len(tokens),
        loss=LossSums.of(losses, lengths - 1),
        layers=layers,
    )


def _sequence_losses(
    logits: Float[Tensor, "sequence position token"],
    tokens: Int[Tensor, "sequence position"],
    lengths: Int[Tensor, " sequence"],
) -> Float[Tensor, " sequence"]:
    """Summed loss of each sequence's predicted tokens, in nats."""
    losses = torch.zeros(len(tokens), dtype=torch.float64)
    for sequence, length in enumerate(lengths.tolist()):
        for begin in range(0, length - 1, LOSS_ROWS):
            end = min(begin + LOSS_ROWS, length - 1)
            target = tokens[sequence, begin + 1 : end + 1].to(logits.device, torch.long)
            loss = cross_entropy(logits[sequence, begin:end].float(), target, reduction="sum")
            losses[sequence] += float(loss)
    return losses


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
    """Attention on repeated random tokens, mean over rows of the repetition, [0, 1].

    `induction`: on the token after the earlier occurrence (Olsson et al. 2022, arXiv
    2209.11895, the prefix-matching score). `duplicate_token`: on that occurrence itself.
    """

    induction: list[Float[Tensor, " head"]]
    duplicate_token: list[Float[Tensor, " head"]]


def repeat_scores(
    subject: Subject,
    *,
    first_token: int,
    planes: list[Planes],
    length: int = 64,
    sequences: int = 8,
    seed: int = 0,
) -> RepeatScores:
    """Scores on sequences of `length` random tokens, twice, after `first_token`.

    Tokens of one sequence differ where the vocabulary allows, so that each has one
    earlier occurrence.
    """
    config = subject.model.config.get_text_config()
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randperm(config.vocab_size, generator=generator) for _ in range(sequences)]
    once = torch.stack([draw[torch.arange(length) % len(draw)] for draw in draws])
    start = torch.full((sequences, 1), first_token)
    tokens = torch.cat([start, once, once], dim=1)

    second = torch.arange(length + 1, 2 * length + 1).expand(sequences, -1)
    weight = torch.full(second.shape, 1 / second.numel())
    rows = Rows(second, weight, torch.full((sequences,), tokens.shape[1]), dense=False)
    mass: dict[int, Tensor] = {}

    def observe(call: AttentionCall) -> None:
        mass[call.layer] = sum_attention(call, rows, planes[call.layer])[1].offset_mass.sum(0)

    with torch.no_grad(), subject.observe(observe):
        subject.forward(tokens)
    layers = [mass[layer] for layer in sorted(mass)]
    return RepeatScores(
        induction=[m[:, length - 1] for m in layers],
        duplicate_token=[m[:, length] for m in layers],
    )
