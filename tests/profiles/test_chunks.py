"""Profiles in chunks, on a GPU, and under edits that differ between heads."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import xarray as xr
from oracles.tiny import random_tokens, tiny
from small_measurements import assert_alike, token_progress
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)

import ropelens as rl
from ropelens.attention.call import AttentionCall
from ropelens.errors import BadArgument
from ropelens.interventions.measure_names import DEFAULT_MEASURES
from ropelens.model import live_model
from ropelens.model.as_live_model import as_live_model
from ropelens.profiles.measurement import Measurement
from ropelens.profiles.passes import collect
from ropelens.rope.planes import Planes, unrotate

CHUNK = 23
TOKENS = random_tokens(sequences=3, length=80)
LENGTHS = torch.tensor([80, 61, 80])


def profile(
    family: str, rows: int | str, heads: str | None
) -> tuple[xr.Dataset, list[int]]:
    """A profile, and the number of earlier tokens in every call of the first pass."""
    model = tiny(family)
    past = []
    progress = []
    edits = []
    if heads:
        edits.append(rl.stop(rl.PlaneNumbers([1]), heads=heads))

    def see(call: AttentionCall) -> None:
        if len(call.query) == 2:
            past.append(call.past)

    with rl.edit_rope(model, *edits), as_live_model(model).observe(see):
        text = rl.Text(TOKENS, lengths=LENGTHS)
        shown = token_progress(progress.append)
        result = rl.profile(
            model,
            text,
            progress=shown,
            rows=rows,
            surrogates=2,
            batch_size=len(TOKENS),
        )
    assert sum(progress) == LENGTHS.sum()
    return result, past


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("family", "rows", "heads"),
    [
        ("llama_gqa", 16, None),
        ("llama_gqa", "all", "0.1"),  # heads of a group differ
        ("gemma2", 16, None),  # a sliding window, a soft-cap
        ("gpt_oss", "all", None),  # sink logits
    ],
)
def test_chunks_give_the_numbers_of_one_pass(family, rows, heads, monkeypatch):
    expected, past = profile(family, rows, heads)
    assert set(past) == {0}
    monkeypatch.setattr(live_model, "ONE_PASS", CHUNK)
    result, past = profile(family, rows, heads)
    assert set(past) == {0, 23, 46, 69}
    assert result.attrs["loss"] == pytest.approx(expected.attrs["loss"], rel=1e-6)
    assert_alike(result, expected)


def test_edits_are_evaluated_in_chunks_as_in_one_pass(monkeypatch: pytest.MonkeyPatch):
    model = tiny("gemma2")
    sizes = set()
    text = rl.Text(TOKENS, lengths=LENGTHS)
    stop = rl.stop(rl.PlaneNumbers([1]), heads="0.1")

    def see(call: AttentionCall) -> None:
        sizes.add(call.query.shape[2])

    def evaluate() -> xr.Dataset:
        sizes.clear()
        with as_live_model(model).observe(see):
            return rl.evaluate(
                model,
                text,
                edits={"head": stop, "none turns": "nope"},
                measures=(*DEFAULT_MEASURES, "copying"),
                rows=16,
                prompt_lengths=[60],
                distances=[30],
            )

    expected = evaluate()
    assert max(sizes - {1 + 2 * 64}) == 80  # without the repeated tokens
    monkeypatch.setattr(live_model, "ONE_PASS", CHUNK)
    result = evaluate()
    assert max(sizes) == CHUNK
    assert_alike(result, expected)


def test_only_the_rows_of_an_earlier_chunk_stay_in_memory(
    monkeypatch: pytest.MonkeyPatch,
):
    """Keys share one buffer, because views would keep earlier tensors of a growing cache."""
    monkeypatch.setattr(live_model, "ONE_PASS", CHUNK)
    live = as_live_model(tiny("llama_gqa"))
    earlier: dict[int, list[StorageWeakRef]] = {}  # rows of earlier chunks, by layer
    buffers: dict[int, set[tuple[int, int]]] = {}  # addresses of keys and values
    still_in_memory = []

    def see(call: AttentionCall) -> None:
        if call.past == 0:  # the first chunk of a pass
            earlier[call.layer] = []
            buffers[call.layer] = set()
        for storage in earlier[call.layer]:
            still_in_memory.append(not storage.expired())
        for rows in (call.query, call.output):
            earlier[call.layer].append(StorageWeakRef(rows.untyped_storage()))
        key_buffer = call.key.untyped_storage().data_ptr()
        value_buffer = call.value.untyped_storage().data_ptr()
        buffers[call.layer].add((key_buffer, value_buffer))

    measurement = Measurement.of(live, TOKENS, rows=16, batch_size=len(TOKENS))
    planes = measurement.rotation.planes(80)
    with live.observe(see):
        collect(measurement, planes)
    chunks = 4
    assert len(earlier[0]) == 2 * chunks, "queries and outputs"
    assert not any(still_in_memory)
    for of_layer in buffers.values():
        assert len(of_layer) == 1, "all chunks share one buffer"


def test_models_without_chunks_run_in_one_pass(monkeypatch: pytest.MonkeyPatch):
    plain = as_live_model(tiny("llama_gqa"))
    assert plain.chunk_length(2**16) is None
    assert plain.chunk_length(2**17) == 256  # keeps the mask of rows and keys small
    assert as_live_model(tiny("llama_dynamic")).chunk_length(2**17) is None


def test_a_rotation_is_undone_with_the_rounded_angles_of_the_model():
    """Angles of 131,072 rad have steps of 0.008 in float32, and this rounding cancels."""
    config = LlamaConfig(hidden_size=128, num_attention_heads=2)
    rotary = LlamaRotaryEmbedding(config)
    planes = Planes(rotary.inv_freq, 64, "half")
    positions = torch.arange(2**17 - 256, 2**17)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, 2, 256, 64, generator=generator)
    cos, sin = rotary(x, positions[None])
    turned, _ = apply_rotary_pos_emb(x, x, cos, sin)
    undone = unrotate(turned, positions, planes)
    torch.testing.assert_close(undone, x, rtol=0, atol=2e-6)
    with_exact_angles = turn_back(turned, positions, rotary.inv_freq)
    assert (with_exact_angles - x).abs().max() > 1e-3


def turn_back(turned: Tensor, positions: Tensor, inv_freq: Tensor) -> Tensor:
    """Undo the rotation with angles in float64."""
    angle = positions.double()[:, None] * inv_freq.double()
    real, imaginary = turned.double().chunk(2, dim=-1)
    backward = torch.polar(torch.ones_like(angle), -angle)
    still = torch.complex(real, imaginary) * backward
    return torch.cat([still.real, still.imag], dim=-1)


no_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def on_gpu(test: Callable) -> Callable:
    return pytest.mark.gpu(no_device(test))


@on_gpu
@pytest.mark.parametrize(
    ("family", "rows"), [("gemma2", "all"), ("gpt_oss", 16), ("glm", 16)]
)
def test_profile_on_cuda_equals_cpu(family: str, rows: int | str):
    tokens = random_tokens(sequences=3, length=80)
    here = rl.profile(tiny(family), tokens, rows=rows)
    there = rl.profile(tiny(family).to("cuda"), tokens, rows=rows)
    names = [
        "q_norm",
        "k_norm",
        "selectivity",
        "offset_mass",
        "sink_mass",
        "total_bits",
    ]
    assert_near(there[names], here[names])


def assert_near(there: xr.Dataset, here: xr.Dataset) -> None:
    for name, expected in here.data_vars.items():
        atol = 1e-3 * float(np.nanmax(np.abs(expected)))
        np.testing.assert_allclose(there[name], expected, atol=atol, err_msg=str(name))


@on_gpu
def test_bfloat16_on_cuda_measures_and_stays_finite():
    model = tiny("llama_gqa").to("cuda", torch.bfloat16)
    profile = rl.profile(model, random_tokens(sequences=2, length=64))
    assert np.isfinite(profile["total_bits"].values).all()


@on_gpu
@pytest.mark.parametrize("family", ["llama_gqa", "gpt_oss"])
def test_captures_and_silences_on_cuda_equal_cpu(family: str):
    tokens = random_tokens(sequences=2, length=40)
    results = []
    for device in ("cpu", "cuda"):
        model = tiny(family).to(device)
        for to in ("zero", "mean", "resample"):
            with rl.silence_heads(model, "0.1", to=to), torch.no_grad():
                model(tokens.to(device), use_cache=False)
        stop = rl.stop(rl.PlaneNumbers([1]), heads="0.1")
        edit = rl.edit_rope(model, stop)
        with edit, rl.silence_heads(model, "0.2", to="mean", text=tokens):
            results.append(rl.capture(model, tokens[0], values=True))
    here, there = results
    assert_near(there, here)


PLANES = [1, 2]

FOUR = random_tokens(sequences=4, length=24)


def edited_profile(model: PreTrainedModel, heads: str | None) -> xr.Dataset:
    edits = []
    if heads is not None:
        edits.append(rl.stop(rl.PlaneNumbers(PLANES), heads=heads))
    with rl.edit_rope(model, *edits):
        return rl.profile(model, FOUR, excerpts=[FOUR[0]], surrogates=1)


def first_layer(values: xr.DataArray) -> xr.DataArray:
    """Values of the first layer, without draws: draws depend on the number of keys."""
    of_layer = values.isel(layer=0)
    return of_layer.isel(draw=0, missing_dims="ignore")


def assert_first_layers_agree(
    single: xr.Dataset, full: xr.Dataset, plain: xr.Dataset, name: str
) -> None:
    """Check that head 0.1 is as if all heads were edited, and other heads as if none was."""
    x = first_layer(single[name])
    full_x = first_layer(full[name])
    plain_x = first_layer(plain[name])
    if name == "excerpt_query_still":  # not stored for heads with another rotation
        assert np.isnan(x.sel(head=1)).all()
        x = x.fillna(0)
        full_x = full_x * 0
    expected = xr.where(x["head"] == 1, full_x, plain_x).transpose(*x.dims)
    np.testing.assert_allclose(x, expected, rtol=1e-4, atol=2e-5, err_msg=name)


def test_edits_of_other_heads_do_not_matter_in_the_first_layer():
    model = tiny("nanochat")
    plain = edited_profile(model, None)
    full = edited_profile(model, "0.*")
    single = edited_profile(model, "0.1")
    compared = 0
    for name in plain.data_vars:
        if name == "excerpt_score_gradient":
            continue  # effects of a score also depend on later layers
        if {"head", "layer"} <= set(single[name].dims):
            assert_first_layers_agree(single, full, plain, str(name))
            compared += 1
    assert compared > 20
    turns = single["head_wavelength"].sel(layer=0)
    others = np.arange(plain.sizes["head"]) != 1
    assert np.isinf(turns[1, PLANES]).all()
    assert np.isfinite(turns[others][:, PLANES]).all()
    xr.testing.assert_allclose(single["wavelength"], plain["wavelength"])
    assert "head_wavelength" not in full
    table = rl.classify_heads(single, resamples=0).set_index(["layer", "head"])
    of_full = rl.classify_heads(full, resamples=0).set_index(["layer", "head"])
    for column in ("mean_wavelength", "top_wavelength", "total_bits"):
        expected = of_full[column][0, 1]
        assert table[column][0, 1] == pytest.approx(expected, rel=1e-4)


def selectivity_of(seen: xr.Dataset) -> np.ndarray:
    """Mean over rows of the contributions, weighted by attention less even attention."""
    attention = seen["attention"].values
    visible = np.tril(np.ones(attention.shape[1:]))
    even = visible / visible.sum(-1, keepdims=True)
    contribution = np.nan_to_num(seen["contribution"])
    chosen = (attention - even)[:, None] * contribution
    return chosen[:, :, 1:].sum(-1).mean(-1)


def test_attention_and_selectivity_match_a_capture():
    model = tiny("llama_gqa")
    sequence = FOUR[:1]
    stop = rl.stop(rl.PlaneNumbers(PLANES), heads="0.1,1.2")
    drop = rl.drop(rl.PlaneNumbers((0,)), heads="1.0")
    with rl.edit_rope(model, stop, drop):
        measured = rl.profile(
            model, sequence, excerpts=[sequence[0]], rows="all", budget=False
        )
        seen = rl.capture(model, sequence[0])
        with torch.no_grad():
            result = model(sequence, output_attentions=True, use_cache=False)
    attention = measured["excerpt_attention"][0]
    expected = torch.cat(result.attentions)
    np.testing.assert_allclose(attention, expected, rtol=0, atol=1e-5)
    shape = (measured.sizes["layer"], measured.sizes["head"])
    expected = selectivity_of(seen).reshape(*shape, -1)
    np.testing.assert_allclose(measured["selectivity"], expected, rtol=0, atol=1e-5)
    q_still = seen["q_still"].values
    vectors = q_still[..., 0] + 1j * q_still[..., 1]
    expected = np.abs(vectors.mean(1)).reshape(*shape, -1)
    mean = measured["q_coherence"].fillna(0) * measured["q_norm"]
    mean = mean.transpose("layer", "head", ...)
    np.testing.assert_allclose(mean, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "measure", [rl.measure_rope, lambda model: rl.reach(model, FOUR)]
)
def test_measures_of_whole_layers_are_refused(measure):
    model = tiny("llama_gqa")
    edit = rl.stop(rl.PlaneNumbers(PLANES), heads="1.2")
    with rl.edit_rope(model, edit), pytest.raises(BadArgument) as refused:
        measure(model)
    assert (
        refused.value.what == "Under this edit heads of one layer rotate differently."
    )
    assert 'heads="3.*"' in refused.value.parts["try"]
