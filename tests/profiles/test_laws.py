"""Laws of a profile: invariances of its numbers, and sums that add up."""

import functools
import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import xarray as xr
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.tiny import _LONGROPE, _ROPE, random_tokens, tiny
from torch import Tensor
from transformers import PreTrainedModel

import ropelens as rl
from ropelens.attention import fast_products
from ropelens.attention.sums import Sums
from ropelens.budget.held_out import LayerFit
from ropelens.measured_rotation.probe import RotationProbe
from ropelens.model.as_live_model import as_live_model
from ropelens.profiles.layer_fits import LayerFitter
from ropelens.profiles.measurement import Measurement
from ropelens.profiles.passes import collect
from ropelens.profiles.summary import summarize
from ropelens.rope.planes import Planes
from ropelens.text.rows import sample_rows
from ropelens.text.text import Text


@dataclass(frozen=True)
class Fitted:
    model: PreTrainedModel
    text: Text
    planes: list[Planes]
    fits: list[LayerFit]

    def collect(
        self, part: slice = slice(None), *, width: int | None = None, **more
    ) -> Sums:
        """Sums over a part of the sequences, padded to `width`, with these fits."""
        if width is None:
            width = self.text.ids.shape[1]
        text = self.text.part(slice(None), width=width)
        live = as_live_model(self.model)
        probe = RotationProbe(live)
        measurement = Measurement(live, text, probe, **more)
        chosen = range(*part.indices(len(text)))
        return collect(measurement, self.planes, fits=self.fits, chosen=chosen)


@functools.cache
def fitted_to(name: str, lengths: tuple[int, ...], *, double: bool = True) -> Fitted:
    tokens = random_tokens(sequences=len(lengths), length=max(lengths))
    model = tiny(name)
    if double:
        model = model.double()
    return fitted(model, tokens, torch.tensor(lengths))


def fitted(model: PreTrainedModel, tokens: Tensor, lengths: Tensor) -> Fitted:
    planes = planes_of(model, context=int(lengths.max()))
    text = rl.Text(tokens, lengths=lengths)
    measurement = Measurement.of(model, text, sinks=[5])
    fits = LayerFitter(measurement, planes, surrogates=0).fit_layers()
    return Fitted(model, measurement.text, planes, fits)


def planes_of(model: PreTrainedModel, *, context: int | None = None) -> list[Planes]:
    probe = RotationProbe(as_live_model(model))
    return probe.planes(context)


def assert_same(first: Sums, other: Sums, case: Fitted, *, rtol: float) -> None:
    """Check that profiles agree to `rtol` of each largest entry (at least 1 bit)."""
    a = summarize(first, case.planes, case.fits)
    b = summarize(other, case.planes, case.fits)
    for name in a.variables:
        x = a[name].values
        y = b[name].values
        least = 1.0 if a[name].attrs.get("units") == "bit" else 1e-2
        scale = np.abs(x[np.isfinite(x)]).max(initial=least)
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * scale, err_msg=name)
    assert a.attrs == pytest.approx(b.attrs, rel=rtol)
    assert float(a["total_bits"].max()) > 0.5
    assert float(a["group_both_gain"].max()) > 0.1


@pytest.mark.parametrize(("name", "rows"), [("gpt_oss", 7), ("mistral_sliding", "all")])
def test_halves_of_different_contexts_add(name: str, rows: int | str):
    """70 tokens need a bin of several offsets, and 20 tokens do not."""
    case = fitted_to(name, (90, 70, 20, 15))
    total = case.collect(batch_size=4, rows=rows)
    long = case.collect(slice(2), rows=rows)
    short = case.collect(slice(2, 4), rows=rows)
    bins_of_short = short.layers[0].sums["offset_mass"].shape[-1]
    bins_of_long = long.layers[0].sums["offset_mass"].shape[-1]
    assert bins_of_short < bins_of_long
    assert_same(total, long + short, case, rtol=1e-6)
    assert_same(total, short + long, case, rtol=1e-6)


@pytest.mark.parametrize(("name", "rows"), [("gemma2", 20), ("gpt_oss", "all")])
def test_blocks_change_nothing(
    name: str, rows: int | str, monkeypatch: pytest.MonkeyPatch
):
    case = fitted_to(name, (70, 33, 51), double=False)
    first = case.collect(rows=rows)
    monkeypatch.setitem(fast_products.BLOCK_ELEMENTS, "cpu", 1)
    assert_same(first, case.collect(rows=rows), case, rtol=1e-5)


@pytest.mark.parametrize(("name", "rows"), [("gemma2", "all"), ("gpt_oss", 6)])
def test_batches_change_nothing(name: str, rows: int | str):
    case = fitted_to(name, (30, 8, 2, 19, 30, 11))
    single = case.collect(rows=rows, batch_size=1)
    several = case.collect(rows=rows, batch_size=4)
    all_ = case.collect(rows=rows, batch_size=6)
    assert_same(single, several, case, rtol=1e-6)
    assert_same(single, all_, case, rtol=1e-6)


@pytest.mark.parametrize("name", ["llama_gqa", "gemma2"])
def test_padding_changes_nothing(name: str):
    tokens = random_tokens(sequences=3, length=40)
    lengths = torch.tensor([30, 8, 19])
    rubbish = tokens.clone()
    for row, length in zip(rubbish, lengths, strict=True):
        row[length:] = 5
    model = tiny(name).double()
    case = fitted(model, tokens, lengths)
    plain = case.collect()
    assert_same(plain, case.collect(width=30), case, rtol=1e-9)
    again = fitted(model, rubbish[:, :34], lengths)
    assert case.text.fingerprint == again.text.fingerprint
    assert_same(plain, again.collect(), again, rtol=1e-6)
    assert plain.tokens == 57
    assert plain.row_weight.sum() == 54


def test_the_same_seed_gives_the_same_numbers_and_the_model_is_restored():
    model = tiny("gpt_oss")
    tokens = random_tokens(sequences=8, length=90)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        before = model(tokens, use_cache=False).logits
    first = rl.profile(model, tokens, seed=1, surrogates=1, rows=5)
    same = rl.profile(model, tokens, seed=1, surrogates=1, rows=5)
    other = rl.profile(model, tokens, seed=2, surrogates=1, rows=5)
    xr.testing.assert_equal(first, same)
    for name in ("selectivity", "group_both_gain", "surrogate_log_wavelength"):
        assert (first[name] != other[name]).any(), name
    with torch.no_grad():
        after = model(tokens, use_cache=False).logits
    assert torch.equal(before, after)
    for key, value in model.state_dict().items():
        assert torch.equal(value, weights[key]), key


LENGTH_DEPENDENT = {
    "llama_longrope": {**_ROPE, **_LONGROPE, "original_max_position_embeddings": 16},
    "llama_dynamic": {**_ROPE, "factor": 2.0},
}


@pytest.mark.filterwarnings("ignore:2 of 3 sequences are measured with the RoPE")
@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
def test_batches_change_nothing_if_rope_depends_on_the_length(name: str):
    """All sequences run with the frequencies of the longest sequence, in any batch."""
    rope = LENGTH_DEPENDENT[name] | {"rope_type": name.removeprefix("llama_")}
    model = tiny(name, rope_parameters=rope, max_position_embeddings=16).double()
    tokens = random_tokens(sequences=3, length=50)
    lengths = torch.tensor([10, 40, 12])
    # `context` is the length of the longest sequence, not the width of the ids.
    of_short = planes_of(model, context=12)[0].inv_freq
    of_longest = planes_of(model, context=40)[0].inv_freq
    assert (of_short - of_longest).abs().max() > 1e-3
    case = fitted(model, tokens, lengths)
    first = case.collect(batch_size=1)
    three = case.collect(batch_size=3)
    assert_same(first, three, case, rtol=1e-6)
    np.testing.assert_array_equal(case.planes[0].inv_freq, of_longest)
    model.model.rotary_emb(torch.zeros(1, 1, 64), torch.tensor([[400]]))
    again = fitted(model, tokens, lengths)  # probes the rotation again
    assert_same(first, again.collect(), again, rtol=1e-6)


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    lengths=st.lists(st.integers(2, 90), min_size=1, max_size=5),
    count=st.integers(1, 100),
    seed=st.integers(0, 2**20),
    first=st.integers(0, 1000),
)
def test_weights_of_sampled_rows_stand_for_all_rows(lengths, count, seed, first):
    length = torch.tensor(lengths)
    numbers = range(first, first + len(lengths))
    rows = sample_rows(length, count=count, seed=seed, numbers=numbers)
    assert torch.equal(rows.weight.sum(1), length.float() - 1)
    assert (rows.position.diff() >= 0).all()
    for position, weight, size in zip(rows.position, rows.weight, lengths, strict=True):
        sampled = position[weight > 0]
        assert len(sampled) == min(count, size - 1)
        assert (sampled.diff() > 0).all()
        assert sampled[0] >= 1
        assert sampled[-1] < size
    for sequence in range(len(lengths)):
        part = slice(sequence, sequence + 1)
        single = sample_rows(
            length[part], count=count, seed=seed, numbers=numbers[part]
        )
        expected = rows.position[part][rows.weight[part] > 0]
        positions = single.position[single.weight > 0]
        assert torch.equal(positions, expected)


SAMPLED = (
    "selectivity",
    "selectivity_keys",
    "offset_mass",
    "sink_mass",
    "entropy_bits",
)
OFTEN = slice(0, 20)  # offsets that almost all rows see


def assert_unbiased(samples: list[xr.Dataset], total: xr.Dataset, name: str) -> None:
    """Check that the mean of the samples is off by a few standard errors at most."""
    values = np.stack([sample[name].values[..., OFTEN] for sample in samples])
    error = values.std(0, ddof=1) / math.sqrt(len(samples))
    off = values.mean(0) - total[name].values[..., OFTEN]
    z = off[error > 0] / error[error > 0]
    assert not off[error == 0].any()
    assert np.abs(z).max() < 5, name
    assert np.sqrt((z**2).mean()) < 2, name


def test_sampled_rows_agree_with_all_rows():
    model = tiny("gemma2").double()
    tokens = random_tokens(sequences=4, length=60)
    of_all = Measurement.of(model, rl.Text(tokens, lengths=[60, 44, 60, 23]))
    planes = planes_of(model)

    def profile_of_rows(**options: int) -> xr.Dataset:
        measurement = replace(of_all, **options)
        sums = collect(measurement, planes)
        return summarize(sums, planes)

    total = profile_of_rows()
    samples = [profile_of_rows(rows=8, seed=seed) for seed in range(24)]
    for name in SAMPLED:
        assert_unbiased(samples, total, name)
    first = samples[0]
    difference = np.abs(first["entropy_bits"] - samples[1]["entropy_bits"])
    assert difference.max() > 1e-4
    for exact in ("q_norm", "k_norm", "q_coherence", "offset_share"):
        np.testing.assert_allclose(first[exact], total[exact], atol=0.3)
    all_rows = profile_of_rows(rows=59)
    for name in ("selectivity", "selectivity_keys", "offset_mass"):
        np.testing.assert_allclose(all_rows[name], total[name], atol=1e-9)


def test_the_sampled_rows_do_not_change_the_budget():
    tokens = random_tokens(sequences=4, length=40)
    model = tiny("llama_gqa")
    total = rl.profile(model, tokens, rows="all", surrogates=0)
    few = rl.profile(model, tokens, rows=3, surrogates=0)
    for name in ("total_bits", "position_bits", "group_both_gain", "offset"):
        np.testing.assert_array_equal(total[name], few[name], err_msg=name)
    assert (total["selectivity"] != few["selectivity"]).any()
