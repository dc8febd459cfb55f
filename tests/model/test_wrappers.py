"""Wrapped models: compiled, in parallel, with adapters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import xarray as xr
from tiny_checkpoints import tiny_llama
from torch import nn
from transformers import PreTrainedModel

import ropelens as rl
from ropelens.model.as_live_model import unwrapped


def compiled_in_place(model: PreTrainedModel) -> nn.Module:
    model.compile(backend="eager")
    return model


class LanguageModel:
    """A wrapper that contains a model like the wrappers of nnsight and nnterp."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._module = model

    def __call__(self, tokens: torch.Tensor) -> Any:
        return self._module(tokens)


WRAPPED: dict[str, Callable[[PreTrainedModel], nn.Module]] = {
    "compiled": lambda model: torch.compile(model, backend="eager"),  # type: ignore[return-value]
    "compiled in place": compiled_in_place,
    "data parallel": nn.DataParallel,
    "nnsight": LanguageModel,  # type: ignore[dict-item]
}


def test_nested_wrappers_are_removed() -> None:
    model = tiny_llama()
    assert unwrapped(nn.DataParallel(torch.compile(model, backend="eager"))) is model  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")  # warnings of torch.compile
@pytest.mark.parametrize("name", WRAPPED)
def test_a_wrapper_is_measured_and_edited_like_its_model(name: str) -> None:
    plain, model = (tiny_llama().eval().requires_grad_(False) for _ in range(2))
    wrapped, tokens = WRAPPED[name](model), torch.randint(40, (3, 24))
    assert unwrapped(wrapped) is model
    wrapped(tokens)  # traced without an observer
    for options in ({"budget": False}, {"surrogates": 0} if name == "compiled" else {}):
        expected, found = (rl.profile(x, tokens, **options) for x in (plain, wrapped))
        xr.testing.assert_equal(found, expected)
    xr.testing.assert_equal(rl.measure_rope(wrapped), rl.measure_rope(plain))
    seen: list[int] = []
    with rl.edit_rope(plain, "nope"):
        edited = plain(tokens).logits
    with rl.edit_rope(wrapped, "nope"), rl.observe(wrapped, lambda c, _: seen.append(c.layer)):
        torch.testing.assert_close(wrapped(tokens).logits, edited)
    assert seen == [0, 1]
    with rl.silence_heads(wrapped, "0.1"):
        assert not torch.allclose(wrapped(tokens).logits, plain(tokens).logits)
    torch.testing.assert_close(wrapped(tokens).logits, plain(tokens).logits)
    assert rl.capture(wrapped, tokens[0], heads="0.0").sizes["head"] == 1


def test_the_error_for_other_objects_states_what_to_pass() -> None:
    with pytest.raises(rl.BadArgument, match="the _module of an nnsight or nnterp model"):
        rl.measure_rope(object())  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")  # warnings of peft
def test_adapters_are_measured_with_their_model() -> None:
    peft = pytest.importorskip("peft")
    model, tokens = tiny_llama().eval(), torch.randint(40, (3, 24))
    plain = rl.profile(model, tokens, budget=False)
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, settings).eval()
    found = rl.profile(adapted, tokens, budget=False)
    assert abs(found["q_norm"] - plain["q_norm"]).max() > 1e-3
    merged = adapted.merge_and_unload()
    again = rl.profile(merged, tokens, budget=False)
    xr.testing.assert_allclose(found["q_norm"], again["q_norm"], rtol=1e-4)
    tuned = peft.get_peft_model(
        tiny_llama(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    )
    with pytest.raises(rl.UnsupportedModel, match=r"trained tokens(.|\n)*get_base_model\(\)"):
        rl.profile(tuned, tokens)
