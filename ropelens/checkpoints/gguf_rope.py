"""RoPE of a GGUF file, with the meaning of llama.cpp; the reader of transformers drops most."""

import math
from pathlib import Path
from typing import Any, NoReturn

import gguf
import numpy as np
from jaxtyping import Float
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropelens.errors import BadCheckpoint


def add_rope(
    path: Path, config: PreTrainedConfig
) -> Float[np.ndarray, " plane"] | None:
    """Add the rotation that a GGUF file states to `config`, and return its frequencies.

    They are in rad/token, of the layers with full attention; None if there is nothing to check.
    Raises BadCheckpoint if no variant of RoPE in transformers rotates in this way.
    """
    reader, facts = gguf.GGUFReader(str(path)), config.to_dict()
    names = {
        name.partition(".rope.")[2]: name for name in reader.fields if ".rope." in name
    }
    stated: dict[str, Any] = {
        key: reader.fields[names[key]].contents() for key in names
    }
    stated |= {
        tensor.name.removesuffix(".weight"): gguf.dequantize(
            tensor.data, tensor.tensor_type
        )
        for tensor in reader.tensors
        if "rope_f" in tensor.name
    }
    whole: dict[str, Any] = facts.get("rope_parameters") or {}
    if not whole and not stated:
        return None
    rope, local = whole.get("full_attention", whole), whole.get("sliding_attention")
    base = rope["rope_theta"] = float(
        stated.pop("freq_base", rope.get("rope_theta", 0))
    )
    base_swa = float(
        stated.pop("freq_base_swa", local["rope_theta"] if local else base)
    )
    if local:
        local["rope_theta"] = base_swa
    elif base_swa != base:
        stated["freq_base_swa"] = base_swa
    size = facts.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"]
    rotated = stated.pop(
        "dimension_count", int(size * rope.get("partial_rotary_factor", 1))
    )
    context = stated.pop(
        "scaling.original_context_length", config.max_position_embeddings
    )
    scaling = _pop_scaling(stated)
    divisor = np.array(
        scaling.get("short_factor", [scaling.get("factor", 1)] * (rotated // 2))
    )
    if stated or 2 * len(divisor) != rotated:
        sizes = [f"{len(divisor)} factors for {rotated} coordinates"] * (not stated)
        _refuse_rope(path, f"keys or tensors of RoPE: {', '.join([*stated, *sizes])}")
    if "attention_factor" in scaling:
        scaling["original_max_position_embeddings"] = context
        if "original_max_position_embeddings" in facts:  # Phi-3
            config.original_max_position_embeddings = context
    if rope["rope_type"] != "proportional":
        rope |= scaling
        if rotated != size * rope.get("partial_rotary_factor", 1):
            rope["partial_rotary_factor"] = rotated / size
    elif not scaling:  # Gemma 4 without the factors that check_rope compares
        return None
    config.rope_parameters = whole
    if rope["rope_type"] == "yarn":
        layer_type = None if rope is whole else "full_attention"
        return ROPE_INIT_FUNCTIONS["yarn"](config, layer_type=layer_type)[0].numpy()
    return base ** -(np.arange(0, rotated, 2) / rotated) / divisor


def _pop_scaling(stated: dict[str, Any]) -> dict[str, Any]:
    """Turn keys and tensors into `rope_parameters`; keys without an equivalent stay."""
    for unused in ("scaling.finetuned", "dimension_count_swa"):
        stated.pop(unused, None)
    kind = stated.pop("scaling.type", "linear")
    factor = float(
        stated.pop("scaling.factor", 0) or stated.pop("scale_linear", 0) or 1
    )
    factor = 1.0 if kind == "none" else factor
    attention = float(stated.pop("scaling.attn_factor", 1))
    betas = {
        f"beta_{end}": stated.pop(f"scaling.yarn_beta_{end}", None)
        for end in ("fast", "slow")
    }
    every = stated.pop("rope_freqs", None)
    lists = {
        f"{name}_factor": (factor * tensor.astype(float)).tolist()
        for name in ("short", "long")
        if (tensor := stated.pop(f"rope_factors_{name}", every)) is not None
    }
    scaling: dict[str, Any] = (
        {"rope_type": "linear", "factor": factor} if factor != 1 else {}
    )
    if lists:
        scaling = {"rope_type": "longrope", "attention_factor": attention} | lists
    elif kind == "yarn":
        attention *= 1 + 0.1 * math.log(max(factor, 1))
        scaling = {"rope_type": "yarn", "factor": factor, "attention_factor": attention}
        scaling |= {name: beta for name, beta in betas.items() if beta is not None}
    fits = {
        "none": True,
        "linear": True,
        "yarn": not lists,
        "longrope": lists and factor == 1,
    }
    if (
        not fits.get(kind)
        or len(lists) == 1
        or attention != scaling.get("attention_factor", 1)
    ):
        stated[f"scaling of type {kind}"] = factor
    return scaling


def check_rope(
    path: Path, model: PreTrainedModel, inv_freq: Float[np.ndarray, " plane"]
) -> None:
    """Raise BadCheckpoint if the buffers of `model` have other frequencies than `inv_freq`."""
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] in ("inv_freq", "full_attention_inv_freq"):
            built = buffer.double().numpy()
            if len(built) != len(inv_freq) or not np.allclose(
                built, inv_freq, 1e-5, 1e-20
            ):
                in_file = (
                    f"{len(inv_freq)} frequencies, sum {inv_freq.sum():.6g} rad/token"
                )
                in_model = f"its model has {len(built)}, sum {built.sum():.6g}"
                _refuse_rope(path, f"{in_file}; {in_model}")


def _refuse_rope(path: Path, seen: str) -> NoReturn:
    what = (
        f"{path.name} states a rotation (RoPE) that ropelens cannot give to its model."
    )
    means = (
        "the model would rotate in another way than the model that the file describes"
    )
    hint = "the folder of the model, with config.json and safetensors"
    raise BadCheckpoint(what, seen=seen, means=means, hint=hint)
