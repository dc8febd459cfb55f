"""Claims next to their originals, one rule of verdicts, and numbers by hand on small arrays."""

import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as hf
from oracles.tiny import COMMON, tiny
from planted import APOSTROPHES, Letters
from synthetic_profile import synthetic_profile

import ropelens as rl
from ropelens.budget.labels import Thresholds
from ropelens.claims import nulls, numbers
from ropelens.claims.arrays import claim_arrays, parts_by_kind, rotating_in
from ropelens.claims.attention_pass import read_attention
from ropelens.claims.claim import Floor
from ropelens.claims.claims import CLAIMS, OTHERS
from ropelens.claims.layers_of_kind import LayersOfKind, why_no_effect
from ropelens.claims.ledger import compare_settings, ledger
from ropelens.claims.stopped_heads import RUNS, _copies_found, distance_of_copies
from ropelens.claims.verdict import judge
from ropelens.profiles.measurement import Measurement
from ropelens.runtime.progress import silent

NAMED = {claim.name: claim for claim in CLAIMS}
TOKENS = torch.randint(3, 90, (4, 130), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMED)
def test_a_claim_states_its_original_its_floor_and_another_statistic(name: str):
    claim = NAMED[name]
    facts = claim.description()
    assert {fact for fact, words in facts.items() if not words} <= {
        "other",
        "floor_day",
    }
    assert facts["nearness"] in ("close", "conceptual")
    assert re.fullmatch(r"10\.48550/arXiv\.\d{4}\.\d{5}|not stated", facts["doi"])
    assert bool(facts["other"]) == (claim.other is not None)
    floors = (claim.floor.at_least, claim.floor.beyond)
    assert all(f"{x:g}" in facts["floor"] for x in floors if x > 0)
    assert re.fullmatch(
        "" if facts["floor"] == "none" else r"2026-11-\d\d", facts["floor_day"]
    )
    if name in ("previous_token", "diagonal"):
        assert claim.floor.at_least == Thresholds.offset


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("floor", [{}, {"at_least": 0.4}, {"beyond": 0.2}])
def test_a_verdict_follows_from_the_printed_numbers(sign: int, floor: dict[str, float]):
    random = np.random.default_rng(0)
    claim = replace(
        NAMED["apostrophes"], sign=sign, floor=Floor(what="", day="", **floor)
    )
    for draws in (40, 41, 79, 200):
        for number in random.normal(0, 1.2, 40).round(1):
            lead = np.append(number, random.normal(size=draws).round(1))[None, None]
            row = judge(claim, {"token_lead": lead}, random, 0)
            holds = row["verdict"] == "holds"
            assert holds == (sign * (row["number"] - row["threshold"]) > 1e-9)
            assert holds == (row["p_value"] <= 0.025)
            assert sign * row["threshold"] >= max(floor.values(), default=-np.inf)
            far = row["null_low"] if sign == 1 else row["null_high"]
            assert row["verdict"] != "contradicted" or sign * (row["number"] - far) < 0


def test_a_stop_of_planes_that_cannot_turn_within_the_text_is_not_testable():
    torch.manual_seed(0)
    shape = {"head_dim": 32, "rope_theta": 1e6, "max_position_embeddings": 256}
    model = hf.LlamaForCausalLM(
        hf.LlamaConfig(**COMMON | shape, initializer_range=0.3)
    ).eval()
    profile = rl.profile(model, TOKENS, surrogates=0)
    rows = rl.test_claims(profile, model=model, text=TOKENS, draws=50).set_index(
        "claim"
    )
    assert np.isfinite(rows.loc["slow_stop", "number"])
    assert rows.loc["slow_stop", ["verdict", "why"]].tolist() == [
        "not testable",
        "the stopped planes have wavelengths of 198,692 tokens or more, and turn by less than "
        "0.1 rad within the tested 130 tokens; a verdict needs 3,163 tokens",
    ]
    assert rows.loc["fast_stop", "verdict"] != "not testable"
    for claim in ("slow_induction", "slow_reach"):
        assert rows.loc[claim, "why"].startswith(
            "no head has an induction score of 0.3; the l"
        )
    assert not why_no_effect(np.array([[np.inf, 198_692.0]]), 3163)


FAR = (np.array([0.1, 0.2, np.nan, 0.3, 0.4]),)
REASONS = [
    (
        "slow_induction",
        (np.zeros((1, 41)), np.ones(1)),
        "no such stop changes the mean",
    ),
    ("slow_reach", (np.full(8, 0.004),), "the stop changes the share of copies"),
    (
        "sinks_slow",
        (np.full((2, 16), np.nan), np.eye(2, 16)),
        "sinks explain less than",
    ),
    ("sinks_slow", (np.ones((2, 16)), np.zeros((2, 16))), "every plane turns once in"),
    ("sinks_slow", (np.ones((2, 16)), np.ones((2, 16))), "no plane turns once in it"),
    ("flat_values", (*np.ones((2, 6)), np.full(6, np.nan)), "values have another size"),
    ("flat_values", tuple(np.ones((3, 6))), "queries, keys and values differ by less"),
    ("positional_early", FAR, "24 draws are possible; a verdict needs 5 layers whose"),
]


@pytest.mark.parametrize(("claim", "arrays", "reason"), REASONS)
def test_the_printed_reason_is_the_one_that_applies(claim, arrays, reason):
    named = dict(zip(NAMED[claim].arrays, arrays, strict=True))
    row = judge(NAMED[claim], named, np.random.default_rng(0), 100)
    assert (row["verdict"], row["why"][: len(reason)]) == ("not testable", reason)


def test_claims_are_tested_within_each_kind_of_layers():
    profile = synthetic_profile(layers=6)[0].assign_attrs(
        context=512, trained_context=4096
    )
    kinds = {"layer_type": ("layer", ["sliding", "sliding", "full"] * 2)}
    kinds["reach"] = ("layer", [64, 64, 4096] * 2)
    table = ledger(profile.assign_coords(kinds), draws=60)
    for claim, layers in table.groupby("claim")["layers"].agg(list).items():
        assert layers == (["sliding", "full"] if NAMED[claim].within_kind else ["all"])
    part = profile.isel(layer=[0, 1, 3, 4]).assign_attrs(context=64, trained_context=64)
    alone = ledger(part, draws=60).set_index("claim")["number"]
    numbers = table[table["layers"] == "sliding"].set_index("claim")["number"]
    pd.testing.assert_series_equal(numbers, alone[numbers.index])
    still = profile["wavelength"].where(profile["layer"] > 2, np.inf)
    kinds["layer_type"] = ("layer", ["none"] * 3 + ["sliding", "sliding", "full"])
    unrotated = profile.assign_coords(kinds).assign({"wavelength": still})
    assert [part.sizes["layer"] for part in parts_by_kind(unrotated).values()] == [2, 1]
    kinds = {"layer_type": ("layer", ["full"] * 6), "reach": ("layer", [64] * 6)}
    assert ledger(profile.assign_coords(kinds), draws=60).equals(
        ledger(profile, draws=60)
    )


def test_planes_stop_only_in_layers_of_the_kind():
    torch.manual_seed(0)
    shape = COMMON | {"head_dim": 32, "num_hidden_layers": 4, "sliding_window": 24}
    shape["layer_types"] = ["sliding_attention", "full_attention"] * 2
    config = hf.Gemma3TextConfig(**shape, initializer_range=0.3)
    model = hf.Gemma3ForCausalLM(config).eval()
    text = TOKENS[:, :48]
    profile = rl.profile(model, text, surrogates=0)
    table = rl.test_claims(profile, model=model, text=text, draws=50)
    rows = table.set_index(["claim", "layers"])
    for kind, heads in (("sliding", "0.*,2.*"), ("full", "1.*,3.*")):
        fastest = rl.stop(rl.PlaneNumbers([0, 1, 2, 3]), heads=heads)
        losses = rl.evaluate(model, text, edits={"fast": fastest}, measures=["loss"])[
            "loss"
        ]
        change = float((losses[1] - losses[0]).mean())
        assert rows.loc[("fast_stop", kind), "number"] == pytest.approx(
            change, abs=1e-6
        )
    assert "within the tested 48 tokens" in rows.loc[("slow_stop", "full"), "why"]


def test_robust_is_the_share_of_settings_with_the_verdict_of_the_main_setting():
    verdicts = {"a": ["holds", "contradicted"], "b": ["holds", "contradicted"]}
    verdicts["b, other"] = ["unresolved", "contradicted"]
    verdicts["c"] = ["holds", "holds"]
    names = {"claim": ["x", "y"], "layers": "all"}
    tables = {
        name: pd.DataFrame(names | {"verdict": v}) for name, v in verdicts.items()
    }
    every = pd.concat({**tables, "d": tables["b"][1:]}, names=["setting", None])
    table = compare_settings(every.reset_index("setting")).drop(columns=[*names])
    assert table.values.tolist() == [
        ["holds", 3 / 4, 4, "b, other: unresolved", False],
        ["contradicted", 4 / 5, 5, "c: holds", True],
    ]


def test_other_statistics_have_other_numbers():
    profile = synthetic_profile(layers=6)[0]
    table, others = [
        ledger(profile, draws=60, claims=claims) for claims in (CLAIMS, OTHERS)
    ]
    assert others["claim"].tolist() == [
        n for n in table["claim"] if NAMED[n].other is not None
    ]
    both = table.merge(others, on="claim", suffixes=("", "_other"))
    tested = both[both["verdict"] != "not testable"]
    assert tested["number_other"].notna().all()
    assert (tested["number"] != tested["number_other"]).mean() > 0.8


def judged(name: str, *arrays: np.ndarray) -> dict:
    claim = NAMED[name]
    given = dict(zip(claim.arrays, arrays, strict=True))
    return judge(claim, given, np.random.default_rng(0), 100)


def test_numbers_of_lengths_pushes_and_coherence():
    length = np.array([[4.0, 2, 1, 1], [1, 1, 2, 4], [1, 1, 1, 1]])
    assert numbers.slow_half(length) == pytest.approx((2 / 8 + 6 / 8 + 2 / 4) / 3)
    assert numbers.slow_half_of_all(length) == pytest.approx(10 / 20)
    unequal = np.array([[9.0, 0, 0, 1], [0, 0, 0, 2]])
    assert numbers.slow_half_of_all(unequal) == pytest.approx(3 / 12)
    by_layer = numbers.slow_half_of_all(unequal, by_layer=True)
    assert by_layer == pytest.approx((1 / 10 + 1) / 2)
    values = np.array([1.0, 3, 2, 4])
    assert numbers.rank_with_depth(values) == pytest.approx(0.8), "Spearman"
    assert numbers.rank_with_depth(values, kendall=True) == pytest.approx(4 / 6)
    assert math.isnan(numbers.slow_half(np.ones((3, 4))))
    assert numbers.fast_at_the_ends(length) == pytest.approx(
        (4 / 8 + 1 / 4) / 2 - 1 / 8
    )
    assert math.isnan(numbers.fast_at_the_ends(length[:2]))
    assert numbers.distance_to_band(length, np.array([1.0, 2.5, 0])) == pytest.approx(
        0.5
    )
    push = np.array([[1.0, 3]])
    slow = np.array([[0.0, 1]])
    assert numbers.push_of_long_planes(push, slow) == 0.75
    for same in (0 * slow, 0 * slow + 1):  # it needs slow and fast planes
        assert math.isnan(numbers.push_of_long_planes(push, same))
    push = np.array([[1.0, 3], [np.nan, np.nan]])
    slow = np.array([[0.0, 1], [0, 1]])
    assert not numbers.why_no_sinks(push, slow), "one layer without sinks"
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


@pytest.mark.parametrize("null", [nulls.OFFSETS, nulls.QUARTERS, nulls.ORDERS])
def test_nulls_in_a_fixed_order_have_the_stated_number_of_draws(null: nulls.Null):
    by_entry = np.arange(42.0).reshape(2, 3, 7)
    drawn = [first.tolist() for (first,) in null.draw((by_entry,), None, 0)]
    assert len(drawn) == null.possible(by_entry)
    assert by_entry.tolist() not in drawn


def test_layers_rotate_if_any_plane_does_and_planes_if_they_do_in_all_these_layers():
    profile = synthetic_profile(layers=3)[0]
    wavelength = profile["wavelength"].copy()
    wavelength[0, 2:] = wavelength[1] = np.inf
    profile = profile.assign_coords(wavelength=wavelength)
    rotating = rotating_in(profile)
    assert (rotating.layers.tolist(), rotating.planes.tolist()) == ([0, 2], [0, 1])
    in_any_layer = LayersOfKind(profile, every=True, seed=0).rotating
    assert in_any_layer.tolist() == profile["frequency"].values.tolist()


def test_copies_are_two_thirds_of_the_context_back_and_2048_tokens_at_most():
    assert [distance_of_copies(context) for context in (300, 8192)] == [200, 2048]


def test_copies_are_not_longer_than_their_distance():
    measurement = Measurement.of(tiny("llama_gqa"), TOKENS)
    found = _copies_found(measurement, "0.0", 10, None)
    near = rl.reach(
        measurement.live.model, TOKENS, heads="0.0", copied=10, copies=[10], draws=RUNS
    )
    np.testing.assert_array_equal(found, near["found_by_draw"])


def test_attention_is_not_read_if_heads_of_a_layer_rotate_differently():
    model = tiny("llama_gqa")
    with rl.edit_rope(model, rl.stop_slowest(0.5, heads="1.2")):
        measurement = Measurement.of(model, TOKENS)
        with pytest.raises(rl.BadArgument, match="heads of one layer rotate diff"):
            read_attention(measurement, Letters(), silent)


def test_too_few_different_draws_give_no_null():
    row = judged("slow_norms", np.array([[1.0, 2, 3]]))
    assert (row["verdict"], row["null_draws"]) == ("not testable", 0)
    assert row["why"] == "6 draws are possible; a verdict needs 8 planes or more"


@pytest.mark.parametrize(
    ("number", "missing", "verdict"),
    [
        (0.5, 1, "holds"),
        (0.5, 2, "not testable"),
        (0.06, 0, "holds"),
        (0.04, 0, "unresolved"),
    ],
)
def test_a_verdict_needs_39_draws_and_a_number_that_counts(number, missing, verdict):
    lead = np.linspace(-0.1, 0, 41)[None, None]
    lead[..., 0] = number
    lead[..., 1 : 1 + missing] = np.nan
    assert judged("apostrophes", lead)["verdict"] == verdict


def test_sinks_are_judged_if_they_explain_a_twentieth_of_the_bits():
    profile, _ = synthetic_profile(layers=3)
    for share, known in ((0.07, True), (0.04, False)):
        of_profile = claim_arrays(
            profile.assign(sink_bits=share * profile["total_bits"])
        )
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
    of_page = ledger(profile, draws=60)
    tested = rl.test_claims(profile, draws=60)
    pd.testing.assert_frame_equal(of_page, tested)
    assert not of_page.equals(rl.test_claims(profile, draws=60, seed=1))


def test_apostrophes_are_compared_with_words_that_are_equally_frequent():
    shuffled = torch.randperm(120, generator=torch.Generator().manual_seed(0))
    for counts, sets in (((9,), None), ((10,), 11), ((10, 1), 1)):
        tokens = torch.arange(120) % 11 + 40
        for token, count, first in zip(APOSTROPHES, counts, (10, 119), strict=False):
            tokens[first : first + 11 * count : 11] = token
        measurement = Measurement.of(tiny("llama_gqa"), tokens[shuffled].view(4, 30))
        read = read_attention(measurement, Letters(), silent).apostrophes
        lead = read.arrays["token_lead"]
        why = read.objections["apostrophes"]
        few = "9 tokens have an apostrophe; a verdict needs 10"
        assert why == (few if sets is None else "")
        assert np.isfinite(lead).all() == (sets is not None)
        assert sets in (None, lead.shape[-1])
