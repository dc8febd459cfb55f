"""Forward hooks of the user in passes that ropelens makes by itself."""

from functools import partial
from typing import Any

import pytest
import torch
from oracles.tiny import random_tokens, tiny
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.nn.utils import prune

import ropelens as rl
from ropelens.errors import UnsupportedModel
from ropelens.model.user_hooks import belongs_to_model, user_hooks, without_user_hooks

TOKENS = random_tokens(sequences=2, length=24)
STEERED = torch.randn(1, 24, 1, generator=torch.Generator().manual_seed(0))


def steer(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
    """Add an activation to each of 24 tokens."""
    return output + STEERED


@torch.no_grad()
def test_an_edit_opens_without_calling_hooks_of_the_user():
    model = tiny("llama_gqa")
    with rl.edit_rope(model, "nope"):
        unsteered = model(TOKENS).logits
    layer = model.model.layers[0]
    passes: list[str] = []

    def record(name: str, *_: Any) -> None:
        passes.append(name)

    layer.mlp.register_forward_hook(steer)
    layer.register_forward_hook(partial(record, "layer"))
    layer.mlp.register_forward_pre_hook(partial(record, "mlp"), with_kwargs=True)
    model.model.embed_tokens.register_forward_pre_hook(partial(record, "embedding"))
    everywhere = register_module_forward_hook(partial(record, "everywhere"))
    before = register_module_forward_pre_hook(partial(record, "before"))
    try:
        with rl.edit_rope(model, "nope"):
            assert passes == []
            steered = model(TOKENS).logits
    finally:
        everywhere.remove()
        before.remove()
    assert passes[:5] == ["before"] * 3 + ["embedding", "everywhere"]
    assert passes.count("layer") == passes.count("mlp") == 1
    assert not torch.allclose(steered, unsteered)


def test_a_measurement_of_a_text_reads_only_the_text_with_hooks():
    model = tiny("llama_gqa")
    read: list[Tensor] = []
    embedding = model.model.embed_tokens
    embedding.register_forward_pre_hook(lambda module, inputs: read.append(inputs[0]))
    rl.evaluate(model, TOKENS, edits={"nope": "nope"}, measures=["loss"])
    assert len(read) == 2  # without an edit, and with it
    assert all(torch.equal(tokens, TOKENS) for tokens in read)


def test_a_hook_that_changes_the_rotation_is_measured():
    model = tiny("llama_gqa")

    def turn_twice(module: nn.Module, inputs: Any, output: Any) -> Any:
        cos, sin = output
        return cos.square() - sin.square(), 2 * cos * sin

    def double_positions(module: nn.Module, args: Any, options: Any) -> Any:
        cos, sin = options["position_embeddings"]
        twice = (cos.square() - sin.square(), 2 * cos * sin)
        return args, options | {"position_embeddings": twice}

    layer = model.model.layers[0]
    for register in (
        lambda: model.model.rotary_emb.register_forward_hook(turn_twice),
        lambda: layer.register_forward_pre_hook(double_positions, with_kwargs=True),
    ):
        handle = register()
        seen = "layer 0: 8 planes, the fastest at 2 rad/token"
        with pytest.raises(UnsupportedModel, match=seen):
            rl.measure_rope(model)
        handle.remove()


def test_an_error_of_such_a_hook_is_explained():
    model = tiny("llama_gqa")
    model.model.layers[1].self_attn.q_proj.register_forward_hook(steer)
    with (
        pytest.raises(UnsupportedModel, match="A pass that ropelens ran") as refused,
        rl.edit_rope(model, "nope"),
    ):
        pass
    assert "model.layers.1.self_attn.q_proj" in refused.value.parts["means"]


def test_an_error_in_a_measurement_on_other_tokens_is_explained():
    model = tiny("llama_gqa")
    model.model.layers[1].mlp.register_forward_hook(steer)
    with pytest.raises(UnsupportedModel, match="ropelens ran on Llama") as refused:
        rl.evaluate(model, TOKENS, edits={}, measures=["induction"])
    assert "your forward hook on model.layers.1.mlp" in refused.value.parts["means"]
    assert "accepts sequences of any length" in refused.value.parts["try"]


def test_hooks_of_libraries_belong_to_the_model():
    model = tiny("llama_gqa")
    mlp = model.model.layers[0].mlp
    prune.identity(mlp.up_proj, "weight")  # a forward hook computes the weights
    mlp.register_forward_hook(mlp.down_proj.forward)  # a method of the model
    assert user_hooks(model) == []
    assert not belongs_to_model(steer, model)
    assert not belongs_to_model(partial(steer), model)


class Recorder(nn.Module):
    """A module of the user, which is not in the model."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Tensor] = []

    def record(self, module: nn.Module, inputs: Any, output: Tensor) -> None:
        self.records.append(output)


def test_a_method_of_a_module_belongs_to_the_model_that_has_the_module():
    model = tiny("llama_gqa")
    recorder = Recorder()
    model.model.layers[0].mlp.register_forward_hook(recorder.record)
    assert [found.hook for found in user_hooks(model)] == [recorder.record]
    model.recorder = recorder
    assert user_hooks(model) == []


def test_hooks_return_in_their_order():
    model = tiny("llama_gqa")
    mlp = model.model.layers[0].mlp
    handles = [mlp.register_forward_hook(partial(steer)) for _ in range(3)]
    before = list(mlp._forward_hooks.items())
    with without_user_hooks(model):
        assert not mlp._forward_hooks
        added = mlp.register_forward_hook(steer)
    assert list(mlp._forward_hooks.items()) == [*before, (added.id, steer)]
    for handle in (*handles, added):
        handle.remove()
    assert not mlp._forward_hooks


def test_a_hook_that_is_removed_in_such_a_pass_stays_removed():
    linear = nn.Linear(1, 1)
    first = linear.register_forward_hook(lambda *_: None)
    own = linear.register_forward_hook(nn.Identity().forward)
    last = linear.register_forward_hook(lambda *_: None)
    with without_user_hooks(linear):
        own.remove()
    assert [*linear._forward_hooks] == [first.id, last.id]
