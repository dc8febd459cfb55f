"""Vectors for attention calls; those of a model on some tokens, as observers are shown them."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ropelens.models.subject import as_subject
from ropelens.rope.planes import Planes
from ropelens.statistics.call import AttentionCall


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def observed_calls(
    model: PreTrainedModel, tokens: Tensor
) -> list[tuple[AttentionCall, Planes]]:
    """Every layer's attention call on a batch, and how it rotates."""
    subject = as_subject(model)
    planes = [layer.planes for layer in subject.rotations(tokens.shape[1])]
    calls: dict[int, AttentionCall] = {}
    with torch.no_grad(), subject.observe(lambda call: calls.update({call.layer: call})):
        subject.forward(tokens)
    return [(calls[layer], planes[layer]) for layer in sorted(calls)]
