"""Random vectors, and the attention calls of a model that observers receive."""

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ropelens.attention.call import AttentionCall
from ropelens.model.as_live_model import as_live_model
from ropelens.rope.planes import Planes
from ropelens.rotation.probe import RotationProbe


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def observed_calls(
    model: PreTrainedModel, tokens: Tensor
) -> list[tuple[AttentionCall, Planes]]:
    """Attention call and planes of every layer, on a batch."""
    live = as_live_model(model)
    planes = RotationProbe(live).planes(tokens.shape[1])
    calls: dict[int, AttentionCall] = {}
    with torch.no_grad(), live.observe(lambda call: calls.update({call.layer: call})):
        live.forward(tokens)
    return [(calls[layer], planes[layer]) for layer in sorted(calls)]
