"""Facts that a transformers configuration states about a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jaxtyping import Int
from torch import Tensor

from ropelens.compatibility import OLD_LINEAR_ATTENTION

if TYPE_CHECKING:  # rooms without transformers read these facts
    from transformers import PreTrainedConfig

# Types of layers
WITHOUT_ATTENTION = {"linear_attention", "conv", "moe", "mlp", OLD_LINEAR_ATTENTION}


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    """Settings of the part of a model that reads text."""
    return config.get_text_config().to_dict()


def layer_types(config: PreTrainedConfig) -> list[str]:
    """Type of each layer, such as "full_attention" or "sliding_attention"."""
    text = config.get_text_config()
    layers: int = getattr(text, "num_hidden_layers", 0)
    stated = getattr(text, "layer_types", None)
    types = stated or ["full_attention"] * layers
    return list(types)[:layers]


def attending_layers(config: PreTrainedConfig, *, turning: bool = False) -> list[int]:
    """Layers that attend; with `turning`, only layers that also rotate."""
    settings = _settings(config)
    layers = []
    for layer, layer_type in enumerate(layer_types(config)):
        if layer_type not in WITHOUT_ATTENTION:
            layers.append(layer)
    # An entry for each layer, which is 0 if the layer has no RoPE.
    ropes = settings.get("no_rope_layers") or settings.get("layer_rope_theta")
    if not turning or not ropes:
        return layers
    return [layer for layer in layers if layer >= len(ropes) or ropes[layer]]


def stated_context(config: PreTrainedConfig) -> int | None:
    """Trained context in tokens; None if the configuration does not state it."""
    settings = _settings(config)
    for name in ("max_position_embeddings", "n_positions"):
        if settings.get(name):
            return int(settings[name])
    return None


def rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The `rope_parameters` of a config, one for each layer type that has its own."""
    parameters = _settings(config).get("rope_parameters") or {}
    by_type = [value for value in parameters.values() if isinstance(value, dict)]
    return by_type or [parameters]


def layer_parameters(config: PreTrainedConfig, layer: int) -> dict[str, Any]:
    """The `rope_parameters` of one layer; empty if the configuration states none."""
    settings = _settings(config)
    parameters: dict[str, Any] = settings.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        parameters = parameters.get(layer_types(config)[layer]) or {}
    bases = settings.get("layer_rope_theta")
    if bases:
        return {**parameters, "rope_theta": bases[layer]}
    return parameters


def rope_types(config: PreTrainedConfig) -> set[str | None]:
    return {parameters.get("rope_type") for parameters in rope_parameters(config)}


def depends_on_length(config: PreTrainedConfig) -> bool:
    """Whether RoPE changes with the length of a batch."""
    for parameters in rope_parameters(config):
        short = parameters.get("short_factor")
        long = parameters.get("long_factor")
        if parameters.get("rope_type") == "dynamic" or short != long:
            return True
    return False


def changes_with_position(config: PreTrainedConfig) -> bool:
    """Whether RoPE changes with the length, or the length of queries with the position."""
    if getattr(config, "attn_temperature_tuning", False):
        return True
    ropes = rope_parameters(config)
    if any(parameters.get("llama_4_scaling_beta") for parameters in ropes):
        return True
    return depends_on_length(config)


def trained_length(config: PreTrainedConfig) -> int:
    """Largest number of tokens at which a RoPE that changes with the length is unchanged."""
    lengths = []
    for parameters in rope_parameters(config):
        original = parameters.get("original_max_position_embeddings")
        length = original or config.max_position_embeddings
        lengths.append(int(length))
    return min(lengths)


def count_length_mismatches(
    config: PreTrainedConfig, lengths: Int[Tensor, " sequence"]
) -> int:
    """Number of sequences that would rotate differently if each of them ran by itself."""
    if not depends_on_length(config):
        return 0
    trained = trained_length(config)
    state = (lengths > trained).int()  # longrope changes once, at the trained length
    if "dynamic" in rope_types(
        config
    ):  # changes with every token past the trained length
        state = lengths.clamp(min=trained)
    return int((state != state.max()).sum())


def stated_number(config: PreTrainedConfig, name: str, otherwise: int) -> int:
    """Number in the config; `otherwise` if it has none, or one for each layer."""
    config = config.get_text_config()
    key = config.attribute_map.get(name, name)  # some families use other names
    number = config.to_dict().get(key)
    return number if isinstance(number, int) else otherwise


def slides(config: Any, past: int) -> bool:
    """Whether a cache of `past` keys may have dropped the keys before a window."""
    for name in ("sliding_window", "attention_chunk_size"):
        width = getattr(config, name, None)
        if width is not None and past + 1 >= width:
            return True
    return False
