"""The horizon of a curve, held to heads built by hand whose horizon is known, and to scipy."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
import pytest
import torch
import xarray as xr
from scipy.optimize import brentq
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

import ropelens as rl
from ropelens.rope.turn import horizons, lowest_scores, moved_scores

HEAD_DIM = 16
SLOW = range(2, 8)  # planes whose quarter turn is longer than the sequences of the tests
ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


# heads built by hand


def built(planes: Iterable[int]) -> LlamaForCausalLM:
    """A Llama of one layer, float64: every query looks for token 1, a head in each plane.

    Moved to distance d, token 1 scores 2 cos(w_f d); every other key is 0.
    """
    heads = len(tuple(planes))
    width = 8 * heads
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=width,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=heads,
        head_dim=HEAD_DIM,
        rope_parameters=ROPE,
        rms_norm_eps=1e-12,
    )
    with torch.random.fork_rng():
        model = LlamaForCausalLM(config).double().eval()
    query = torch.zeros(heads, HEAD_DIM, width, dtype=torch.float64)
    key = torch.zeros_like(query)
    for head, plane in enumerate(planes):
        query[head, plane, :8] = 2 * (HEAD_DIM / width) ** 0.5
        key[head, plane, 1] = 1 / width**0.5
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(8, width) * width**0.5)
        attention.q_proj.weight.copy_(query.flatten(0, 1))
        attention.k_proj.weight.copy_(key.flatten(0, 1))
    return model


def planted(sequences: int = 4, length: int = 8) -> torch.Tensor:
    """Sequences that hold token 1 once, at position 1 or 2."""
    tokens = 3 + torch.arange(sequences * length).view(sequences, length) % 5
    tokens[:, 0] = 0
    tokens[torch.arange(sequences), 1 + torch.arange(sequences) % 2] = 1
    return tokens


def inv_freq(model: PreTrainedModel) -> np.ndarray:
    return model.model.rotary_emb.inv_freq.double().numpy()


@pytest.fixture(scope="module")
def by_plane() -> tuple[LlamaForCausalLM, xr.Dataset]:
    """A head for each slow plane, in which its score stands alone."""
    model = built(SLOW)
    variants = ("own", "p-rope:0.75", "linear:4", "nope", "p-rope-reversed:0.75")
    return model, rl.reach(model, planted(), variants=variants, copies=(), rows="all")


def test_the_horizon_of_one_plane_is_a_quarter_of_its_wavelength(by_plane):
    model, found = by_plane
    expected = math.pi / (2 * inv_freq(model)[list(SLOW)])
    for variant, stretch in (("own", 1), ("linear:4", 4)):
        measured = found["horizon"].sel(variant=variant, layer=0)
        np.testing.assert_allclose(measured, stretch * expected, rtol=1e-9)


def test_a_stopped_plane_has_no_horizon_and_the_others_keep_theirs(by_plane):
    _, found = by_plane
    horizon = found["horizon"].sel(layer=0)
    stopped = np.array([plane >= 6 for plane in SLOW])  # int(0.75 * 16 // 2) = 6 turn
    truncated, plain = horizon.sel(variant="p-rope:0.75"), horizon.sel(variant="own")
    np.testing.assert_array_equal(np.isinf(truncated), stopped)
    np.testing.assert_array_equal(truncated[~stopped], plain[~stopped])
    reversed_ = horizon.sel(variant="p-rope-reversed:0.75")
    np.testing.assert_array_equal(reversed_, plain)  # planes 0 and 1 stand still
    assert np.isinf(horizon.sel(variant="nope")).all()
    certain = found["lowest_score"] > found["others_level"]
    np.testing.assert_array_equal(certain, np.isinf(found["horizon"]))
    score = found["moved_score"].sel(variant="nope", layer=0)
    np.testing.assert_allclose(score, np.broadcast_to(score[:, :1], score.shape))


# the curve itself


@pytest.mark.parametrize("within", [50, 700])
@pytest.mark.parametrize("seed", range(4))
def test_the_first_crossing_of_any_curve_is_found(seed: int, within: int):
    """Every whole distance one by one in numpy, then scipy's root of the token before."""
    random = np.random.default_rng(seed)
    w = 10_000.0 ** (-np.arange(6) / 6)
    w[4:] = 0.0
    curves, farthest = 40, 6000
    product = random.normal(size=(curves, 6)) + 1j * random.normal(size=(curves, 6))
    product[:, 4:] = product[:, 4:].real * 2
    level = random.normal(size=curves) * 2
    found = horizons(
        torch.from_numpy(product),
        torch.from_numpy(w),
        torch.from_numpy(level),
        within=within,
        farthest=farthest,
    )
    waves = np.exp(1j * np.outer(np.arange(farthest + 1), w))
    kinds = set()
    for c, at, measured in zip(product, level, found.tolist(), strict=True):

        def above(d: float, c: np.ndarray = c, at: float = at) -> float:
            return float((c * np.exp(1j * w * d)).sum().real - at)

        sign = (waves @ c).real > at
        falls = 1 + np.flatnonzero(sign[:-1] & ~sign[1:])
        if not sign[:within].any():
            assert measured == 0
            kinds.add("never above")
        elif not len(falls):
            assert measured == math.inf
            kinds.add("never below")
        else:
            assert measured == pytest.approx(brentq(above, falls[0] - 1, falls[0]), abs=1e-6)
            kinds.add("falls")
    assert kinds == {"never above", "never below", "falls"}


def test_no_distance_takes_a_score_below_its_lowest():
    w = torch.tensor([1.0, math.sqrt(0.5), 0.0], dtype=torch.float64)
    product = torch.tensor([[1 + 1j, 0.5 - 1j, 2 + 3j]], dtype=torch.complex128)
    score = moved_scores(product, w, torch.arange(200_000).double())
    lowest = lowest_scores(product, w)
    assert float(lowest) == pytest.approx(2 - math.sqrt(2) - math.sqrt(1.25))
    assert float(lowest) < float(score.min()) < float(lowest) + 1e-3
