"""Rotation of a model: measured, and shown for every attention call."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xarray as xr
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import pad
from transformers import PreTrainedConfig

from ropelens.attention.call import AttentionCall
from ropelens.attention.variables import labelled, stack, table
from ropelens.checkpoints.files import ConfigInput, read_config_of
from ropelens.errors import BadArgument, Positive, public
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.rope.planes import Planes
from ropelens.rotation.arrays import ArrayRotation, Arrays, read_array, read_arrays
from ropelens.rotation.conformance import (
    CLOCKWISE,
    AskedRotation,
    array_faults,
    asked_rotations,
    judge_rotation,
)
from ropelens.rotation.probe import RotationProbe
from ropelens.rotation.stated import configured_rotations

ROTATION = table("""
inv_freq (layer, frequency) rad/token: angular frequency, measured
inv_freq_stated (layer, frequency) rad/token: angular frequency that the model states
inv_freq_configured (layer, frequency) rad/token: angular frequency of the configuration
query_scale (layer, position) 1: length of queries, relative to position 0
wavelength (layer, frequency) token: tokens per turn
residual (layer) 1: change with position that is not a rotation
rotary_dim (layer) 1: coordinates of a head that rotate
pairing (layer): which coordinates share a plane
layer_type (layer): type of the layer in the configuration
""")


@public
def measure_rope(
    model: Model | Arrays, *, config: ConfigInput | None = None, context: Positive | None = None
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
    layers. The dataset then describes q, or k if there is no q.

    Returns a dataset over `layer` and `frequency`. Coordinates that RoPE does not rotate are
    the last frequency, with inv_freq 0. Layers that do not attend are NaN.

    - `inv_freq`, rad/token, and `wavelength`, tokens: measured; `inv_freq` is negative in
      planes that rotate backward. (NanoChat rotates all planes by a negative angle; they
      count as forward.)
    - `inv_freq_stated`, `inv_freq_configured`: rad/token, from the buffer of the model and
      from its configuration; NaN if unknown.
    - `residual`: change of a plane's length between positions, relative to the mean length.
    - `pairing`: "half", "interleaved" or "none". `rotary_dim`: coordinates in planes.
    - `query_scale`, over `position`: length of queries relative to position 0 (Llama 4).
    - attributes `verdict` ("same", "different", "unknown") and `why`, a sentence, which names
      the properties that differ from `config`: a configuration, or its dict or file, or the
      name of a checkpoint. The default is the configuration of the model. Edits do not count.

    Warns if the model does not rotate as its configuration asks. Raises `UnsupportedModel` if
    queries do not rotate, if they do not rotate as the model states, or if a layer hides its
    attention; and `BadArgument` for arrays that cannot be read, and if an edit makes heads of a
    layer differ.
    """
    asked_config = None if config is None else read_config_of(config)
    if isinstance(model, (Mapping, str, Path)):
        return _measure_arrays(model, asked_config, context)
    live = as_live_model(model)
    probe = RotationProbe(live)
    layers, edited = probe.layers(context), probe.planes(context, alike=True)
    facts: Any = {"layers": live.layers, "length": context}
    configured = configured_rotations(asked_config or live.config, **facts)
    backward = live.config.model_type in CLOCKWISE
    planes, measured = [], []
    references: tuple[list[Tensor], list[Tensor]] = ([], [])
    for layer, now, (asked, _) in zip(layers, edited, configured, strict=True):
        same = torch.equal(now.inv_freq, layer.planes.inv_freq)
        planes.append(layer.measured.planes if same else now)
        direction = -1 if backward else 1
        measured.append(direction * planes[-1].term_inv_freq)
        edit = direction * now.inv_freq
        asked = None if layer.planes.pairing == "none" else asked
        for column, inv_freq in zip(references, (layer.stated, asked), strict=True):
            inv_freq = inv_freq if same else edit
            column.append(_with_terms(inv_freq, planes[-1].terms))
    values: dict[str, Any] = {
        "inv_freq": stack(measured),
        "inv_freq_stated": stack(references[0]),
        "inv_freq_configured": stack(references[1]),
        "residual": [layer.measured.residual for layer in layers],
        "pairing": [layer.pairing for layer in planes],
        "rotary_dim": [layer.rotary_dim for layer in planes],
        "layer_type": live.layer_types,
        "query_scale": [list(layer.query_scale.values()) for layer in layers],
    }
    coords = {"layer": range(len(layers)), "position": list(layers[0].query_scale)}
    return _dataset(values, coords, judge_rotation(probe.faults(asked_config, context)))


def _measure_arrays(
    source: Arrays, config: PreTrainedConfig | None, context: int | None
) -> xr.Dataset:
    """`measure_rope` for arrays of queries and keys."""
    positions, arrays = read_arrays(source)
    longest, number = int(positions[-1] - positions[0]), 1 + max(layer for layer, _ in arrays)
    if config is not None and number > config.num_hidden_layers:
        seen = f"layer {number - 1}; the configuration has {config.num_hidden_layers} layers"
        raise BadArgument("The configuration has no such layer.", seen=seen)
    length = context or int(positions[-1]) + 1
    asked = dict(enumerate(asked_rotations(config, layers=number, length=length)))
    found: dict[int, dict[str, ArrayRotation]] = {}
    faults = []
    for (layer, name), (x, before) in arrays.items():
        inv_freq = asked[layer].inv_freq if layer in asked else None
        rotation = read_array(x, before, positions, [] if inv_freq is None else [len(inv_freq)])
        found.setdefault(layer, {})[name] = rotation
        wanted = asked.get(layer) or AskedRotation.like(found[layer].get("q", rotation))
        texts = array_faults(rotation, wanted, longest)
        faults += [f"layer {layer}, {name}: {text}" for text in texts]
        shifts = {shift for other in found[layer].values() for shift in other.shift}
        if len(shifts) > 1:
            faults.append(f"layer {layer}: heads rotate by positions {sorted(shifts)} ahead")
    first = [next(iter(of_layer.values())) for of_layer in found.values()]
    planes = [rotation.measured.planes for rotation in first]
    configured = [
        _with_terms(asked[layer].inv_freq if layer in asked else None, x.terms)
        for layer, x in zip(found, planes, strict=True)
    ]
    values: dict[str, Any] = {
        "inv_freq": stack(x.term_inv_freq for x in planes),
        "inv_freq_stated": stack(torch.full((x.terms,), math.nan) for x in planes),
        "inv_freq_configured": stack(configured),
        "residual": [rotation.measured.residual for rotation in first],
        "pairing": [x.pairing for x in planes],
        "rotary_dim": [x.rotary_dim for x in planes],
        "layer_type": [""] * len(first),
        "query_scale": stack(rotation.growth for rotation in first),
    }
    coords = {"layer": list(found), "position": positions.tolist()}
    return _dataset(values, coords, judge_rotation(faults, configured=config is not None))


def _with_terms(inv_freq: Tensor | None, terms: int) -> Float[Tensor, " term"]:
    """Frequencies for all terms of a score, NaN where they are unknown."""
    known = torch.zeros(0) if inv_freq is None else inv_freq[:terms].double()
    return pad(known, (0, terms - len(known)), value=math.nan)


def _dataset(
    values: dict[str, Any], coords: dict[str, Any], verdict: dict[str, str]
) -> xr.Dataset:
    with np.errstate(divide="ignore"):
        values["wavelength"] = 2 * math.pi / np.abs(values["inv_freq"])
    values = {row.name: values[row.name] for row in ROTATION}
    return xr.Dataset(labelled(values, ROTATION), coords=coords, attrs=verdict)


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
