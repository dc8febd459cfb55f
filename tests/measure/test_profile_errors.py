"""What `rl.profile` and `rl.plane_means` refuse, in the words that a Python user sees."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from oracles.tiny import tiny
from torch import nn

from ropelens.errors import BadArgument, UnsupportedModel
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
        (TOKENS, {"rows": 0}, 'rows must be "all" or a number, 1 or more'),
        (TOKENS, {"rows": "some"}, "seen:  'some'"),
        (TOKENS, {"lengths": torch.tensor([12])}, "1 lengths for 2 sequences"),
        (TOKENS, {"lengths": torch.tensor([1, 12])}, "the shortest 1"),
        (TOKENS, {"lengths": torch.tensor([12, 13])}, "length 13 of 12 positions"),
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


def test_a_model_of_another_kind() -> None:
    with pytest.raises(UnsupportedModel, match="Linear is not a model that ropelens can"):
        profile(nn.Linear(2, 2), TOKENS)


@pytest.mark.parametrize("family", ["gpt2", "bert", "bloom", "mamba", "gptj"])
def test_a_model_that_does_not_rotate_or_hides_it(family: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"does not rotate|hides its attention"):
        profile(tiny(family), TOKENS)
