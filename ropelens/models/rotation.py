"""How each layer of a live model rotates, measured and held against what it states."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
import xarray as xr
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedModel

from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.models.door import AttentionEdit, by_itself, open_edit
from ropelens.models.lone import LoneTokens, depends_on_length, lone_tokens, rope_parameters
from ropelens.models.places import with_weights
from ropelens.models.subject import Subject, as_subject, trained_context
from ropelens.rope.planes import Planes
from ropelens.rope.probe import MeasuredRotation, probe_positions, read_rotation
from ropelens.statistics.ragged import stack

LONGEST_PROBE = 2**24
"""Positions are exact in float32 up to here; a wavelength of 10 million tokens still turns."""

LARGEST_RESIDUAL = 1e-3


@dataclass(frozen=True)
class LayerRotation:
    """One layer: what was `measured`, what the model `stated`, and the `planes` to use.

    `planes` carries the stated frequencies where there are any, exact to the bit, and
    the measured ones otherwise.
    """

    measured: MeasuredRotation
    stated: Float[Tensor, " frequency"] | None
    planes: Planes


_probed: ContextVar[dict[PreTrainedModel, list[LayerRotation]]] = ContextVar("ropelens_probed")
"""What `one_probe` found of each model in its block."""


def measure_rope(model: nn.Module, *, context: int | None = None) -> xr.Dataset:
    """The rotation of every layer of `model`, measured from one forward pass.

    A sequence of one token has the same hidden state whatever its position, so from
    positions 0, 1, 2, 4, 8, ... its queries and keys differ by their rotation alone. (One
    token repeated in one sequence would do as well, but for sink logits, which take less
    from a row the more keys it sees.) RoPE variants
    that change with the length (dynamic, longrope) are measured as they are at
    `context` tokens; None means within the trained context. Under `edit_rope`, what the
    edit leaves of the measured rotation.

    Returns a dataset over `layer` and `frequency`: `inv_freq` (rad/token, measured),
    `wavelength` (tokens; infinite where nothing turns), `inv_freq_stated` (rad/token,
    the model's own; NaN where it states none), `residual` (change of a plane's length
    between positions, relative to the mean length), `pairing` ("half", "interleaved",
    "none") and `rotary_dim` (coordinates of a head that lie in planes). Where RoPE
    leaves coordinates alone, the last frequency is that rest, with inv_freq 0.

    Raises `UnsupportedModel` where the lengths of planes change with position, where
    measured and stated frequencies disagree, where nothing rotates although nothing
    says so, and where a layer hides its attention.
    """
    layers = read_layers(as_subject(model), context=context)
    measured = [layer.measured.planes.term_inv_freq.abs() for layer in layers]
    per_plane = ("layer", "frequency")
    dataset = xr.Dataset(
        {
            "inv_freq": (per_plane, stack(measured)),
            "wavelength": (per_plane, stack(2 * math.pi / w.double() for w in measured)),
            "inv_freq_stated": (per_plane, stack(map(_beside, layers))),
            "residual": ("layer", [layer.measured.residual for layer in layers]),
            "pairing": ("layer", [layer.measured.planes.pairing for layer in layers]),
            "rotary_dim": ("layer", [layer.measured.planes.rotary_dim for layer in layers]),
        },
        coords={"layer": range(len(layers))},
    )
    described = {
        "inv_freq": ("angular frequency, measured", "rad/token"),
        "wavelength": ("tokens per turn", "token"),
        "inv_freq_stated": ("angular frequency that the model states", "rad/token"),
        "residual": ("change of plane lengths with position", "1"),
        "pairing": ("which coordinates share a plane", ""),
        "rotary_dim": ("coordinates of a head that rotate", "1"),
    }
    for name, (long_name, units) in described.items():
        dataset[name].attrs = {"long_name": long_name, "units": units}
    return dataset


def _beside(layer: LayerRotation) -> Float[Tensor, " term"]:
    """The stated frequencies in the places of the measured ones, NaN where none is."""
    terms = layer.measured.planes.terms
    known = torch.zeros(0) if layer.stated is None else layer.stated[:terms].double()
    return pad(known, (0, terms - len(known)), value=math.nan)


def read_layers(subject: Subject, *, context: int | None = None) -> list[LayerRotation]:
    """The rotation of each layer, as `measure_rope` describes; raises as it does.

    Under an open edit: measured without it, then as the edit has it. Raises `BadArgument`
    where it lets the heads of a layer rotate at different frequencies.
    """
    layers = _remembered(subject, context)
    now = _planes_of(subject, layers, context)
    return [_edited(*layer) for layer in zip(layers, now, range(len(now)), strict=True)]


def read_planes(subject: Subject, *, context: int | None = None) -> list[Planes]:
    """How each layer rotates, with a row for each head where an open edit makes them differ.

    Measured without the edit, then as the edit has it; raises as `measure_rope` otherwise.
    """
    return _planes_of(subject, _remembered(subject, context), context)


def _planes_of(
    subject: Subject, layers: list[LayerRotation], context: int | None
) -> list[Planes]:
    """How layers that rotate so by themselves rotate under the open edit."""
    own = [layer.planes for layer in layers]
    edit = open_edit(subject.model)
    if edit is None:
        return own
    length = context or trained_context(subject.model)
    return [edited_planes(edit, layer, p, length=length) for layer, p in enumerate(own)]


@contextmanager
def one_probe() -> Iterator[None]:
    """Measure the rotation of a model once while the block runs, for all who read it.

    Nothing may change a model's weights or configuration meanwhile. A model whose rotation
    depends on the length is measured anew each time.
    """
    token = _probed.set({})
    try:
        yield
    finally:
        _probed.reset(token)


def _remembered(subject: Subject, context: int | None) -> list[LayerRotation]:
    """The rotation of each layer of the model by itself, measured once in `one_probe`."""
    probed = None if depends_on_length(subject.model) else _probed.get(None)
    if probed is None or subject.model not in probed:
        with by_itself(subject.model):
            layers = _read_layers(subject, context)
        if probed is None:
            return layers
        probed[subject.model] = layers
    return probed[subject.model]


def _edited(layer: LayerRotation, planes: Planes, index: int) -> LayerRotation:
    """A layer that rotates in `planes` now; raises `BadArgument` where its heads differ."""
    if torch.equal(planes.inv_freq, layer.planes.inv_freq):
        return layer
    if planes.inv_freq.ndim == 2:
        raise BadArgument(
            f"Under this edit the heads of layer {index} rotate differently.",
            means="this is measured for all heads of a layer at once",
            attempt='an edit of whole layers (heads="3.*"), or of no frequencies (drop, '
            "mean_ablate); ropelens.profile and capture also take this one",
        )
    resolution = torch.zeros_like(planes.inv_freq)
    measured = MeasuredRotation(planes, layer.measured.residual, resolution)
    return LayerRotation(measured, planes.inv_freq.abs(), planes)


def edited_planes(edit: AttentionEdit, layer: int, planes: Planes, *, length: int) -> Planes:
    """How a layer rotates under an edit, with a row for each head where they differ."""
    inv_freq = edit.inv_freq(layer, planes, length=length)
    if not (inv_freq == inv_freq[:1]).all():
        return replace(planes, inv_freq=inv_freq)
    if torch.equal(inv_freq[0], planes.inv_freq.float()):
        return planes
    return replace(planes, inv_freq=inv_freq[0])


def inv_freq_by_head(
    model: PreTrainedModel, layer: int, planes: Planes, *, length: int
) -> Float[Tensor, "_ frequency"]:
    """How each head rotates in a call of `length` tokens, in rad/token; one row for all alike.

    `planes` is how the layer rotates by itself; an open edit may let its heads differ.
    """
    edit = open_edit(model)
    if edit is None:
        return planes.inv_freq[None]
    inv_freq = edit.inv_freq(layer, planes, length=length)
    return planes.inv_freq[None] if (inv_freq == planes.inv_freq).all() else inv_freq


def planes_now(
    model: PreTrainedModel, layer: int, planes: Planes, *, continued: bool
) -> Planes:
    """How the model by itself rotates in the call that runs, whose length may matter.

    `planes` is how the layer rotates within the trained context. Raises `UnsupportedModel`
    for a call that continues a cache of keys which may have been rotated otherwise.
    """
    if not depends_on_length(model):
        return planes
    count = len(planes.inv_freq)
    stated = next(w for w in stated_inv_freq(model, layer) if len(w) == count)
    now = -stated if planes.inv_freq.sum() < 0 else stated
    if continued and not torch.equal(now, planes.inv_freq):
        raise UnsupportedModel(
            "It cannot be told how the keys in this cache were rotated.",
            seen="a RoPE that changes with the length, past the length it was trained for",
            attempt="call the model with use_cache=False",
        )
    return replace(planes, inv_freq=now)


def _read_layers(subject: Subject, context: int | None) -> list[LayerRotation]:
    """The rotation of each layer of the model by itself."""
    positions = probe_positions(_longest_position(subject.model, context))
    lone = lone_tokens(subject, positions)
    noise = torch.finfo(subject.model.dtype).eps
    measured = read_rotations(subject.model, lone, positions)
    _check_rotates(subject.model, measured, noise)
    _check_values(subject.model, lone, noise)
    return [
        _agree(subject.model, layer, rotation, int(positions[-1]), noise)
        for layer, rotation in enumerate(measured)
    ]


def read_rotations(
    model: PreTrainedModel, lone: dict[int, LoneTokens], positions: Int[Tensor, " position"]
) -> list[MeasuredRotation]:
    """The rotation of each layer, read off its lone tokens at these positions."""
    return [
        read_rotation(
            lone[layer].vectors,
            positions,
            noise=torch.finfo(model.dtype).eps,
            counts=[len(w) for w in stated_inv_freq(model, layer)],
        )
        for layer in sorted(lone)
    ]


def stated_inv_freq(model: PreTrainedModel, layer: int) -> list[Float[Tensor, " frequency"]]:
    """The `inv_freq` that the model states for a layer: one, or several to choose from.

    Rotary modules keep it as a buffer, as `{layer_type}_inv_freq` where types of layers
    differ (Gemma 3). Sorted by how specific the name is.
    """
    config = model.config.get_text_config()
    names = ["inv_freq"]
    if "layer_types" in config.to_dict() and config.layer_types is not None:
        names.insert(0, f"{config.layer_types[layer]}_inv_freq")
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for module in model.modules():
        for name in found.keys() & {name for name, _ in module.named_buffers(recurse=False)}:
            with with_weights(module):
                found[name].append(module.get_buffer(name).float().cpu())
    return [buffer for name in names for buffer in found[name]]


def _longest_position(model: PreTrainedModel, context: int | None) -> int:
    """The farthest position that the probe may use without changing the rotation."""
    config = model.config.get_text_config()
    if "rope_parameters" not in config.to_dict() or not stated_inv_freq(model, 0):
        # No rotary module: positions may index a table, which ends somewhere.
        return trained_context(model) - 1
    if not depends_on_length(model):
        return LONGEST_PROBE
    trained = min(
        int(p.get("original_max_position_embeddings") or config.max_position_embeddings)
        for p in rope_parameters(model)
    )
    return max(context or 0, trained) - 1


def _check_rotates(
    model: PreTrainedModel, measured: list[MeasuredRotation], noise: float
) -> None:
    """Refuse a model whose queries change by anything but a rotation, or not at all."""
    limit = max(LARGEST_RESIDUAL, 16 * noise)
    name = type(model).__name__
    for layer, rotation in enumerate(measured):
        if not rotation.residual <= limit:
            raise UnsupportedModel(
                f"{name} does not rotate its queries.",
                seen=f"layer {layer}: the lengths of its planes change with position "
                f"(residual {rotation.residual:.2g}; a rotation keeps them to {limit:.0e})",
                means="this model does not use RoPE, or changes queries after rotating them",
                attempt="ropelens rope MODEL on a Llama, Qwen, Gemma, GPT-NeoX or GLM model",
            )
    stated = stated_inv_freq(model, 0)
    stands_still = all(rotation.planes.pairing == "none" for rotation in measured)
    if stands_still and not any(len(w) and not w.any() for w in stated):
        raise UnsupportedModel(
            f"{name} does not rotate its queries.",
            seen="queries and keys are the same at every position (residual 0)",
            means="this model does not use RoPE",
            attempt="ropelens rope MODEL on a Llama, Qwen, Gemma, GPT-NeoX or GLM model",
        )


def _check_values(model: PreTrainedModel, lone: dict[int, LoneTokens], noise: float) -> None:
    """Refuse a model whose values turn too: no edit would reach them (DeepSeek V4)."""
    for layer, found in sorted(lone.items()):
        change = (found.values - found.values[:, :1]).square().mean().sqrt()
        size = found.values.square().mean().sqrt()
        if change > max(LARGEST_RESIDUAL, 16 * noise) * size:
            raise UnsupportedModel(
                f"{type(model).__name__} rotates its values too.",
                seen=f"layer {layer}: the values of a token change with its position",
                means="what its heads say depends on position beside what they attend to",
                attempt="a model that rotates its queries and keys alone",
            )


def _agree(
    model: PreTrainedModel, layer: int, rotation: MeasuredRotation, longest: int, noise: float
) -> LayerRotation:
    """Hold a measured rotation against the stated one; refuse where they disagree.

    A layer that stands still while its model states frequencies is a NoPE layer
    (SmolLM3); where the stated ones are all 0, its planes stand still by construction.
    """
    candidates = stated_inv_freq(model, layer)
    planes = rotation.planes
    if planes.pairing == "none":
        still = [w for w in candidates if not w.any() and 2 * len(w) <= planes.head_dim]
        if still:
            planes = replace(planes, inv_freq=still[0], pairing="half")
        return LayerRotation(rotation, still[0] if still else None, planes)
    direction = planes.inv_freq.nansum().sign().float()  # the fastest may be stopped or unseen
    for stated in candidates:
        if _matches(planes, rotation.resolution, stated, longest, noise):
            used = replace(planes, inv_freq=direction * stated)
            return LayerRotation(rotation, stated, used)
    if candidates:
        worst = candidates[0][: len(planes.inv_freq)]
        raise UnsupportedModel(
            f"{type(model).__name__} does not rotate as it states.",
            seen=f"layer {layer}: {len(planes.inv_freq)} planes, the fastest at "
            f"{planes.inv_freq[0]:.6g} rad/token; its inv_freq holds "
            f"{len(candidates[0])}, the fastest at {worst[0]:.6g}",
            means="something between the model's rotary module and its attention is not RoPE",
            attempt="report the model; its measured rotation cannot be trusted",
        )
    return LayerRotation(
        rotation, None, replace(planes, inv_freq=planes.inv_freq.nan_to_num(0))
    )


def _matches(
    planes: Planes,
    resolution: Float[Tensor, " frequency"],
    stated: Float[Tensor, " stated"],
    longest: int,
    noise: float,
) -> bool:
    """Whether stated frequencies are the measured ones, to the measurement's resolution.

    Planes in which nothing was seen agree with anything.
    """
    count = len(planes.inv_freq)
    if len(stated) < count or stated[count:].any() or 2 * len(stated) > planes.head_dim:
        return False
    difference = (planes.inv_freq.double().abs() - stated[:count].double()).abs()
    allowed = 32 * torch.where(
        resolution.isfinite(), resolution * stated[:count].abs(), noise / longest
    )
    return bool((difference.isnan() | (difference <= allowed)).all())
