"""What a configuration says, and asks of the rotation, beside what the live model does.

A patched rotary module may leave its configuration aside, a cast may round its buffer, and a
configuration may set what its family does not read.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ropelens.config_facts import rope_parameters
from ropelens.rope.planes import Planes
from ropelens.rope.variants import parse_variant
from ropelens.rotation.probe import LayerRotation
from ropelens.rotation.variant_config import frequencies, stated_shape

if TYPE_CHECKING:
    from ropelens.model.live_model import LiveModel


def warn_of_configuration(live: LiveModel, layers: Sequence[LayerRotation]) -> None:
    """Warn of frequencies, or a number of them, that differ from those of the configuration.

    The configuration's are computed from it alone, without the model. Warns also of keys of the
    configuration that the model does not read.
    """
    words = _idle_keys(live.config, [layer.planes for layer in layers])
    configured = configured_inv_freqs(live)
    for number, (layer, asked) in enumerate(zip(layers, configured, strict=True)):
        if layer.stated is not None and asked is not None:
            difference = _difference(layer.stated.double(), asked, layer.planes.rotary_dim)
            if difference and not any(difference in earlier for earlier in words):
                words.append(f"layer {number}: {difference}; what is measured is the model.")
    for each in words:
        warnings.warn(f"{live.class_name}, {each}", stacklevel=2)


def _idle_keys(config: PreTrainedConfig, layers: list[Planes]) -> list[str]:
    """Keys that do not reach a rotation, beside those that transformers names as it reads."""
    facts = config.to_dict()
    with suppress(OSError, ValueError):  # the file has keys that transformers drops as it reads
        written, _ = config.get_config_dict(str(config.name_or_path), local_files_only=True)
        facts = written | written.get("text_config", {}) | facts
    bases = {None, *(part.get("rope_theta") for part in rope_parameters(config))}
    idle = [
        f"{name} {facts[name]:g}, beside another in rope_parameters"
        for name in ("rope_theta", "rotary_emb_base")
        if facts.get(name) not in bases
    ]
    turning = {planes.rotary_dim: planes.head_dim for planes in layers if planes.rotary_dim}
    for name, unit in (("rotary_dim", 1), ("rotary_pct", max(turning.values(), default=0))):
        if turning and facts.get(name) is not None and int(facts[name] * unit) not in turning:
            idle.append(f"{name} {facts[name]}, where {max(turning)} coordinates turn")
    if facts.get("rope_interleave") and not hasattr(type(config), "rope_interleave"):
        idle.append("rope_interleave, a key of other families")
    still = zip(facts.get("no_rope_layers") or (), layers, strict=False)
    if any(not turns and planes.rotary_dim for turns, planes in still):
        idle.append("no_rope_layers, where these layers turn")
    return [f"the configuration sets what the model does not read: {each}" for each in idle]


def configured_inv_freqs(
    live: LiveModel, *, length: int | None = None
) -> list[Float[Tensor, " frequency"] | None]:
    """The frequencies (rad/token) that the configuration asks for, layer by layer.

    None where it does not say, or says it in words that only its family knows.
    """
    config = live.config
    facts = config.to_dict()
    parameters, kinds = facts.get("rope_parameters") or {}, facts.get("layer_types") or [None]
    if {*(facts.get("layer_rope_theta") or ())} - {0, parameters.get("rope_theta")}:
        return [None] * live.layers

    def asked(kind: str | None) -> Float[Tensor, " frequency"] | None:
        kind = kind if isinstance(parameters.get(kind), dict) else None
        of_kind = parameters if kind is None else parameters[kind]
        init = ROPE_INIT_FUNCTIONS.get(of_kind.get("rope_type", "default"))
        with suppress(AttributeError, KeyError, TypeError, ValueError):  # names of its own
            if init is not None:
                return init(config, "cpu", seq_len=length, layer_type=kind)[0].double()
            shape = stated_shape(config, of_kind)
            rotary = int(shape.head_dim * (of_kind.get("partial_rotary_factor") or 1))
            plain = frequencies(parse_variant("rope"), replace(shape, head_dim=rotary))
            return plain[0].double()
        return None

    of_kinds = {kind: asked(kind) for kind in kinds}
    return [of_kinds[kinds[layer % len(kinds)]] for layer in range(live.layers)]


def _difference(
    stated: Float[Tensor, " stated"], asked: Float[Tensor, " frequency"], rotary: int
) -> str:
    """How frequencies differ from those of the configuration; "" where they do not."""
    if len(stated) != len(asked):
        return (
            f"the configuration asks for {2 * len(asked)} rotated coordinates of a head "
            f"(partial_rotary_factor), the model rotates {rotary}"
        )
    off = ((stated - asked).abs() / asked.abs().clamp(min=1e-30)).nan_to_num(0)
    worst = int(off.argmax())
    if off[worst] <= 1e-6:  # which rounding makes in float32
        return ""
    rounded = off[worst] <= 4e-3  # which it makes in half precision
    cause = "rounded to half precision" if rounded else "not those of its configuration"
    return (
        f"the frequencies are {cause}: plane {worst} turns by {float(stated[worst]):.6g} "
        f"rad/token, the configuration asks for {float(asked[worst]):.6g}"
    )
