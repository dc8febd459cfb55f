"""RoPE variants in transformers: frequencies by its formulas, and configurations."""

import copy
from types import SimpleNamespace
from typing import Any, TypeVar

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropelens.arguments import public
from ropelens.config_facts import rope_parameters
from ropelens.errors import UnsupportedModel
from ropelens.rope.rope_types import stated_shape
from ropelens.rope.variants import Shape, Variant, parse_variant

Config = TypeVar("Config")


def frequencies(variant: Variant, shape: Shape) -> tuple[Tensor, float]:
    """`inv_freq` of every plane in rad/token, and the factor on queries and keys."""
    inv_freq = variant.inv_freq(shape)
    if inv_freq is not None:
        return inv_freq, 1.0
    config = SimpleNamespace(  # a real config takes 3 ms, for each layer of each call
        head_dim=shape.head_dim,
        hidden_size=shape.head_dim,
        num_attention_heads=1,
        max_position_embeddings=shape.context,
        rope_parameters=variant.rope_parameters(shape),
        standardize_rope_params=lambda: None,
    )
    formula = ROPE_INIT_FUNCTIONS[variant.rope_type]
    with torch.device("cpu"):  # some formulas use the default device as well
        return formula(config, "cpu", seq_len=shape.length)


@public
def variant_config(config: Config, variant: str) -> Config:
    """Copy of `config` for a model that rotates as `variant`, such as "p-rope:0.75".

    The base is the base of `config`, unless the variant names one. The trained context is
    max_position_embeddings. If types of layers have their own RoPE (Gemma 3), each type keeps
    its base.

    Raises `UnsupportedModel` if the family cannot express the variant.
    """
    parsed = parse_variant(variant)
    changed: Any = copy.deepcopy(config)
    _check_expressible(changed, variant)
    text_config = changed.get_text_config()
    stated = text_config.to_dict()
    parameters = stated["rope_parameters"]
    by_type = {
        layer_type: _varied(of_type, parsed, text_config)
        for layer_type, of_type in parameters.items()
        if isinstance(of_type, dict)
    }
    if by_type:
        text_config.rope_parameters = parameters | by_type
    else:
        text_config.rope_parameters = _varied(parameters, parsed, text_config)
    bases = stated.get("layer_rope_theta") or []
    for layer, base in enumerate(bases):  # Granite states a base for each layer
        if base:
            of_layer = _varied(parameters | {"rope_theta": base}, parsed, text_config)
            text_config.layer_rope_theta[layer] = of_layer["rope_theta"]
    return changed


def _check_expressible(config: Any, variant: str) -> None:
    """Refuse a configuration without RoPE, or with heads of which only a part rotates."""
    parameters = config.get_text_config().to_dict().get("rope_parameters") or {}
    shares = {
        of_type.get("partial_rotary_factor") for of_type in rope_parameters(config)
    }
    if not parameters or shares - {None, 1.0}:
        what = f"The configuration of {config.model_type} cannot express {variant}."
        hint = "the variant as an edit of the live model, ropelens.edit_rope"
        raise UnsupportedModel(what, seen=f"rope_parameters {parameters}", hint=hint)


def _varied(
    parameters: dict[str, Any], variant: Variant, config: Any
) -> dict[str, Any]:
    """`rope_parameters` of a variant that keep the base and the axes (M-RoPE)."""
    axes = {key: value for key, value in parameters.items() if key.startswith("mrope_")}
    return axes | variant.rope_parameters(stated_shape(config, parameters))
