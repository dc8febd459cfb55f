"""How each layer of a live model rotates, measured and held against what it states."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING

import torch
from accelerate.utils import align_module_device
from jaxtyping import Float, Int
from torch import Tensor

from ropelens.attention.call import AttentionCall
from ropelens.config_facts import rope_parameters, trained_length
from ropelens.errors import UnsupportedModel
from ropelens.model.attention_hooks import AttentionEdit
from ropelens.rope.planes import MeasuredRotation, Planes, probe_positions, read_rotation

if TYPE_CHECKING:  # a live measures its rotation here
    from ropelens.model.live_model import LiveModel


@dataclass(frozen=True)
class SingleTokenProbe:
    """What one layer's attention is given for sequences of one token, in float64.

    `vectors` are queries and keys, a few tokens times all heads; `values` those of all
    key-value heads.
    `query_scale` is by how much queries are longer than at position 0 (Ministral 3, Llama 4),
    which is taken off `vectors`.
    """

    vectors: Float[Tensor, "vector position coordinate"]
    values: Float[Tensor, "token position kv_head feature"]
    scale: float
    query_scale: Float[Tensor, " position"]


@dataclass(frozen=True)
class LayerRotation:
    """One layer: what was `measured`, what the model `stated`, and the `planes` to use.

    `planes` carries the stated frequencies where there are any, exact to the bit, and
    the measured ones otherwise. Queries at each position are `query_scale` times as long.
    """

    measured: MeasuredRotation
    stated: Float[Tensor, " frequency"] | None
    planes: Planes
    query_scale: dict[int, float]


def measure_rotations(live: LiveModel, *, context: int | None) -> list[LayerRotation]:
    """The rotation of each layer of a live without edits; see `measure_rope`."""
    positions = probe_positions(_longest_position(live, context))
    lone = probe_single_tokens(live, positions)
    measured = read_rotations(live, lone, positions)
    _check_rotates(live, measured)
    _check_values(live, lone)
    places, longest = positions.tolist(), int(positions[-1])
    nothing = Planes(torch.zeros(0), 0, "none")
    unmeasured = MeasuredRotation(nothing, math.nan, torch.zeros(0))
    scales = dict.fromkeys(places, math.nan)
    layers = [LayerRotation(unmeasured, None, nothing, scales)] * live.layers
    for layer, one in measured.items():
        scale = dict(zip(places, lone[layer].query_scale.tolist(), strict=True))
        layers[layer] = LayerRotation(*_agree(live, layer, one, longest), scale)
    if any("mrope_section" in vars(module) for module in live.model.modules()):
        for layer, axis in _axes(live, layers, positions).items():
            planes = replace(layers[layer].planes, axis=axis)
            layers[layer] = replace(layers[layer], planes=planes)
    return layers


@torch.no_grad()
def probe_single_tokens(
    live: LiveModel, positions: Int[Tensor, "*axis position"]
) -> dict[int, SingleTokenProbe]:
    """Four tokens, each alone at each of `positions`, as each layer's attention sees them."""
    tokens = torch.arange(1, 5) * live.vocabulary // 6
    rows = {  # of layers that scale a query by its row, which lone tokens do not show: Llama 4
        module["layer_idx"]: 1
        + module["attn_scale"] * ((positions + 1) // module["floor_scale"]).double().log1p()
        for module in map(vars, live.model.modules())
        if module.get("attn_temperature_tuning") and not module["use_rope"]
    }

    def collect(call: AttentionCall) -> SingleTokenProbe:
        query, key, values = (
            x[:, :, 0].double().cpu().unflatten(0, (len(tokens), -1))
            for x in (call.query, call.key, call.value)
        )
        if not (query.isfinite().all() and key.isfinite().all()):
            raise UnsupportedModel(
                f"{live.class_name} has queries or keys that are NaN or infinite.",
                seen=f"layer {call.layer}",
                hint="whole weights, and rope_parameters that give frequencies",
            )
        length = query.square().sum((0, 2, 3)).sqrt()
        scale = (length / length[0]).nan_to_num(1)
        scale = scale.where((scale - 1).abs() > live.tolerance, 1)
        both = torch.cat([query / scale[:, None, None], key], dim=2)
        vectors = both.transpose(1, 2).flatten(0, 1)
        scale = scale * rows.get(call.layer, 1)
        return SingleTokenProbe(vectors, values, float(call.scale), scale)

    places = positions.repeat(*(1,) * (positions.ndim - 1), len(tokens))[..., None]
    alone = tokens.repeat_interleave(positions.shape[-1])[:, None]
    kinds = {x.dtype for x in live.model.parameters() if x.is_floating_point()}
    device = live.device.type
    mixed = len(kinds) > 1 and torch.is_autocast_enabled(device)  # and would not run without
    autocast = torch.autocast(device, torch.get_autocast_dtype(device), enabled=mixed)
    with live.without_hooks(), autocast:
        if live.depends_on_length:
            live.forward(tokens[:1, None])  # dynamic RoPE forgets what was longer before
        return live.record_calls(alone, collect, places)


def attention_factor(live: LiveModel) -> float | None:
    """By how much the model's rotary modules make queries and keys longer (YaRN, LongRoPE).

    None where a norm behind them makes up for it, as is tried (NanoChat, Llama 4).
    """
    modules = [vars(module) for module in live.model.modules()]
    rotary = [(m, name) for m in modules for name in m if name.endswith("attention_scaling")]
    factors = {float(module[name]) for module, name in rotary} or {1.0}
    if len(factors) > 1:
        raise UnsupportedModel(
            f"{live.class_name} scales its queries in more than one way: {sorted(factors)}."
        )
    (factor,), lengths = factors, []
    try:
        for tried in (factor, 2 * factor):
            for module, name in rotary:
                module[name] = tried
            layers, lone = live.rotations(), probe_single_tokens(live, torch.tensor([0]))
            turned = [of.vectors[..., layers[at].planes.first] for at, of in lone.items()]
            lengths.append(sum(float(of.abs().sum()) for of in turned))
    finally:
        for module, name in rotary:
            module[name] = factor
    return None if rotary and lengths[1] < 1.5 * lengths[0] else factor


def _axes(
    live: LiveModel, layers: list[LayerRotation], positions: Int[Tensor, " position"]
) -> dict[int, Int[Tensor, " frequency"]]:
    """Which of a token's three positions turns each plane, from tokens that move along one."""
    turned: dict[int, list[Tensor]] = {}
    for axis in range(3):
        alone = positions * (torch.arange(3) == axis)[:, None]
        for layer, lone in probe_single_tokens(live, alone).items():
            x = lone.vectors[..., layers[layer].planes.first]
            change = (x - x[:, :1]).square().mean((0, 1)).sqrt()
            moved = change > 32 * live.noise * x.square().mean().sqrt()
            turned.setdefault(layer, []).append(moved)
    return {layer: torch.stack(of).byte().argmax(0) for layer, of in turned.items()}


def read_rotations(
    live: LiveModel, lone: dict[int, SingleTokenProbe], positions: Int[Tensor, " position"]
) -> dict[int, MeasuredRotation]:
    """The rotation of each layer, read off its lone tokens at these positions."""
    stated = {at: [len(w) for w in stated_inv_freq(live, at)] for at in lone}
    return {
        at: read_rotation(of.vectors, positions, noise=live.noise, counts=stated[at])
        for at, of in lone.items()
    }


# under edits, and as the length changes


def edited_planes(
    edit: AttentionEdit | None, layer: int, planes: Planes, *, length: int
) -> Planes:
    """How a layer rotates in a call of `length` tokens, with a row per head where heads differ.

    `planes` is how it rotates without the edit.
    """
    if edit is None:
        return planes
    inv_freq = edit.inv_freq(layer, planes, length=length)
    alike = (inv_freq == inv_freq[:1]).all()
    return replace(planes, inv_freq=inv_freq[0] if alike else inv_freq)


def planes_now(live: LiveModel, layer: int, *, continued: bool) -> Planes:
    """How the model rotates without edits in the call that runs, whose length may matter.

    Raises `UnsupportedModel` for a call that continues a cache of keys which may have been
    rotated otherwise: by a longer call, of which the cache was cropped, or before the block.
    """
    planes = live.rotations()[layer].planes
    if not live.depends_on_length:
        return planes
    count = len(planes.inv_freq)
    stated = next(w for w in stated_inv_freq(live, layer) if len(w) == count)
    now = -stated if planes.inv_freq.sum() < 0 else stated
    before = live.last_inv_freq.get(layer)
    if continued and (before is None or not torch.equal(now, before)):
        raise UnsupportedModel(
            "It cannot be told how the keys in this cache were rotated.",
            seen="a RoPE that changes with the length, and keys of another length or block",
            hint="call the model with use_cache=False",
        )
    live.last_inv_freq[layer] = now
    return replace(planes, inv_freq=now)


def planes_of(live: LiveModel, call: AttentionCall) -> Planes:
    """How the layer of the call that runs rotates, under the open edit; see `planes_now`."""
    planes = planes_now(live, call.layer, continued=call.past > 0)
    return edited_planes(live.open_edit, call.layer, planes, length=call.key.shape[2])


# what the model states


def stated_inv_freq(live: LiveModel, layer: int) -> list[Float[Tensor, " frequency"]]:
    """The `inv_freq` that the model states for a layer: one, or several to choose from.

    Rotary modules keep it as a buffer, as `{layer_type}_inv_freq` where types of layers
    differ (Gemma 3), which comes first.
    """
    types = live.config.to_dict().get("layer_types")
    names = ["inv_freq"] if types is None else [f"{types[layer]}_inv_freq", "inv_freq"]
    stated = []
    for name in names:
        for module in live.model.modules():
            if name in module._buffers:
                with align_module_device(module):
                    # cloned: longrope changes it in place
                    stated.append(module.get_buffer(name).float().cpu().clone())
    return stated


def _longest_position(live: LiveModel, context: int | None) -> int:
    """The farthest position that the probe may use without changing the rotation."""
    config = live.config
    if "rope_parameters" not in config.to_dict() or not stated_inv_freq(live, 0):
        return live.context - 1  # positions may index a table
    if not live.depends_on_length:
        return 2**24  # exact in float32; a wavelength of 10 million tokens still turns
    return max(context or 0, trained_length(config)) - 1


def count_length_mismatches(live: LiveModel, lengths: Int[Tensor, " sequence"]) -> int:
    """How many sequences do not turn as the longest, with which they run, makes them."""
    if not live.depends_on_length:
        return 0
    trained = trained_length(live.config)
    kinds = {part.get("rope_type") for part in rope_parameters(live.config)}
    # dynamic changes with every token past the trained length, longrope once
    alone = lengths.clamp(min=trained) if "dynamic" in kinds else lengths > trained
    return int((alone != alone.max()).sum())


# what is refused


def _check_rotates(live: LiveModel, measured: dict[int, MeasuredRotation]) -> None:
    """Refuse a model whose queries change by anything but a rotation, or not at all."""
    seen, what = "", f"{live.class_name} does not rotate its queries."
    for layer, rotation in reversed(measured.items()):
        if not rotation.residual <= live.tolerance:
            what = (
                f"{live.class_name} changes its queries with position, but not by a rotation."
            )
            seen = (
                f"layer {layer}: the lengths of its planes change with position (residual "
                f"{rotation.residual:.2g}; a rotation keeps them to {live.tolerance:.0e})"
            )
    stops_all = any(len(w) and not w.any() for w in stated_inv_freq(live, 0))
    still = all(rotation.planes.pairing == "none" for rotation in measured.values())
    if still and not stops_all:
        seen = "queries and keys are the same at every position (residual 0)"
    if seen:
        raise UnsupportedModel(
            what,
            seen=seen,
            hint="a model that uses RoPE, such as Llama, Qwen, Gemma, GPT-NeoX or GLM",
        )


def _check_values(live: LiveModel, lone: dict[int, SingleTokenProbe]) -> None:
    """Refuse a model whose values turn too: no edit would reach them (DeepSeek V4)."""
    for layer, tokens in lone.items():
        change = (tokens.values - tokens.values[:, :1]).square().mean().sqrt()
        if change > live.tolerance * tokens.values.square().mean().sqrt():
            raise UnsupportedModel(
                f"{live.class_name} rotates its values too.",
                seen=f"layer {layer}: the values of a token change with its position",
            )


def _agree(
    live: LiveModel, layer: int, rotation: MeasuredRotation, longest: int
) -> tuple[MeasuredRotation, Float[Tensor, " stated"] | None, Planes]:
    """Hold a measured rotation against the stated one; refuse where they disagree.

    A layer that stands still while its model states frequencies is a NoPE layer
    (SmolLM3); where the stated ones are all 0, its planes stand still by construction.
    """
    candidates = stated_inv_freq(live, layer)
    planes = rotation.planes
    if planes.pairing == "none":
        still = [w for w in candidates if not w.any() and 2 * len(w) <= planes.head_dim]
        if still:
            planes = replace(planes, inv_freq=still[0], pairing="half")
        return rotation, still[0] if still else None, planes
    for stated, direction in product(candidates, (1, -1)):
        used = replace(planes, inv_freq=direction * stated)
        turns = _turns_apart(rotation, used.inv_freq, longest, live.noise)
        if turns is not None:
            seen = replace(planes, inv_freq=planes.inv_freq + 2 * math.pi * turns)
            return replace(rotation, planes=seen), stated, used
    if candidates:
        raise UnsupportedModel(
            f"{live.class_name} does not rotate as it states.",
            seen=f"layer {layer}: {len(planes.inv_freq)} planes, the fastest at "
            f"{planes.inv_freq[0]:.6g} rad/token; its inv_freq holds "
            f"{len(candidates[0])}, the fastest at {candidates[0][0]:.6g}",
        )
    return rotation, None, replace(planes, inv_freq=planes.inv_freq.nan_to_num(0))


def _turns_apart(
    rotation: MeasuredRotation, stated: Float[Tensor, " stated"], longest: int, noise: float
) -> Float[Tensor, " frequency"] | None:
    """Whole turns a token by which stated frequencies differ from the measured ones.

    Tokens stand at whole positions, which do not show such turns. None where they differ by
    more, beyond the measurement's resolution. Planes in which nothing was seen agree with
    anything.
    """
    planes, resolution = rotation.planes, rotation.resolution
    count = len(planes.inv_freq)
    if len(stated) < count or stated[count:].any() or 2 * len(stated) > planes.head_dim:
        return None
    difference = (stated[:count].double() - planes.inv_freq.double()).nan_to_num(0)
    turns = (difference / (2 * math.pi)).round()
    allowed = 32 * torch.where(
        resolution.isfinite(), resolution * stated[:count].abs(), noise / longest
    )
    return turns if ((difference - 2 * math.pi * turns).abs() <= allowed).all() else None
