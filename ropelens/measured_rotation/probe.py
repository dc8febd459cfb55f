"""The rotation of a live model, measured once and kept, with and without open edits."""

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ropelens.attention.call import AttentionCall
from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.measured_rotation.conformance import configuration_faults
from ropelens.measured_rotation.layer_kinds import (
    LayerKind,
    LayerMask,
    layer_kinds,
    mask_of,
    stated_windows,
)
from ropelens.measured_rotation.model_layers import measure_layers
from ropelens.measured_rotation.read import LayerRotation
from ropelens.measured_rotation.single_tokens import probe_single_tokens
from ropelens.measured_rotation.stated import stated_inv_freq
from ropelens.model.forward_patches import skip_mlp_work
from ropelens.model.live_model import LiveModel
from ropelens.rope.planes import Planes


@dataclass(frozen=True)
class FactorAttribute:
    """An attribute of a rotary module by which queries and keys are multiplied."""

    attributes: dict[str, Any]  # of the module
    name: str

    @property
    def value(self) -> float:
        return float(self.attributes[self.name])

    @contextmanager
    def replaced(self, value: float) -> Iterator[None]:
        before = self.attributes[self.name]
        self.attributes[self.name] = value
        try:
            yield
        finally:
            self.attributes[self.name] = before


@dataclass(frozen=True, eq=False)
class RotationProbe:
    """Rotation of every layer of a live model, measured once and kept."""

    live: LiveModel
    _layers: dict[int | None, list[LayerRotation]] = field(default_factory=dict)
    _last_inv_freq: dict[int, Tensor] = field(default_factory=dict)

    def layers(self, context: int | None = None) -> list[LayerRotation]:
        """Rotation of each layer without edits; `measure_rope` explains `context`."""
        live = self.live
        key = context if live.depends_on_length else None
        if key not in self._layers:
            self._layers[key] = measure_layers(live, context)
            if not live.depends_on_length:
                for fault in configuration_faults(self._layers[key], live.config):
                    message = (
                        f"{live.class_name}, {fault}; ropelens measures the model."
                    )
                    warnings.warn(message, stacklevel=2)
        return self._layers[key]

    @cached_property
    def kinds(self) -> list[LayerKind]:
        """Kind of each layer without edits; one pass if the configuration states a window."""
        live = self.live
        context = live.context
        masks = dict.fromkeys(live.attending, LayerMask("full", context))
        widths = stated_windows(live.config, context)
        if widths:
            tokens = torch.ones(1, max(widths) + 2, dtype=torch.long, device="cpu")
            with live.without_hooks(), skip_mlp_work(live.model):
                masks = live.record_calls(tokens, partial(mask_of, context=context))
        return layer_kinds(live.config, masks, self.layers())

    def kind_names(self) -> list[str]:
        return [kind.name for kind in self.kinds]

    def planes(
        self, context: int | None = None, *, alike: bool = False
    ) -> list[Planes]:
        """Planes of each layer under the open edit, with a row per head if heads may differ.

        Raises `BadArgument` if heads of a layer differ and must be `alike`.
        """
        planes = [layer.planes for layer in self.layers(context)]
        length = context or self.live.context
        for intervention in self.live.interventions:
            for number, of_layer in enumerate(planes):
                planes[number] = intervention.planes(number, of_layer, length=length)
        if alike and any(of_layer.inv_freq.ndim == 2 for of_layer in planes):
            what = "Under this edit heads of one layer rotate differently."
            hint = 'an edit of whole layers (heads="3.*"), or ropelens.capture'
            raise BadArgument(what, hint=hint)
        return planes

    def planes_now(self, layer: int, *, continued: bool) -> Planes:
        """Unedited planes of the call that runs; refuses cached keys of another rotation."""
        planes = self.layers()[layer].planes
        if not self.live.depends_on_length:
            return planes
        inv_freq = self._inv_freq_now(layer, planes)
        before = self._last_inv_freq.get(layer)
        if continued and (before is None or not torch.equal(inv_freq, before)):
            what = "ropelens cannot infer the rotation of the keys in this cache."
            seen = "a RoPE that changes with the length, and keys of another length or block"
            hint = "call the model with use_cache=False"
            raise UnsupportedModel(what, seen=seen, hint=hint)
        self._last_inv_freq[layer] = inv_freq
        return replace(planes, inv_freq=inv_freq)

    def _inv_freq_now(self, layer: int, planes: Planes) -> Tensor:
        """The frequencies that the buffer states now, in the direction of `planes`."""
        candidates = stated_inv_freq(self.live.model, self.live.layer_types[layer])
        counts = [len(inv_freq) for inv_freq in candidates]
        stated = candidates[counts.index(len(planes.inv_freq))]
        return -stated if planes.inv_freq.sum() < 0 else stated

    def planes_of(self, call: AttentionCall) -> Planes:
        """Planes of the call that runs, under the open edit; see `planes_now`."""
        planes = self.planes_now(call.layer, continued=call.past > 0)
        length = call.key.shape[2]
        for intervention in self.live.interventions:
            planes = intervention.planes(call.layer, planes, length=length)
        return planes

    @cached_property
    def attention_factor(self) -> float | None:
        """Factor of rotary modules on queries and keys; None if a later norm cancels it."""
        factors = [
            FactorAttribute(vars(module), name)
            for module in self.live.model.modules()
            for name in vars(module)
            if name.endswith("attention_scaling")
        ]
        values = sorted({factor.value for factor in factors})
        if len(values) > 1:
            what = f"{self.live.class_name} scales its queries in more than one way"
            raise UnsupportedModel(f"{what}: {values}.")
        if not values:
            return 1.0
        length = self._rotated_length()
        with ExitStack() as doubled:
            for factor in factors:
                doubled.enter_context(factor.replaced(2 * factor.value))
            doubled_length = self._rotated_length()
        return None if doubled_length < 1.5 * length else values[0]

    def _rotated_length(self) -> float:
        """Sum of the absolute coordinates of queries and keys that rotate, at position 0."""
        layers = self.layers()
        position = torch.tensor([0], dtype=torch.long, device="cpu")
        probes = probe_single_tokens(self.live, position)
        length = 0.0
        for layer, probe in probes.items():
            first = layers[layer].planes.first
            length += float(probe.vectors[..., first].abs().sum())
        return length
