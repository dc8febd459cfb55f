"""RoPE of a GGUF file, with the meaning of llama.cpp; the reader of transformers drops most."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropelens.errors import BadCheckpoint

UNUSED = ("scaling.finetuned", "dimension_count_swa")
"""Keys that do not change the rotation."""


@dataclass(frozen=True)
class GgufRope:
    """The rotation of the layers with full attention that a GGUF file states.

    `context` is the trained length in tokens before the scaling, and `scaling` the
    `rope_parameters` of the scaling, empty without one.
    """

    base: float
    rotary_dim: int
    context: int
    scaling: dict[str, Any]

    @property
    def changes_length(self) -> bool:
        """Whether the scaling also changes the length of queries and keys."""
        return "attention_factor" in self.scaling

    @property
    def divisor(self) -> Float[np.ndarray, " factor"]:
        """The number by which the frequency of each plane is divided."""
        factor = self.scaling.get("factor", 1.0)
        equal = [factor] * (self.rotary_dim // 2)
        return np.array(self.scaling.get("short_factor", equal))

    @property
    def inv_freq(self) -> Float[np.ndarray, " plane"]:
        """Frequencies in rad/token, except for YaRN."""
        exponent = np.arange(0, self.rotary_dim, 2) / self.rotary_dim
        return self.base**-exponent / self.divisor


def add_rope(
    path: Path, config: PreTrainedConfig
) -> Float[np.ndarray, " plane"] | None:
    """Add the rotation that a GGUF file states to `config`, and return its frequencies.

    They are in rad/token, of the layers with full attention; None if there is nothing to check.
    Raises BadCheckpoint if no variant of RoPE in transformers rotates in this way.
    """
    # Each step takes the entries that it understands, and entries that stay are refused.
    entries = _rope_entries(path)
    settings = config.to_dict()
    parameters: dict[str, Any] = settings.get("rope_parameters") or {}
    if not parameters and not entries:
        return None
    rope = parameters.get("full_attention", parameters)
    _take_bases(entries, rope, parameters.get("sliding_attention"))
    head_dim = settings.get("head_dim")
    if not head_dim:
        head_dim = settings["hidden_size"] // settings["num_attention_heads"]
    rotary_dim = int(head_dim * rope.get("partial_rotary_factor", 1))
    stated = GgufRope(
        base=rope["rope_theta"],
        rotary_dim=entries.pop("dimension_count", rotary_dim),
        context=entries.pop(
            "scaling.original_context_length", config.max_position_embeddings
        ),
        scaling=_take_scaling(entries),
    )
    _check_used(path, stated, entries)
    if rope["rope_type"] == "proportional" and not stated.scaling:
        return None  # Gemma 4 without the factors that check_rope compares
    if rope["rope_type"] != "proportional":
        _add_scaling(rope, stated, head_dim=head_dim)
    if stated.changes_length and "original_max_position_embeddings" in settings:
        config.original_max_position_embeddings = stated.context  # Phi-3
    config.rope_parameters = parameters
    if rope["rope_type"] == "yarn":
        layer_type = None if rope is parameters else "full_attention"
        with torch.device("cpu"):
            inv_freq, _ = ROPE_INIT_FUNCTIONS["yarn"](config, layer_type=layer_type)
        return inv_freq.numpy()
    return stated.inv_freq


def _add_scaling(rope: dict[str, Any], stated: GgufRope, *, head_dim: int) -> None:
    """Add the stated scaling, and the share of a head that rotates, to `rope_parameters`."""
    rope.update(stated.scaling)
    if stated.changes_length:
        rope["original_max_position_embeddings"] = stated.context
    if stated.rotary_dim != head_dim * rope.get("partial_rotary_factor", 1):
        rope["partial_rotary_factor"] = stated.rotary_dim / head_dim


def begins_with_bos(path: Path) -> bool | None:
    """Whether a GGUF file states that texts begin with BOS; None if it does not state it."""
    stated = _stated_in(path, "tokenizer.ggml.add_bos_token")
    return None if stated is None else bool(stated)


def stated_license(path: Path) -> str | None:
    """The licence that a GGUF file states; None if it does not state it."""
    stated = _stated_in(path, "general.license")
    return None if stated is None else str(stated)


def _stated_in(path: Path, key: str) -> Any:
    """The value of a key in a GGUF file; None without it."""
    import gguf  # an optional package

    field = gguf.GGUFReader(str(path)).fields.get(key)
    return None if field is None else field.contents()


def _rope_entries(path: Path) -> dict[str, Any]:
    """Keys and tensors about RoPE in a GGUF file, by their short names."""
    import gguf  # an optional package

    reader = gguf.GGUFReader(str(path))
    entries: dict[str, Any] = {}
    for key, key_field in reader.fields.items():
        _, found, name = key.partition(".rope.")
        if found:
            entries[name] = key_field.contents()
    for tensor in reader.tensors:
        if "rope_f" in tensor.name:
            name = tensor.name.removesuffix(".weight")
            entries[name] = gguf.dequantize(tensor.data, tensor.tensor_type)
    return entries


def _take_bases(
    entries: dict[str, Any], rope: dict[str, Any], local: dict[str, Any] | None
) -> None:
    """Set the bases of full (`rope`) and sliding (`local`) attention, which may be missing."""
    configured = rope.get("rope_theta", 0)
    base = float(entries.pop("freq_base", configured))
    rope["rope_theta"] = base
    stated_local = local["rope_theta"] if local else base
    local_base = float(entries.pop("freq_base_swa", stated_local))
    if local:
        local["rope_theta"] = local_base
    elif local_base != base:
        entries["freq_base_swa"] = local_base


def _take_scaling(entries: dict[str, Any]) -> dict[str, Any]:
    """Turn entries into `rope_parameters`; entries without an equivalent stay."""
    for name in UNUSED:
        entries.pop(name, None)
    scaling_type = entries.pop("scaling.type", "linear")
    factor = _take_factor(entries)
    if scaling_type == "none":
        factor = 1.0
    attention = float(entries.pop("scaling.attn_factor", 1))
    betas = {
        "beta_fast": entries.pop("scaling.yarn_beta_fast", None),
        "beta_slow": entries.pop("scaling.yarn_beta_slow", None),
    }
    lists = _take_lists(entries, factor)
    if lists:
        longrope = {"rope_type": "longrope", "attention_factor": attention}
        scaling = longrope | lists
    elif scaling_type == "yarn":
        attention *= 1 + 0.1 * math.log(max(factor, 1))
        yarn = {"rope_type": "yarn", "factor": factor, "attention_factor": attention}
        stated_betas = {name: beta for name, beta in betas.items() if beta is not None}
        scaling = yarn | stated_betas
    elif factor != 1:
        scaling = {"rope_type": "linear", "factor": factor}
    else:
        scaling = {}
    is_known = _is_known(scaling_type, lists, factor)
    if not is_known or attention != scaling.get("attention_factor", 1):
        entries[f"scaling of type {scaling_type}"] = factor
    return scaling


def _take_factor(entries: dict[str, Any]) -> float:
    """The factor under its name, or under the name in older files; 1 without a factor."""
    for name in ("scaling.factor", "scale_linear"):
        factor = float(entries.pop(name, 0))
        if factor:
            return factor
    return 1.0


def _take_lists(entries: dict[str, Any], factor: float) -> dict[str, list[float]]:
    """The stated `short_factor` and `long_factor`, with one number for each plane."""
    both = entries.pop("rope_freqs", None)
    lists = {}
    for name in ("short", "long"):
        tensor = entries.pop(f"rope_factors_{name}", both)
        if tensor is not None:
            lists[f"{name}_factor"] = (factor * tensor.astype(float)).tolist()
    return lists


def _is_known(scaling_type: str, lists: dict[str, list[float]], factor: float) -> bool:
    """Whether transformers has a scaling of this type, with these lists and factor."""
    if len(lists) == 1:
        return False
    if scaling_type == "yarn":
        return not lists
    if scaling_type == "longrope":
        return bool(lists) and factor == 1
    return scaling_type in ("none", "linear")


def _check_used(path: Path, stated: GgufRope, entries: dict[str, Any]) -> None:
    """Raise BadCheckpoint for `entries` that were not taken, and for lists of wrong length."""
    faults = list(entries)
    factors = len(stated.divisor)
    if not faults and 2 * factors != stated.rotary_dim:
        faults = [f"{factors} factors for {stated.rotary_dim} coordinates"]
    if faults:
        raise _other_rotation(path, f"keys or tensors of RoPE: {', '.join(faults)}")


def check_rope(
    path: Path, model: PreTrainedModel, inv_freq: Float[np.ndarray, " plane"]
) -> None:
    """Raise BadCheckpoint if the buffers of `model` have other frequencies than `inv_freq`."""
    for name, buffer in model.named_buffers():
        if name.rpartition(".")[2] not in ("inv_freq", "full_attention_inv_freq"):
            continue
        built = buffer.double().numpy()
        same_length = len(built) == len(inv_freq)
        if not same_length or not np.allclose(built, inv_freq, 1e-5, 1e-20):
            in_file = f"{len(inv_freq)} frequencies, sum {inv_freq.sum():.6g} rad/token"
            in_model = f"its model has {len(built)}, sum {built.sum():.6g}"
            raise _other_rotation(path, f"{in_file}; {in_model}")


def _other_rotation(path: Path, seen: str) -> BadCheckpoint:
    what = (
        f"{path.name} states a rotation (RoPE) that ropelens cannot give to its model."
    )
    means = (
        "the model would rotate in another way than the model that the file describes"
    )
    hint = "the folder of the model, with config.json and safetensors"
    return BadCheckpoint(what, seen=seen, means=means, hint=hint)
