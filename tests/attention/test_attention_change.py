"""The change of attention by edits, against transformers' attention and torch's divergence."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from oracles.handmade import call_of
from oracles.tiny import keep, random_tokens, tiny
from torch.distributions import Categorical, kl_divergence
from transformers import PreTrainedModel

import ropelens as rl
from ropelens.attention import fast_products
from ropelens.attention.attention_change import attention_change
from ropelens.attention.visibility import Visibility
from ropelens.interventions.edit import Edit
from ropelens.text.rows import all_rows

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}
P_ROPE = {**ROPE, "rope_type": "proportional", "partial_rotary_factor": 0.25}
# Families whose rotary modules read rope_parameters of any type, over the whole head; with
# grouped queries, sliding windows, soft-caps, layers without rotation, neighbouring pairs.
CONFIGURED = ("llama_gqa", "llama_mqa", "mistral_sliding", "gemma2", "cohere", "smollm3")
LENGTHS = torch.tensor([30, 17, 2])
tokens = partial(random_tokens, sequences=3)


@torch.no_grad()
def attentions(model: PreTrainedModel) -> list[torch.Tensor]:
    """The attention that the model returns, in float64; a learned sink is the last key."""
    layers = model(tokens(), use_cache=False, output_attentions=True).attentions
    weights = [layer.double() for layer in layers]
    if "sinks" not in str(model.state_dict().keys()):
        return weights
    return [torch.cat([w, 1 - w.sum(-1, keepdim=True)], dim=-1) for w in weights]


def expected(before: PreTrainedModel, after: PreTrainedModel) -> np.ndarray:
    """Mean divergence in bits [layer, head] over all rows but the first, without padding."""
    counts = torch.arange(30) < LENGTHS[:, None]
    counts[:, 0] = False
    layers = []
    for old, new in zip(attentions(before), attentions(after), strict=True):
        rows = kl_divergence(Categorical(probs=old), Categorical(probs=new))
        layers.append(rows.transpose(1, 2)[counts].mean(0) / np.log(2))
    return torch.stack(layers).numpy()


def measured(model: PreTrainedModel, edit: Edit) -> np.ndarray:
    edits = {"e": edit}
    text = rl.Text(tokens(), lengths=LENGTHS)
    found = rl.evaluate(model, text, edits=edits, measures="change")
    assert not found.attention_change.sel(edit="none").any()
    return found.attention_change.sel(edit="e").values


@pytest.mark.parametrize("name", CONFIGURED)
def test_against_transformers_p_rope(name: str, monkeypatch: pytest.MonkeyPatch):
    if name == "gemma2":  # in many blocks
        monkeypatch.setitem(fast_products.BLOCK_ELEMENTS, "cpu", 1)
    model = tiny(name, rope_parameters=ROPE)
    change = measured(model, rl.stop_slowest(0.75))
    other = tiny(name, rope_parameters=P_ROPE)
    assert expected(model, other).max() > 0.05
    np.testing.assert_allclose(change, expected(model, other), rtol=1e-3, atol=1e-5)


def test_a_learned_sink_is_one_key_more():
    change = measured(tiny("gpt_oss"), rl.stop_slowest(0.75))
    # In float64, because the share of the sink is 1 minus the sum over the keys.
    model, fast = tiny("gpt_oss").double(), lambda count: torch.arange(count) < count // 4
    other = keep(tiny("gpt_oss"), fast).double()
    assert attentions(model)[0][..., -1].max() > 0.1
    np.testing.assert_allclose(change, expected(model, other), rtol=1e-3, atol=1e-5)


def test_rows_that_see_other_keys_afterwards_have_no_divergence():
    x = torch.randn(1, 2, 6, 4, generator=torch.manual_seed(0))
    mask = torch.rand(1, 6, 6, generator=torch.manual_seed(1)) < 0.5
    seen, other = (mask | torch.eye(6).bool(), mask | torch.ones(6, 6).tril().bool())
    sees = [Visibility.from_mask(mask, range(6)) for mask in (seen, other)]
    before, after = (replace(call_of(x, x), visibility=visibility) for visibility in sees)
    rows = all_rows(torch.tensor([6]))
    every = torch.ones(1, 1, 6, dtype=torch.bool)
    assert attention_change(before, after, rows, every).isnan().all()
    assert not attention_change(before, before, rows, every).any()
