"""Change of the attention between two models, on the same tokens."""

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from oracles.divergence import attention_divergence
from oracles.tiny import random_tokens, tiny
from transformers import PreTrainedModel

import ropelens as rl
from ropelens.errors import BadArgument
from ropelens.profiles.attention_change import attention_change

TOKENS = random_tokens(sequences=3)
LENGTHS = torch.tensor([30, 17, 2])


@torch.no_grad()
def nearby(family: str) -> PreTrainedModel:
    """The tiny model of a family, with a tenth of the weights of another seed."""
    model = tiny(family)
    other = tiny(family, seed=1)
    for weight, drawn in zip(model.parameters(), other.parameters(), strict=True):
        weight.lerp_(drawn, 0.1)
    return model


@pytest.mark.parametrize("family", ["llama_gqa", "mistral_sliding", "gemma2"])
def test_other_weights_change_attention_as_transformers_returns_it(family: str):
    first = tiny(family)
    second = nearby(family)
    text = rl.Text(TOKENS, lengths=LENGTHS)
    change = attention_change(first, second, text)
    expected = attention_divergence(first, second, TOKENS, LENGTHS)
    assert expected.min() > 0.01
    assert_allclose(change, expected, rtol=1e-3)
    assert change.dims == ("layer", "head")
    assert change.attrs["units"] == "bit"


def test_the_same_weights_do_not_change_attention():
    assert not attention_change(tiny("llama_gqa"), tiny("llama_gqa"), TOKENS).any()


def test_a_variant_changes_attention_as_its_edit_does():
    model = tiny("llama_gqa")
    second = type(model)(rl.variant_config(model.config, "p-rope:0.5"))
    second.load_state_dict(model.state_dict())
    second.set_attn_implementation("eager")
    change = attention_change(model, second.eval(), TOKENS, rows=7)
    edits = {"half": "p-rope:0.5"}
    results = rl.evaluate(model, TOKENS, edits=edits, measures="change", rows=7)
    expected = results["attention_change"].sel(edit="half")
    assert_allclose(change, expected, rtol=1e-4, atol=1e-7)


def test_a_variant_that_depends_on_the_length_gets_the_length_of_the_text():
    first = tiny("llama_dynamic", max_position_embeddings=16)
    second = tiny("llama_dynamic", max_position_embeddings=16, seed=1)
    text = rl.Text(TOKENS, lengths=LENGTHS)
    with pytest.warns(UserWarning, match="with the RoPE of the longest one"):
        change = attention_change(first, second, text)
    assert_allclose(
        change, attention_divergence(first, second, TOKENS, LENGTHS), rtol=1e-3
    )


def test_models_of_other_shapes_are_refused():
    with pytest.raises(BadArgument, match="attention of these models cannot be"):
        attention_change(
            tiny("llama_gqa"), tiny("llama_gqa", num_hidden_layers=1), TOKENS
        )


def test_a_mask_that_differs_has_no_divergence():
    first = tiny("mistral_sliding")
    second = tiny("mistral_sliding", sliding_window=3)
    assert np.isnan(attention_change(first, second, TOKENS)).all()
