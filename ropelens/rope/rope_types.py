"""The rope types that only ropelens knows, in the table of transformers.

`register` runs as soon as transformers is imported. Therefore this file must not import it.
"""

from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from ropelens.rope.variants import OWN, VARIANTS, Shape, Variant, parse_variant


def register(modeling_rope_utils: ModuleType) -> None:
    """Add our types, and checks of their configs, to `transformers.modeling_rope_utils`."""
    mixin = modeling_rope_utils.RotaryEmbeddingConfigMixin
    for name, variant in VARIANTS.items():
        rope_type = variant.rope_type
        if rope_type == OWN + name:
            modeling_rope_utils.ROPE_INIT_FUNCTIONS[rope_type] = _own_frequencies
            # transformers warns of a type without a check.
            setattr(mixin, f"_validate_{rope_type}_rope_parameters", _check_own)


def _own_frequencies(
    config: Any,
    device: torch.device | str | None = None,
    seq_len: int | None = None,
    layer_type: str | None = None,
) -> tuple[Tensor, float]:
    """inv_freq and attention factor of a `rope_type` of ours, with transformers' signature."""
    parameters = config.rope_parameters
    if layer_type is not None:
        parameters = parameters[layer_type]
    inv_freq = _own_variant(parameters).inv_freq(stated_shape(config, parameters))
    assert inv_freq is not None, "transformers knows this type"
    if device is None:  # of the model that is built
        device = torch.get_default_device()
    return inv_freq.to(device), 1.0


def _check_own(_config: Any, parameters: dict[str, Any], ignore_keys: Any) -> None:
    _own_variant(parameters)


def _own_variant(parameters: dict[str, Any]) -> Variant:
    name = parameters["rope_type"].removeprefix(OWN)
    return parse_variant(f"{name}:{parameters.get('p', '')}")


def stated_shape(config: Any, parameters: dict[str, Any]) -> Shape:
    """Shape of the heads that these `rope_parameters` of a config rotate."""
    size = config.to_dict().get(config.attribute_map.get("head_dim", "head_dim"))
    context = parameters.get("original_max_position_embeddings")
    return Shape(
        head_dim=size or config.hidden_size // config.num_attention_heads,
        base=float(parameters["rope_theta"]),
        context=int(context or config.max_position_embeddings),
    )
