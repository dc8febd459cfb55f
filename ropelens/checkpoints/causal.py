"""The check that a model is causal: a token does not change the logits before it."""

from functools import partial
from itertools import combinations

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from ropelens import noise
from ropelens.checkpoints.not_finite import OTHER_DTYPE, first_not_finite
from ropelens.config_facts import stated_context
from ropelens.errors import BadCheckpoint, UnsupportedModel, explained
from ropelens.runtime.devices import device_of
from ropelens.text.rows import Ids

Logits = Float[Tensor, "sequence position token"]


@torch.no_grad()
def check_causal(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel if other last tokens change the logits of earlier positions.

    One pass over two sequences of 32 tokens suffices if the change is below the floor, which no
    check refuses. Otherwise four sequences of 64 tokens and the noise of three passes decide. A
    fault that begins after 32 tokens is not seen.
    """
    allowed = noise.allowed_residual(0.0, torch.finfo(model.dtype).eps)
    two_sequences = _tokens(model, noise.FEW_TOKENS)[:2]
    logits = _checked_logits(model, two_sequences)
    if _change_before_last_tokens(logits) > allowed:
        _check_with_noise(model)


def _check_with_noise(model: PreTrainedModel) -> None:
    ids = _tokens(model, noise.NOISE_TOKENS)
    logits = _checked_logits(model, ids)

    def run(some: Tensor) -> Tensor:
        return logits if some is ids else _logits(model, some)

    run_noise = noise.run_noise(run, ids)
    change = _change_before_last_tokens(logits)
    if change > noise.allowed_residual(run_noise, torch.finfo(model.dtype).eps):
        seen = f"other last tokens change earlier logits by {change:.2g} of their "
        seen += f"spread over the vocabulary; equal runs differ by {run_noise:.2g}"
        hint = "a decoder-only model, such as a Llama"
        what = f"{type(model).__name__} is not a causal language model."
        raise UnsupportedModel(what, seen=seen, hint=hint)


def _tokens(model: PreTrainedModel, longest: int) -> Ids:
    """Sequences of `longest` tokens that differ only in their last tokens."""
    context = stated_context(model.config) or longest
    vocabulary = model.config.get_text_config().vocab_size
    return noise.noise_tokens(vocabulary, min(context, longest))


def _checked_logits(model: PreTrainedModel, ids: Ids) -> Logits:
    """Finite logits; raises BadCheckpoint if the model does not compute them."""
    what = f"{type(model).__name__} does not run in {model.dtype} on token ids."
    hint = "another dtype (float32 or bfloat16), or another checkpoint"
    with explained(what, hint=hint):
        logits = _logits(model, ids)
    if not torch.isfinite(logits).all():
        cause = first_not_finite(model, partial(_logits, model, ids))
        seen = "some logits are NaN or infinite"
        if cause:
            seen += f"; the first numbers are those of {cause}"
        if model.dtype == torch.float16:
            hint = f"{OTHER_DTYPE}, or another checkpoint"
        raise BadCheckpoint(what, seen=seen, hint=hint)
    return logits


def _logits(model: PreTrainedModel, ids: Ids) -> Logits:
    on_device = ids.to(device_of(model))
    return model(input_ids=on_device, use_cache=False).logits


def _change_before_last_tokens(logits: Logits) -> float:
    """Largest difference between sequences that differ only in their last tokens."""
    common = logits[:, : noise.common_tokens(logits.shape[1])].split(1)
    pairs = combinations(common, 2)
    changes = torch.cat([noise.logit_change(one, other) for one, other in pairs])
    # The median, because rounding may send a token of one sequence to another expert.
    typical = changes.median(0).values
    return float(typical.max())
