"""What a configuration asks of the rotation, beside what the live model states and does.

A patched rotary module may leave its configuration aside, a cast may round its buffer, and a
configuration may set what its family does not read.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropelens.models.rotation import LayerRotation, rope_parameters
from ropelens.models.variants import frequencies, stated_shape
from ropelens.rope.variants import parse_variant

if TYPE_CHECKING:
    from ropelens.models.subject import Subject

EXACT, HALF = 1e-6, 4e-3
"""Relative difference of frequencies that rounding makes in float32, and in half precision."""


def warn_of_configuration(subject: Subject, layers: Sequence[LayerRotation]) -> None:
    """Warn of frequencies, or a number of them, that differ from those of the configuration.

    The configuration's are computed from it alone, without the model. Warns also of keys of the
    configuration that the model does not read.
    """
    rotary = {layer.planes.rotary_dim for layer in layers} - {0}
    idle = "; ".join(_idle_keys(subject.config, rotary))
    told = {f"the configuration sets what the model does not read: {idle}"} if idle else set()
    configured = asked_inv_freqs(subject)
    for number, (layer, asked) in enumerate(zip(layers, configured, strict=True)):
        if layer.stated is not None and asked is not None:
            words = _difference(layer.stated.double(), asked, layer.planes.rotary_dim)
            if words and not any(words in earlier for earlier in told):
                told.add(f"layer {number}: {words}")
    for words in sorted(told):
        warnings.warn(f"{subject.kind}, {words}", stacklevel=2)


def _idle_keys(config: PreTrainedConfig, rotary: set[int]) -> list[str]:
    """Keys that do not reach a rotation, beside those that transformers names as it reads."""
    facts = config.to_dict()
    with suppress(OSError, ValueError):  # the file has keys that transformers drops as it reads
        written, _ = config.get_config_dict(str(config.name_or_path), local_files_only=True)
        facts = written | written.get("text_config", {}) | facts
    base = facts.get("rope_theta")
    bases = {part.get("rope_theta") for part in rope_parameters(config)}
    idle = []
    if base is not None and base not in bases:
        idle.append(f"rope_theta {base:g}, beside another in rope_parameters")
    if rotary and facts.get("rotary_dim") not in (None, *rotary):
        idle.append(f"rotary_dim {facts['rotary_dim']}, where {max(rotary)} coordinates turn")
    return idle


def asked_inv_freqs(
    subject: Subject, *, length: int | None = None
) -> list[Float[Tensor, " frequency"] | None]:
    """The frequencies (rad/token) that the configuration asks for, layer by layer.

    None where it does not say, or says it in words that only its family knows.
    """
    kinds = subject.config.to_dict().get("layer_types") or [None]
    by_kind = {kind: _asked_inv_freq(subject.config, kind, length) for kind in kinds}
    return [by_kind[kinds[layer % len(kinds)]] for layer in range(subject.layers)]


def _asked_inv_freq(
    config: Any, kind: str | None, length: int | None
) -> Float[Tensor, " frequency"] | None:
    """The frequencies of a kind of layer."""
    parameters = config.to_dict().get("rope_parameters") or {}
    by_kind = kind is not None and isinstance(parameters.get(kind), dict)
    parameters = parameters[kind] if by_kind else parameters
    name = parameters.get("rope_type", "default")
    of_kind = {"layer_type": kind} if by_kind else {}
    try:
        if name in ROPE_INIT_FUNCTIONS:
            rates = ROPE_INIT_FUNCTIONS[name](config, "cpu", seq_len=length, **of_kind)
            return rates[0].double()
        shape = stated_shape(config, parameters)
        rotary = int(shape.head_dim * (parameters.get("partial_rotary_factor") or 1))
        plain = frequencies(parse_variant("rope"), replace(shape, head_dim=rotary))
        return plain[0].double()
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
