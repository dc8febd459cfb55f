"""RoPE variants in transformers: the table of rope types, and configurations.

`register` runs as soon as transformers is imported. Therefore this file must not import it.
"""

import copy
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import torch

from ropelens.arguments import public
from ropelens.errors import UnsupportedModel
from ropelens.rope.variants import OWN, VARIANTS, Shape, Variant, parse_variant

Config = TypeVar("Config")


def register(modeling_rope_utils: ModuleType) -> None:
    """Add our types, and checks of their configs, to `transformers.modeling_rope_utils`."""
    for name, row in VARIANTS.items():
        if row.rope_type == OWN + name:
            modeling_rope_utils.ROPE_INIT_FUNCTIONS[row.rope_type] = _rates
            check = f"_validate_{row.rope_type}_rope_parameters"  # it warns without
            mixin = modeling_rope_utils.RotaryEmbeddingConfigMixin
            setattr(
                mixin, check, lambda _, parameters, ignore_keys: _variant(parameters)
            )


def _rates(
    config: Any,
    device: torch.device | str | None = None,
    seq_len: int | None = None,
    layer_type: str | None = None,
) -> tuple[torch.Tensor, float]:
    """inv_freq and attention factor of a `rope_type` of ours, with transformers' signature."""
    parameters = config.rope_parameters
    parameters = parameters if layer_type is None else parameters[layer_type]
    inv_freq, factor = frequencies(
        _variant(parameters), stated_shape(config, parameters)
    )
    return inv_freq.to(device), factor


def frequencies(variant: Variant, shape: Shape) -> tuple[torch.Tensor, float]:
    """`inv_freq` of every plane in rad/token, and the factor on queries and keys."""
    if (inv_freq := variant.inv_freq(shape)) is not None:
        return inv_freq, 1.0
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = SimpleNamespace(  # a real config takes 3 ms, for each layer of each call
        head_dim=shape.head_dim,
        hidden_size=shape.head_dim,
        num_attention_heads=1,
        max_position_embeddings=shape.context,
        rope_parameters=variant.rope_parameters(shape),
        standardize_rope_params=lambda: None,
    )
    return ROPE_INIT_FUNCTIONS[variant.rope_type](config, "cpu", seq_len=shape.length)


def _variant(parameters: dict[str, Any]) -> Variant:
    name, value = parameters["rope_type"].removeprefix(OWN), parameters.get("p", "")
    return parse_variant(f"{name}:{value}")


def stated_shape(config: Any, parameters: dict[str, Any]) -> Shape:
    """Shape of the heads that these `rope_parameters` of a config rotate."""
    context = parameters.get("original_max_position_embeddings")
    size = config.to_dict().get(config.attribute_map.get("head_dim", "head_dim"))
    return Shape(
        size or config.hidden_size // config.num_attention_heads,
        float(parameters["rope_theta"]),
        int(context or config.max_position_embeddings),
    )


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
    text = changed.get_text_config()
    parameters = text.to_dict().get("rope_parameters") or {}
    by_type = {key: part for key, part in parameters.items() if isinstance(part, dict)}
    parts = [
        part.get("partial_rotary_factor") for part in by_type.values() or [parameters]
    ]
    if not parameters or {*parts} - {None, 1.0}:
        what = f"The configuration of {changed.model_type} cannot express {variant}."
        hint = "the variant as an edit of the live model, ropelens.edit_rope"
        raise UnsupportedModel(what, seen=f"rope_parameters {parameters}", hint=hint)

    def varied(part: dict[str, Any]) -> dict[str, Any]:
        axes = {key: value for key, value in part.items() if key.startswith("mrope_")}
        return axes | parsed.rope_parameters(stated_shape(text, part))

    by_type = {key: varied(part) for key, part in by_type.items()}
    text.rope_parameters = parameters | by_type if by_type else varied(parameters)
    for layer, base in enumerate(
        text.to_dict().get("layer_rope_theta") or ()
    ):  # Granite SWA
        of_layer = parameters | {"rope_theta": base}
        text.layer_rope_theta[layer] = base and varied(of_layer)["rope_theta"]
    return changed
