"""Layers that were removed, moved or copied must have the numbers of their places."""

import copy

import pytest
import torch
from oracles.tiny import random_tokens, tiny
from torch import nn
from transformers import PreTrainedModel

import ropelens as rl
from ropelens.errors import UnsupportedModel

TOKENS = random_tokens(sequences=1, length=16)


def without_first_layer() -> PreTrainedModel:
    model = tiny("llama_gqa")
    del model.model.layers[0]
    model.config.num_hidden_layers = 1
    return model


def with_exchanged_layers() -> PreTrainedModel:
    model = tiny("llama_gqa")
    first, second = model.model.layers
    model.model.layers = nn.ModuleList([second, first])
    return model


def with_a_copied_layer() -> PreTrainedModel:
    model = tiny("llama_gqa")
    model.model.layers.append(copy.deepcopy(model.model.layers[0]))
    model.config.num_hidden_layers = 3
    return model


@pytest.mark.parametrize(
    ("make", "seen"),
    [
        (without_first_layer, "layer_idx 1 in model.model.layers[0]"),
        (with_exchanged_layers, "layer_idx 1 in model.model.layers[0]"),
        (with_a_copied_layer, "layer_idx 0 in model.model.layers[2]"),
    ],
)
def test_layers_with_the_numbers_of_other_places_are_refused(make, seen):
    model = make()
    with pytest.raises(UnsupportedModel, match="numbers of other places") as refused:
        rl.silence_heads(model, "0.1")
    assert refused.value.parts["seen"] == seen
    exec(refused.value.parts["try"], {"model": model})  # the remedy works
    profile = rl.profile(model, TOKENS, budget=False)
    assert profile.layer.size == len(model.model.layers)


def test_a_silenced_head_of_a_renumbered_layer_is_in_the_place_that_its_number_names():
    model = with_exchanged_layers()
    for place, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = place
    with rl.silence_heads(model, "0.0"):
        silenced = model(TOKENS).logits
    size = model.config.hidden_size // model.config.num_attention_heads
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight[:, :size] = 0
    torch.testing.assert_close(silenced, model(TOKENS).logits)
