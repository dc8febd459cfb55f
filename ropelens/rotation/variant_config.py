"""RoPE variants in transformers' hands: its table of rope types, configs, live models.

`import ropelens` calls `register` as soon as transformers is imported, so that transformers
builds and loads models with the rope types that only ropelens knows. Nothing that imports
transformers is imported here.
"""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ropelens.errors import UnsupportedModel, public
from ropelens.rope.variants import OWN, VARIANTS, Rates, Shape, Variant, parse_variant

if TYPE_CHECKING:
    from ropelens.model.live_model import LiveModel

Config = TypeVar("Config")


def register(modeling_rope_utils: ModuleType) -> None:
    """Add our types to `transformers.modeling_rope_utils`, and the checks of their configs."""
    for name, row in VARIANTS.items():
        if row.rope_type == OWN + name:
            modeling_rope_utils.ROPE_INIT_FUNCTIONS[row.rope_type] = _rates
            check = f"_validate_{row.rope_type}_rope_parameters"  # a type without is warned of
            mixin = modeling_rope_utils.RotaryEmbeddingConfigMixin
            setattr(mixin, check, lambda _, parameters, ignore_keys: _variant(parameters))


def _rates(
    config: Any,
    device: torch.device | str | None = None,
    seq_len: int | None = None,
    layer_type: str | None = None,
) -> tuple[torch.Tensor, float]:
    """inv_freq and attention factor of a `rope_type` of ours; transformers' signature."""
    parameters = config.rope_parameters
    parameters = parameters if layer_type is None else parameters[layer_type]
    inv_freq, factor = frequencies(_variant(parameters), stated_shape(config, parameters))
    return inv_freq.to(device), factor


def frequencies(variant: Variant, shape: Shape) -> Rates:
    """`inv_freq` of every plane in rad/token, and the factor on queries and keys."""
    if variant.formula is not None:
        return variant.formula(variant.value, shape)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = SimpleNamespace(  # a real one takes 3 ms, for each layer of each call
        head_dim=shape.head_dim,
        hidden_size=shape.head_dim,
        num_attention_heads=1,
        max_position_embeddings=shape.context,
        rope_parameters=variant.rope_parameters(shape),
        standardize_rope_params=lambda: None,
    )
    return ROPE_INIT_FUNCTIONS[variant.rope_type](config, "cpu", seq_len=shape.length)


def _variant(parameters: dict[str, Any]) -> Variant:
    return parse_variant(f"{parameters['rope_type'].removeprefix(OWN)}:{parameters.get('p')}")


def stated_shape(config: Any, parameters: dict[str, Any]) -> Shape:
    """The head that the rope_parameters of a config, or of one kind of its layers, rotate."""
    context = parameters.get("original_max_position_embeddings")
    size = config.to_dict().get(config.attribute_map.get("head_dim", "head_dim"))
    return Shape(
        size or config.hidden_size // config.num_attention_heads,
        float(parameters["rope_theta"]),
        int(context or config.max_position_embeddings),
    )


@public
def variant_config(config: Config, variant: str) -> Config:
    """A copy of `config` for a model that rotates as `variant`, such as "p-rope:0.75".

    The base is that of `config` unless the variant names one; max_position_embeddings is the
    trained context. Kinds of layers with RoPE of their own (Gemma 3) each keep their base.

    Raises `UnsupportedModel` where the family cannot express the variant.
    """
    asked = parse_variant(variant)
    changed: Any = copy.deepcopy(config)
    text = changed.get_text_config()
    parameters = text.to_dict().get("rope_parameters") or {}
    by_type = {key: part for key, part in parameters.items() if isinstance(part, dict)}
    parts = [part.get("partial_rotary_factor") for part in by_type.values() or [parameters]]
    if not parameters or {*parts} - {None, 1.0}:
        raise UnsupportedModel(
            f"The configuration of {changed.model_type} cannot express {variant}.",
            seen=f"rope_parameters {parameters}",
            hint="the variant as an edit of the live model, ropelens.edit_rope",
        )

    def varied(part: dict[str, Any]) -> dict[str, Any]:
        axes = {key: value for key, value in part.items() if key.startswith("mrope_")}
        return axes | asked.rope_parameters(stated_shape(text, part))

    own = {key: varied(part) for key, part in by_type.items()}
    text.rope_parameters = parameters | own if by_type else varied(parameters)
    for layer, base in enumerate(text.to_dict().get("layer_rope_theta") or ()):  # Granite SWA
        of_layer = parameters | {"rope_theta": base}
        text.layer_rope_theta[layer] = base and varied(of_layer)["rope_theta"]
    return changed


def shape_of(live: LiveModel, layer: int, *, rotary_dim: int, length: int) -> Shape:
    """What a variant's frequencies depend on, as one layer of a live model has it."""
    config, facts = live.config, live.config.to_dict()
    parameters = facts.get("rope_parameters") or {}
    if any(isinstance(part, dict) for part in parameters.values()):
        parameters = parameters[config.layer_types[layer]] or {}
    if bases := facts.get("layer_rope_theta"):
        parameters = parameters | {"rope_theta": bases[layer]}
    if "rope_theta" not in parameters:
        raise UnsupportedModel(
            f"{live.class_name} does not state the base of its RoPE.",
            hint="ropelens.rescale with the frequencies themselves",
        )
    return replace(stated_shape(config, parameters), head_dim=rotary_dim, length=length)


def sharpening(live: LiveModel) -> float:
    """By how much the model multiplied its scale for a longer context (DeepSeek's mscale).

    Modules with latent keys fixed their scale when they were built.
    """
    module: Any
    for module in live.model.modules():
        if hasattr(module, "scaling") and hasattr(module, "qk_head_dim"):
            return float(module.scaling * math.sqrt(module.qk_head_dim))
    return 1.0
