"""What `rl.profile` and `rl.plane_means` refuse, in the words that a Python user sees."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from oracles.tiny import tiny
from torch import nn

from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.measure.heads import classify_heads
from ropelens.measure.means import plane_means
from ropelens.measure.profile import profile

TOKENS = torch.arange(24).reshape(2, 12) + 3  # of a vocabulary of 96


@pytest.mark.parametrize(
    ("tokens", "options", "words"),
    [
        (TOKENS[:, :2], {}, "tokens must be a table of sequences of at least 3 tokens"),
        (TOKENS[:0], {}, r"seen:  shape \(0, 12\)"),
        (TOKENS - 4, {}, "ids -1 to 22, vocabulary 96"),
        (TOKENS + 90, {}, "Some tokens are not in the model's vocabulary"),
        (TOKENS, {"rows": 0}, 'rows must be "auto", "all" or a number, 1 or more'),
        (TOKENS, {"rows": "some"}, "seen:  'some'"),
        (TOKENS, {"lengths": torch.tensor([12])}, "1 lengths for 2 sequences"),
        (TOKENS, {"lengths": torch.tensor([1, 12])}, "the shortest 1"),
        (TOKENS, {"lengths": torch.tensor([12, 13])}, "length 13 of 12 positions"),
        (TOKENS, {"lengths": [12.0, 12.0]}, "lengths must be whole numbers"),
        (TOKENS, {"lengths": [[12, 12]]}, "2 lengths for 2 sequences"),
        (TOKENS.float(), {}, "tokens must be whole numbers"),
        ([["a", "b", "c"]], {}, "tokens must be whole numbers"),
    ],
)
def test_arguments_out_of_range(
    tokens: torch.Tensor, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(BadArgument, match=words):
        profile(tiny("llama_gqa"), tokens, **options)
    if "rows" not in options:  # means are over tokens
        with pytest.raises(BadArgument, match=words):
            plane_means(tiny("llama_gqa"), tokens, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"documents": ["a", "b"]}, "documents must be whole numbers"),
        ({"documents": [1]}, "numbers for 2 sequences"),
        ({"sinks": 5}, "sinks are ids of tokens"),
        ({"sinks": [1.5]}, "sinks must be whole numbers"),
        ({"sinks": [96]}, "0 to 95"),
        ({"sinks": ["the"]}, "sinks must be whole numbers"),
        ({"batch_size": 1.5}, "batch_size must be a whole number, 1 or more"),
    ],
)
def test_options_of_a_profile(options: dict[str, Any], words: str) -> None:
    with pytest.raises(BadArgument, match=words):
        profile(tiny("llama_gqa"), TOKENS, **options)


def test_tokens_in_any_width_and_seeds_of_any_kind() -> None:
    options: dict[str, Any] = {"surrogates": 1, "rows": 3, "seed": np.int64(-1)}
    plain = profile(tiny("llama_gqa"), TOKENS, surrogates=1, rows=3, seed=-1)
    narrow = profile(tiny("llama_gqa"), TOKENS.to(torch.uint8).numpy(), **options)
    xr.testing.assert_equal(plain, narrow)
    one, other = (classify_heads(found, seed=-1) for found in (plain, narrow))
    pd.testing.assert_frame_equal(one, other)


def test_a_model_whose_scores_are_not_finite() -> None:
    model = tiny("llama_gqa")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = torch.nan
    with pytest.raises(UnsupportedModel, match=r"layer 1: NaN or infinity"):
        profile(model, TOKENS)


def test_a_model_of_another_kind() -> None:
    with pytest.raises(UnsupportedModel, match="Linear is not a model that ropelens can"):
        profile(nn.Linear(2, 2), TOKENS)


@pytest.mark.parametrize("family", ["gpt2", "bert", "bloom", "mamba", "gptj"])
def test_a_model_that_does_not_rotate_or_hides_it(family: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"does not rotate|hides its attention"):
        profile(tiny(family), TOKENS)
