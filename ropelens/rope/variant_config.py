"""RoPE variants in transformers: frequencies by its formulas, and configurations."""

import copy
from types import SimpleNamespace
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropelens.arguments import public
from ropelens.config_facts import layer_types, rope_parameters
from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.rope.planes import Planes
from ropelens.rope.rope_types import stated_shape
from ropelens.rope.variants import Shape, Variant, parse_variant

Config = TypeVar("Config")

STOPPED = 1e39  # factor on the wavelength of a stopped plane: infinite in float32
ROUNDING = 1e-7  # largest relative change of a frequency that is rounding

SCALE_OF_POSITION = ("llama_4_scaling_beta", "original_max_position_embeddings")
"""Parameters by which Ministral 3 scales queries by their position."""

SCALE_OF_SCALED_ROPE = ("mscale_all_dim", "factor")
"""Parameters by which DeepSeek scales scores if its RoPE is scaled."""


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

    The model has the rotation that `edit_rope` gives a model of `config`. The base is the base
    of `config`, unless the variant names one. If the RoPE of `config` is scaled (linear, yarn,
    llama3, longrope), a variant that stops planes keeps the scaled frequencies of the other
    planes. If types of layers have their own RoPE (Gemma 3), each type keeps its base.

    Raises `UnsupportedModel` if the family, or a configuration of transformers, cannot express
    the variant.
    """
    parsed = parse_variant(variant)
    changed: Any = copy.deepcopy(config)
    _check_expressible(changed, variant)
    text_config = changed.get_text_config()
    stated = text_config.to_dict()
    parameters = stated["rope_parameters"]
    _check_layers(text_config, parsed.layers)
    by_type = {}
    for layer_type, of_type in parameters.items():
        if isinstance(of_type, dict) and parsed.layers in ("", _kind(layer_type)):
            by_type[layer_type] = _varied(of_type, parsed, text_config)
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


def _kind(layer_type: str) -> str:
    """The kind of layers in lists of heads, such as "full"."""
    return layer_type.removesuffix("_attention")


def _check_layers(config: Any, layers: str) -> None:
    """Refuse a kind of layers that has no RoPE of its own."""
    if not layers:
        return
    kinds = {_kind(layer_type) for layer_type in layer_types(config)}
    parameters = config.to_dict()["rope_parameters"]
    own = {_kind(name) for name, part in parameters.items() if isinstance(part, dict)}
    if layers not in kinds:
        seen = f"layers of {', '.join(sorted(kinds))}"
        raise BadArgument(f"The model has no {layers} layers.", seen=seen)
    if layers not in own and len(kinds) > 1:
        _refuse(f"a RoPE of only {layers} layers", seen="one RoPE for all layers")


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
    """`rope_parameters` of a variant that keep the base, the axes (M-RoPE) and other scales."""
    rope_type = parameters.get("rope_type", "default")
    if variant.stops is not None and rope_type != "default":
        return _with_stopped_planes(parameters, variant, config)
    shape = stated_shape(config, parameters)
    if (
        variant.rope_type == "dynamic"
        and shape.context != config.max_position_embeddings
    ):
        _refuse(
            f"dynamic RoPE beyond {shape.context:,} tokens",
            seen=f"max_position_embeddings {config.max_position_embeddings:,}, from which "
            "transformers computes it",
        )
    return _axes_and_scale(parameters) | variant.rope_parameters(shape)


def _with_stopped_planes(
    parameters: dict[str, Any], variant: Variant, config: Any
) -> dict[str, Any]:
    """`rope_parameters` of scaled RoPE, with the planes stopped that a variant stops."""
    rope_type = parameters["rope_type"]
    if rope_type == "dynamic":
        _refuse("stopped planes of a RoPE that depends on the length", seen=rope_type)
    flat = copy.deepcopy(config)
    flat.rope_parameters = parameters
    formula = ROPE_INIT_FUNCTIONS[rope_type]
    with torch.device("cpu"):  # some formulas use the default device as well
        inv_freq, factor = formula(flat, "cpu")
    planes = Planes(inv_freq, 2 * len(inv_freq), "half")
    assert variant.stops is not None
    stopped = variant.stops(variant.value)(planes)
    if not (stopped & (inv_freq != 0)).any():
        return parameters
    if rope_type == "longrope":
        stopped_factors = {}
        for name in ("short_factor", "long_factor"):
            factors = torch.tensor(parameters[name], dtype=torch.float64, device="cpu")
            stopped_factors[name] = factors.masked_fill(stopped, STOPPED).tolist()
        return parameters | stopped_factors
    inv_freq = inv_freq.masked_fill(stopped, 0.0)
    return longrope_parameters(config, parameters, inv_freq, factor=factor)


def longrope_parameters(
    config: Any, stated: dict[str, Any], inv_freq: Tensor, *, factor: float
) -> dict[str, Any]:
    """`rope_parameters` of type "longrope" for planes that rotate at `inv_freq` (rad/token).

    They keep the base, the axes (M-RoPE) and the scales of scores of the `stated` parameters.
    `factor` is the attention factor.
    """
    shape = stated_shape(config, stated)
    rotary_dim = 2 * len(inv_freq)
    exponent = torch.arange(0, rotary_dim, 2, dtype=torch.float32, device="cpu")
    wavelength = shape.base ** (exponent / rotary_dim)
    slower = 1 / (wavelength.double() * inv_freq.double().abs())
    slower = torch.where((slower - 1).abs() < ROUNDING, 1.0, slower)
    factors = slower.clamp(max=STOPPED).tolist()
    parameters = {
        "rope_type": "longrope",
        "rope_theta": stated["rope_theta"],
        "factor": 1.0,
        "short_factor": factors,
        "long_factor": factors,
        "attention_factor": factor,
        "original_max_position_embeddings": shape.context,
    }
    if "partial_rotary_factor" in stated:
        parameters["partial_rotary_factor"] = rotary_dim / shape.head_dim
    if stated.get("mscale_all_dim") is not None:
        for name in SCALE_OF_SCALED_ROPE:
            parameters[name] = stated[name]
    return parameters | _axes_and_scale(stated)


def _axes_and_scale(stated: dict[str, Any]) -> dict[str, Any]:
    """The stated axes (M-RoPE), and the scale of queries by position."""
    kept = {}
    for name, value in stated.items():
        if name.startswith("mrope_"):
            kept[name] = value
    if stated.get("llama_4_scaling_beta") is not None:
        for name in SCALE_OF_POSITION:
            kept[name] = stated[name]
    return kept


def _refuse(what: str, *, seen: str) -> NoReturn:
    raise UnsupportedModel(
        f"A configuration cannot express {what}.", seen=seen, hint="ropelens.edit_rope"
    )
