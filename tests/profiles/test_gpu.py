"""Results on a GPU equal the results on the CPU."""

import numpy as np
import pytest
import torch
import xarray as xr
from oracles.tiny import random_tokens, tiny

import ropelens as rl

no_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
pytestmark = [pytest.mark.gpu, no_device]


@pytest.mark.parametrize(("family", "rows"), [("gemma2", "all"), ("gpt_oss", 16), ("glm", 16)])
def test_profile_on_cuda_equals_cpu(family: str, rows: int | str):
    tokens = random_tokens(sequences=3, length=80)
    here = rl.profile(tiny(family), tokens, rows=rows)
    there = rl.profile(tiny(family).to("cuda"), tokens, rows=rows)
    names = ["q_norm", "k_norm", "selectivity", "offset_mass", "sink_mass", "total_bits"]
    assert_near(there[names], here[names])


def assert_near(there: xr.Dataset, here: xr.Dataset) -> None:
    for name, expected in here.data_vars.items():
        atol = 1e-3 * float(np.nanmax(np.abs(expected)))
        np.testing.assert_allclose(there[name], expected, atol=atol, err_msg=str(name))


def test_bfloat16_on_cuda_measures_and_stays_finite():
    model = tiny("llama_gqa").to("cuda", torch.bfloat16)
    profile = rl.profile(model, random_tokens(sequences=2, length=64))
    assert np.isfinite(profile["total_bits"].values).all()


@pytest.mark.parametrize("family", ["llama_gqa", "gpt_oss"])
def test_captures_and_silences_on_cuda_equal_cpu(family: str):
    tokens = random_tokens(sequences=2, length=40)
    results = []
    for device in ("cpu", "cuda"):
        model = tiny(family).to(device)
        for to in ("zero", "mean", "resample"):
            with rl.silence_heads(model, "0.1", to=to), torch.no_grad():
                model(tokens.to(device), use_cache=False)
        edit = rl.edit_rope(model, rl.stop(rl.PlaneNumbers([1]), heads="0.1"))
        with edit, rl.silence_heads(model, "0.2", to="mean", text=tokens):
            results.append(rl.capture(model, tokens[0], values=True))
    here, there = results
    assert_near(there, here)
