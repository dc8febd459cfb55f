"""A small broken model breaks each assumption of docs/families.md, and raises its error."""

import math
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import families
import pytest
import torch
from measured import differs_when_observed
from oracles.tiny import random_tokens, tiny
from torch import Tensor
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
    with torch.device("meta"):
        return LlamaForCausalLM(tiny("llama_gqa").config)


def configured(**facts: Any) -> PreTrainedModel:
    model = tiny("llama_gqa")
    vars(model.config).update(facts)
    return model


def with_attention(implementation: str, **attributes: bool) -> PreTrainedModel:
    model = tiny("llama_gqa")
    vars(model.model.layers[0].self_attn).update(attributes)
    model.set_attn_implementation(implementation)
    return model


def not_finite() -> PreTrainedModel:
    model = tiny("llama_gqa").requires_grad_(False)
    model.model.layers[0].self_attn.q_proj.weight.fill_(math.nan)
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
    kwargs["position_ids"] = None
    return forward(
        torch.cat([torch.ones(len(input_ids), 5).long(), input_ids], 1), **kwargs
    )


@torch.inference_mode()
def in_inference_mode() -> PreTrainedModel:
    return tiny("llama_gqa")


def twice(forward: Callable, *args: Any, **kwargs: Any) -> Any:
    forward(*args, **kwargs)
    return forward(*args, **kwargs)


def rotated(change: Callable[[Callable, Tensor, Tensor], Any]) -> PreTrainedModel:
    return patched(lambda f, x, position_ids: change(f, x, position_ids), "rotary_emb")


def other_buffer() -> PreTrainedModel:
    used = tiny("llama_gqa").model.rotary_emb
    model = rotated(lambda _, x, at: used(x, at))
    model.model.rotary_emb.inv_freq *= 1.001
    return model


def two_factors() -> PreTrainedModel:
    model = tiny("llama_gqa")
    model.model.other = type(model.model.rotary_emb)(model.config)
    model.model.other.attention_scaling = 2.0
    return model


CALLS: dict[str, Callable[[Any], object]] = {
    "attends in a way": lambda model: rl.capture(model, TOKENS[0]),
    "has no gradients": lambda model: rl.attribute_planes(model, TOKENS[0], answer=5),
    "computes something else": lambda model: rl.profile(model, TOKENS, budget=False),
    "more than one way": lambda model: rl.edit_rope(model, "yarn:4").__enter__(),
    "the base of its RoPE": lambda model: rl.edit_rope(model, "yarn:4").__enter__(),
    "to the logits is not linear": lambda model: rl.capture(
        model, TOKENS[0], logits_of=[7]
    ),
}
"""Calls that raise an error which `measure_rope` does not raise, by words of the error."""

# fmt: off
BROKEN: dict[str, tuple[Callable[[], Any], str]] = {
    "is not a model": (lambda: tiny("llama_gqa").model, ""),
    "different numbers of heads": (lambda: families.tiny("Dots3NoteForCausalLM"),
        "AmbiguousGlobalPerLayerAttributeError"),
    "is on meta": (on_meta, ""),
    "has no attention": (lambda: tiny("mamba"), "layers of linear_attention"),
    "is an encoder-decoder": (
        lambda: T5ForConditionalGeneration(T5Config(d_model=8, d_ff=8, num_layers=1)), ""),
    "tokens of its own": (lambda: patched(with_prefix, ""), "layer 0: 6 rows for 1 tokens"),
    "has no gradients": (in_inference_mode, ""),
    "hides its attention": (
        lambda: patched(lambda _, hidden_states, **__: (hidden_states, None)),
        "1 of 2 layers showed their queries and keys; the first that did not is layer 0"),
    "attends more than once": (lambda: patched(twice),
        "a second attention call of layer 0 in one pass"),
    "hides its mask": (lambda: with_attention("flex_attention"), "flex_attention"),
    "attends in a way": (lambda: with_attention("sdpa", is_causal=False),
        "layer 0: attention from its queries, keys and mask misses"),
    "computes something else": (lambda: patched(differs_when_observed),
        "logits of 30 tokens: a relative change of"),
    "NaN or infinite": (not_finite, "layer 0"),
    "does not rotate its queries": (lambda: rotated(lambda rotary, x, at: rotary(x, 0 * at)),
        "queries and keys are the same at every position (residual 0)"),
    "but not by a rotation": (
        lambda: rotated(lambda f, x, at: [y * (1 + 0.01 * at[..., None]) for y in f(x, at)]),
        "layer 0: the lengths of its planes change with position (residual "),
    "rotates its values": (lambda: families.tiny("DeepseekV4ForCausalLM"),
        "layer 0: the values of a token change with its position"),
    "not rotate as it states": (other_buffer, "layer 0: 8 planes, the fastest at 1 rad/token"),
    "more than one way": (two_factors, ""),
    "the base of its RoPE": (lambda: configured(rope_parameters={"rope_type": "default"}), ""),
    "to the logits is not linear": (lambda: tiny("gemma2"), "a norm or a factor on the path"),
}
"""A broken model, and the `seen` of its error, by words of the error."""
# fmt: on


@pytest.mark.filterwarnings("ignore:.*configuration")
@pytest.mark.parametrize(("module", "function", "error"), ASSUMPTIONS)
def test_a_broken_assumption_raises_its_error(module: str, function: str, error: str):
    (words,) = [words for words in BROKEN if words in error]
    make, seen = BROKEN[words]
    model = make()
    with pytest.raises(UnsupportedModel) as refused:
        CALLS.get(words, rl.measure_rope)(model)
    assert refused.value.what == error.replace("MODEL", type(model).__name__)
    assert refused.value.parts["seen"].startswith(seen)
    frames = {(frame.name, Path(frame.path).stem) for frame in refused.traceback}
    assert (function.rpartition(".")[2], module.rpartition(".")[2]) in frames


def test_every_broken_model_breaks_an_assumption():
    assert len(BROKEN) == len(ASSUMPTIONS)
    assert CALLS.keys() <= BROKEN.keys()


def test_a_live_model_has_few_methods():
    methods = [
        x for x in vars(LiveModel).values() if callable(x) or hasattr(x, "__get__")
    ]
    assert 10 < len(methods) <= 25


Attend = Callable[..., tuple[Tensor, Tensor]]


def with_mask(change: Callable[[Tensor], Tensor]) -> Attend:
    return lambda attend, *inputs, **more: attend(
        *inputs[:-1], change(inputs[-1]), **more
    )


def causal(mask: Tensor) -> Tensor:
    return (
        torch.full(mask.shape[-2:], torch.finfo(mask.dtype).min)
        .triu(1)
        .expand(mask.shape)
    )


def biased(mask: Tensor) -> Tensor:
    row, key = (torch.arange(size) for size in mask.shape[-2:])
    return mask - 0.1 * (row[:, None] - key)


def without_sinks(attend: Attend, *inputs: Any, **options: Any) -> Any:
    return modeling_llama.eager_attention_forward(*inputs, **options)


def with_scale(changed: float) -> Attend:
    return lambda attend, *args, scaling, **more: attend(*args, scaling=changed, **more)


def uncapped(attend: Attend, *inputs: Any, softcap: float, **options: Any) -> Any:
    return attend(*inputs, softcap=None, **options)


def gated(attend: Attend, *inputs: Any, **options: Any) -> Any:
    output, weights = attend(*inputs, **options)
    return output * torch.linspace(0.5, 1.5, output.shape[2])[:, None], weights


# fmt: off
CAUSES: list[tuple[str, Attend, str]] = [
    ("mistral_sliding", with_mask(causal), "if rows see all keys up to their own position"),
    ("llama_gqa", with_mask(torch.zeros_like), "if rows see all keys, also later keys"),
    ("gemma2", uncapped, "if the soft-cap is left out"),
    ("gpt_oss", without_sinks, "if the sink logits are left out"),
    ("granite", with_scale(0.25), "with the scale 1 / sqrt(head_dim)"),
    ("llama_gqa", with_scale(1.0), "if the scale is left out"),
    ("llama_gqa", gated, ""),
    ("llama_gqa", with_mask(biased), ""),
]
# fmt: on


@pytest.mark.parametrize(("name", "attend", "cause"), CAUSES)
def test_the_changed_component_is_named(name, attend, cause, monkeypatch):
    model = tiny(name)
    if name == "granite":
        model.model.layers[0].self_attn.scaling = 0.1
    file = sys.modules[type(model).__module__]
    plain = file.eager_attention_forward
    monkeypatch.setattr(file, "eager_attention_forward", partial(attend, plain))
    with pytest.raises(UnsupportedModel, match="attends in a way") as refused:
        rl.capture(model, TOKENS[0])
    seen = refused.value.parts["seen"]
    assert seen.startswith("layer 0: attention from its queries, keys and mask misses")
    assert seen.partition("; it matches ")[2].startswith(cause)
    assert ("; " in seen) == bool(cause)
