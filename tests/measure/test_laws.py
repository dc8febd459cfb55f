"""Laws of a profile: what may change none of its numbers, and what adds up."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.tiny import _LONGROPE, _ROPE, random_tokens, tiny
from transformers import PreTrainedModel

import ropelens as rl
from ropelens.measure.batches import collect
from ropelens.measure.summary import summarize
from ropelens.models.rotation import read_layers
from ropelens.models.subject import as_subject
from ropelens.rope.planes import Planes
from ropelens.statistics import block
from ropelens.statistics.rows import sample_rows
from ropelens.statistics.sums import Sums


@pytest.mark.parametrize("factor", [0.0, 0.5, 3.0])
def test_norms_do_not_depend_on_the_rotation(factor: float):
    """Of layer 0, which sees the same hidden states however its heads turn."""
    tokens = torch.from_numpy(random_tokens(sequences=3, length=20))
    model = tiny("llama_gqa")
    before = rl.profile(model, tokens)
    model.model.rotary_emb.inv_freq *= factor
    after = rl.profile(model, tokens)
    for name in ("q_norm", "k_norm"):
        np.testing.assert_allclose(after[name][0], before[name][0], rtol=1e-5)
    # Coherence is that of vectors without their rotation, so of the same vectors.
    np.testing.assert_allclose(after["q_coherence"][0], before["q_coherence"][0], atol=1e-4)
    assert np.abs(after["selectivity"][0] - before["selectivity"][0]).max() > 0.01


# sums over sequences


def planes_of(model: PreTrainedModel, *, context: int | None = None) -> list[Planes]:
    return [layer.planes for layer in read_layers(as_subject(model), context=context)]


def assert_same(one: Sums, other: Sums, planes: list[Planes], *, rtol: float) -> None:
    """The profiles of both agree to `rtol` of each array's largest entry, or of one bit."""
    a, b = summarize(one, planes), summarize(other, planes)
    for name in a.variables:
        x, y = a[name].values, b[name].values
        least = 1.0 if a[name].attrs.get("units") == "bit" else 1e-2
        scale = np.abs(x[np.isfinite(x)]).max(initial=least)
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * scale, err_msg=name)
    assert a.attrs == pytest.approx(b.attrs, rel=rtol)


@pytest.mark.parametrize("name", ["llama_gqa", "gemma2", "gpt_oss", "gpt_neox"])
@pytest.mark.parametrize("rows", ["all", 7])
def test_two_halves_add_up_to_the_whole(name: str, rows: int | str):
    model = tiny(name).double()
    subject, planes = as_subject(model), planes_of(model)
    tokens = torch.from_numpy(random_tokens(sequences=5, length=30))
    lengths = torch.tensor([30, 30, 12, 30, 21])
    whole = collect(subject, tokens, lengths, planes=planes, rows=rows, batch_size=1)
    halves = [
        collect(
            subject,
            tokens[part],
            lengths[part],
            planes=planes,
            rows=rows,
            batch_size=1,
            first=first,
        )
        for part, first in ((slice(2), 0), (slice(2, 5), 2))
    ]
    assert_same(whole, halves[0] + halves[1], planes, rtol=1e-9)
    assert_same(whole, halves[1] + halves[0], planes, rtol=1e-9)


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_sliding"])
def test_halves_of_different_contexts_add(name: str):
    """70 tokens need a bin of several offsets, 20 do not."""
    model = tiny(name).double()
    subject, planes = as_subject(model), planes_of(model)
    tokens = torch.from_numpy(random_tokens(sequences=4, length=90))
    lengths = torch.tensor([90, 70, 20, 15])
    whole = collect(subject, tokens, lengths, planes=planes, batch_size=4)
    long = collect(subject, tokens[:2], lengths[:2], planes=planes)
    short = collect(subject, tokens[2:, :20], lengths[2:], planes=planes, first=2)
    assert len(short.layers[0].by_group["offset_mass"][0, 0]) < len(
        long.layers[0].by_group["offset_mass"][0, 0]
    )
    assert_same(whole, long + short, planes, rtol=1e-9)
    assert_same(whole, short + long, planes, rtol=1e-9)


@pytest.mark.parametrize("name", ["llama_gqa", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("rows", ["all", 20])
def test_blocks_change_nothing(name: str, rows: int | str, monkeypatch: pytest.MonkeyPatch):
    model = tiny(name)
    subject, planes = as_subject(model), planes_of(model)
    tokens = torch.from_numpy(random_tokens(sequences=3, length=70))
    lengths = torch.tensor([70, 33, 51])
    one = collect(subject, tokens, lengths, planes=planes, rows=rows)
    monkeypatch.setitem(block.BLOCK_ELEMENTS, "cpu", 1)
    many = collect(subject, tokens, lengths, planes=planes, rows=rows)
    assert_same(one, many, planes, rtol=1e-6)


@pytest.mark.parametrize("name", ["llama_gqa", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("rows", ["all", 6])
def test_batches_change_nothing(name: str, rows: int | str):
    model = tiny(name).double()
    subject, planes = as_subject(model), planes_of(model)
    tokens = torch.from_numpy(random_tokens(sequences=6, length=30))
    lengths = torch.tensor([30, 8, 2, 19, 30, 11])
    alone, some, all_ = (
        collect(subject, tokens, lengths, planes=planes, rows=rows, batch_size=size)
        for size in (1, 4, 6)
    )
    assert_same(alone, some, planes, rtol=1e-6)
    assert_same(alone, all_, planes, rtol=1e-6)


@pytest.mark.parametrize("name", ["llama_gqa", "gemma2", "mistral_sliding"])
def test_padding_changes_nothing(name: str):
    """Neither its tokens nor how much of it there is."""
    model = tiny(name).double()
    subject, planes = as_subject(model), planes_of(model)
    tokens = torch.from_numpy(random_tokens(sequences=3, length=40))
    lengths = torch.tensor([30, 8, 19])
    plain = collect(subject, tokens, lengths, planes=planes)
    rubbish = tokens.clone()
    for row, length in zip(rubbish, lengths, strict=True):
        row[length:] = 5
    assert_same(plain, collect(subject, rubbish, lengths, planes=planes), planes, rtol=1e-9)
    cut = collect(subject, tokens[:, :30], lengths, planes=planes)
    assert_same(plain, cut, planes, rtol=1e-9)
    assert plain.tokens == 57
    assert plain.row_weight.sum() == 54


LENGTH_DEPENDENT = {
    "llama_longrope": {**_ROPE, **_LONGROPE, "original_max_position_embeddings": 16},
    "llama_dynamic": {**_ROPE, "factor": 2.0},
}


@pytest.mark.parametrize("name", LENGTH_DEPENDENT)
def test_batches_change_nothing_where_rope_depends_on_the_length(name: str):
    """Short sequences run with the frequencies of the longest one, whoever is beside them."""
    rope = LENGTH_DEPENDENT[name] | {"rope_type": name.removeprefix("llama_")}
    model = tiny(name, rope_parameters=rope, max_position_embeddings=16).double()
    tokens = torch.from_numpy(random_tokens(sequences=3, length=50))
    lengths = torch.tensor([10, 40, 12])
    one, three = (
        rl.profile(model, tokens, lengths=lengths, batch_size=size) for size in (1, 3)
    )
    # `context` is how long the longest sequence is, not how wide the table of tokens.
    lengths_of = [planes_of(model, context=context)[0].inv_freq for context in (12, 40)]
    assert (lengths_of[0] - lengths_of[1]).abs().max() > 1e-3
    np.testing.assert_array_equal(one["inv_freq"][0], lengths_of[1])
    for variable in one.data_vars:
        if one[variable].dtype.kind == "f":
            np.testing.assert_allclose(one[variable], three[variable], atol=1e-6)
    model.model.rotary_emb(torch.zeros(1, 1, 64), torch.tensor([[400]]))
    again = rl.profile(model, tokens, lengths=lengths)
    np.testing.assert_allclose(again["q_coherence"], one["q_coherence"], atol=1e-6)


# sampled rows


@settings(deadline=None, max_examples=25, derandomize=True)
@given(
    lengths=st.lists(st.integers(2, 90), min_size=1, max_size=5),
    count=st.integers(1, 100),
    seed=st.integers(0, 2**20),
    first=st.integers(0, 1000),
)
def test_weights_of_sampled_rows_stand_for_all_rows(
    lengths: list[int], count: int, seed: int, first: int
):
    length = torch.tensor(lengths)
    rows = sample_rows(length, count=count, seed=seed, first=first)
    assert torch.equal(rows.weight.sum(1), length.float() - 1)
    assert (rows.position.diff() >= 0).all()
    for position, weight, own in zip(rows.position, rows.weight, lengths, strict=True):
        taken = position[weight > 0]
        assert len(taken) == min(count, own - 1)
        assert (taken.diff() > 0).all()
        assert taken[0] >= 1
        assert taken[-1] < own
    for sequence in range(len(lengths)):
        part = slice(sequence, sequence + 1)
        alone = sample_rows(length[part], count=count, seed=seed, first=first + sequence)
        both = rows.weight[part] > 0
        assert torch.equal(alone.position[both], rows.position[part][both])


def test_every_seed_and_every_sequence_draws_its_own_rows():
    seeds = [0, 1, 2, 2**32, 2**40 + 1, -1]
    length = torch.tensor([10_000, 10_000, 10_000])
    drawn = torch.cat([sample_rows(length, count=5, seed=seed).position for seed in seeds])
    assert len(drawn.unique(dim=0)) == 3 * len(seeds)


@pytest.mark.parametrize(("length", "count"), [(30, 7), (30, 1), (9, 8), (5, 40), (2, 3)])
def test_every_row_stands_for_itself_on_average(length: int, count: int):
    draws = 3000
    rows = sample_rows(torch.full((draws,), length), count=count, seed=1)
    mean = rows.by_position(length).mean(0)
    assert mean[0] == 0
    # A row of a stretch of n rows is drawn with 1/n and stands for n: variance n - 1.
    error = math.sqrt((math.ceil((length - 1) / count) - 1) / draws)
    assert (mean[1:] - 1).abs().max() <= 4.5 * error


@pytest.mark.parametrize("name", ["llama_gqa", "gemma2"])
def test_sampled_rows_agree_with_all_rows(name: str):
    """Over 24 seeds the mean lies within its standard error: no |z| beyond chance."""
    model = tiny(name).double()
    tokens = torch.from_numpy(random_tokens(sequences=4, length=60))
    lengths = torch.tensor([60, 44, 60, 23])
    whole = rl.profile(model, tokens, lengths=lengths)
    samples = [rl.profile(model, tokens, lengths=lengths, rows=8, seed=s) for s in range(24)]
    for variable in ("selectivity", "offset_mass", "sink_mass", "entropy_bits", "total_bits"):
        often = slice(0, 20)  # offsets that nearly every row sees
        values = np.stack([sample[variable].values[..., often] for sample in samples])
        error = values.std(0, ddof=1) / math.sqrt(len(samples))
        off = values.mean(0) - whole[variable].values[..., often]
        z = off[error > 0] / error[error > 0]
        assert not off[error == 0].any()
        assert np.abs(z).max() < 5, variable
        assert np.sqrt((z**2).mean()) < 2, variable
    assert np.abs(samples[0]["total_bits"] - samples[1]["total_bits"]).max() > 1e-4
    for exact in ("q_norm", "k_norm", "q_coherence", "offset_share"):
        np.testing.assert_allclose(samples[0][exact], whole[exact], atol=0.3)
    every = rl.profile(model, tokens, lengths=lengths, rows=59)
    for variable in ("selectivity", "offset_mass", "position_bits", "kernel"):
        np.testing.assert_allclose(every[variable], whole[variable], atol=1e-9)
