"""If the output does not match, the error names the component that the model changed."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracles.tiny import random_tokens, tiny
from torch import Tensor
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.llama import modeling_llama

import ropelens as rl
from ropelens.errors import UnsupportedModel

Attend = Callable[..., tuple[Tensor, Tensor]]
TOKENS = random_tokens(sequences=1)[0]


def run(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, attend: Attend, **options: Any
) -> Any:
    return attend(module, q, k, v, mask, **options)


def causal(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
    low = torch.finfo(q.dtype).min
    mask = torch.full(mask.shape[-2:], low).triu(1).expand(mask.shape)
    return run(module, q, k, v, mask, **options)


def every_key(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
    return run(module, q, k, v, torch.zeros_like(mask), **options)


def without_sinks(module: Any, *inputs: Any, attend: Attend, **options: Any) -> Any:
    return modeling_llama.eager_attention_forward(module, *inputs, **options)


def capped(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
    options |= {"attend": modeling_gemma2.eager_attention_forward, "softcap": 7.0}
    return run(module, q, k, v, mask, **options)


def biased(module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, **options: Any) -> Any:
    offset = torch.arange(q.shape[2])[:, None] - torch.arange(k.shape[2])
    return run(module, q, k, v, mask - 0.1 * offset, **options)


def with_options(**changes: Callable[[Any], Any]) -> Attend:
    def change(module: Any, *inputs: Any, **options: Any) -> Any:
        options |= {name: new(options.get(name)) for name, new in changes.items()}
        return run(module, *inputs, **options)

    return change


def gated(module: Any, *inputs: Any, **options: Any) -> Any:
    output, weights = run(module, *inputs, **options)
    return output * torch.linspace(0.5, 1.5, output.shape[2])[:, None], weights


CAUSES: list[tuple[str, Attend, str]] = [
    ("mistral_sliding", causal, "it matches if rows see all keys up to their own position"),
    ("llama_gqa", every_key, "it matches if rows see all keys, also later keys"),
    (
        "gemma2",
        with_options(softcap=lambda cap: None),
        "it matches if the soft-cap is left out",
    ),
    ("gpt_oss", without_sinks, "it matches if the sink logits are left out"),
    (
        "granite",
        with_options(scaling=lambda _: 0.25),
        "it matches with the scale 1 / sqrt(head_dim)",
    ),
    ("llama_gqa", with_options(scaling=lambda _: 1.0), "it matches if the scale is left out"),
    (
        "llama_gqa",
        with_options(scaling=lambda scale: 1.7 * scale),
        "it matches with the scale 0.425 instead of 0.25",
    ),
    ("llama_gqa", capped, "it matches with a soft-cap of 7"),
    ("llama_gqa", gated, "it matches up to a factor of each row and head"),
    ("llama_gqa", biased, ""),
]


@pytest.mark.parametrize(("name", "attend", "cause"), CAUSES)
def test_the_changed_component_is_named(
    name: str, attend: Attend, cause: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(name)
    if name == "granite":
        model.model.layers[0].self_attn.scaling = 0.1
    file = sys.modules[type(model).__module__]
    plain = file.eager_attention_forward
    monkeypatch.setattr(
        file,
        "eager_attention_forward",
        lambda *inputs, **options: attend(*inputs, attend=plain, **options),
    )
    with pytest.raises(UnsupportedModel, match="attends in a way") as refused:
        rl.capture(model, TOKENS)
    seen = refused.value.parts["seen"]
    assert seen.startswith("layer 0: attention from its queries, keys and mask misses")
    assert seen.partition("; ")[2].startswith(cause)
    assert bool(seen.partition("; ")[2]) == bool(cause)
