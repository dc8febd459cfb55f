"""Facts that a transformers configuration states about a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxtyping import Int
from torch import Tensor

if TYPE_CHECKING:  # rooms without transformers read these facts
    from transformers import PreTrainedConfig

WITHOUT_ATTENTION = {"linear_attention", "conv", "moe", "mlp"}  # types of layers


def layer_types(config: PreTrainedConfig) -> list[str]:
    """Type of each layer, such as "full_attention" or "sliding_attention"."""
    text = config.get_text_config()
    layers: int = getattr(text, "num_hidden_layers", 0)
    return list(getattr(text, "layer_types", None) or ["full_attention"] * layers)[
        :layers
    ]


def attending_layers(config: PreTrainedConfig, *, turning: bool = False) -> list[int]:
    """Layers that attend; with `turning`, only layers that also rotate."""
    facts = config.get_text_config().to_dict()
    rotates = (
        facts.get("no_rope_layers") or facts.get("layer_rope_theta") or ()
    )  # 0: no
    without_rope = [layer for layer, rope in enumerate(rotates) if not rope]
    return [
        layer
        for layer, layer_type in enumerate(layer_types(config))
        if layer_type not in WITHOUT_ATTENTION
        and not (turning and layer in without_rope)
    ]


def stated_context(config: PreTrainedConfig) -> int | None:
    """Trained context in tokens; None if the configuration does not state it."""
    facts = config.get_text_config().to_dict()
    length = facts.get("max_position_embeddings") or facts.get("n_positions")
    return int(length) if length else None


def rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The `rope_parameters` of a config, one for each layer type that has its own."""
    parameters = config.get_text_config().to_dict().get("rope_parameters") or {}
    return [p for p in parameters.values() if isinstance(p, dict)] or [parameters]


def layer_parameters(config: PreTrainedConfig, layer: int) -> dict[str, Any]:
    """The `rope_parameters` of one layer; empty if the configuration states none."""
    facts = config.get_text_config().to_dict()
    parameters: dict[str, Any] = facts.get("rope_parameters") or {}
    if any(isinstance(part, dict) for part in parameters.values()):
        parameters = parameters.get(layer_types(config)[layer]) or {}
    bases = facts.get("layer_rope_theta")
    return parameters | {"rope_theta": bases[layer]} if bases else parameters


def depends_on_length(config: PreTrainedConfig) -> bool:
    """Whether RoPE changes with the length of a batch."""
    return any(
        part.get("rope_type") == "dynamic"
        or part.get("short_factor") != part.get("long_factor")
        for part in rope_parameters(config)
    )


def changes_with_position(config: PreTrainedConfig) -> bool:
    """Whether RoPE changes with the length, or the length of queries with the position."""
    scales = [part.get("llama_4_scaling_beta") for part in rope_parameters(config)]
    scales.append(getattr(config, "attn_temperature_tuning", False))
    return any(scales) or depends_on_length(config)


def trained_length(config: PreTrainedConfig) -> int:
    """Largest number of tokens at which a RoPE that changes with the length is unchanged."""
    lengths = [
        p.get("original_max_position_embeddings") for p in rope_parameters(config)
    ]
    return min(int(length or config.max_position_embeddings) for length in lengths)


def count_length_mismatches(
    config: PreTrainedConfig, lengths: Int[Tensor, " sequence"]
) -> int:
    """Number of sequences that would rotate differently if each of them ran by itself."""
    if not depends_on_length(config):
        return 0
    trained = trained_length(config)
    types = {part.get("rope_type") for part in rope_parameters(config)}
    # dynamic RoPE changes with every token past the trained length, longrope only once
    state = lengths.clamp(min=trained) if "dynamic" in types else lengths > trained
    return int((state != state.max()).sum())


def stated_number(config: PreTrainedConfig, name: str, otherwise: int) -> int:
    """Number in the config; `otherwise` if it has none, or one for each layer."""
    config = config.get_text_config()
    key = config.attribute_map.get(name, name)  # some families use other names
    value = config.to_dict().get(key)
    return value if isinstance(value, int) else otherwise


def slides(config: Any, past: int) -> bool:
    """Whether a cache of `past` keys may have dropped the keys before a window."""
    widths = [
        getattr(config, n, None) for n in ("sliding_window", "attention_chunk_size")
    ]
    return any(past + 1 >= width for width in widths if width is not None)
