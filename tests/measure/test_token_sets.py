"""Tokens by their text or class, and the attention they get: against dense attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles.recording import attention_calls
from oracles.tiny import random_tokens, tiny

import ropelens as rl
from ropelens.errors import BadArgument
from ropelens.measure.token_sets import find_tokens
from ropelens.report.words import attention_on as describe_attention_on

TEXTS = ["the", " the", "The", "'", "'s", " ...", "_", "12", "\n", "’", "$", "other"]


class Names:
    """A tokenizer whose tokens are `TEXTS`; it drops the space that a text begins with."""

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join(TEXTS[token] for token in token_ids).removeprefix(" ")


def found(what: str | list[str]) -> list[str]:
    every = torch.arange(len(TEXTS))[None]
    among = find_tokens(every, what, Names())[0]
    return [text for text, yes in zip(TEXTS, among.tolist(), strict=True) if yes]


def test_tokens_are_found_by_their_text_and_by_class():
    assert found("the") == ["the", " the"]
    assert found(["'", "'s", "’"]) == ["'", "'s", "’"]
    assert found("\n") == ["\n"]
    assert found("punctuation") == ["'", " ...", "_", "’"]
    assert found(["punctuation"]) == found("rope") == []
    again = find_tokens(torch.tensor([[4, 2, 4, 4, 7, 2], [7, 4, 1, 0, 3, 0]]), "repeated")
    assert again.int().tolist() == [[0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 1]]


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_sliding"])
def test_the_attention_on_them_is_dense_attention(name: str):
    """A sliding window too, whose keys have repeated what it no longer sees."""
    model = tiny(name).double()
    tokens = torch.from_numpy(random_tokens(sequences=1, length=40) % len(TEXTS))
    sets = {"apostrophe_or_apostrophe_s": ["'", "'s"], "repeated": "repeated"}
    statistics = [
        row for what in sets.values() for row in rl.attention_on(tokens, what, Names())
    ]
    profile = rl.profile(model, tokens, statistics=statistics, surrogates=0, rows="all")
    calls, _ = attention_calls(model, tokens[0].numpy())
    for name_of, what in sets.items():
        on = find_tokens(tokens, what, Names())[0].double()
        for layer, call in enumerate(calls):
            key = call.key.repeat_interleave(len(call.query) // len(call.key), dim=0)
            score = call.scale * call.query @ key.mT
            attention = score.masked_fill(~call.visible, -torch.inf).softmax(-1).double()
            even = call.visible.double() / call.visible.sum(-1, keepdim=True)
            ours = profile.sel(layer=layer)
            expected = (attention @ on)[:, 1:].mean(-1)
            np.testing.assert_allclose(ours[f"attention_on_{name_of}"], expected, atol=1e-6)
            np.testing.assert_allclose(
                ours[f"even_on_{name_of}"], (even @ on)[..., 1:].mean(), atol=1e-6
            )
    table = rl.classify_heads(profile, resamples=0)
    assert "attention_on_repeated" in table
    assert "even_on_repeated" not in table
    most, _ = describe_attention_on(profile)
    lead = profile["attention_on_apostrophe_or_apostrophe_s"] - profile[statistics[1].name]
    layer, head = np.unravel_index(lead.values.argmax(), lead.shape)
    assert most.startswith(f"Head {layer}.{head} attends most to tokens ' or 's: 0.")


def test_what_cannot_be_found_is_refused():
    tokens = torch.zeros(1, 4, dtype=torch.long)
    for what, tokenizer in (("'", None), ("", Names())):
        with pytest.raises(BadArgument, match="and there is no tokenizer or text"):
            rl.attention_on(tokens, what, tokenizer)
    with pytest.raises(BadArgument, match="attention_on: what must be"):
        rl.attention_on(tokens, 3, Names())
    with pytest.raises(BadArgument, match="There is no token 'rope' in this text"):
        rl.attention_on(tokens, "rope", Names())
