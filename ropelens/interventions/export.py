"""Export of an edited model as a checkpoint that transformers loads without ropelens.

New frequencies go into the configuration, and factors on scores into weights of the queries.
"""

import copy
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from huggingface_hub.errors import StrictDataclassError
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import normalize

from ropelens.arguments import public
from ropelens.attention.call import AttentionCall
from ropelens.checkpoints.quiet import quiet_transformers
from ropelens.config_facts import rope_parameters
from ropelens.errors import UnsupportedModel, explained
from ropelens.interventions.export_differences import cause_of_difference
from ropelens.interventions.plane_edits import Edit
from ropelens.interventions.rotation_edit import RotationEdit, place_edits
from ropelens.interventions.save_warning import save_pretrained
from ropelens.measured_rotation.conformance import (
    asked_rotations,
    rotation_differences,
)
from ropelens.measured_rotation.probe import RotationProbe
from ropelens.measured_rotation.read import LayerRotation
from ropelens.model.as_live_model import Model, as_live_model
from ropelens.model.live_model import LiveModel
from ropelens.noise import logit_change, noise_tokens
from ropelens.rope.variant_config import longrope_parameters, variant_config
from ropelens.rope.variants import OWN, parse_variant
from ropelens.runtime.folder import check_new_folder, output_folder

PROBE_TOKENS = 16
SAME_DIRECTION = 1 - 1e-4  # cosine of a query coordinate and the output that it copies
SAME_LOGITS = 1e-4  # change relative to the spread of the logits over the vocabulary

Gains = Float[Tensor, "head coordinate"]


@public
def export(
    model: Model, *edits: Edit | str, out: str | Path, tokenizer: Any = None
) -> Path:
    """Write `model`, changed by `edits`, as a checkpoint; return its folder `out`.

    The checkpoint has a configuration, weights in float32 (safetensors) and the `tokenizer`.
    transformers loads it without ropelens and gives the logits of the model under `edit_rope`.
    They are compared first: in float32 they may differ by 1e-4 of their spread.

    A variant of transformers becomes its `rope_type`. Other frequencies become the `rope_type`
    "longrope", whose factor for a stopped plane is 1e39; so do the frequencies of a model that
    does not rotate as its configuration states. The factors of `drop`, `scale` and
    `attention_factor` multiply the weights that make the queries, or weights of their norm.

    Raises `UnsupportedModel`, with the reason, for edits that neither can carry: frequencies of
    only some heads, or in a model whose RoPE depends on the length, and factors that a norm
    undoes. It is also raised for weights that are not plain tensors in memory (quantized, under
    an adapter, on a disk), and for a model that a checkpoint does not carry: the error names
    what differs, such as a hook. Raises `BadArgument` if `out` is not an empty folder or cannot
    be written to, before any work, and the errors of `edit_rope`.
    """
    live = as_live_model(model)
    check_new_folder(out)
    state = _whole_weights(live)
    edit = place_edits(RotationProbe(live), edits)
    config = _native_config(live, edit, edits)
    if config is None:
        config = _written_config(live, edit)
        state |= scaled_queries(live, _gains(live, edit))
    config.architectures = [live.class_name]
    config.dtype = torch.float32
    what = f"transformers cannot store {live.class_name} with this edit."
    with output_folder(out) as folder, explained(what, error=UnsupportedModel):
        with quiet_transformers():
            weights = _in_float32(state, tied=_ties_weights(live))
            save_pretrained(live.model, folder, state_dict=weights)
            config.save_pretrained(folder)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            saved: Any = type(live.model).from_pretrained(
                folder,
                dtype="float32",
                attn_implementation=live.model.config._attn_implementation,
            )
        for file in folder.iterdir():  # only the owner could read the weights
            file.chmod((folder / "config.json").stat().st_mode)
        _check_logits(live, edit, as_live_model(saved.to(live.device).eval()))
    return Path(out)


def stored_config(live: LiveModel, variant: str) -> Any:
    """The configuration of a model that rotates as `edit_rope` with this variant.

    Raises `UnsupportedModel` if a configuration alone cannot express it.
    """
    edit = place_edits(RotationProbe(live), [variant])
    config = _native_config(live, edit, (variant,))
    if config is not None:
        return config
    if _gains(live, edit):
        _refuse(live, "factors on scores, which only weights can carry")
    return _written_config(live, edit)


def _whole_weights(live: LiveModel) -> dict[str, Tensor]:
    """The weights by name; refuses a model whose weights are not plain tensors in memory."""
    if type(live) is not LiveModel:
        _refuse(live, "a bridge", hint="the transformers model without the bridge")
    state = live.model.state_dict()
    adapted = [name for name in state if ".base_layer." in name]
    if adapted:
        seen = f"an adapter of peft, at {adapted[0]}"
        _refuse(live, seen, hint="model.merge_and_unload(), then export")
    whole = "the model with whole weights in memory, or ropelens.edit_rope"
    settings = live.model.config.to_dict().get("quantization_config")
    if settings:
        method = settings.get("quant_method", "quantization_config")
        _refuse(live, f"weights in few bits ({method})", hint=whole)
    for name, weight in state.items():
        if type(weight) not in (Tensor, nn.Parameter):
            seen = f"{name}, which is {type(weight).__name__} and no plain tensor: "
            _refuse(live, f"{seen}weights in few bits, or parts of weights", hint=whole)
        if weight.is_meta:
            _refuse(live, f"{name}, which accelerate keeps elsewhere", hint=whole)
    return state


def _ties_weights(live: LiveModel) -> bool:
    """Whether a configuration of the model lets its output and input share weights."""
    configs = (live.model.config, live.config)
    return any(config.to_dict().get("tie_word_embeddings", True) for config in configs)


def _in_float32(state: Mapping[str, Tensor], *, tied: bool) -> dict[str, Tensor]:
    """The weights in float32.

    Weights that share their memory still share it if the configuration ties weights. Otherwise
    they are copied, because transformers writes one of several weights that share memory.
    """
    converted: dict[tuple[int, torch.Size], Tensor] = {}
    by_name = {}
    for name, weight in state.items():
        memory = (weight.data_ptr(), weight.shape)
        if memory not in converted:
            is_float = weight.is_floating_point()
            converted[memory] = weight.float() if is_float else weight
            by_name[name] = converted[memory]
        elif tied:
            by_name[name] = converted[memory]
        else:
            by_name[name] = converted[memory].clone()
    return by_name


def _refuse(
    live: LiveModel, seen: str, *, hint: str = "ropelens.edit_rope"
) -> NoReturn:
    what = f"{live.class_name} cannot be exported."
    raise UnsupportedModel(what, seen=seen, hint=hint)


def _native_config(
    live: LiveModel, edit: RotationEdit, edits: tuple[Edit | str, ...]
) -> Any:
    """The configuration of a single variant; None if the family or transformers lacks it."""
    if len(edit.edits) != 1 or not isinstance(edits[0], str):
        return None
    if any(_other_frequencies(live, edit.rotation.layers())):
        return None  # the variant would start from the frequencies of the configuration
    variant = parse_variant(edits[0])
    scaled = any(
        part.get("rope_type") != "default" for part in rope_parameters(live.config)
    )
    if variant.rope_type.startswith(OWN) or (variant.stops is not None and scaled):
        return None
    with suppress(
        ValueError, KeyError, StrictDataclassError
    ):  # the family refuses the type
        config = variant_config(live.model.config, edits[0])
        return type(config).from_dict(config.to_dict())
    return None


def _gains(live: LiveModel, edit: RotationEdit) -> dict[int, Gains]:
    """The factors on the queries of each layer that the edit changes."""
    gains: dict[int, Gains] = {}
    for number, layer in enumerate(edit.rotation.layers()):
        rotations = edit.rotations(number, layer.planes, length=live.context)
        gain = rotations.of_queries.gain * rotations.of_keys.gain
        by_coordinate = layer.planes.by_coordinate(gain)
        if (by_coordinate != 1).any():
            gains[number] = by_coordinate
    return gains


def _written_config(live: LiveModel, edit: RotationEdit) -> Any:
    """The configuration with the frequencies of the edit."""
    config = copy.deepcopy(live.model.config)
    text = config.get_text_config()
    layers = edit.rotation.layers()
    other = _other_frequencies(live, layers)
    inv_freq: dict[str, Tensor] = {}  # by type of layers
    whole = text.to_dict().get("rope_parameters") or {}
    nested = any(isinstance(part, dict) for part in whole.values())
    parts = dict(whole) if nested else {"": whole}  # by type of layers
    for number, heads in enumerate(live.attending_heads):
        planes = layers[number].planes
        if not planes.rotary_dim or not heads.any():
            continue
        kind = live.layer_types[number] if nested else ""
        rotations = edit.rotations(number, planes, length=live.context)
        of_heads = rotations.of_queries.inv_freq
        new = inv_freq.setdefault(kind, of_heads[0])
        if (of_heads != new).any():
            _refuse(live, "new frequencies of planes of only some heads or layers")
        if not other[number] and torch.equal(new, planes.inv_freq.float()):
            continue
        if live.depends_on_length:
            seen = "new frequencies of planes, and a RoPE that depends on the length"
            _refuse(live, seen)
        parts[kind] = longrope_parameters(
            text, whole.get(kind, whole), new, factor=layers[number].factor or 1.0
        )
    text.rope_parameters = parts if nested else parts[""]
    return config


def _other_frequencies(live: LiveModel, layers: list[LayerRotation]) -> list[bool]:
    """Whether each layer rotates, but with other frequencies than its configuration states.

    A user may have changed the buffer inv_freq, or the configuration after the model was made.
    """
    asked = asked_rotations(live.config, layers=len(layers))
    other = []
    for layer, wanted in zip(layers, asked, strict=True):
        rotates = layer.planes.rotary_dim > 0 and wanted.inv_freq is not None
        other.append(rotates and bool(rotation_differences(layer, wanted)))
    return other


def scaled_queries(live: LiveModel, gains: Mapping[int, Gains]) -> dict[str, Tensor]:
    """New weights, by name, that multiply the queries of each layer by its gains.

    Position 0 is not rotated. The weights of a coordinate are therefore the row of the last
    module whose output is proportional to this coordinate, for sequences of one token.
    """
    outputs: list[tuple[str, Any, Any, Tensor]] = []  # since the last attention
    scaled: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        if isinstance(output, Tensor) and len(output) == PROBE_TOKENS:
            outputs.append((name, module, inputs, output))

    def scale(call: AttentionCall) -> None:
        query = normalize(call.query.flatten(1).double(), dim=0)
        missing = (
            query.any(0).nonzero()[:, 0] if call.layer in gains else query.new_zeros(0)
        )
        for name, module, inputs, output in reversed(
            outputs[:]
        ):  # `functional_call` adds
            if not len(missing):
                break
            likeness = query[:, missing].T @ normalize(
                output.flatten(1).double(), dim=0
            )
            copied = likeness.amax(1) > SAME_DIRECTION
            gain = gains[call.layer].flatten().to(query.device)[missing[copied]]
            linear = isinstance(module, nn.Linear)
            size = len(module.weight) if linear else module.weight.numel()
            rows = likeness.argmax(1)[copied] % size
            ones = torch.ones(size, dtype=gain.dtype, device=gain.device)
            factor = ones.index_put((rows,), gain)
            if (factor[rows] != gain).any():
                _refuse(live, f"{name}, whose weights multiply several heads at once")
            weights = dict(module.named_parameters(recurse=False)) if len(rows) else {}
            zeros = {key: torch.zeros_like(weight) for key, weight in weights.items()}
            one = (
                bool(weights) and functional_call(module, zeros, inputs).any()
            )  # Gemma: 1 + w
            for key, weight in weights.items():
                by = factor.view(
                    (-1, *[1] * (weight.ndim - 1)) if linear else weight.shape
                )
                added = float(one and key == "weight")
                scaled[f"{name}.{key}"] = (weight.detach().float() + added) * by - added
            missing = missing[~copied]
        outputs.clear()
        if len(missing):
            _refuse(
                live,
                f"queries of layer {call.layer} that no weight multiplies by itself",
            )

    number = torch.arange(PROBE_TOKENS, device="cpu")[:, None]
    tokens = number * live.vocabulary // PROBE_TOKENS
    with ExitStack() as hooks, live.without_hooks():
        for name, module in live.model.named_modules() if gains else ():
            if isinstance(module._parameters.get("weight"), Tensor):
                handle = module.register_forward_hook(partial(keep, name))
                hooks.callback(handle.remove)
        live.record_calls(tokens, scale)
    return scaled


@torch.no_grad()
def _check_logits(live: LiveModel, edit: RotationEdit, loaded: LiveModel) -> None:
    """Refuse a checkpoint whose logits differ from the logits of the edited model."""
    tokens = noise_tokens(live.vocabulary, live.context)
    with live.intervene(edit):
        expected = live.forward(tokens)
    change = float(logit_change(expected, loaded.forward(tokens)).max())
    allowed = max(SAME_LOGITS, 30 * live.eps)
    if change <= allowed:
        return

    def run_edited(tokens: Tensor) -> Tensor:
        with live.intervene(edit):
            return live.forward(tokens)

    cause = cause_of_difference(live, loaded, run=run_edited, close=allowed)
    seen = (
        f"logits of the checkpoint that differ by {change:.2g} of their spread; {cause}"
    )
    hint = "undo what differs, then export; or ropelens.edit_rope"
    _refuse(live, seen, hint=hint)
