"""Heads on repeated random tokens: do they find the earlier occurrence, or what followed it?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from ropelens.measure.batches import token_losses
from ropelens.measure.tasks import repeated_tokens
from ropelens.models.subject import Subject, trained_context
from ropelens.rope.planes import Planes
from ropelens.statistics.attention import sum_attention
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.ragged import stack
from ropelens.statistics.rows import Rows
from ropelens.statistics.variables import named

REPEATED_TOKENS = 64
"""Random tokens before they are repeated, where the context holds twice as many."""

REPEATS = 8
"""Sequences of repeated random tokens that scores are means of."""


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
    def values(self) -> dict[str, np.ndarray]:
        """Both scores as means over the sequences, and one of each, by name."""
        return {
            "induction": stack(scores.mean(0) for scores in self.induction),
            "trial_induction": np.moveaxis(stack(self.induction), 1, 0),
            "duplicate_token": stack(scores.mean(0) for scores in self.duplicate_token),
        }


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
    config = subject.config
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
    by_offset = named("offset_mass")
    rows = Rows(second, weight, whole, dense=False)
    mass: dict[int, Tensor] = {}

    def observe(call: AttentionCall) -> None:
        sums = sum_attention(
            call, rows, planes[call.layer], tokens=tokens, statistics=by_offset
        )["offset_mass"]
        hidden = bool((call.start[second[0]] > second[0] - length).any())
        mass[call.layer] = torch.full_like(sums, torch.nan) if hidden else sums

    with torch.no_grad(), subject.observe(observe):
        losses = token_losses(subject, tokens, whole)
    layers = [mass[layer] for layer in sorted(mass)]
    return RepeatScores(
        induction=[m[..., length - 1] for m in layers],
        duplicate_token=[m[..., length] for m in layers],
        losses=losses,
    )


def repeat_length(model: PreTrainedModel) -> int:
    """Random tokens before they are repeated: `REPEATED_TOKENS`, or what the context holds."""
    return max(2, min(REPEATED_TOKENS, (trained_context(model.config) - 1) // 2))
