"""RoPE of a GGUF file: the metadata `ARCH.rope.*` and the tensors `rope_*`.

The GGUF reader of transformers drops scaling, frequency factors and most counts of rotated
coordinates. `add_rope` adds them to the configuration, with the meaning that they have in
llama.cpp. `check_rope` compares the frequencies of the model with the file.
"""

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from jaxtyping import Float
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropelens.errors import BadCheckpoint

KEYS = {
    *("dimension_count", "dimension_count_swa", "freq_base", "freq_base_swa", "scale_linear"),
    *("scaling.type", "scaling.factor", "scaling.original_context_length", "scaling.finetuned"),
    *("scaling.attn_factor", "scaling.yarn_beta_fast", "scaling.yarn_beta_slow"),
}


def add_rope(path: Path, config: PreTrainedConfig) -> Float[np.ndarray, " plane"] | None:
    """Add the rotation that a GGUF file states to `config`, and return its frequencies.

    They are in rad/token, of the layers with full attention; None if there is nothing to check.
    Raises BadCheckpoint if no variant of RoPE in transformers rotates in this way.
    """
    (keys, scaling, unread), facts = _read_rope(path), config.to_dict()
    whole: dict[str, Any] = facts.get("rope_parameters") or {}
    if not (whole or scaling or unread):
        return None
    rope, local = whole.get("full_attention", whole), whole.get("sliding_attention")
    base = rope["rope_theta"] = float(keys.get("freq_base", rope.get("rope_theta", 0)))
    base_swa = float(keys.get("freq_base_swa", base))
    if local and "freq_base_swa" in keys:
        local["rope_theta"] = base_swa
    unread += [f"rope.freq_base_swa {base_swa:g}"] * (base_swa != base and not local)
    size = facts.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"]
    rotated = keys.get("dimension_count", int(size * rope.get("partial_rotary_factor", 1)))
    divisor = np.array(scaling.get("short_factor", [scaling.get("factor", 1)] * (rotated // 2)))
    unread += [f"{len(divisor)} factors, {rotated} coordinates"] * (2 * len(divisor) != rotated)
    if unread:
        raise _refusal(path, ", ".join(unread))
    context = keys.get("scaling.original_context_length", config.max_position_embeddings)
    if "original_max_position_embeddings" in facts:  # Phi-3 reads it there
        config.original_max_position_embeddings = context
    if scaling.keys() & {"attention_factor"}:
        scaling["original_max_position_embeddings"] = context
    if rope["rope_type"] != "proportional":
        if rotated != size * rope.get("partial_rotary_factor", 1):
            rope["partial_rotary_factor"] = rotated / size
        rope |= scaling
    elif scaling:  # Gemma 4 divides by 1 or, for planes that do not rotate, by 1e30
        rope["partial_rotary_factor"] = float((divisor < 1e20).mean())
    else:
        return None
    config.rope_parameters = whole
    if rope["rope_type"] == "yarn":
        layer_type = None if rope is whole else "full_attention"
        return ROPE_INIT_FUNCTIONS["yarn"](config, layer_type=layer_type)[0].numpy()
    return base ** -(np.arange(0, rotated, 2) / rotated) / divisor


def _read_rope(path: Path) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Keys of the rotation, `rope_parameters` of its scaling, and what these cannot express."""
    reader = gguf.GGUFReader(path)
    names = {name.partition(".rope.")[2]: name for name in reader.fields if ".rope." in name}
    keys: dict[str, Any] = {key: reader.fields[name].contents() for key, name in names.items()}
    tensors = {
        tensor.name.removesuffix(".weight"): gguf.dequantize(tensor.data, tensor.tensor_type)
        for tensor in reader.tensors
        if "rope_f" in tensor.name
    }
    kind = keys.get("scaling.type", "linear")
    factor = float(keys.get("scaling.factor") or keys.get("scale_linear") or 1)
    factor = 1.0 if kind == "none" else factor
    mscale = 1 + 0.1 * math.log(max(factor, 1)) if kind == "yarn" else 1.0
    # Programs disagree about these keys, unless they repeat what follows from the other keys.
    implied = {"ext_factor": float(kind == "yarn"), "attn_factor": mscale, "log_multiplier": 0}
    unread = [
        f"rope.{key} {value}"
        for key, value in keys.items()
        if key not in KEYS
        and not np.isclose(
            implied.get(key.removeprefix("scaling.yarn_"), math.inf), value, 1e-5
        )
    ]
    every = tensors.pop("rope_freqs", None)
    divisors = [tensors.pop(f"rope_factors_{n}", every) for n in ("short", "long")]
    unread += sorted(tensors)
    attention = mscale * float(keys.get("scaling.attn_factor", 1))
    lists = [(factor * x.astype(float)).tolist() for x in divisors if x is not None]
    scaling: dict[str, Any] = {"rope_type": "linear", "factor": factor} if factor != 1 else {}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor, "attention_factor": attention}
        betas = {f"beta_{x}": keys.get(f"scaling.yarn_beta_{x}") for x in ("fast", "slow")}
        scaling |= {name: beta for name, beta in betas.items() if beta is not None}
    elif len(lists) == 2:
        scaling = {"rope_type": "longrope", "attention_factor": attention}
        scaling |= {"short_factor": lists[0], "long_factor": lists[1]}
    lengths = {"none": (0, 2), "linear": (0, 2), "yarn": (0,), "longrope": (2,)}
    odd = (kind == "longrope" and factor != 1) or (attention != 1 and not len(scaling) > 2)
    if odd or len(lists) not in lengths.get(kind, ()):
        unread.append(f"rope.scaling.type {kind}, factor {factor:g}, {len(lists)} tensors")
    return keys, scaling, unread


def check_rope(
    path: Path, model: PreTrainedModel, inv_freq: Float[np.ndarray, " plane"]
) -> None:
    """Raise BadCheckpoint if the buffers of `model` have other frequencies than `inv_freq`."""
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] in ("inv_freq", "full_attention_inv_freq"):
            shown = buffer.double().numpy()
            if shown.shape != inv_freq.shape or not np.allclose(shown, inv_freq, 1e-5, 1e-20):
                seen = f"{len(inv_freq)} planes, the slowest at {inv_freq[-1]:.3g} rad/token; "
                seen += f"transformers has {len(shown)}, the slowest at {shown[-1]:.3g}"
                raise _refusal(path, seen)


def _refusal(path: Path, seen: str) -> BadCheckpoint:
    return BadCheckpoint(
        f"{path.name} states a rotation (RoPE) that ropelens cannot give to its model.",
        seen=seen,
        means="the model would rotate in another way than the model that the file describes",
        hint="the folder of the model, with config.json and safetensors",
    )
