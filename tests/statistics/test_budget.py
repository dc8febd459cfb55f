"""The attention budget: bins of offsets, the fit against scipy, the split into bits."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.fit import Rows as TrueRows
from oracles.fit import fit
from oracles.tiny import random_tokens, tiny
from ropelens.statistics.split import split_bits
from torch import Tensor

import ropelens as rl
from ropelens.statistics.bins import offset_edges, sum_bins
from ropelens.statistics.budget import OffsetBins, Sight, fit_kernel

few = settings(deadline=None, max_examples=25, derandomize=True)
seeds = st.integers(0, 2**20)


def normal(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


# offsets and their bins


@few
@given(context=st.integers(1, 5000))
def test_bins_are_exact_then_eight_an_octave(context: int):
    edges = offset_edges(context)
    assert edges[:65].tolist() == list(range(65))
    assert edges[-1] >= context
    assert (edges.diff() > 0).all()
    width = edges.diff()[64:]
    assert (8 * width <= edges[64:-1]).all(), "at least eight an octave"
    assert (16 * width > edges[64:-1]).all()
    longest = offset_edges(5000)
    assert torch.equal(edges, longest[: len(edges)]), "results of two contexts add up"
    mass = normal(2, context, seed=context)
    binned = sum_bins(mass, edges)
    for place, (low, high) in enumerate(itertools.pairwise(edges.tolist())):
        torch.testing.assert_close(binned[:, place], mass[:, low:high].sum(1))


@few
@given(
    seed=seeds, context=st.sampled_from([3, 40, 90, 300]), window=st.sampled_from([2, 30, 999])
)
def test_sums_over_what_rows_see_by_brute_force(seed: int, context: int, window: int):
    start = (torch.arange(context) - window + 1).clamp_min(0)
    sight, edges = Sight.of(start), offset_edges(context)
    bins = OffsetBins(edges, sight)
    kernel, sink = normal(2, len(edges) - 1, seed=seed).exp(), normal(2, seed=seed).exp()
    values = normal(2, context, seed=seed + 1)
    counts = counted(start, edges)
    torch.testing.assert_close(sight.choices, counts.sum(1).long())
    torch.testing.assert_close(sight.sees_sink, start == 0)
    norms = kernel @ counts.T + sink[:, None] * (start == 0)
    torch.testing.assert_close(bins.norms(kernel, sink), norms)
    torch.testing.assert_close(bins.sums_over_rows(values), values @ counts)


def counted(start: Tensor, edges: Tensor) -> Tensor:
    """How many offsets of each bin each row sees at keys other than 0, [position, bin]."""
    counts = torch.zeros(len(start), len(edges) - 1, dtype=torch.float64)
    for i, first in enumerate(start.tolist()):
        for j in range(max(first, 1), i + 1):
            counts[i, int((edges <= i - j).sum()) - 1] += 1
    return counts


# the fit, against scipy


def mass_of(weights: Tensor) -> tuple[Tensor, Tensor]:
    """Mean attention [row, key] by offset (keys but 0) and on position 0, of rows from 1 on."""
    rows = len(weights) - 1
    by_offset = torch.zeros(len(weights), dtype=torch.float64)
    for i in range(1, len(weights)):
        by_offset[:i] += weights[i, 1 : i + 1].flip(0) / rows
    return by_offset, weights[1:, 0].sum() / rows


def random_attention(start: Tensor, *, seed: int, sharpness: float) -> Tensor:
    context = len(start)
    key = torch.arange(context)
    hidden = (key > key[:, None]) | (key < start[:, None])
    scores = sharpness * normal(context, context, seed=seed)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def at_key(start: Tensor, key: int, *, share: float) -> Tensor:
    """`share` of every row on one key (or the first one seen after it), the rest even."""
    weights = random_attention(start, seed=0, sharpness=0.0) * (1 - share)
    for i, first in enumerate(start.tolist()):
        weights[i, min(max(first, key), i)] += share
    return weights


FULL, WINDOW = 1000, 12
MASSES = {
    **{
        f"random {window} {sharpness} {context}": (
            window,
            context,
            lambda start, s=sharpness: random_attention(start, seed=1, sharpness=s),
        )
        for window in (FULL, WINDOW)
        for sharpness in (0.5, 3.0, 20.0)
        for context in (40, 150)
    },
    **{
        f"on key {key}, {share}, {window}, {context}": (
            window,
            context,
            lambda start, k=key, s=share: at_key(start, k, share=s),
        )
        for key, share in ((0, 0.99), (1, 0.5), (1, 0.99), (1, 0.999), (2, 0.9))
        for window, context in ((FULL, 40), (WINDOW, 40), (FULL, 200))
    },
    "diagonal": (FULL, 40, lambda start: torch.eye(40, dtype=torch.float64)),
}


@pytest.mark.parametrize("case", MASSES)
def test_the_fit_gains_what_scipys_gains(case: str):
    """Also where weights grow by orders of magnitude an offset: a head on position 1."""
    window, context, attend = MASSES[case]
    start = (torch.arange(context) - window + 1).clamp_min(0)
    edges = offset_edges(context)
    exact, sink = mass_of(attend(start))
    mass = sum_bins(exact, edges)
    weight = torch.ones(context, dtype=torch.float64)
    weight[0] = 0
    rows = context - 1
    sight = Sight.of(start)
    ours = fit_kernel(mass[None] * rows, sink[None] * rows, weight, sight, edges)
    likelihood = ours.log_likelihood(mass[None] * rows, sink[None] * rows, weight)
    gain = float(likelihood + weight @ sight.log_keys) / rows / math.log(2)

    counts = counted(start, edges)[1:]
    exactly = counted(start, torch.arange(context + 1))[1:]
    true = fit(
        mass.numpy(),
        float(sink),
        rows=TrueRows(
            exactly.numpy(), (start[1:] == 0).double().numpy(), np.full(rows, 1 / rows)
        ),
        bins=np.stack([edges[:-1], edges[1:]], axis=1),
    )
    assert abs(gain - true.gain) < (0.005 if "0.99" in case else 1e-5)
    assert (ours.kernel >= 0).all()
    assert torch.isfinite(ours.log_norm).all()
    total = ours.kernel @ edges.diff().double() + ours.sink
    torch.testing.assert_close(total, torch.ones_like(total))
    modelled = ours.kernel * (counts / ours.log_norm[:, 1:].exp().T).mean(0)
    if "0.99" not in case:
        torch.testing.assert_close(modelled[0], mass, rtol=0, atol=1e-5)


# the budget


@few
@given(seed=seeds)
def test_the_split_adds_up_and_never_goes_below_zero(seed: int):
    """For any gains that the models can have: nested, and at most what there is."""
    uniform = torch.from_numpy(np.random.default_rng(seed).uniform(size=(4, 50)))
    total = 5 * uniform[0]
    sink = total * uniform[1]
    position = (total - sink) * uniform[2]
    still = (total - sink) * (2 * uniform[3] - 1)
    parts = split_bits(total, sink, position, still)
    torch.testing.assert_close(sum(parts), total)
    assert torch.equal(parts[0], sink)
    for part in parts:
        assert (part >= -1e-12).all()
    # Never more than the models gained, and no less than what only the offset explains.
    only = total - sink - still.clamp(min=0)
    torch.testing.assert_close(parts[1], torch.minimum(position, only))


@pytest.mark.parametrize("name", ["llama_gqa", "gemma2", "gpt_oss", "smollm3"])
def test_bits_add_up_and_masses_to_one(name: str):
    tokens = torch.from_numpy(random_tokens(sequences=3, length=90))
    profile = rl.profile(tiny(name), tokens, lengths=torch.tensor([90, 40, 77]))
    parts = profile["sink_bits"] + profile["position_bits"] + profile["content_bits"]
    np.testing.assert_allclose(parts, profile["total_bits"], rtol=1e-9)
    for name in ("sink_bits", "position_bits", "content_bits"):
        assert float(profile[name].min()) > -1e-6
    mass = profile["offset_mass"].sum("offset_bin") + profile["sink_mass"]
    np.testing.assert_allclose(mass, 1, rtol=1e-6)
    width = profile["offset_stop"] - profile["offset_start"]
    kernel = (profile["kernel"] * width).sum("offset_bin") + profile["kernel_sink"]
    np.testing.assert_allclose(kernel, 1, rtol=1e-9)
    for name in ("q_coherence", "k_coherence"):
        assert float(profile[name].min()) >= 0
        assert float(profile[name].max()) <= 1 + 1e-6


def test_without_rotation_nothing_is_positional():
    """p = 0: what a head does without rotation is all that it does."""
    model = tiny("llama_gqa")
    model.model.rotary_emb.inv_freq.zero_()
    profile = rl.profile(model, torch.from_numpy(random_tokens(sequences=3, length=50)))
    rest = profile["total_bits"] - profile["sink_bits"]
    assert float(rest.min()) > 0.1
    np.testing.assert_allclose(profile["content_bits"], rest, atol=1e-5)
    np.testing.assert_allclose(profile["position_bits"], 0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama_gqa", "cohere", "gpt_neox", "nanochat"])
def test_of_one_token_the_predicted_kernel_is_the_score(name: str):
    """One token repeated: in layer 0 the mean query and key are every query and key."""
    profile = rl.profile(tiny(name), torch.full((2, 50), 7)).isel(layer=0)
    np.testing.assert_allclose(profile["q_coherence"], 1, atol=1e-5)
    np.testing.assert_allclose(profile["k_coherence"], 1, atol=1e-5)
    last_row = np.log(profile["excerpt_attention"].values[:, -1, ::-1])  # by offset
    predicted = profile["predicted_kernel"].values[:, :50]
    difference = last_row - predicted
    np.testing.assert_allclose(difference - difference[:, :1], 0, atol=1e-3)
    assert np.ptp(predicted, axis=1).min() > 0.5


def test_rows_of_nothing():
    """Two tokens have one row, that of position 1, and it sees no second offset."""
    tokens = torch.from_numpy(random_tokens(sequences=2, length=3))
    profile = rl.profile(tiny("llama_gqa"), tokens, lengths=torch.tensor([2, 2]))
    np.testing.assert_allclose(profile["offset_mass"][..., 0] + profile["sink_mass"], 1)
    assert np.isnan(profile["previous_token"]).all()
    np.testing.assert_allclose(profile["position_bits"], 0, atol=1e-6)  # both weights are free
