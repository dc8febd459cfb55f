"""Keys of a configuration that seem to change a rotation, and do not."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from ropelens.config_facts import rope_parameters
from ropelens.rope.planes import Planes

FAULT = "the configuration has a key that the model does not read"

READ_BY_ANY = {"rope_theta", "partial_rotary_factor"}
YARN_KEYS = {"attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
READ: dict[str | None, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "yarn": {"factor", *YARN_KEYS},
    "longrope": {"factor", "attention_factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
}
"""Numbers that transformers reads from `rope_parameters`, by rope type."""

ONLY_A_LENGTH = {"original_max_position_embeddings", "max_position_embeddings"}
"""Lengths, which many files state without a use."""


def unused_keys(config: PreTrainedConfig, layers: list[Planes]) -> list[str]:
    """A sentence for each key that seems to change the rotation and does not.

    transformers logs some of these keys, which `load` hides, and drops others.
    """
    written = _written_settings(config)
    settings = written | config.to_dict()
    unused = [
        *_unused_bases(settings, config),
        *_unused_sizes(settings, layers),
        *_unused_parameters(written, config),
    ]
    if settings.get("rope_interleave") and not hasattr(type(config), "rope_interleave"):
        unused.append("rope_interleave, a key of other families")
    return [f"{FAULT}: {key}" for key in unused]


def _written_settings(config: PreTrainedConfig) -> dict[str, Any]:
    """The keys of the file of a config, of which transformers drops some; {} without a file."""
    folder = str(config.name_or_path)
    with suppress(OSError, ValueError):
        written, _ = config.get_config_dict(folder, local_files_only=True)
        return {**written, **written.get("text_config", {})}
    return {}


def _unused_bases(settings: dict[str, Any], config: PreTrainedConfig) -> Iterator[str]:
    bases = [parameters.get("rope_theta") for parameters in rope_parameters(config)]
    for name in ("rope_theta", "rotary_emb_base"):
        base = settings.get(name)
        if isinstance(base, float | int) and base not in bases:
            yield f"{name} {base:g}, unlike the base in rope_parameters"


def _unused_sizes(settings: dict[str, Any], layers: list[Planes]) -> Iterator[str]:
    """Sizes of the rotated part of a head that no layer has."""
    rotating = {
        planes.rotary_dim: planes.head_dim for planes in layers if planes.rotary_dim
    }
    if not rotating:
        return
    largest_head = max(rotating.values())
    for name, unit in (("rotary_dim", 1), ("rotary_pct", largest_head)):
        size = settings.get(name)
        if size is not None and int(size * unit) not in rotating:
            yield f"{name} {size}, but {max(rotating)} coordinates rotate"


@dataclass(frozen=True)
class StatedParameters:
    """Parameters of RoPE, and the name under which they are stated."""

    place: str
    parameters: dict[str, Any]


def _unused_parameters(
    written: dict[str, Any], config: PreTrainedConfig
) -> Iterator[str]:
    """Numbers among parameters of RoPE that the rope types of the config do not read."""
    read: list[dict[str, Any]] = []
    for parameters in rope_parameters(config):
        # After an assignment to config.rope_scaling of a model, a newer transformers states a
        # base of None, and an older one keeps the old name "type" and no base.
        if parameters.get("rope_theta") is None and parameters.keys() & {
            "rope_theta",
            "type",
        }:
            rope_type = parameters.get("rope_type", parameters.get("type"))
            yield f"rope_type {rope_type!r} without rope_theta"
            return
        if parameters.get("rope_type") not in READ:
            return
        keys = READ_BY_ANY | READ[parameters.get("rope_type")]
        read.append({key: parameters.get(key) for key in keys})
    of_family = getattr(type(config), "ignore_keys_at_rope_validation", None) or ()
    ignored = {*ONLY_A_LENGTH, *of_family}
    found: set[str] = set()
    for stated in _stated_parameters(written, config):
        for key, value in stated.parameters.items():
            is_number = isinstance(value, float | int) and not isinstance(value, bool)
            if not is_number or value == 1 or key in ignored | found:
                continue
            if all(value != parameters.get(key) for parameters in read):
                found.add(key)
                yield f"{key} {value:g} in {stated.place}"


def _stated_parameters(
    written: dict[str, Any], config: PreTrainedConfig
) -> Iterator[StatedParameters]:
    """All parameters of RoPE in the config, which is in use, and in its file."""
    for parameters in rope_parameters(config):
        yield StatedParameters("rope_parameters", parameters)
    for name in ("rope_parameters", "rope_scaling"):
        of_file = written.get(name)
        if isinstance(of_file, dict):
            nested = [part for part in of_file.values() if isinstance(part, dict)]
            for parameters in nested or [of_file]:
                yield StatedParameters(f"{name} of its file", parameters)
