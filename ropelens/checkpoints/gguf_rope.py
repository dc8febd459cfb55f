"""RoPE of a GGUF file: the metadata `ARCH.rope.*` and the tensors `rope_*`.

The GGUF reader of transformers drops scaling, frequency factors and most counts of rotated
coordinates. `add_rope` adds them to the configuration, with the meaning that they have in
llama.cpp. `check_rope` compares the frequencies of the model with the file.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

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
DIVISORS = {"rope_factors_short": ("short_factor",), "rope_factors_long": ("long_factor",)}
DIVISORS["rope_freqs"] = ("short_factor", "long_factor")  # it replaces the other two
"""Tensors that divide the frequencies, and the parameters of longrope that take them."""


class FileRope(NamedTuple):
    """Rotation that a file states. `divisors` are its tensors times the scaling factor."""

    keys: dict[str, Any]
    divisors: dict[str, Float[np.ndarray, " plane"]]
    kind: str
    factor: float
    attention: float
    unread: list[str]

    @property
    def scaled(self) -> bool:
        return self.factor != 1 or self.attention != 1 or bool(self.divisors)


def read_rope(path: Path) -> FileRope:
    """Read the keys and tensors of a GGUF file that describe its rotation."""
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
    divisors = {
        parameter: factor * tensors[name].ravel().astype(float)
        for name in DIVISORS.keys() & tensors.keys()
        for parameter in DIVISORS[name]
    }
    # Programs disagree about these keys, unless they repeat what follows from the other keys.
    implied = {"ext_factor": float(kind == "yarn"), "attn_factor": mscale, "log_multiplier": 0}
    implied = {f"scaling.yarn_{name}": value for name, value in implied.items()}
    unread = [
        f"rope.{key} {value}"
        for key, value in keys.items()
        if key not in KEYS and not (key in implied and np.isclose(value, implied[key], 1e-5))
    ]
    unread += sorted(tensors.keys() - DIVISORS)
    fits = {"none": True, "linear": True, "yarn": not tensors, "longrope": factor == 1}
    if not fits.get(kind) or len(divisors) < (kind == "longrope" or len(tensors) > 0) * 2:
        unread.append(f"rope.scaling.type {kind}, factor {factor:g}, tensors {sorted(tensors)}")
    attention = float(keys.get("scaling.attn_factor", 1)) * mscale
    return FileRope(keys, divisors, kind, factor, attention, unread)


def add_rope(path: Path, config: PreTrainedConfig) -> Float[np.ndarray, " plane"] | None:
    """Add the rotation that a GGUF file states to `config`, and return its frequencies.

    They are in rad/token, of the layers with full attention; None if there is nothing to check.
    Raises BadCheckpoint if no variant of RoPE in transformers rotates in this way.
    """
    file, facts = read_rope(path), config.to_dict()
    whole: dict[str, Any] = facts.get("rope_parameters") or {}
    if not (whole or file.unread or file.scaled):
        return None
    rope, local = whole.get("full_attention", whole), whole.get("sliding_attention")
    base = rope["rope_theta"] = float(file.keys.get("freq_base", rope.get("rope_theta", 0)))
    base_swa = file.keys.get("freq_base_swa", base)
    if local and "freq_base_swa" in file.keys:
        local["rope_theta"] = float(base_swa)
    size = facts.get("head_dim") or facts["hidden_size"] // facts["num_attention_heads"]
    rotated = file.keys.get("dimension_count", int(size * rope.get("partial_rotary_factor", 1)))
    divisor = file.divisors.get("short_factor", np.full(rotated // 2, file.factor))
    unread = file.unread + [f"rope.freq_base_swa {base_swa:g}"] * (base_swa != base and not local)
    if unread or not whole or 2 * len(divisor) != rotated:
        raise refusal(path, ", ".join(unread) or f"{len(divisor)} factors, {rotated} coordinates")
    context = file.keys.get("scaling.original_context_length", config.max_position_embeddings)
    if "original_max_position_embeddings" in facts:  # Phi-3
        config.original_max_position_embeddings = context  # type: ignore[attr-defined]
    limits = {"original_max_position_embeddings": context, "attention_factor": file.attention}
    if proportional := rope["rope_type"] == "proportional":  # Gemma 4 divides by 1 or by 1e30
        rope |= {"partial_rotary_factor": (divisor < 1e20).mean()} if file.divisors else {}
    elif rotated != size or "partial_rotary_factor" in rope:
        rope["partial_rotary_factor"] = rotated / size
    if file.kind == "yarn" and file.factor != 1:
        betas = {f"beta_{x}": file.keys.get(f"scaling.yarn_beta_{x}") for x in ("fast", "slow")}
        rope |= {"rope_type": "yarn", "factor": file.factor} | limits | betas
    elif not proportional and (file.divisors or file.attention != 1):
        factors = dict.fromkeys(DIVISORS["rope_freqs"], divisor) | file.divisors
        lists = {name: values.tolist() for name, values in factors.items()}
        rope |= {"rope_type": "longrope"} | limits | lists
    elif file.factor != 1:
        rope |= {"rope_type": "linear", "factor": file.factor}
    config.rope_parameters = whole  # type: ignore[attr-defined]
    if rope["rope_type"] == "yarn":
        layer_type = None if rope is whole else "full_attention"
        return ROPE_INIT_FUNCTIONS["yarn"](config, layer_type=layer_type)[0].numpy()
    if proportional and not file.divisors:
        return None
    return base ** -(np.arange(0, rotated, 2) / rotated) / divisor


def check_rope(path: Path, model: PreTrainedModel, inv_freq: Float[np.ndarray, " plane"]) -> None:
    """Raise BadCheckpoint if the buffers of `model` have other frequencies than `inv_freq`."""
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] in ("inv_freq", "full_attention_inv_freq"):
            shown = buffer.double().numpy()
            if shown.shape != inv_freq.shape or not np.allclose(shown, inv_freq, 1e-5, 1e-20):
                seen = f"{len(inv_freq)} planes, the slowest at {inv_freq[-1]:.3g} rad/token; "
                seen += f"transformers has {len(shown)}, the slowest at {shown[-1]:.3g}"
                raise refusal(path, seen)


def refusal(path: Path, seen: str) -> BadCheckpoint:
    """Error for a rotation that transformers cannot apply."""
    return BadCheckpoint(
        f"{path.name} states a rotation (RoPE) that transformers cannot apply.",
        seen=seen,
        hint="the folder of the model, with config.json and safetensors",
    )
