"""Rotation of a model: measured, and shown for every attention call."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import xarray as xr
from torch import Tensor
from torch.nn.functional import pad

from ropelens.arguments import IN_WORDS, Positive, public
from ropelens.attention.call import AttentionCall
from ropelens.checkpoints.files import ConfigInput, read_config_of
from ropelens.measured_rotation.array_source import ArraySource
from ropelens.measured_rotation.arrays import array_layers
from ropelens.measured_rotation.conformance import asked_rotations, configuration_faults
from ropelens.measured_rotation.layer_kinds import LayerKind
from ropelens.measured_rotation.probe import RotationProbe
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.rope.planes import Planes
from ropelens.schema import ROTATION, labelled, stack

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

    Warns if the model does not rotate as its configuration asks. Raises `UnsupportedModel` if
    queries do not rotate, if they do not rotate as the model states, or if a layer hides its
    attention; and `BadArgument` for arrays that cannot be read, and if an edit makes heads of a
    layer differ.
    """
    config = None if config is None else read_config_of(config)
    if isinstance(model, (Mapping, str, Path)):
        read = array_layers(model, config, context)
        by_layer, faults = read.layers, read.faults
        layers = list(by_layer.values())
        kinds = [LayerKind("", 0, math.nan, "")] * len(layers)
        edited, context = (
            [x.planes for x in layers],
            context or 1 + max(layers[0].query_scale),
        )
    else:
        live = as_live_model(model)
        probe = RotationProbe(live)
        layers, edited = probe.layers(context), probe.planes(context, alike=True)
        by_layer, kinds = dict(enumerate(layers)), probe.kinds
        config = config or live.config
        faults = configuration_faults(layers, config, context)
    asked = asked_rotations(config, layers=1 + max(by_layer), length=context)
    planes, measured = [], []
    references: tuple[list[Tensor], list[Tensor]] = ([], [])
    for layer, now, wanted in zip(
        layers, edited, [asked[n] for n in by_layer], strict=True
    ):
        same = now is layer.planes or torch.equal(now.inv_freq, layer.planes.inv_freq)
        planes.append(layer.measured.planes if same else now)
        measured.append(wanted.direction * planes[-1].term_inv_freq)
        edit = wanted.direction * now.inv_freq
        configured = None if layer.planes.pairing == "none" else wanted.inv_freq
        for column, inv_freq in zip(
            references, (layer.stated, configured), strict=True
        ):
            inv_freq = inv_freq if same else edit
            terms = planes[-1].terms
            inv_freq = torch.zeros(0) if inv_freq is None else inv_freq[:terms].double()
            column.append(pad(inv_freq, (0, terms - len(inv_freq)), value=math.nan))
    values: dict[str, Any] = {
        "inv_freq": stack(measured),
        "wavelength": stack(2 * math.pi / w.double().abs() for w in measured),
        "inv_freq_stated": stack(references[0]),
        "inv_freq_configured": stack(references[1]),
        "residual": [layer.measured.residual for layer in layers],
        "pairing": [layer.pairing for layer in planes],
        "rotary_dim": [layer.rotary_dim for layer in planes],
        "layer_type": [kind.name for kind in kinds],
        "base": [kind.base for kind in kinds],
        "scaling": [kind.scaling for kind in kinds],
        "reach": [kind.reach for kind in kinds],
        "query_scale": [list(layer.query_scale.values()) for layer in layers],
    }
    coords = {"layer": list(by_layer), "position": list(layers[0].query_scale)}
    verdict = "different" if faults else "same" if config else "unknown"
    rotates = (
        "rotates" if any(layer.rotary_dim for layer in planes) else "does not rotate"
    )
    why = (
        "rotates as configured"
        if config
        else f"{rotates}; no configuration is compared"
    )
    if faults:
        why = (
            f"does not rotate{' as configured' * bool(config)}: {'; '.join(faults[:3])}"
        )
        why += f"; and {len(faults) - 3} more" * (len(faults) > 3)
    attrs = {"verdict": verdict, "why": why}
    return xr.Dataset(labelled(values, ROTATION), coords=coords, attrs=attrs)


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
