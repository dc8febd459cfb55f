"""Tokens by their text or class, and the attention they get: against dense attention."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracles.recording import attention_calls
from oracles.tiny import random_tokens, tiny

import ropelens as rl
from ropelens.attention.sums import LayerMeans
from ropelens.errors import BadArgument
from ropelens.profiles.measurement import Measurement
from ropelens.profiles.passes import collect
from ropelens.profiles.token_sets import AFTER, controls, ids_of, places_of
from ropelens.report.words import attention_sentences

TEXTS = ["the", " the", "The", "'", "'s", " ...", "_", "12", "\n", "’", "$", "other"]


class Names:
    """A tokenizer whose tokens are `TEXTS`; it drops the space that a text begins with."""

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join(TEXTS[token] for token in token_ids).removeprefix(" ")


def find_tokens(tokens: torch.Tensor, what: str | list[str]) -> torch.Tensor:
    word = what.removeprefix(AFTER) if isinstance(what, str) else what
    ids = None if word == "repeated" else ids_of(tokens, word, Names())
    return places_of(tokens, ids, after=word != what)


def found(what: str | list[str]) -> list[str]:
    every = torch.arange(len(TEXTS))[None]
    among = find_tokens(every, what)[0]
    return [text for text, yes in zip(TEXTS, among.tolist(), strict=True) if yes]


def test_tokens_are_found_by_their_text_and_by_class():
    assert found("the") == ["the", " the"]
    assert found(["'", "'s", "’"]) == ["'", "'s", "’"]
    assert found("\n") == ["\n"]
    assert found("punctuation") == ["'", " ...", "_", "’"]
    assert found(["punctuation"]) == found("rope") == []
    assert found("*'*") == ["'", "'s"]
    assert (found("newline"), found("digits"), found("capital")) == (["\n"], ["12"], ["The"])
    after = find_tokens(torch.tensor([[3, 0, 4, 4], [0, 2, 3, 3]]), "after:*'*")
    assert after.int().tolist() == [[0, 1, 0, 1], [0, 0, 0, 1]]
    again = find_tokens(torch.tensor([[4, 2, 4, 4, 7, 2], [7, 4, 1, 0, 3, 0]]), "repeated")
    assert again.int().tolist() == [[0, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 1]]


@torch.no_grad()
def test_a_token_whose_only_copy_is_hidden_is_not_repeated():
    ids, mask = torch.arange(3, 23)[None], torch.ones(1, 20, dtype=torch.long)
    ids[0, 12] = ids[0, 9] = ids[0, 5]
    ids[0, 15], mask[0, 7], mask[0, 5] = ids[0, 7], 0, 0
    held, model = {"input_ids": ids, "attention_mask": mask}, tiny("llama_gqa")
    statistics = rl.attention_on(ids, "repeated")
    found = rl.profile(model, held, statistics=statistics, budget=False)
    model.set_attn_implementation("eager")
    result = model(**held, output_attentions=True)
    rows = torch.stack(result.attentions)[:, 0, :, 12:]
    expected = rows[..., 12].sum(-1) / rows[..., 1:].sum((-2, -1))
    np.testing.assert_allclose(found["attention_on_repeated"], expected, rtol=1e-4)


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_sliding"])
def test_the_attention_on_them_is_dense_attention(name: str):
    """A sliding window too, whose keys have repeated what it no longer sees; sinks apart."""
    model = tiny(name).double()
    tokens = random_tokens(sequences=1, length=40) % len(TEXTS)
    sets = {
        "apostrophe_or_apostrophe_s": ["'", "'s"],
        "repeated": "repeated",
        "after_any_apostrophe": "after:*'*",
    }
    statistics = [
        row for what in sets.values() for row in rl.attention_on(tokens, what, Names())
    ]
    measurement = Measurement.of(model, tokens, sinks=[4])
    planes = measurement.rotation.planes(40)
    sums = collect(measurement, planes, statistics=statistics)
    calls, _ = attention_calls(model, tokens[0])
    count = tokens[0].bincount()[tokens].double().log2()
    apart = measurement.text.sinks[0, 0] == 0
    assert not apart[tokens[0] == 4].any()
    for name_of, what in sets.items():
        on = find_tokens(tokens, what)
        weights = {"attention": on[0].double(), "control": controls(on, count)[0]}
        for layer, call in enumerate(calls):
            key = call.key.repeat_interleave(len(call.query) // len(call.key), dim=0)
            score = call.scale * call.query @ key.mT
            attention = score.masked_fill(~call.visible, -torch.inf).softmax(-1).double()
            rows = [i for i in range(1, 40) if (call.visible[i] & on[0] & apart).any()]
            whole = (attention[:, rows] * apart).sum((1, 2))
            seen = call.visible[rows].double() @ (on[0] & apart).double()
            for kind, weight in weights.items():
                part = (attention[:, rows] @ (weight * apart)).sum(1)
                others = call.visible[rows].double() @ (weight * apart)
                expected = part / whole * seen.sum() / others.sum()
                (row,) = [row for row in statistics if row.name == f"{kind}_on_{name_of}"]
                means = LayerMeans(sums.layers[layer], sums, planes[layer], statistics)
                np.testing.assert_allclose(row.value(means), expected, atol=1e-6)
    profile = rl.profile(model, tokens, statistics=statistics, surrogates=0)
    table = rl.classify_heads(profile, resamples=0)
    assert "attention_on_repeated" in table
    assert "control_on_repeated" not in table
    most, *_ = attention_sentences(profile)
    lead = profile["attention_on_apostrophe_or_apostrophe_s"] - profile[statistics[1].name]
    layer, head = np.unravel_index(lead.values.argmax(), lead.shape)
    assert most.startswith(f"Head {layer}.{head} attends most to tokens ' or 's. In rows")


def test_controls_are_near_and_as_frequent():
    count = torch.tensor([[9, 1, 8, 4, 3, 8, 1, 1, 8, 2]]).double()
    on = torch.zeros(1, 10, dtype=torch.bool)
    on[0, 5] = True
    (weight,) = controls(on, count.log2()).tolist()
    assert {at: x for at, x in enumerate(weight) if x} == {2: 0.5, 8: 0.5}
    on[0, 8] = True  # itself no control then; the first token is none either
    (weight,) = controls(on, count.log2()).tolist()
    assert {at: x for at, x in enumerate(weight) if x} == {2: 1.0, 9: 1.0}
    assert sum(weight) == 2 * on.sum() / 2


def test_what_cannot_be_found_is_refused():
    tokens = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(BadArgument, match=r"There is no token [^$]*try:   tokenizer="):
        rl.attention_on(tokens, "'")
    with pytest.raises(BadArgument, match="There is no token ''"):
        rl.attention_on(tokens, "", Names())
    with pytest.raises(BadArgument, match="attention_on: what must be"):
        rl.attention_on(tokens, 3, Names())
    with pytest.raises(BadArgument, match="There is no token 'rope' in this text"):
        rl.attention_on(tokens, "rope", Names())
    with pytest.raises(BadArgument, match="There is no token 'after:after:repeated'"):
        rl.attention_on(tokens, "after:after:repeated", Names())
