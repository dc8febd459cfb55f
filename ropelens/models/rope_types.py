"""The rope types that only ropelens knows, in transformers' table of them.

`import ropelens` calls `register` as soon as transformers is imported, so that transformers
builds and loads models with these types.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch

from ropelens.rope.formulas import Shape
from ropelens.rope.variants import OWN, VARIANTS


def register(modeling_rope_utils: ModuleType) -> None:
    """Add our types to `transformers.modeling_rope_utils`, and the checks of their configs."""
    for name, row in VARIANTS.items():
        if row.rope_type == OWN + name:
            modeling_rope_utils.ROPE_INIT_FUNCTIONS[row.rope_type] = _rates
            check = f"_validate_{row.rope_type}_rope_parameters"  # a type without is warned of
            setattr(modeling_rope_utils.RotaryEmbeddingConfigMixin, check, _check)


def head_dim_of(config: Any) -> int:
    """Coordinates of a head, which a config states or leaves to its width."""
    stated = config.to_dict().get("head_dim")
    return stated or config.hidden_size // config.num_attention_heads


def stated_shape(config: Any, parameters: dict[str, Any]) -> Shape:
    """The head that the rope_parameters of a config, or of one kind of its layers, rotate."""
    context = parameters.get("original_max_position_embeddings")
    context = int(context or config.max_position_embeddings)
    return Shape(head_dim_of(config), float(parameters["rope_theta"]), context)


def _rates(
    config: Any,
    device: torch.device | str | None = None,
    seq_len: int | None = None,
    layer_type: str | None = None,
) -> tuple[torch.Tensor, float]:
    """inv_freq and attention factor of a `rope_type` of ours; transformers' signature."""
    parameters = config.rope_parameters
    parameters = parameters if layer_type is None else parameters[layer_type]
    row = VARIANTS[parameters["rope_type"].removeprefix(OWN)]
    inv_freq, factor = row.frequencies(parameters.get("p"), stated_shape(config, parameters))
    return inv_freq.to(device), factor


def _check(config: Any, rope_parameters: dict[str, Any], ignore_keys: Any = None) -> None:
    """Check a config's parameters by the row of the table."""
    value = rope_parameters.get("p")
    row = VARIANTS[rope_parameters["rope_type"].removeprefix(OWN)]
    row.parse("" if value is None else str(value))
