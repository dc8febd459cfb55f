"""What a configuration of transformers states about a model."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

WITHOUT_ATTENTION = {"linear_attention", "conv", "moe", "mlp"}
"""What transformers calls layers that choose no keys (state spaces, convolutions, experts)."""

LENGTH_DEPENDENT = {"dynamic", "longrope"}
"""RoPE that changes with the length of a batch."""


def layer_kinds(config: PreTrainedConfig) -> list[str]:
    """What a configuration calls its layers."""
    text = config.get_text_config()
    layers: int = getattr(text, "num_hidden_layers", 0)
    return list(getattr(text, "layer_types", None) or ["full_attention"] * layers)[:layers]


def attending_layers(config: PreTrainedConfig, *, turning: bool = False) -> list[int]:
    """The layers that attend, and rotate, where `turning`, as far as a configuration says."""
    facts = config.get_text_config().to_dict()
    still = [n for n, turns in enumerate(facts.get("no_rope_layers") or ()) if not turns]
    return [
        layer
        for layer, kind in enumerate(layer_kinds(config))
        if kind not in WITHOUT_ATTENTION and not (turning and layer in still)
    ]


def stated_context(config: PreTrainedConfig) -> int | None:
    """Positions that a model's configuration was made for; None where it does not say."""
    facts = config.get_text_config().to_dict()
    length = facts.get("max_position_embeddings") or facts.get("n_positions")
    return int(length) if length else None


def changes_with_position(config: PreTrainedConfig) -> bool:
    """Whether RoPE changes with the length, or the length of queries with the position."""
    parts = rope_parameters(config)
    scaled = getattr(config, "attn_temperature_tuning", False)
    scaled = scaled or any(part.get("llama_4_scaling_beta") for part in parts)
    return bool(scaled) or any(part.get("rope_type") in LENGTH_DEPENDENT for part in parts)


def rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The `rope_parameters` of a config, for every type of layer that has its own."""
    parameters = config.get_text_config().to_dict().get("rope_parameters") or {}
    return [p for p in parameters.values() if isinstance(p, dict)] or [parameters]


def trained_length(config: PreTrainedConfig) -> int:
    """Tokens up to which a RoPE that changes with the length does not."""
    lengths = [p.get("original_max_position_embeddings") for p in rope_parameters(config)]
    return min(int(length or config.max_position_embeddings) for length in lengths)


def stated_number(config: PreTrainedConfig, name: str, otherwise: int) -> int:
    """A number of the config, or `otherwise` where it states none or one for each layer."""
    config = config.get_text_config()
    stated = config.attribute_map.get(name, name)  # some families have names of their own
    value = config.to_dict().get(stated)
    return value if isinstance(value, int) else otherwise


def slides(config: Any, past: int) -> bool:
    """Whether a cache of so many keys may have dropped those before a window."""
    names = ("sliding_window", "attention_chunk_size")
    widths = [getattr(config, name, None) for name in names]
    return any(past + 1 >= width for width in widths if width is not None)
