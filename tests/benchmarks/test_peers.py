"""The comparison with other libraries runs, and its sums are the sums of a profile."""

import cost
import dense
import numpy as np
import peers
import pytest
import torch
from tiny_checkpoints import tiny_llama

import ropelens as rl


def test_dense_sums_are_those_of_a_profile():
    model = tiny_llama().eval()
    model.set_attn_implementation("eager")
    tokens = torch.randint(3, model.config.vocab_size, (1, 48))
    with torch.no_grad():
        layers = dense.dense_sums(model, tokens)
    profile = rl.profile(model, tokens.repeat(2, 1), surrogates=0)
    compared = set(layers[0]) & set(profile)
    assert compared == set(layers[0]) - {"entropy", "information"}
    for name in compared:
        dense_sum = torch.stack([layer[name] for layer in layers]).numpy()
        wanted = profile[name].values[..., : dense_sum.shape[-1]]
        np.testing.assert_allclose(dense_sum, wanted, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("way", ["plain forward", "ropelens, all rows", "ropelens, 512 rows"])
def test_a_way_has_a_time_and_a_memory(way: str, monkeypatch: pytest.MonkeyPatch):
    model = tiny_llama(vocab_size=32000).eval().requires_grad_(False)
    monkeypatch.setattr(cost, "random_llama", lambda: model)
    measured = peers.cost_of(way, 16)
    assert measured["seconds"] > 0
    assert measured["peak_mib"] >= 0
