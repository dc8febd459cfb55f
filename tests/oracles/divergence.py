"""Divergence of the attention that transformers returns, in bits."""

import numpy as np
import torch
from torch.distributions import Categorical, kl_divergence
from transformers import PreTrainedModel


@torch.no_grad()
def attentions(model: PreTrainedModel, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The attention that the model returns, in float64; a learned sink is the last key."""
    output = model(tokens, use_cache=False, output_attentions=True)
    weights = [layer.double() for layer in output.attentions]
    if "sinks" not in str(model.state_dict().keys()):
        return weights
    with_sink = []
    for weight in weights:
        on_sink = 1 - weight.sum(-1, keepdim=True)
        with_sink.append(torch.cat([weight, on_sink], dim=-1))
    return with_sink


def attention_divergence(
    before: PreTrainedModel,
    after: PreTrainedModel,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
) -> np.ndarray:
    """Mean divergence [layer, head] over all rows but the first, without padding."""
    counts = torch.arange(tokens.shape[1]) < lengths[:, None]
    counts[:, 0] = False
    layers = []
    for old, new in zip(
        attentions(before, tokens), attentions(after, tokens), strict=True
    ):
        nats = kl_divergence(Categorical(probs=old), Categorical(probs=new))
        of_rows = nats.transpose(1, 2)[counts]
        layers.append(of_rows.mean(0) / np.log(2))
    return torch.stack(layers).numpy()
