"""Each assumption about a model fails in a small broken model, with the error of the table."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import MethodType
from typing import Any

import families
import pytest
import torch
from oracles.tiny import random_tokens, tiny
from torch import nn
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama

import ropelens as rl
from ropelens.errors import UnsupportedModel
from ropelens.model.assumptions import ASSUMPTIONS, Assumption
from ropelens.model.live_model import LiveModel

TOKENS = random_tokens()
DOCS = Path(rl.__file__).parents[1] / "docs/families.md"


def variant(model: nn.Module) -> object:
    return rl.edit_rope(model, "yarn:4").__enter__()


def run(model: nn.Module) -> object:
    return rl.profile(model, TOKENS, budget=False)


def on_meta() -> PreTrainedModel:
    with torch.device("meta"):
        return LlamaForCausalLM(tiny("llama_gqa").config)


def changed(model: PreTrainedModel, change: Callable[[Any], object]) -> PreTrainedModel:
    with torch.no_grad():
        change(model.model.layers[0].self_attn)
    return model


def patched_forward(
    model: PreTrainedModel, change: Callable[..., Any], part: str = "layers.0.self_attn"
) -> PreTrainedModel:
    """`model`, one module of which runs `change(forward, ...)` instead of its forward."""
    module = model.model.get_submodule(part)
    forward = type(module).forward
    module.forward = MethodType(lambda self, *a, **k: change(forward, self, *a, **k), module)
    return model


def differs_when_observed(forward: Callable, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    named = modeling_llama.ALL_ATTENTION_FUNCTIONS.get_interface(
        "eager", modeling_llama.eager_attention_forward
    )
    output, weights = forward(self, *args, **kwargs)
    plain = named is modeling_llama.eager_attention_forward
    return output * (1 if plain else 1.001), weights


def twice(forward: Callable, self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward(self, *args, **kwargs)
    return forward(self, *args, **kwargs)


def rotated_by(change: Callable) -> PreTrainedModel:
    """A model whose cosines and sines are changed."""

    def rotary(forward: Callable, self: nn.Module, x: Any, position_ids: Any) -> Any:
        return change(*forward(self, x, position_ids), position_ids[..., None])

    return patched_forward(tiny("llama_gqa"), rotary, "rotary_emb")


def other_buffer() -> PreTrainedModel:
    model = tiny("llama_gqa")
    used = model.model.rotary_emb.inv_freq.clone()

    def rotary(forward: Callable, self: nn.Module, x: Any, position_ids: Any) -> Any:
        angle = (position_ids[..., None] * used).repeat(1, 1, 2)
        return angle.cos(), angle.sin()

    patched_forward(model, rotary, "rotary_emb").model.rotary_emb.inv_freq *= 1.001
    return model


def two_factors() -> PreTrainedModel:
    model = tiny("llama_gqa")
    model.model.other = type(model.model.rotary_emb)(model.config)
    model.model.other.attention_scaling = 2.0
    return model


def without_base() -> PreTrainedModel:
    model = tiny("llama_gqa")
    model.config.rope_parameters = {"rope_type": "default"}
    return model


def sdpa_ahead() -> PreTrainedModel:
    model = changed(tiny("llama_gqa"), lambda attention: setattr(attention, "is_causal", False))
    model.set_attn_implementation("sdpa")
    return model


def flex() -> PreTrainedModel:
    model = tiny("llama_gqa")
    model.set_attn_implementation("flex_attention")
    return model


def grows(cos: torch.Tensor, sin: torch.Tensor, p: torch.Tensor) -> Any:
    return cos * (1 + 0.01 * p), sin * (1 + 0.01 * p)


def stands_still(cos: torch.Tensor, sin: torch.Tensor, p: torch.Tensor) -> Any:
    return torch.ones_like(cos), torch.zeros_like(sin)


BROKEN: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {
    "is not a model": (lambda: nn.Linear(2, 2), rl.measure_rope),
    "different numbers of heads": (
        lambda: families.tiny("Dots3NoteForCausalLM"),
        rl.measure_rope,
    ),
    "is on meta": (on_meta, rl.measure_rope),
    "has no attention": (lambda: tiny("mamba"), rl.measure_rope),
    "hides its attention": (lambda: tiny("bloom"), rl.measure_rope),
    "attends more than once": (
        lambda: patched_forward(tiny("llama_gqa"), twice),
        rl.measure_rope,
    ),
    "hides its mask": (flex, rl.measure_rope),
    "attends in a way": (sdpa_ahead, lambda model: rl.capture(model, TOKENS[0])),
    "computes something else": (
        lambda: patched_forward(tiny("llama_gqa"), differs_when_observed),
        run,
    ),
    "NaN or infinite": (
        lambda: changed(tiny("llama_gqa"), lambda a: a.q_proj.weight.fill_(math.nan)),
        rl.measure_rope,
    ),
    "does not rotate its queries": (lambda: rotated_by(stands_still), rl.measure_rope),
    "but not by a rotation": (lambda: rotated_by(grows), rl.measure_rope),
    "rotates its values": (lambda: families.tiny("DeepseekV4ForCausalLM"), rl.measure_rope),
    "not rotate as it states": (other_buffer, rl.measure_rope),
    "more than one way": (two_factors, variant),
    "the base of its RoPE": (without_base, variant),
    "to the logits is not linear": (
        lambda: tiny("gemma2"),
        lambda model: rl.capture(model, TOKENS[0], logits_of=[7]),
    ),
}
"""Model that breaks the assumption whose error has these words, and a call that fails."""


@pytest.mark.filterwarnings("ignore:.*configuration")
@pytest.mark.parametrize("assumption", ASSUMPTIONS, ids=lambda row: row.checked_by)
def test_a_broken_assumption_raises_its_error(assumption: Assumption) -> None:
    (broken,) = [case for words, case in BROKEN.items() if words in assumption.error]
    make, call = broken
    model = make()
    with pytest.raises(UnsupportedModel) as refused:
        call(model)
    assert refused.value.what == assumption.error.format(model=type(model).__name__)
    module, function = assumption.checked_by.split(":")
    frames = {(f.name, Path(f.path).stem) for f in refused.traceback}
    assert (function.rpartition(".")[2], module.rpartition(".")[2]) in frames
    assert import_module(f"ropelens.{module}")


def test_each_broken_model_belongs_to_one_assumption() -> None:
    errors = [row.error for row in ASSUMPTIONS]
    assert [sum(words in error for error in errors) for words in BROKEN] == [1] * len(errors)


def test_the_page_of_families_lists_the_assumptions() -> None:
    page = DOCS.read_text(encoding="utf-8")
    for row in ASSUMPTIONS:
        module, function = row.checked_by.split(":")
        error = row.error.format(model="MODEL")
        assert f"| {row.statement} | `{module}`: `{function}` | {error} |" in page


def test_a_live_model_has_few_methods() -> None:
    methods = [x for x in vars(LiveModel).values() if callable(x) or hasattr(x, "__get__")]
    assert 10 < len(methods) <= 25
