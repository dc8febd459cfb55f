"""Reach of heads, compared with loops over the rows of a run and with real distances."""

import itertools
import math

import numpy as np
import pytest
import torch
import xarray as xr
from oracles.recording import attention_calls
from oracles.tiny import TEN, random_tokens, tiny

import ropelens as rl
from ropelens.attention.call import AttentionCall
from ropelens.errors import BadArgument
from ropelens.interventions.reach import share_found, two_copies
from ropelens.model.as_live_model import as_live_model
from ropelens.profiles.measurement import Measurement
from ropelens.rotation.probe import RotationProbe

COPIED, TOKENS = 6, torch.arange(40)[None]


def scores_of(model, sequence: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    layers = []
    for call in attention_calls(model, sequence)[0]:
        keys = call.key.repeat_interleave(len(call.query) // len(call.key), dim=0)
        layers.append(((call.scale * call.query @ keys.mT).numpy(), call.visible.numpy()))
    return layers


@pytest.mark.parametrize("name", TEN)
def test_a_turned_key_scores_as_in_a_run_at_that_distance(name: str):
    """In layer 0, the key of a token does not depend on its position."""
    model, distance, farther = tiny(name), 7, 12
    live = as_live_model(model)
    rotation = RotationProbe(live)
    near = two_copies(Measurement.of(model, torch.arange(40)[None]), distance, COPIED, 0)
    far = torch.cat([near[:, : COPIED + 1], near.new_full((1, 5), 7), near[:, COPIED + 1 :]], 1)

    def see(call: AttentionCall) -> torch.Tensor:
        planes, further = rotation.planes()[call.layer], torch.tensor([distance, farther])
        call = call.of_heads(torch.arange(call.query.shape[1]))
        return share_found(call, planes, COPIED, distance, further.double())

    wins = live.record_calls(near, see)[0].numpy()
    (scores, visible), (real, _) = (scores_of(model, x[0])[0] for x in (near, far))
    expected = np.zeros((len(scores), 3))
    for head, row in np.ndindex(len(scores), COPIED - 1):
        i, right = near.shape[1] - COPIED + row, 2 + row
        best = max(scores[head, i, j] for j in range(1, i) if visible[i, j] and j != right)
        turned, near_score = real[head, i + farther - distance, right], scores[head, i, right]
        expected[head] += np.array([near_score, near_score, turned]) > best
    np.testing.assert_allclose(wins, expected / (COPIED - 1), atol=1e-9)
    assert expected.any()


@pytest.mark.parametrize(
    ("name", "copied"),
    [("llama_gqa", 48), ("gemma2", 48), ("gpt_oss", 48), ("phi", 48), ("llama_gqa", 3)],
)
def test_shares_of_found_copies_match_loops_over_a_run(name: str, copied: int):
    model, tokens = tiny(name), random_tokens(sequences=2, length=40)
    apart, draws = (48, 96), 2
    reach = rl.reach(model, tokens, copied=copied, copies=apart, draws=draws)
    assert reach.attrs["copied"] == copied
    measured = Measurement.of(model, tokens)
    shares = np.zeros((draws, *reach["found_share"].shape[1:]))
    for draw, (n, distance) in itertools.product(range(draws), enumerate(apart)):
        sequence = two_copies(measured, distance, copied, draw)[0]
        assert (sequence[1 : copied + 1] == sequence[-copied:]).all()
        assert len(sequence) == 1 + distance + copied
        for layer, (scores, visible) in enumerate(scores_of(model, sequence)):
            for head, row in np.ndindex(len(scores), copied - 1):
                i = len(sequence) - copied + row
                seen = [j for j in np.flatnonzero(visible[i]) if 0 < j < i]
                right = 2 + row
                hit = right in seen and right == max(seen, key=lambda j: scores[head, i, j])
                shares[draw, layer, head, n] += hit / (copied - 1)
    found_share = reach["found_share"].isel(variant=0)
    assert found_share.notnull().any()
    expected = np.where(found_share.isnull(), np.nan, shares.mean(0))
    np.testing.assert_allclose(found_share, expected, atol=1e-6)


def test_the_induction_head_finds_copies():
    model, _ = rl.load("bundled")
    text = torch.randint(5, model.config.vocab_size, (4, 100), generator=torch.manual_seed(0))
    reach = rl.reach(model, text, heads="4.4,2.0", variants=("own", "nope"))
    one_head = reach.sel(layer=4, head=4)
    own, nope = (one_head.sel(variant=name) for name in ("own", "nope"))
    assert (own["found_share"].sel(run_distance=[48, 96]) > 0.5).all()
    assert (own["found_low"] <= own["found_share"]).all()
    assert (reach["found_share"].sel(layer=2, head=0) < 0.1).all()
    assert (nope["found_share"] < 0.1).all()
    assert reach["found_share"].sel(layer=0).isnull().all()
    far = own["extrapolated_share"]
    assert (far["distance"] > reach["run_distance"].max()).all()
    assert (far[-8:] < own["found_share"].max()).all()
    foretold = own["foretold_share"].values
    assert math.isnan(foretold[0])
    assert (abs(foretold[1:] - own["found_share"][1:]) < 0.3).all()


def test_copies_must_be_in_the_context():
    model = tiny("llama_gqa")
    context = model.config.max_position_embeddings
    with pytest.raises(BadArgument, match="must lie in the context"):
        rl.reach(model, torch.arange(40)[None], copies=(context,))
    unmodified = rl.reach(model, torch.arange(40)[None], copies=(48,), draws=1, variants=[])
    assert unmodified["variant"].values.tolist() == ["own"]


def test_a_rotation_that_depends_on_the_length_is_taken_from_the_run():
    """Past 16 tokens, this rotation equals linear scaling with factor 4."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "attention_factor": 1.0}
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 1.0, **factors}
    long = {**rope, "original_max_position_embeddings": 16}
    linear = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
    models = [tiny("llama_gqa", rope_parameters=parameters) for parameters in (long, linear)]
    reach, expected = (rl.reach(x, TOKENS, copied=6, copies=(24, 48)) for x in models)
    xr.testing.assert_equal(reach, expected)
    assert reach["foretold_share"].sel(run_distance=48).any()
