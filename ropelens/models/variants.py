"""RoPE variants in transformers' hands: written into a config, read off a model."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from transformers import PreTrainedConfig

from ropelens.errors import UnsupportedModel, public
from ropelens.models.rope_types import stated_shape
from ropelens.models.subject import Subject
from ropelens.rope.formulas import Shape
from ropelens.rope.variants import Variant, parse_variant

Config = TypeVar("Config", bound=PreTrainedConfig)

LAYER_PATTERN = "no_rope_layers"
"""The list in a config (SmolLM3, Llama 4) of which layers rotate, 1, and which do not, 0."""


@public
def variant_config(config: Config, variant: Variant | str) -> Config:
    """A copy of `config` for a model that rotates as `variant`, such as "p-rope:0.75".

    The base is that of `config` unless the variant names one; max_position_embeddings is the
    trained context. Kinds of layers with RoPE of their own (Gemma 3) each keep their base.

    Raises `UnsupportedModel` where the family cannot express the variant.
    """
    variant = variant if isinstance(variant, Variant) else parse_variant(variant)
    changed = copy.deepcopy(config)
    text = changed.get_text_config()
    facts = text.to_dict()
    if variant.name == "nope-every":
        if LAYER_PATTERN not in facts:
            raise _cannot(config, variant, f"it has no {LAYER_PATTERN}, as SmolLM3 has")
        types = sorted(set(facts.get("layer_types") or ()))
        if len(types) > 1:
            why = f"its layers are {' or '.join(types)} by whether they rotate"
            raise _cannot(config, variant, why)
        layers = range(facts["num_hidden_layers"])
        text.no_rope_layers = [int(not variant.stops_in(layer)) for layer in layers]
    if not facts.get("rope_parameters"):
        raise _cannot(config, variant, "it has no rope_parameters")
    parameters = text.rope_parameters
    by_type = {key: part for key, part in parameters.items() if isinstance(part, dict)}
    text.rope_parameters = {
        key: _parameters(config, part, variant) for key, part in by_type.items()
    } or _parameters(config, parameters, variant)
    return changed


def _parameters(
    config: PreTrainedConfig, parameters: dict[str, Any], variant: Variant
) -> dict[str, Any]:
    """The variant's rope_parameters for one kind of layer, with the base of `parameters`."""
    partial = parameters.get("partial_rotary_factor")
    if partial not in (None, 1.0):
        raise _cannot(config, variant, f"it rotates a part of each head already ({partial})")
    return variant.rope_parameters(stated_shape(config.get_text_config(), parameters))


def shape_of(subject: Subject, layer: int, *, rotary_dim: int, length: int) -> Shape:
    """What a variant's frequencies depend on, as one layer of a live model has it.

    Raises `UnsupportedModel` where the model does not state its base.
    """
    config = subject.config
    facts = config.to_dict()
    parameters = facts.get("rope_parameters") or {}
    if any(isinstance(part, dict) for part in parameters.values()):
        parameters = parameters[config.layer_types[layer]]
    if "rope_theta" not in parameters:
        raise UnsupportedModel(
            f"{subject.kind} does not state the base of its RoPE.",
            attempt="ropelens.rescale with the frequencies themselves",
        )
    context = parameters.get("original_max_position_embeddings") or subject.context
    return Shape(rotary_dim, float(parameters["rope_theta"]), int(context), length)


def attention_factor(subject: Subject) -> float:
    """By how much the model's rotary modules make queries and keys longer (YaRN, LongRoPE).

    Raises `UnsupportedModel` where they disagree.
    """
    factors = {
        float(value)
        for module in subject.model.modules()
        for name, value in vars(module).items()
        if name.endswith("attention_scaling")
    }
    if len(factors) > 1:
        raise UnsupportedModel(
            f"{subject.kind} scales its queries in more than one way: {sorted(factors)}."
        )
    return factors.pop() if factors else 1.0


def _cannot(config: PreTrainedConfig, variant: Variant, why: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"The configuration of {config.model_type} cannot express {variant.text}.",
        seen=why,
        attempt="the variant as an edit of the live model, ropelens.edit_rope",
    )
