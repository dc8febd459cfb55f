"""A profile under edits that differ between heads: what does this head do without plane 2?"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
import xarray as xr
from oracles.tiny import random_tokens, tiny
from transformers import PreTrainedModel

import ropelens as rl
from ropelens.errors import BadArgument

PLANES = [1, 2]


tokens = partial(random_tokens, sequences=4, length=24)


def profile(model: PreTrainedModel, heads: str | None) -> xr.Dataset:
    """That of the model while `PLANES` of some heads stand still."""
    edits = [] if heads is None else [rl.stop(rl.PlaneNumbers(PLANES), heads=heads)]
    with rl.edit_rope(model, *edits):
        return rl.profile(model, tokens(), excerpts=[tokens()[0]], surrogates=1)


def test_each_head_of_a_first_layer_is_as_if_all_were_edited_alike():
    """Nothing comes before the first layer: head 1 is that of a model whose heads are all
    edited, the others are those of the model as it is, in every number that a head has."""
    model = tiny("nanochat")
    plain, every, one = (profile(model, heads) for heads in (None, "0.*", "0.1"))
    heads = np.arange(plain.sizes["head"])
    compared = 0
    for key in plain.data_vars:
        own = one[key]
        if not {"head", "layer"} <= {*own.dims} or key == "excerpt_score_gradient":
            continue  # what comes of a score is told by later layers too
        every_one, as_it_is, own = (x[key].isel(layer=0) for x in (every, plain, one))
        if "draw" in own.dims:  # other draws are of orders by key, and keys are not as many
            every_one, as_it_is, own = (x.isel(draw=0) for x in (every_one, as_it_is, own))
        if key == "excerpt_query_still":  # not kept of a head that turns otherwise
            assert np.isnan(own.sel(head=1)).all()
            own, every_one = own.fillna(0), every_one * 0
        expected = xr.where(own["head"] == 1, every_one, as_it_is).transpose(*own.dims)
        np.testing.assert_allclose(own, expected, rtol=1e-4, atol=2e-5, err_msg=str(key))
        compared += 1
    assert compared > 20
    turns = one["head_wavelength"].sel(layer=0)
    assert np.isinf(turns[1, PLANES]).all()
    assert np.isfinite(turns[heads != 1][:, PLANES]).all()
    xr.testing.assert_allclose(one["wavelength"], plain["wavelength"])
    assert "head_wavelength" not in every
    table, expected = (
        rl.classify_heads(p, resamples=0).set_index(["layer", "head"]) for p in (one, every)
    )
    for column in ("mean_wavelength", "top_wavelength", "total_bits"):
        assert table[column][0, 1] == pytest.approx(expected[column][0, 1], rel=1e-4)


def test_what_heads_attend_to_and_pick_keys_through_is_what_a_capture_shows():
    """In every layer, whose input the edit changes. Selectivity by its definition."""
    model = tiny("llama_gqa")
    one = tokens()[:1]
    edits = (
        rl.stop(rl.PlaneNumbers(PLANES), heads="0.1,1.2"),
        rl.drop(rl.PlaneNumbers((0,)), heads="1.0"),
    )
    with rl.edit_rope(model, *edits):
        measured = rl.profile(model, one, excerpts=[one[0]], rows="all", budget=False)
        seen = rl.capture(model, one[0])
        with torch.no_grad():
            expected = model(one, output_attentions=True, use_cache=False).attentions
    shape = (measured.sizes["layer"], measured.sizes["head"])
    np.testing.assert_allclose(
        measured["excerpt_attention"][0], torch.cat(expected), rtol=0, atol=1e-5
    )
    visible = np.tril(np.ones((one.shape[1], one.shape[1])))
    even = visible / visible.sum(-1, keepdims=True)
    chosen = (seen["attention"].values - even)[:, None] * np.nan_to_num(seen["contribution"])
    selectivity = chosen[:, :, 1:].sum(-1).mean(-1).reshape(*shape, -1)
    np.testing.assert_allclose(measured["selectivity"], selectivity, rtol=0, atol=1e-5)
    still = seen["q_still"].values[..., 0] + 1j * seen["q_still"].values[..., 1]
    expected = np.abs(still.mean(1)).reshape(*shape, -1)
    mean = (measured["q_coherence"].fillna(0) * measured["q_norm"]).transpose(
        "layer", "head", ...
    )
    np.testing.assert_allclose(mean, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("measure", [rl.measure_rope, lambda model: rl.reach(model, tokens())])
def test_what_is_of_whole_layers_is_refused(measure):
    model = tiny("llama_gqa")
    edit = rl.stop(rl.PlaneNumbers(PLANES), heads="1.2")
    with rl.edit_rope(model, edit), pytest.raises(BadArgument) as refused:
        measure(model)
    assert refused.value.what == "Under this edit heads of one layer rotate differently."
    assert 'heads="3.*"' in refused.value.parts["try"]
