"""Profiles under edits that differ between heads."""

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
    edits = [] if heads is None else [rl.stop(rl.PlaneNumbers(PLANES), heads=heads)]
    with rl.edit_rope(model, *edits):
        return rl.profile(model, tokens(), excerpts=[tokens()[0]], surrogates=1)


def test_edits_of_other_heads_do_not_matter_in_the_first_layer():
    """Head 1 equals head 1 of a model with all heads edited, and others are unmodified."""
    model = tiny("nanochat")
    plain, full, single = (profile(model, heads) for heads in (None, "0.*", "0.1"))
    heads = np.arange(plain.sizes["head"])
    compared = 0
    for key in plain.data_vars:
        if not {"head", "layer"} <= {*single[key].dims} or key == "excerpt_score_gradient":
            continue  # effects of a score also depend on later layers
        x, full_x, plain_x = (p[key].isel(layer=0) for p in (single, full, plain))
        if "draw" in x.dims:  # draws depend on the number of keys
            x, full_x, plain_x = (part.isel(draw=0) for part in (x, full_x, plain_x))
        if key == "excerpt_query_still":  # not stored for heads with another rotation
            assert np.isnan(x.sel(head=1)).all()
            x, full_x = x.fillna(0), full_x * 0
        expected = xr.where(x["head"] == 1, full_x, plain_x).transpose(*x.dims)
        np.testing.assert_allclose(x, expected, rtol=1e-4, atol=2e-5, err_msg=str(key))
        compared += 1
    assert compared > 20
    turns = single["head_wavelength"].sel(layer=0)
    assert np.isinf(turns[1, PLANES]).all()
    assert np.isfinite(turns[heads != 1][:, PLANES]).all()
    xr.testing.assert_allclose(single["wavelength"], plain["wavelength"])
    assert "head_wavelength" not in full
    table, expected = (
        rl.classify_heads(p, resamples=0).set_index(["layer", "head"]) for p in (single, full)
    )
    for column in ("mean_wavelength", "top_wavelength", "total_bits"):
        assert table[column][0, 1] == pytest.approx(expected[column][0, 1], rel=1e-4)


def test_attention_and_selectivity_match_a_capture():
    model = tiny("llama_gqa")
    sequence = tokens()[:1]
    stop = rl.stop(rl.PlaneNumbers(PLANES), heads="0.1,1.2")
    with rl.edit_rope(model, stop, rl.drop(rl.PlaneNumbers((0,)), heads="1.0")):
        measured = rl.profile(model, sequence, excerpts=[sequence[0]], rows="all", budget=False)
        seen = rl.capture(model, sequence[0])
        with torch.no_grad():
            expected = model(sequence, output_attentions=True, use_cache=False).attentions
    shape = (measured.sizes["layer"], measured.sizes["head"])
    attention = measured["excerpt_attention"][0]
    np.testing.assert_allclose(attention, torch.cat(expected), rtol=0, atol=1e-5)
    visible = np.tril(np.ones((sequence.shape[1], sequence.shape[1])))
    even = visible / visible.sum(-1, keepdims=True)
    chosen = (seen["attention"].values - even)[:, None] * np.nan_to_num(seen["contribution"])
    selectivity = chosen[:, :, 1:].sum(-1).mean(-1).reshape(*shape, -1)
    np.testing.assert_allclose(measured["selectivity"], selectivity, rtol=0, atol=1e-5)
    still = seen["q_still"].values[..., 0] + 1j * seen["q_still"].values[..., 1]
    expected = np.abs(still.mean(1)).reshape(*shape, -1)
    mean = measured["q_coherence"].fillna(0) * measured["q_norm"]
    mean = mean.transpose("layer", "head", ...)
    np.testing.assert_allclose(mean, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("measure", [rl.measure_rope, lambda model: rl.reach(model, tokens())])
def test_measures_of_whole_layers_are_refused(measure):
    model = tiny("llama_gqa")
    edit = rl.stop(rl.PlaneNumbers(PLANES), heads="1.2")
    with rl.edit_rope(model, edit), pytest.raises(BadArgument) as refused:
        measure(model)
    assert refused.value.what == "Under this edit heads of one layer rotate differently."
    assert 'heads="3.*"' in refused.value.parts["try"]
