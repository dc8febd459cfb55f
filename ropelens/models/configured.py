"""What a configuration asks of the rotation, beside what the live model states and does.

A patched rotary module may leave its configuration aside, a cast may round its buffer, and a
configuration may set what its family does not read.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropelens.models.variants import stated_shape
from ropelens.rope.variants import parse_variant

if TYPE_CHECKING:
    from ropelens.models.rotation import LayerRotation
    from ropelens.models.subject import Subject

EXACT, HALF = 1e-6, 4e-3
"""Relative difference of frequencies that rounding makes in float32, and in half precision."""


def warn_of_configuration(subject: Subject, layers: Sequence[LayerRotation]) -> None:
    """Warn of frequencies, or a number of them, that differ from those of the configuration.

    The configuration's are computed from it alone, without the model.
    """
    config = subject.config
    types = config.to_dict().get("layer_types") or [None] * len(layers)
    told: set[str] = set()
    for number, (layer, kind) in enumerate(zip(layers, types, strict=False)):
        asked = asked_inv_freq(config, kind)
        if layer.stated is None or asked is None:
            continue
        words = _difference(layer.stated.double(), asked, layer.planes.rotary_dim)
        if words and words not in told:
            told.add(words)
            warnings.warn(f"{subject.kind}, layer {number}: {words}", stacklevel=2)


def asked_inv_freq(config: Any, kind: str | None) -> Float[Tensor, " frequency"] | None:
    """The frequencies (rad/token) of a kind of layer; None where the configuration has none."""
    parameters = config.to_dict().get("rope_parameters") or {}
    by_kind = kind is not None and isinstance(parameters.get(kind), dict)
    parameters = parameters[kind] if by_kind else parameters
    name = parameters.get("rope_type", "default")
    of_kind = {"layer_type": kind} if by_kind else {}
    try:
        if name in ROPE_INIT_FUNCTIONS:
            return ROPE_INIT_FUNCTIONS[name](config, "cpu", **of_kind)[0].double()
        shape = stated_shape(config, parameters)
        rotary = int(shape.head_dim * (parameters.get("partial_rotary_factor") or 1))
        return parse_variant("rope").frequencies(replace(shape, head_dim=rotary))[0].double()
    except (AttributeError, KeyError, TypeError, ValueError):  # a family with other names
        return None


def _difference(
    stated: Float[Tensor, " stated"], asked: Float[Tensor, " frequency"], rotary: int
) -> str:
    """How frequencies differ from those of the configuration; "" where they do not."""
    measured = "what is measured is the model."
    if len(stated) != len(asked):
        return (
            f"the configuration asks for {2 * len(asked)} rotated coordinates of a head "
            f"(partial_rotary_factor), the model rotates {rotary}; {measured}"
        )
    off = ((stated - asked).abs() / asked.abs().clamp(min=1e-30)).nan_to_num(0)
    worst = int(off.argmax())
    if off[worst] <= EXACT:
        return ""
    rounded = off[worst] <= HALF
    cause = "rounded to half precision" if rounded else "not those of its configuration"
    return (
        f"the frequencies are {cause}: plane {worst} turns by {float(stated[worst]):.6g} "
        f"rad/token, the configuration asks for {float(asked[worst]):.6g}; {measured}"
    )
