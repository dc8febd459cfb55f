"""Rotation of a model: measured, and shown for every attention call."""

import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import xarray as xr
from jaxtyping import Float
from numpy.typing import ArrayLike
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from ropelens.arguments import IN_WORDS, Positive, public
from ropelens.attention.call import AttentionCall
from ropelens.checkpoints.config import ConfigInput, read_config_of
from ropelens.checkpoints.not_finite import first_not_finite, remedy
from ropelens.measured_rotation.array_source import ArraySource
from ropelens.measured_rotation.arrays import ArrayLayers, array_layers
from ropelens.measured_rotation.conformance import (
    AskedRotation,
    asked_rotations,
    configuration_faults,
)
from ropelens.measured_rotation.layer_kinds import LayerKind
from ropelens.measured_rotation.probe import RotationProbe
from ropelens.measured_rotation.read import LayerRotation
from ropelens.measured_rotation.single_tokens import FULL, probe_tokens
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.model.live_model import LiveModel
from ropelens.rope.planes import Planes
from ropelens.schema.rotation import ROTATION
from ropelens.schema.rows import labelled, stack

Measurable = Model | ArraySource
IN_WORDS[Measurable] = f"{IN_WORDS[Model]}; or a dict or a file of arrays"


@public
def measure_rope(
    model: Measurable,
    *,
    config: ConfigInput | None = None,
    context: Positive | None = None,
) -> xr.Dataset:
    """The rotation of every layer of `model`, measured from one forward pass.

    A sequence of one token has the same hidden state at every position. At positions 0, 1, 2,
    4, 8, ..., queries and keys therefore differ only by their rotation. RoPE that changes
    with the length (dynamic, longrope) is measured at `context` tokens; None means within the
    trained context (or, for arrays, up to the last position). Under `edit_rope`, the edited
    rotation is returned.

    Instead of a model, pass the queries and keys of any runtime: a dict of arrays, or a .npz or
    .safetensors file. `q` and `k` [position, head, coordinate] belong to one token that is
    repeated at `positions`, by default 0, 1, 2, ...; the best positions are 0, 1, 2, 4, 8, ...
    up to the trained context. With `q_before` and `k_before`, the same arrays before RoPE, they
    may belong to any text. Names such as `q.3` are of layer 3; an array with four axes has all
    layers. The dataset then describes q, or k if q is missing.

    Returns a dataset over `layer` and `frequency`. Coordinates that RoPE does not rotate are
    the last frequency, with inv_freq 0. Layers that do not attend are NaN.

    - `inv_freq`, rad/token, and `wavelength`, tokens: measured; `inv_freq` is negative in
      planes that rotate backward. (NanoChat rotates all planes by a negative angle; they
      count as forward.)
    - `inv_freq_stated`, `inv_freq_configured`: rad/token, from the buffer of the model and
      from its configuration; NaN if unknown.
    - `residual`: change of a plane's length between positions, relative to the mean length.
    - `pairing`: "half", "interleaved" or "none". `rotary_dim`: coordinates in planes.
    - `layer_type`, `base`, `scaling` and `reach`: kind of the layer, as in a profile; unknown
      for arrays.
    - `query_scale`, over `position`: length of queries relative to position 0 (Llama 4).
    - attributes `verdict` ("same", "different", "unknown") and `why`, a sentence, which names
      the properties that differ from `config`: a configuration, or its dict or file, or the
      name of a checkpoint. The default is the configuration of the model. Edits do not count.

    Warns if the model does not rotate as its configuration asks, and if it computes numbers
    that are not finite. Raises `UnsupportedModel` if
    queries do not rotate, if they do not rotate as the model states, or if a layer hides its
    attention; and `BadArgument` for arrays that cannot be read, and if an edit makes heads of a
    layer differ.
    """
    configuration = None if config is None else read_config_of(config)
    length = context
    if isinstance(model, (Mapping, str, Path)):
        read = array_layers(model, configuration, context)
        measured = _measured_arrays(read)
        if length is None:
            length = 1 + read.last_position
    else:
        live = as_live_model(model)
        configuration = configuration or live.config
        with _warned_of_logits(live):
            measured = _measured_model(live, configuration, context)
    asked = asked_rotations(
        configuration, layers=1 + max(measured.layers), length=length
    )
    layers = [
        _describe_layer(measured.layers[number], planes, asked[number])
        for number, planes in measured.planes.items()
    ]
    attrs = _verdict(
        measured.faults,
        configured=configuration is not None,
        rotates=any(layer.planes.rotary_dim for layer in layers),
    )
    return _dataset(measured, layers).assign_attrs(attrs)


@contextmanager
def _warned_of_logits(live: LiveModel) -> Iterator[None]:
    """Warn after the block if the model computed logits in it that are not finite."""
    wrong: list[bool] = []

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and not output.isfinite().all():
            wrong.append(True)

    unembedding: Any = live.model.get_output_embeddings()
    handle = unembedding.register_forward_hook(look)
    try:
        yield
    finally:
        handle.remove()
    if not wrong:
        return
    tokens = probe_tokens(live.vocabulary, FULL.tokens)[:, None]
    with live.without_hooks():
        cause = first_not_finite(live.model, partial(live.forward, tokens, last=1))
    message = f"{live.class_name} computes NaN or infinity"
    if cause:
        message += f" first in {cause}"
    hint = remedy(live.model.dtype, "another checkpoint")
    warnings.warn(f"{message}; try: {hint}", stacklevel=5)


@dataclass(frozen=True)
class MeasuredLayers:
    """Rotations by the number of the layer, and differences from the configuration.

    `planes` are the planes under the open edit; `layers` are without edits.
    """

    layers: dict[int, LayerRotation]
    planes: dict[int, Planes]
    kinds: list[LayerKind]
    faults: list[str]


def _measured_arrays(read: ArrayLayers) -> MeasuredLayers:
    return MeasuredLayers(
        layers=read.layers,
        planes={number: layer.planes for number, layer in read.layers.items()},
        kinds=[LayerKind("", 0, math.nan, "")] * len(read.layers),
        faults=read.faults,
    )


def _measured_model(
    live: LiveModel, config: PreTrainedConfig, context: int | None
) -> MeasuredLayers:
    probe = RotationProbe(live)
    layers = probe.layers(context)
    planes = probe.planes(context, alike=True)
    return MeasuredLayers(
        layers=dict(enumerate(layers)),
        planes=dict(enumerate(planes)),
        kinds=probe.kinds,
        faults=configuration_faults(layers, config, context),
    )


@dataclass(frozen=True)
class LayerFrequencies:
    """Frequencies of one layer by term, in rad/token; NaN if they are unknown."""

    planes: Planes
    inv_freq: Float[Tensor, " term"]
    stated: Float[Tensor, " term"]
    configured: Float[Tensor, " term"]


def _describe_layer(
    layer: LayerRotation, edited: Planes, asked: AskedRotation
) -> LayerFrequencies:
    """Frequencies of a layer, or of its `edited` planes if an edit changes them.

    Frequencies of planes have the sign of their rotation, and stated and configured frequencies
    do not. Therefore frequencies of planes are multiplied by the direction.
    """
    if edited is layer.planes or torch.equal(edited.inv_freq, layer.planes.inv_freq):
        return _unedited_frequencies(layer, asked)
    inv_freq = asked.direction * edited.term_inv_freq
    of_edit = _by_term(asked.direction * edited.inv_freq, edited)
    return LayerFrequencies(edited, inv_freq, stated=of_edit, configured=of_edit)


def _unedited_frequencies(
    layer: LayerRotation, asked: AskedRotation
) -> LayerFrequencies:
    planes = layer.measured.planes
    configured = asked.inv_freq
    if layer.planes.pairing == "none":
        configured = None
    return LayerFrequencies(
        planes,
        inv_freq=asked.direction * planes.term_inv_freq,
        stated=_by_term(layer.stated, planes),
        configured=_by_term(configured, planes),
    )


def _by_term(
    inv_freq: Float[Tensor, " frequency"] | None, planes: Planes
) -> Float[Tensor, " term"]:
    if inv_freq is None:
        return torch.full((planes.terms,), math.nan, dtype=torch.float32, device="cpu")
    inv_freq = inv_freq[: planes.terms].double()
    return pad(inv_freq, (0, planes.terms - len(inv_freq)), value=math.nan)


def _dataset(measured: MeasuredLayers, layers: list[LayerFrequencies]) -> xr.Dataset:
    rotations = list(measured.layers.values())
    inv_freq = [layer.inv_freq for layer in layers]
    values: dict[str, ArrayLike] = {
        "inv_freq": stack(inv_freq),
        "wavelength": stack(2 * math.pi / w.double().abs() for w in inv_freq),
        "inv_freq_stated": stack(layer.stated for layer in layers),
        "inv_freq_configured": stack(layer.configured for layer in layers),
        "residual": [rotation.measured.residual for rotation in rotations],
        "pairing": [layer.planes.pairing for layer in layers],
        "rotary_dim": [layer.planes.rotary_dim for layer in layers],
        "layer_type": [kind.name for kind in measured.kinds],
        "base": [kind.base for kind in measured.kinds],
        "scaling": [kind.scaling for kind in measured.kinds],
        "reach": [kind.reach for kind in measured.kinds],
        "query_scale": [list(rotation.query_scale.values()) for rotation in rotations],
    }
    positions = list(rotations[0].query_scale)
    coords = {"layer": list(measured.layers), "position": positions}
    return xr.Dataset(labelled(values, ROTATION), coords=coords)


def _verdict(faults: list[str], *, configured: bool, rotates: bool) -> dict[str, str]:
    """The attributes `verdict` and `why` of `measure_rope`."""
    if faults:
        why = "does not rotate as configured" if configured else "does not rotate"
        why += f": {'; '.join(faults[:3])}"
        if len(faults) > 3:
            why += f"; and {len(faults) - 3} more"
        return {"verdict": "different", "why": why}
    if configured:
        return {"verdict": "same", "why": "rotates as configured"}
    rotation = "rotates" if rotates else "does not rotate"
    why = f"{rotation}; no configuration is compared"
    return {"verdict": "unknown", "why": why}


@public
@contextmanager
def observe(
    model: Model, function: Callable[[AttentionCall, Planes], object]
) -> Iterator[None]:
    """Call `function(call, planes)` for every attention call of `model` in the block.

    `call` (`AttentionCall`) has the queries [batch, head, position, coordinate] and keys after
    their rotation. The tensors belong to the model: clone them before you keep or change them.
    `planes` (`Planes`) is the rotation of the layer, as `measure_rope` measures it. With a
    key-value cache, a call has only the new rows, and all keys; `call.past` of these come
    before the first row. The output of the model keeps every bit.

    Under `edit_rope` the function gets edited queries, keys and `planes`. If heads of the
    layer differ, `planes.inv_freq` has a row and `call.key` a head for each query head. Under
    `silence_heads`, `call.output` is the output before heads are silenced.

    Raises the same errors as `measure_rope`. If RoPE changes with the length, a run with a
    cache longer than the trained length raises `UnsupportedModel`.
    """
    live = as_live_model(model)
    probe = RotationProbe(live)
    probe.layers()  # before the block, because this may raise an error

    def show(call: AttentionCall) -> None:
        function(call, probe.planes_of(call))

    with live.observe(show):
        yield
