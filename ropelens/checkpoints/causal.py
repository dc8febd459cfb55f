"""The check that a model is causal: a token does not change the logits before it."""

from itertools import combinations

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from ropelens import noise
from ropelens.config_facts import stated_context
from ropelens.errors import UnsupportedModel, explained
from ropelens.runtime.devices import device_of


@torch.no_grad()
def check_causal(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel if other last tokens change the logits of earlier positions."""
    name = type(model).__name__
    context = stated_context(model.config) or noise.NOISE_TOKENS
    ids = noise.noise_tokens(model.config.get_text_config().vocab_size, context)
    what = f"{name} does not run in {model.dtype} on token ids."
    hint = "another dtype (float32 or bfloat16), or another checkpoint"
    with explained(what, hint=hint):
        logits = _logits(model, ids)
        if not torch.isfinite(logits).all():
            raise ValueError("some logits are NaN or infinite")

    def run(some: Tensor) -> Tensor:
        return logits if some is ids else _logits(model, some)

    run_noise = noise.run_noise(run, ids)
    change = _change_before_last_tokens(logits)
    if change > noise.allowed_residual(run_noise, torch.finfo(model.dtype).eps):
        seen = f"other last tokens change earlier logits by {change:.2g} of their "
        seen += f"spread over the vocabulary; equal runs differ by {run_noise:.2g}"
        hint = "a decoder-only model, such as a Llama"
        what = f"{name} is not a causal language model."
        raise UnsupportedModel(what, seen=seen, hint=hint)


def _logits(model: PreTrainedModel, ids: Tensor) -> Tensor:
    on_device = ids.to(device_of(model))
    return model(input_ids=on_device, use_cache=False).logits


def _change_before_last_tokens(
    logits: Float[Tensor, "sequence position token"],
) -> float:
    """Largest difference between sequences that differ only in their last tokens."""
    common = logits[:, : noise.common_tokens(logits.shape[1])].split(1)
    pairs = combinations(common, 2)
    changes = torch.cat([noise.logit_change(one, other) for one, other in pairs])
    # The median, because rounding may send a token of one sequence to another expert.
    typical = changes.median(0).values
    return float(typical.max())
