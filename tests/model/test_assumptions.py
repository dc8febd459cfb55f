"""A small broken model breaks each assumption of docs/families.md, and raises its error."""

import math
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from oracles.tiny import random_tokens, tiny
from oracles.versions import tiny_class
from small_measurements import differs_when_observed
from torch import Tensor, nn
from transformers import (
    LlamaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama import modeling_llama

import ropelens as rl
from ropelens.errors import UnsupportedModel
from ropelens.model.live_model import LiveModel

TOKENS = random_tokens()
ROW = re.compile(r"^\| .+ \| `(.+)`: `(.+)` \| (.+) \|$", re.MULTILINE)
ASSUMPTIONS = ROW.findall(families.PAGE.read_text(encoding="utf-8"))
"""Module, function that checks the assumption, and error, of each row of the table."""


def on_meta() -> PreTrainedModel:
    config = tiny("llama_gqa").config
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def without_base() -> PreTrainedModel:
    model = tiny("llama_gqa")
    vars(model.config)["rope_parameters"] = {"rope_type": "default"}
    return model


def with_flex_attention() -> PreTrainedModel:
    model = tiny("llama_gqa")
    model.set_attn_implementation("flex_attention")
    return model


def not_causal() -> PreTrainedModel:
    model = tiny("llama_gqa")
    model.model.layers[0].self_attn.is_causal = False
    model.set_attn_implementation("sdpa")
    return model


def not_finite() -> PreTrainedModel:
    model = tiny("llama_gqa").requires_grad_(False)
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.fill_(math.nan)
    return model


def patched(
    change: Callable[..., Any], part: str = "layers.0.self_attn"
) -> PreTrainedModel:
    """A model, one module of which runs `change(forward, ...)` instead of its forward."""
    model = tiny("llama_gqa")
    module = model.model.get_submodule(part)
    module.forward = partial(change, module.forward)
    return model


def with_prefix(forward: Callable, input_ids: Tensor, **kwargs: Any) -> Any:
    """A pass that puts five tokens before the text."""
    prefix = torch.ones(len(input_ids), 5).long()
    kwargs["position_ids"] = None
    return forward(torch.cat([prefix, input_ids], dim=1), **kwargs)


def without_attention(_: Callable, hidden_states: Tensor, **kwargs: Any) -> Any:
    return hidden_states, None


@torch.inference_mode()
def in_inference_mode() -> PreTrainedModel:
    return tiny("llama_gqa")


def twice(forward: Callable, *args: Any, **kwargs: Any) -> Any:
    forward(*args, **kwargs)
    return forward(*args, **kwargs)


def at_position_zero(rotary: Callable, x: Tensor, position_ids: Tensor) -> Any:
    return rotary(x, 0 * position_ids)


def longer_with_position(rotary: Callable, x: Tensor, position_ids: Tensor) -> Any:
    length = 1 + 0.01 * position_ids[..., None]
    return [length * part for part in rotary(x, position_ids)]


def other_buffer() -> PreTrainedModel:
    used = tiny("llama_gqa").model.rotary_emb

    def rotation(_: Callable, x: Tensor, position_ids: Tensor) -> Any:
        return used(x, position_ids)

    model = patched(rotation, "rotary_emb")
    model.model.rotary_emb.inv_freq *= 1.001
    return model


def two_factors() -> PreTrainedModel:
    model = tiny("llama_gqa")
    other = type(model.model.rotary_emb)(model.config)
    other.attention_scaling = 2.0
    model.model.other = other
    return model


def capture(model: PreTrainedModel) -> None:
    rl.capture(model, TOKENS[0])


def capture_logits(model: PreTrainedModel) -> None:
    rl.capture(model, TOKENS[0], logits_of=[7])


def attribute(model: PreTrainedModel) -> None:
    rl.attribute_planes(model, TOKENS[0], answer=5)


def profile(model: PreTrainedModel) -> None:
    rl.profile(model, TOKENS, budget=False)


def edit(model: PreTrainedModel) -> None:
    with rl.edit_rope(model, "yarn:4"):
        pass


CALLS: dict[str, Callable[[PreTrainedModel], None]] = {
    "attends in a way": capture,
    "has no gradients": attribute,
    "computes something else": profile,
    "more than one way": edit,
    "the base of its RoPE": edit,
    "to the logits is not linear": capture_logits,
}
"""Calls that raise an error which `measure_rope` does not raise, by words of the error."""


@dataclass(frozen=True)
class Broken:
    """A broken model, and the start of the `seen` of its error."""

    make: Callable[[], nn.Module]
    seen: str = ""


BROKEN = {
    "is not a model": Broken(lambda: tiny("llama_gqa").model),
    "different numbers of heads": Broken(
        lambda: tiny_class("Dots3NoteForCausalLM"),
        seen="AmbiguousGlobalPerLayerAttributeError",
    ),
    "is on meta": Broken(on_meta),
    "has no attention": Broken(
        lambda: tiny("mamba"), seen="layers of linear_attention"
    ),
    "is an encoder-decoder": Broken(
        lambda: T5ForConditionalGeneration(T5Config(d_model=8, d_ff=8, num_layers=1))
    ),
    "tokens of its own": Broken(
        lambda: patched(with_prefix, ""), seen="layer 0: 6 rows for 1 tokens"
    ),
    "has no gradients": Broken(in_inference_mode),
    "hides its attention": Broken(
        lambda: patched(without_attention),
        seen="1 of 2 layers showed their queries and keys; "
        "the first that did not is layer 0",
    ),
    "attends more than once": Broken(
        lambda: patched(twice), seen="a second attention call of layer 0 in one pass"
    ),
    "hides its mask": Broken(with_flex_attention, seen="flex_attention"),
    "attends in a way": Broken(
        not_causal, seen="layer 0: attention from its queries, keys and mask misses"
    ),
    "computes something else": Broken(
        lambda: patched(differs_when_observed),
        seen="logits of 30 tokens: a relative change of",
    ),
    "NaN or infinite": Broken(not_finite, seen="layer 0"),
    "does not rotate its queries": Broken(
        lambda: patched(at_position_zero, "rotary_emb"),
        seen="queries and keys are the same at every position (residual 0)",
    ),
    "but not by a rotation": Broken(
        lambda: patched(longer_with_position, "rotary_emb"),
        seen="layer 0: the lengths of its planes change with position (residual ",
    ),
    "rotates its values": Broken(
        lambda: tiny_class("DeepseekV4ForCausalLM"),
        seen="layer 0: the values of a token change with its position",
    ),
    "not rotate as it states": Broken(
        other_buffer, seen="layer 0: 8 planes, the fastest at 1 rad/token"
    ),
    "more than one way": Broken(two_factors),
    "the base of its RoPE": Broken(without_base),
    "to the logits is not linear": Broken(
        lambda: tiny("gemma2"), seen="a norm on the path"
    ),
}
"""Each broken model, by words of its error."""


@pytest.mark.filterwarnings("ignore:.*configuration")
@pytest.mark.parametrize(("module", "function", "error"), ASSUMPTIONS)
def test_a_broken_assumption_raises_its_error(module: str, function: str, error: str):
    (words,) = [words for words in BROKEN if words in error]
    broken = BROKEN[words]
    model = broken.make()
    call = CALLS.get(words, rl.measure_rope)
    with pytest.raises(UnsupportedModel) as refused:
        call(model)
    assert refused.value.what == error.replace("MODEL", type(model).__name__)
    assert refused.value.parts["seen"].startswith(broken.seen)
    frames = {(frame.name, Path(frame.path).stem) for frame in refused.traceback}
    function_name = function.rpartition(".")[2]
    file_name = module.rpartition(".")[2]
    assert (function_name, file_name) in frames


def test_a_window_without_keys_is_refused_with_a_remedy():
    model = tiny("mistral_sliding", sliding_window=0)
    with pytest.raises(UnsupportedModel, match="window of 0 tokens") as refused:
        rl.measure_rope(model)
    exec(refused.value.parts["try"].partition(" for ")[0], {"model": model})
    assert "full" in rl.measure_rope(model).layer_type


def test_every_broken_model_breaks_an_assumption():
    assert len(BROKEN) == len(ASSUMPTIONS)
    assert CALLS.keys() <= BROKEN.keys()


def test_a_live_model_has_few_methods():
    methods = [
        value
        for value in vars(LiveModel).values()
        if callable(value) or hasattr(value, "__get__")
    ]
    assert 10 < len(methods) <= 25


Attend = Callable[..., tuple[Tensor, Tensor]]


def with_mask(change: Callable[[Tensor], Tensor]) -> Attend:
    return lambda attend, module, query, key, value, mask, **options: attend(
        module, query, key, value, change(mask), **options
    )


def causal(mask: Tensor) -> Tensor:
    lowest = torch.finfo(mask.dtype).min
    hidden = torch.full(mask.shape[-2:], lowest).triu(1)
    return hidden.expand(mask.shape)


def biased(mask: Tensor) -> Tensor:
    rows, keys = mask.shape[-2:]
    distance = torch.arange(rows)[:, None] - torch.arange(keys)
    return mask - 0.1 * distance


def without_sinks(attend: Attend, *inputs: Any, **options: Any) -> Any:
    return modeling_llama.eager_attention_forward(*inputs, **options)


def with_scale(changed: float) -> Attend:
    return lambda attend, *args, scaling, **more: attend(*args, scaling=changed, **more)


def uncapped(attend: Attend, *inputs: Any, softcap: float, **options: Any) -> Any:
    return attend(*inputs, softcap=None, **options)


def gated(attend: Attend, *inputs: Any, **options: Any) -> Any:
    output, weights = attend(*inputs, **options)
    gates = torch.linspace(0.5, 1.5, output.shape[2])
    return output * gates[:, None], weights


CAUSES: list[tuple[str, Attend, str]] = [
    (
        "mistral_sliding",
        with_mask(causal),
        "if rows see all keys up to their own position",
    ),
    ("llama_gqa", with_mask(torch.zeros_like), "if rows see all keys, also later keys"),
    ("gemma2", uncapped, "if the soft-cap is left out"),
    ("gpt_oss", without_sinks, "if the sink logits are left out"),
    ("granite", with_scale(0.25), "with the scale 1 / sqrt(head_dim)"),
    ("llama_gqa", with_scale(1.0), "if the scale is left out"),
    ("llama_gqa", gated, ""),
    ("llama_gqa", with_mask(biased), ""),
]


@pytest.mark.parametrize(("name", "attend", "cause"), CAUSES)
def test_the_changed_component_is_named(name, attend, cause, monkeypatch):
    model = tiny(name)
    if name == "granite":
        model.model.layers[0].self_attn.scaling = 0.1
    file = sys.modules[type(model).__module__]
    changed = partial(attend, file.eager_attention_forward)
    monkeypatch.setattr(file, "eager_attention_forward", changed)
    with pytest.raises(UnsupportedModel, match="attends in a way") as refused:
        rl.capture(model, TOKENS[0])
    seen = refused.value.parts["seen"]
    assert seen.startswith("layer 0: attention from its queries, keys and mask misses")
    named = seen.partition("; it matches ")[2]
    assert named.startswith(cause)
    assert ("; " in seen) == bool(cause)
