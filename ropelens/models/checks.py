"""Refuse what transformers loads without a word.

Weights it would fill with random numbers, weights with NaN, models whose tokens see what
comes after them, settings without effect: each measured or read, and named.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator

import torch
from accelerate.utils import align_module_device
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)

from ropelens.errors import BadCheckpoint, UnsupportedModel, words_of
from ropelens.models.device import device_of
from ropelens.models.rope_types import head_dim_of

COUNTS = ("vocab_size", "hidden_size", "num_attention_heads", "num_hidden_layers")

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_counts(config: PreTrainedConfig) -> None:
    """Raise BadCheckpoint for a count that no model has: transformers would build for ever."""
    text = config.get_text_config()
    facts = text.to_dict()
    for name in COUNTS:
        count = facts.get(text.attribute_map.get(name, name))
        if isinstance(count, int) and not 1 <= count < 2**31:
            raise BadCheckpoint(f"config.json states an impossible {name}: {count!r:.100}.")


def check_architecture(config: PreTrainedConfig) -> None:
    """Raise UnsupportedModel where a config says itself that the model is not causal."""
    brings_code = "auto_map" in config.to_dict()  # which is measured once it is loaded
    known = brings_code or type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if config.is_encoder_decoder or not known:
        raise _not_causal(f"The model type {config.model_type}")


def check_loading(model: PreTrainedModel, found: dict[str, set]) -> None:
    """Raise BadCheckpoint for weights that the checkpoint does not give, warn of any left over.

    `found` is what from_pretrained(output_loading_info=True) says; without this check such
    weights are random numbers.
    """
    name = type(model).__name__
    if found["mismatched_keys"]:
        key, given, wanted = sorted(found["mismatched_keys"])[0]
        raise BadCheckpoint(
            f"The weights do not fit the shapes that the config gives {name}: {key} is "
            f"{list(given)} in the file and {list(wanted)} in the model."
        )
    if found["missing_keys"]:
        raise BadCheckpoint(
            f"The checkpoint lacks weights of {name}, which would be random numbers.",
            seen=f"{len(found['missing_keys'])} missing: {_some(found['missing_keys'])}",
        )
    if found["unexpected_keys"]:
        warnings.warn(
            f"{name} has no place for some tensors of the checkpoint and leaves them out: "
            f"{len(found['unexpected_keys'])}, {_some(found['unexpected_keys'])}",
            stacklevel=6,  # who called load
        )


def check_finite(model: PreTrainedModel) -> None:
    """Raise BadCheckpoint, naming the tensor, where a weight is NaN or infinite."""
    broken = []
    for name, tensor in _weights(model):
        low, high = torch.aminmax(tensor)  # both are NaN where any number is
        if not (torch.isfinite(low) and torch.isfinite(high)):
            broken.append((name, int((~torch.isfinite(tensor)).sum()), tensor.numel()))
    if broken:
        name, count, total = broken[0]
        raise BadCheckpoint(
            f"The weights are broken: {name} holds NaN or infinite numbers.",
            seen=f"{count:,} of its {total:,} numbers; {len(broken)} such tensors",
            attempt="another dtype where float16 overflows, else an earlier checkpoint",
        )


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """The weights that are plain floats, one module in memory at a time.

    Quantized ones are whole numbers; what is wrong with their scales shows in the logits.
    """
    saved = model.state_dict().keys()
    for prefix, module in model.named_modules():
        with align_module_device(module):
            own = (module.named_parameters, module.named_buffers)
            for name, tensor in (pair for each in own for pair in each(prefix, recurse=False)):
                plain = type(tensor) in (Tensor, nn.Parameter, nn.Buffer)
                if plain and name in saved and tensor.dtype in FLOATS and tensor.numel():
                    yield name, tensor.detach()


@torch.no_grad()
def check_causal(model: PreTrainedModel) -> None:
    """Raise UnsupportedModel where a token changes what is predicted before it.

    Measured, because no config says it for all families: GPT-NeoX is causal with
    is_decoder=False, BERT is not. Changes are held against that of the last token's logits.
    """
    length, vocabulary = 8, model.config.get_text_config().vocab_size
    tokens = torch.arange(length, device=device_of(model)) % vocabulary
    pair = torch.stack([tokens, tokens])
    pair[1, -1] = (pair[1, -1] + 1) % vocabulary
    try:
        logits = model(input_ids=pair, use_cache=False).logits
    except Exception as error:  # the config's fault: nothing of ours runs inside
        raise BadCheckpoint(
            f"{type(model).__name__} does not run.", seen=words_of(error, kind=True)
        ) from error
    if not torch.isfinite(logits).all():
        raise BadCheckpoint(
            f"{type(model).__name__} gives logits that are NaN or infinite.",
            seen=f"weights in {model.dtype}, all finite",
            attempt="another dtype (float32 or bfloat16), or another checkpoint",
        )
    change = (logits[0] - logits[1]).abs().amax(-1)
    tolerance = max(1e-4, 4 * torch.finfo(model.dtype).eps)
    before, own = float(change[:-1].max()), float(change[-1])
    if before > tolerance * own:
        raise _not_causal(
            type(model).__name__,
            seen=f"another last token changes the logits before it by {before:.2g}, its own by "
            f"{own:.2g}",
        )


def warn_of_idle_rotary_factor(model: PreTrainedModel) -> None:
    """Warn where the config sets a `partial_rotary_factor` that the model does not read.

    Llama and its kin, with rope_type "default", rotate the whole head whatever the factor
    says; GPT-NeoX, Phi or GLM do read it. Told apart by how many planes rotate.
    """
    config = model.config.get_text_config()
    rope = config.to_dict().get("rope_parameters") or {}
    factor = rope.get("partial_rotary_factor")
    if factor in (None, 1.0) or rope["rope_type"] != "default":
        return
    head_dim = head_dim_of(config)
    rotated = [
        2 * buffer.numel()
        for name, buffer in model.named_buffers()
        if name.endswith("rotary_emb.inv_freq")
    ]
    if rotated and max(rotated) == head_dim:
        warnings.warn(
            f"partial_rotary_factor={factor} has no effect on {type(model).__name__} with "
            f'rope_type "default": all {head_dim} coordinates of every head rotate. For p-RoPE '
            'set rope_type "proportional".',
            stacklevel=5,  # who called load
        )


def _not_causal(what: str, *, seen: str = "") -> UnsupportedModel:
    return UnsupportedModel(
        f"{what} is not a causal language model.",
        seen=seen,
        means="its tokens see what comes after them",
        attempt="a decoder-only model, such as a Llama",
    )


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:3]) + (", ..." if len(ordered) > 3 else "")
