"""Numbers of claims, by hand on small arrays."""

import math

import numpy as np
import pandas as pd
import pytest
import torch
from oracles.tiny import tiny
from planted import APOSTROPHES, Letters
from synthetic_profile import synthetic_profile

import ropelens as rl
from ropelens.claims import nulls, numbers
from ropelens.claims.arrays import claim_arrays
from ropelens.claims.claim_runs import _token_lead
from ropelens.claims.claims import CLAIMS
from ropelens.claims.tables import ledger
from ropelens.claims.verdict import judge
from ropelens.profiles.measurement import Measurement

NAMED = {claim.name: claim for claim in CLAIMS}


def judged(name: str, *arrays: np.ndarray) -> dict:
    claim = NAMED[name]
    given = dict(zip(claim.arrays, arrays, strict=True))
    return judge(claim, given, np.random.default_rng(0), 100)


def test_numbers_of_lengths():
    length = np.array([[4.0, 2, 1, 1], [1, 1, 2, 4], [1, 1, 1, 1]])
    assert numbers.slow_half(length) == pytest.approx((2 / 8 + 6 / 8 + 2 / 4) / 3)
    assert numbers.slow_half_of_all(length) == pytest.approx(10 / 20)
    assert math.isnan(numbers.slow_half(np.ones((3, 4))))
    assert numbers.fast_at_the_ends(length) == pytest.approx((4 / 8 + 1 / 4) / 2 - 1 / 8)
    assert math.isnan(numbers.fast_at_the_ends(length[:2]))
    assert numbers.distance_to_band(length, np.array([1.0, 2.5, 0])) == pytest.approx(0.5)


def test_the_push_of_slow_planes_needs_fast_planes_as_well():
    push = np.array([[1.0, 3]])
    assert numbers.push_of_long_planes(push, np.array([[0.0, 1]])) == 0.75
    for slow in (np.zeros((1, 2)), np.ones((1, 2))):
        assert math.isnan(numbers.push_of_long_planes(push, slow))


def test_a_head_has_a_fixed_vector_if_its_longest_plane_is_coherent():
    coherence = np.array([[[0.96, 0.1], [0.96, 0.1]], [[0.1, 0.94], [0.1, 0.96]]])
    length = np.array([[[2.0, 1], [1, 2]], [[1, 2], [1, 2]]])
    assert numbers.fixed_in_longest(coherence, length) == 2 / 4


def test_small_changes_count_as_none():
    assert numbers.cost(np.array([[1.0, 0.3], [2, 0]]), np.array([10.0, 20])) == 0.1
    assert math.isnan(numbers.cost(np.array([[0.2, 0.2]]), np.array([30.0])))
    count = NAMED["decay"].count
    assert [count(np.array([x])) for x in (0.3, -0.3, 0.1, -0.1)] == [0.3, -0.3, 0, 0]
    assert NAMED["flat_values"].count(*np.array([[3.0], [1], [1.5]])) == 0.5
    assert NAMED["flat_values"].count(*np.array([[2.0], [1], [1.45]])) == 0


def test_other_pairs_of_layers_come_first_and_last_once():
    layers = np.arange(5)
    orders = [order.tolist() for (order,) in nulls.PAIRS.draw((layers,), None, 0)]
    assert all(sorted(order) == layers.tolist() for order in orders)
    ends = [(order[0], order[-1]) for order in orders]
    assert len(ends) == len({*ends}) == math.comb(5, 2) - 1
    assert (0, 4) not in ends


def test_too_few_different_draws_give_no_null():
    row = judged("slow_norms", np.array([[1.0, 2, 3]]))
    assert (row["verdict"], row["null_draws"]) == ("not testable", 0)
    assert row["why"] == "6 draws are possible; a verdict needs 8 planes or more"


@pytest.mark.parametrize(
    ("number", "missing", "verdict"),
    [(0.5, 1, "holds"), (0.5, 2, "not testable"), (0.06, 0, "holds"), (0.04, 0, "unresolved")],
)
def test_a_verdict_needs_39_draws_and_a_number_that_counts(number, missing, verdict):
    lead = np.linspace(-0.1, 0, 41)[None, None]
    lead[..., 0], lead[..., 1 : 1 + missing] = number, np.nan
    assert judged("apostrophes", lead)["verdict"] == verdict


def test_sinks_are_judged_if_they_explain_a_twentieth_of_the_bits():
    profile, _ = synthetic_profile(layers=3)
    for share, known in ((0.07, True), (0.04, False)):
        of_profile = claim_arrays(profile.assign(sink_bits=share * profile["total_bits"]))
        assert np.isfinite(of_profile["sink_push"]).all() == known


def test_unevenness_is_the_mean_over_the_heads_that_a_layer_has():
    profile, _ = synthetic_profile(layers=2, heads=3)
    q_norm = profile["q_norm"].copy()
    q_norm[0, 2] = np.nan
    q = [layer[:heads] for layer, heads in zip(q_norm.values, (2, 3), strict=True)]
    uneven = claim_arrays(profile.assign(q_norm=q_norm))["q_uneven"]
    np.testing.assert_allclose(uneven, [(x.std(-1) / x.mean(-1)).mean() for x in q])


def test_a_page_has_the_ledger_of_the_default_seed():
    profile, _ = synthetic_profile(layers=4)
    of_page, tested = ledger(profile, draws=60), rl.test_claims(profile, draws=60)
    pd.testing.assert_frame_equal(of_page, tested)
    assert not of_page.equals(rl.test_claims(profile, draws=60, seed=1))


def test_apostrophes_are_compared_with_words_that_are_equally_frequent():
    shuffled = torch.randperm(120, generator=torch.Generator().manual_seed(0))
    for counts, sets in (((9,), None), ((10,), 11), ((10, 1), 1)):
        tokens = torch.arange(120) % 11 + 40
        for token, count, first in zip(APOSTROPHES, counts, (10, 119), strict=False):
            tokens[first : first + 11 * count : 11] = token
        measurement = Measurement.of(tiny("llama_gqa"), tokens[shuffled].view(4, 30))
        lead, why = _token_lead(measurement, Letters())
        few = "9 tokens have an apostrophe; a verdict needs 10"
        assert why == (few if sets is None else "")
        assert np.isfinite(lead).all() == (sets is not None)
        assert sets in (None, lead.shape[-1])
