"""The rotation of each layer of a live model, measured and compared with the stated one."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.attention.call import AttentionCall
from ropelens.config_facts import trained_length
from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.measured_rotation.conformance import LayerRotation, configuration_faults
from ropelens.measured_rotation.layer_kinds import (
    LayerKind,
    layer_kinds,
    mask_of,
    stated_windows,
)
from ropelens.measured_rotation.read import (
    MeasuredRotation,
    probe_positions,
    read_rotation,
)
from ropelens.measured_rotation.stated import (
    match_stated,
    stated_factor,
    stated_inv_freq,
)
from ropelens.model.forward_patches import skip_mlp_work
from ropelens.model.live_model import LiveModel
from ropelens.model.model_noise import CHANGED_WEIGHT, changed_embeddings
from ropelens.noise import NOISE_FACTOR, allowed_residual
from ropelens.rope.planes import Planes

NOISE_REPEATS = 4  # further runs of each token at the first position, which show noise
ROUNDED = 4  # further such runs with embeddings that are rounded otherwise


@dataclass(frozen=True)
class SingleTokenProbe:
    """Queries and keys (`vectors`) and values of one layer for sequences of one token.

    Some models scale queries by their position (Ministral 3, Llama 4). `vectors` are divided by
    this factor, `query_scale`.
    """

    vectors: Float[Tensor, "vector position coordinate"]
    values: Float[Tensor, "token position kv_head feature"]
    scale: float
    query_scale: Float[Tensor, " position"]
    noise: Float[Tensor, " coordinate"]  # rounding noise of `vectors`, in their units
    value_noise: float  # relative to the size of the values


@torch.no_grad()
def probe_single_tokens(
    live: LiveModel, positions: Int[Tensor, "*axis position"]
) -> dict[int, SingleTokenProbe]:
    """Run four tokens, each as a sequence of its own at each of `positions`, without edits.

    The differences of several runs at the first position are noise. Some of them have rounded
    embeddings, because a few models (gpt-oss in half precision) amplify such rounding.
    """
    tokens, count = torch.arange(1, 5) * live.vocabulary // 6, positions.shape[-1]
    repeats = positions[..., :1].expand(*positions.shape[:-1], NOISE_REPEATS + ROUNDED)
    positions = torch.cat([positions, repeats], -1)
    rounded = count + NOISE_REPEATS
    kinds = (slice(count, rounded), 1.0), (slice(rounded, None), CHANGED_WEIGHT)
    row_scales = {  # Llama 4 scales some queries by their row, which these sequences lack
        module["layer_idx"]: 1
        + module["attn_scale"]
        * ((positions + 1) // module["floor_scale"]).double().log1p()
        for module in map(vars, live.model.modules())
        if module.get("attn_temperature_tuning") and not module["use_rope"]
    }

    def read(call: AttentionCall) -> SingleTokenProbe:
        query, key, values = (
            x[:, :, 0].double().cpu().unflatten(0, (len(tokens), -1))
            for x in (call.query, call.key, call.value)
        )
        if not (query.isfinite().all() and key.isfinite().all()):
            what = f"{live.class_name} has queries or keys that are NaN or infinite."
            hint = "whole weights, and rope_parameters that give frequencies"
            raise UnsupportedModel(what, seen=f"layer {call.layer}", hint=hint)
        length = query.square().sum((0, 2, 3)).sqrt()
        scale = (length / length[0]).nan_to_num(1)
        noise_of_scale = max(
            part * float((scale[at] - 1).abs().max()) for at, part in kinds
        )
        allowed = allowed_residual(noise_of_scale, live.eps)
        scale = scale.where((scale - 1).abs() > allowed, 1)
        both = torch.cat([query / scale[:, None, None], key], dim=2)
        vectors = both.transpose(1, 2).flatten(0, 1)
        changes = (part * (vectors[:, at] - vectors[:, :1]) for at, part in kinds)
        noise = torch.stack([x.square().mean((0, 1)).sqrt() for x in changes]).amax(0)
        first = values[:, :1]
        return SingleTokenProbe(
            vectors=vectors[:, :count],
            values=values[:, :count],
            scale=float(call.scale),
            query_scale=(scale * row_scales.get(call.layer, 1))[:count],
            noise=noise.clamp(min=live.eps * vectors.square().mean().sqrt()),
            value_noise=max(
                p * _relative_change(values[:, at], first) for at, p in kinds
            ),
        )

    position_ids = positions.repeat(*(1,) * (positions.ndim - 1), len(tokens))[
        ..., None
    ]
    sequences = tokens.repeat_interleave(positions.shape[-1])[:, None]
    share = (
        live.eps
        / 2
        * (torch.arange(positions.shape[-1]) >= rounded).repeat(len(tokens))
    )
    dtypes = {x.dtype for x in live.model.parameters() if x.is_floating_point()}
    device = live.device.type
    # A model of several dtypes runs only under the autocast that is open.
    mixed = len(dtypes) > 1 and torch.is_autocast_enabled(device)
    autocast = torch.autocast(device, torch.get_autocast_dtype(device), enabled=mixed)
    with live.without_hooks(), autocast:
        if live.depends_on_length:
            live.forward(tokens[:1, None])  # a short sequence resets dynamic RoPE
        with changed_embeddings(live.model, share):
            return live.record_calls(sequences, read, position_ids)


def find_axes(
    live: LiveModel, planes: list[Planes], positions: Int[Tensor, " position"]
) -> dict[int, Int[Tensor, " frequency"]]:
    """Index of the axis, of the three position axes of M-RoPE, that rotates each plane."""
    rotated: dict[int, list[Tensor]] = {}
    for axis in range(3):
        on_axis = positions * (torch.arange(3) == axis)[:, None]
        for layer, probe in probe_single_tokens(live, on_axis).items():
            x = probe.vectors[..., planes[layer].first]
            change = (x - x[:, :1]).square().mean((0, 1)).sqrt()
            moved = change > NOISE_FACTOR * probe.noise[planes[layer].first]
            rotated.setdefault(layer, []).append(moved)
    return {
        layer: torch.stack(axes).byte().argmax(0) for layer, axes in rotated.items()
    }


def _relative_change(x: Tensor, reference: Tensor) -> float:
    """Root mean square difference, relative to the size of `reference`."""
    size = reference.square().mean().sqrt().clamp(min=1e-30)
    return float((x - reference).square().mean().sqrt() / size)


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
        live, context = self.live, self.live.context
        masks = dict.fromkeys(live.attending, ("full", context))
        if widths := stated_windows(live.config, context):
            tokens = torch.ones(1, max(widths) + 2, dtype=torch.long)
            with live.without_hooks(), skip_mlp_work(live.model):
                masks = live.record_calls(tokens, partial(mask_of, context=context))
        return layer_kinds(live.config, masks, self.layers())

    def kind_names(self) -> list[str]:
        return [kind.name for kind in self.kinds]

    def planes(
        self, context: int | None = None, *, alike: bool = False
    ) -> list[Planes]:
        """Planes of each layer under the open edit, with a row per head if heads may differ."""
        length, edit = context or self.live.context, self.live.open_edit
        planes = [layer.planes for layer in self.layers(context)]
        if edit is not None:
            planes = [
                edit.planes(n, layer, length=length) for n, layer in enumerate(planes)
            ]
        if alike and any(layer.inv_freq.ndim == 2 for layer in planes):
            hint = 'an edit of whole layers (heads="3.*"), or ropelens.capture'
            raise BadArgument(
                "Under this edit heads of one layer rotate differently.", hint=hint
            )
        return planes

    def planes_now(self, layer: int, *, continued: bool) -> Planes:
        """Unedited planes of the call that runs; refuses cached keys of another rotation."""
        planes = self.layers()[layer].planes
        if not self.live.depends_on_length:
            return planes
        candidates = stated_inv_freq(self.live.model, self.live.layer_types[layer])
        stated = next(w for w in candidates if len(w) == len(planes.inv_freq))
        inv_freq = -stated if planes.inv_freq.sum() < 0 else stated
        before = self._last_inv_freq.get(layer)
        if continued and (before is None or not torch.equal(inv_freq, before)):
            what = "ropelens cannot infer the rotation of the keys in this cache."
            seen = "a RoPE that changes with the length, and keys of another length or block"
            raise UnsupportedModel(
                what, seen=seen, hint="call the model with use_cache=False"
            )
        self._last_inv_freq[layer] = inv_freq
        return replace(planes, inv_freq=inv_freq)

    def planes_of(self, call: AttentionCall) -> Planes:
        """Planes of the call that runs, under the open edit; see `planes_now`."""
        planes = self.planes_now(call.layer, continued=call.past > 0)
        edit, length = self.live.open_edit, call.key.shape[2]
        return (
            planes if edit is None else edit.planes(call.layer, planes, length=length)
        )

    @cached_property
    def attention_factor(self) -> float | None:
        """Factor of rotary modules on queries and keys; None if a later norm cancels it."""
        modules = map(vars, self.live.model.modules())
        rotary = [
            (m, key) for m in modules for key in m if key.endswith("attention_scaling")
        ]
        factors = {float(module[key]) for module, key in rotary} or {1.0}
        if len(factors) > 1:
            ways = f"{self.live.class_name} scales its queries in more than one way"
            raise UnsupportedModel(f"{ways}: {sorted(factors)}.")
        (factor,), lengths = factors, []
        try:
            for value in (factor, 2 * factor):
                for module, key in rotary:
                    module[key] = value
                layers = self.layers()
                probes = probe_single_tokens(self.live, torch.tensor([0]))
                rotated = (
                    x.vectors[..., layers[n].planes.first] for n, x in probes.items()
                )
                lengths.append(sum(float(x.abs().sum()) for x in rotated))
        finally:
            for module, key in rotary:
                module[key] = factor
        return None if rotary and lengths[1] < 1.5 * lengths[0] else factor


def measure_layers(live: LiveModel, context: int | None = None) -> list[LayerRotation]:
    """Rotation of each layer without edits; `measure_rope` explains `context`."""
    config, longest = (
        live.config,
        2**24,
    )  # a wavelength of 10 million tokens still turns
    model, kinds = live.model, live.layer_types
    has_buffers = any(stated_inv_freq(model, kind) for kind in {*kinds})
    if "rope_parameters" not in config.to_dict() or not has_buffers:
        longest = live.context - 1  # positions may index a table
    elif live.depends_on_length:
        longest = max(context or 0, trained_length(config)) - 1
    positions = probe_positions(longest)
    probes = probe_single_tokens(live, positions)
    stated = {kind: stated_inv_freq(model, kind) for kind in {*kinds}}
    factors = {kind: stated_factor(model, kind) for kind in {*kinds}}
    measured = {
        layer: read_rotation(probe.vectors, positions, noise=probe.noise, counts=counts)
        for layer, probe in probes.items()
        for counts in [list(map(len, stated[kinds[layer]]))]
    }
    zero = any(
        len(w) and not w.any() for candidates in stated.values() for w in candidates
    )
    _check_rotation(live.class_name, measured, probes, eps=live.eps, zero=zero)
    nothing = Planes(torch.zeros(0), 0, "none")
    unmeasured = MeasuredRotation(nothing, math.nan, math.nan, torch.zeros(0))
    scales = dict.fromkeys(positions.tolist(), math.nan)
    layers = [LayerRotation(unmeasured, None, nothing, scales)] * live.layers
    for layer, rotation in measured.items():
        matched = match_stated(rotation, stated[kinds[layer]], (live.class_name, layer))
        scale = dict(zip(scales, probes[layer].query_scale.tolist(), strict=True))
        layers[layer] = LayerRotation(*matched, scale, factors[kinds[layer]])
    if any("mrope_section" in vars(module) for module in live.model.modules()):
        for layer, axis in find_axes(
            live, [x.planes for x in layers], positions
        ).items():
            planes = replace(layers[layer].planes, axis=axis)
            layers[layer] = replace(layers[layer], planes=planes)
    return layers


def _check_rotation(
    class_name: str,
    measured: Mapping[int, MeasuredRotation],
    probes: Mapping[int, SingleTokenProbe],
    *,
    eps: float,
    zero: bool,
) -> None:
    """Refuse a model whose queries do not rotate or whose values do; frequencies may be 0."""
    faults = []
    for layer, rotation in measured.items():
        allowed = allowed_residual(rotation.noise, eps)
        if not rotation.residual <= allowed:
            seen = f"layer {layer}: the lengths of its planes change with position (residual "
            seen += f"{rotation.residual:.2g}; a rotation keeps them to {allowed:.0e})"
            faults.append(
                ("changes its queries with position, but not by a rotation", seen)
            )
    if not zero and all(
        rotation.planes.pairing == "none" for rotation in measured.values()
    ):
        seen = "queries and keys are the same at every position (residual 0)"
        faults.append(("does not rotate its queries", seen))
    for layer, probe in probes.items():
        change = _relative_change(probe.values, probe.values[:, :1])
        if change > allowed_residual(probe.value_noise, eps):
            seen = f"layer {layer}: the values of a token change with its position"
            faults.append(("rotates its values too", seen))
    for fault, seen in faults[:1]:
        hint = "a model that rotates only queries and keys, such as Llama, Qwen, Gemma or GLM"
        raise UnsupportedModel(f"{class_name} {fault}.", seen=seen, hint=hint)
