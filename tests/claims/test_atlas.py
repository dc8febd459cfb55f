"""Claims next to their originals, one rule of verdicts, and numbers by hand on small arrays."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
import transformers as hf
import xarray as xr
from oracles.tiny import COMMON, tiny
from planted import APOSTROPHES, Letters
from synthetic_profile import synthetic_profile

import ropelens as rl
from ropelens.budget.labels import Thresholds
from ropelens.claims import nulls, numbers
from ropelens.claims.arrays import claim_arrays, parts_by_kind, rotating_in
from ropelens.claims.attention_pass import read_attention
from ropelens.claims.claim import Floor
from ropelens.claims.claim_runs import count_induction_tokens
from ropelens.claims.claims import CLAIMS, OTHERS
from ropelens.claims.far_copies import far_induction
from ropelens.claims.layers_of_kind import LayersOfKind, why_no_effect
from ropelens.claims.ledger import compare_settings, ledger
from ropelens.claims.run_arrays import RunArrays
from ropelens.claims.stopped_heads import (
    RUNS,
    _copies_found,
    distance_of_copies,
    induction_arrays,
)
from ropelens.claims.verdict import judge
from ropelens.interventions.plane_edits import Edit
from ropelens.interventions.reach import two_copies
from ropelens.profiles.measurement import Measurement
from ropelens.runtime.progress import silent

NAMED = {claim.name: claim for claim in CLAIMS}
TOKENS = torch.randint(3, 90, size=(4, 130), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", NAMED)
def test_a_claim_states_its_original_its_floor_and_another_statistic(name: str):
    claim = NAMED[name]
    description = claim.description()
    empty = {column for column, words in description.items() if not words}
    assert empty <= {"other", "floor_day"}
    assert description["nearness"] in ("close", "conceptual")
    doi = r"10\.48550/arXiv\.\d{4}\.\d{5}"
    assert re.fullmatch(f"{doi}|not stated", description["doi"])
    assert bool(description["other"]) == (claim.other is not None)
    for floor in (claim.floor.at_least, claim.floor.beyond):
        if floor > 0:
            assert f"{floor:g}" in description["floor"]
    if description["floor"] == "none":
        assert description["floor_day"] == ""
    else:
        assert re.fullmatch(r"2026-11-\d\d", description["floor_day"])
    if name in ("previous_token", "diagonal"):
        assert claim.floor.at_least == Thresholds.offset


FLOORS = [
    Floor(what="", day=""),
    Floor(what="", day="", at_least=0.4),
    Floor(what="", day="", beyond=0.2),
]


def assert_verdict_follows(row: dict, *, sign: int, floor: Floor) -> None:
    """The verdict and the threshold follow from the numbers of a row of the ledger."""
    holds = row["verdict"] == "holds"
    beyond = sign * (row["number"] - row["threshold"])
    assert holds == (beyond > 1e-9)
    assert holds == (row["p_value"] <= 0.025)
    least = max(floor.at_least, floor.beyond)
    assert sign * row["threshold"] >= least
    if row["verdict"] == "contradicted":
        opposite = row["null_low"] if sign == 1 else row["null_high"]
        assert sign * (row["number"] - opposite) < 0


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("floor", FLOORS)
def test_a_verdict_follows_from_the_printed_numbers(sign: int, floor: Floor):
    random = np.random.default_rng(0)
    claim = replace(NAMED["apostrophes"], sign=sign, floor=floor)
    for draws in (40, 41, 79, 200):
        for number in random.normal(0, 1.2, 40).round(1):
            of_null = random.normal(size=draws).round(1)
            lead = np.append(number, of_null)[None, None]
            row = judge(claim, {"token_lead": lead}, random, 0)
            assert_verdict_follows(row, sign=sign, floor=floor)


FAR = 335  # 0.1 * 50,000 ** 0.75: the fastest slow plane of 16 turns by 0.1 rad


@pytest.fixture(scope="module")
def slow_model() -> hf.LlamaForCausalLM:
    return with_base(50_000, context=512, attn_implementation="eager")


def test_induction_on_far_copies_is_the_attention_of_transformers(slow_model):
    measurement = Measurement.of(slow_model, TOKENS, seed=0)
    edit = rl.stop_slowest(0.25)
    scores = far_induction(measurement, {"slow": edit}, FAR, None)
    copies = [two_copies(measurement, FAR, 48, draw) for draw in range(2)]
    tokens = torch.cat(copies)
    last = tokens.shape[1] - 1
    rows = torch.arange(last - 47, last)
    for edits, score in zip([[], [edit]], scores, strict=True):
        with rl.edit_rope(slow_model, *edits), torch.no_grad():
            attention = slow_model(tokens, output_attentions=True).attentions
        of_layers = [layer[:, :, rows, rows - FAR + 1] for layer in attention]
        expected = torch.stack(of_layers).mean((1, 3))
        np.testing.assert_allclose(score, expected, atol=1e-6)
    assert abs(scores[1] - scores[0]).max() > 1e-4


def test_a_plan_counts_the_tokens_between_far_copies(slow_model):
    stops = 42  # none, the slowest planes, and 40 random sets
    near = stops * 8 * 129
    far = stops * 2 * (1 + FAR + 48)
    assert count_induction_tokens(slow_model.config, 0, 512) == near + far
    too_short = FAR + 48
    assert count_induction_tokens(slow_model.config, 0, too_short) == 2 * near


@pytest.mark.thorough
def test_slow_planes_are_tested_on_copies_so_far_apart_that_they_turn(slow_model):
    profile = rl.profile(slow_model, TOKENS, surrogates=0)
    profile["induction"][:] = 1
    kind = LayersOfKind(profile, every=True, seed=0)
    measurement = Measurement.of(slow_model, TOKENS, seed=0)
    read = []
    hook = slow_model.model.embed_tokens.register_forward_hook(
        lambda _module, inputs, _output: read.append(inputs[0].numel())
    )
    runs = induction_arrays(kind, measurement, silent)
    hook.remove()
    assert runs.objections["slow_induction"] == ""
    copies = 2 * RUNS * (1 + distance_of_copies(512) + 48)
    planned = count_induction_tokens(slow_model.config, 0, 512) + copies
    assert sum(read) == planned
    expected = far_induction(
        measurement,
        {"slow": rl.stop_slowest(0.25)},
        FAR,
        None,
    ).mean((1, 2))
    lost = runs.arrays["induction_lost"]
    assert lost.shape == (1, 41)
    np.testing.assert_allclose(lost[0, 0], expected[0] - expected[1], atol=1e-9)


def common(**changes: Any) -> dict[str, Any]:
    """Arguments of a small configuration, with changes."""
    return COMMON | changes


def with_base(base: float, *, context: int, **changes: Any) -> hf.LlamaForCausalLM:
    """A small model with 16 planes and a large base, whose slow planes hardly turn."""
    torch.manual_seed(0)
    arguments = common(
        head_dim=32,
        rope_theta=base,
        max_position_embeddings=context,
        initializer_range=0.3,
        **changes,
    )
    return hf.LlamaForCausalLM(hf.LlamaConfig(**arguments)).eval()


def test_a_stop_of_planes_that_cannot_turn_within_the_text_is_not_testable():
    model = with_base(1e6, context=256)
    profile = rl.profile(model, TOKENS, surrogates=0)
    table = rl.test_claims(profile, model=model, text=TOKENS, draws=50)
    table = table.set_index("claim")
    slow_stop = table.loc["slow_stop"]
    assert np.isfinite(slow_stop["number"])
    assert slow_stop["verdict"] == "not testable"
    assert slow_stop["why"] == (
        "the stopped planes have wavelengths of 198,692 tokens or more, and turn by less than "
        "0.1 rad within the tested 130 tokens; a verdict needs 3,163 tokens"
    )
    assert table.loc["fast_stop", "verdict"] != "not testable"
    no_induction = "no head has an induction score of 0.3; the l"
    assert table.loc["slow_induction", "why"].startswith(no_induction)
    assert table.loc["slow_reach", "why"].startswith(no_induction)
    wavelength = np.array([[np.inf, 198_692.0]])
    assert not why_no_effect(wavelength, 3163)


def judged(name: str, *arrays: np.ndarray) -> dict:
    claim = NAMED[name]
    named = dict(zip(claim.arrays, arrays, strict=True))
    return judge(claim, named, np.random.default_rng(0), 100)


@dataclass(frozen=True, eq=False)
class NotTestable:
    """Arrays with which a claim is not testable, and the first words of the reason."""

    claim: str
    reason: str
    arrays: tuple[np.ndarray, ...]


NOT_TESTABLE = [
    NotTestable(
        "slow_induction",
        "no such stop changes the mean",
        arrays=(np.zeros((1, 41)), np.ones(1)),
    ),
    NotTestable(
        "slow_reach",
        "the stop changes the share of copies",
        arrays=(np.full(8, 0.004),),
    ),
    NotTestable(
        "sinks_slow",
        "sinks explain less than",
        arrays=(np.full((2, 16), np.nan), np.eye(2, 16)),
    ),
    NotTestable(
        "sinks_slow",
        "every plane turns once in",
        arrays=(np.ones((2, 16)), np.zeros((2, 16))),
    ),
    NotTestable(
        "sinks_slow",
        "no plane turns once in it",
        arrays=(np.ones((2, 16)), np.ones((2, 16))),
    ),
    NotTestable(
        "flat_values",
        "values have another size",
        arrays=(np.ones(6), np.ones(6), np.full(6, np.nan)),
    ),
    NotTestable(
        "flat_values",
        "queries, keys and values differ by less",
        arrays=(np.ones(6), np.ones(6), np.ones(6)),
    ),
    NotTestable(
        "positional_early",
        "24 draws are possible; a verdict needs 5 layers whose",
        arrays=(np.array([0.1, 0.2, np.nan, 0.3, 0.4]),),
    ),
]


@pytest.mark.parametrize(
    "case", NOT_TESTABLE, ids=lambda case: f"{case.claim}: {case.reason}"
)
def test_the_printed_reason_is_the_one_that_applies(case: NotTestable):
    row = judged(case.claim, *case.arrays)
    assert row["verdict"] == "not testable"
    assert row["why"].startswith(case.reason)


def with_layers(
    profile: xr.Dataset, layer_types: list[str], reach: list[int]
) -> xr.Dataset:
    return profile.assign_coords(
        layer_type=("layer", layer_types), reach=("layer", reach)
    )


def assert_numbers_are_of_sliding_layers(
    table: pd.DataFrame, profile: xr.Dataset, layers: list[int]
) -> None:
    """The ledger of sliding layers has the numbers of a profile of only these layers."""
    alone = profile.isel(layer=layers).assign_attrs(context=64, trained_context=64)
    expected = ledger(alone, draws=60).set_index("claim")["number"]
    of_sliding = table[table["layers"] == "sliding"].set_index("claim")["number"]
    pd.testing.assert_series_equal(of_sliding, expected[of_sliding.index])


def test_claims_are_tested_within_each_kind_of_layers():
    profile, _ = synthetic_profile(layers=6)
    profile = profile.assign_attrs(context=512, trained_context=4096)
    reach = [64, 64, 4096] * 2
    two_kinds = with_layers(profile, ["sliding", "sliding", "full"] * 2, reach)
    table = ledger(two_kinds, draws=60)
    for claim, layers in table.groupby("claim")["layers"].agg(list).items():
        expected = ["sliding", "full"] if NAMED[claim].within_kind else ["all"]
        assert layers == expected
    assert_numbers_are_of_sliding_layers(table, profile, [0, 1, 3, 4])
    # Layers that do not rotate belong to no kind.
    layer_types = ["none", "none", "none", "sliding", "sliding", "full"]
    still = profile["wavelength"].where(profile["layer"] > 2, np.inf)
    half_rotated = with_layers(profile, layer_types, reach).assign(wavelength=still)
    parts = parts_by_kind(half_rotated)
    assert [part.sizes["layer"] for part in parts.values()] == [2, 1]
    # A model with one kind of layers has the ledger of all layers.
    one_kind = with_layers(profile, ["full"] * 6, [64] * 6)
    of_one_kind = ledger(one_kind, draws=60)
    assert of_one_kind.equals(ledger(profile, draws=60))


def change_of_loss(model: hf.PreTrainedModel, text: torch.Tensor, edit: Edit) -> float:
    measured = rl.evaluate(model, text, edits={"edit": edit}, measures=["loss"])
    without, with_edit = measured["loss"]
    return float((with_edit - without).mean())


def test_planes_stop_only_in_layers_of_the_kind():
    torch.manual_seed(0)
    arguments = common(
        head_dim=32,
        num_hidden_layers=4,
        sliding_window=24,
        layer_types=["sliding_attention", "full_attention"] * 2,
        initializer_range=0.3,
    )
    config = hf.Gemma3TextConfig(**arguments)
    model = hf.Gemma3ForCausalLM(config).eval()
    text = TOKENS[:, :48]
    profile = rl.profile(model, text, surrogates=0)
    table = rl.test_claims(profile, model=model, text=text, draws=50)
    table = table.set_index(["claim", "layers"])
    fastest = rl.PlaneNumbers([0, 1, 2, 3])
    for layers, heads in (("sliding", "0.*,2.*"), ("full", "1.*,3.*")):
        expected = change_of_loss(model, text, rl.stop(fastest, heads=heads))
        number = table.loc[("fast_stop", layers), "number"]
        assert number == pytest.approx(expected, abs=1e-6)
    why = table.loc[("slow_stop", "full"), "why"]
    assert "within the tested 48 tokens" in why


def verdicts_on_two_claims(of_x: str, of_y: str) -> pd.DataFrame:
    columns = {"claim": ["x", "y"], "layers": "all", "verdict": [of_x, of_y]}
    return pd.DataFrame(columns)


def test_robust_is_the_share_of_settings_with_the_verdict_of_the_main_setting():
    tables = {
        "a": verdicts_on_two_claims("holds", "contradicted"),
        "b": verdicts_on_two_claims("holds", "contradicted"),
        "b, other": verdicts_on_two_claims("unresolved", "contradicted"),
        "c": verdicts_on_two_claims("holds", "holds"),
        "d": verdicts_on_two_claims("holds", "contradicted")[1:],  # only claim y
    }
    every = pd.concat(tables, names=["setting", None]).reset_index("setting")
    table = compare_settings(every).drop(columns=["claim", "layers"])
    assert table.values.tolist() == [
        ["holds", 3 / 4, 4, "b, other: unresolved", False],
        ["contradicted", 4 / 5, 5, "c: holds", True],
    ]


def test_other_statistics_have_other_numbers():
    profile, _ = synthetic_profile(layers=6)
    table = ledger(profile, draws=60, claims=CLAIMS)
    others = ledger(profile, draws=60, claims=OTHERS)
    expected = [name for name in table["claim"] if NAMED[name].other is not None]
    assert others["claim"].tolist() == expected
    both = table.merge(others, on="claim", suffixes=("", "_other"))
    tested = both[both["verdict"] != "not testable"]
    assert tested["number_other"].notna().all()
    differ = tested["number"] != tested["number_other"]
    assert differ.mean() > 0.8


LENGTH = np.array([[4.0, 2, 1, 1], [1, 1, 2, 4], [1, 1, 1, 1]])
"""Lengths [layer, plane]; the sums of the layers are 8, 8 and 4."""


def assert_slow_halves() -> None:
    of_layers = (2 / 8 + 6 / 8 + 2 / 4) / 3
    assert numbers.slow_half(LENGTH) == pytest.approx(of_layers)
    assert numbers.slow_half_of_all(LENGTH) == pytest.approx(10 / 20)
    unequal = np.array([[9.0, 0, 0, 1], [0, 0, 0, 2]])
    assert numbers.slow_half_of_all(unequal) == pytest.approx(3 / 12)
    by_layer = numbers.slow_half_of_all(unequal, by_layer=True)
    assert by_layer == pytest.approx((1 / 10 + 1) / 2)
    equal = np.ones((3, 4))
    assert math.isnan(numbers.slow_half(equal))


def assert_ranks_with_depth() -> None:
    values = np.array([1.0, 3, 2, 4])
    spearman = numbers.rank_with_depth(values)
    assert spearman == pytest.approx(0.8)
    kendall = numbers.rank_with_depth(values, kendall=True)
    assert kendall == pytest.approx(4 / 6)


def assert_fast_planes_at_the_ends() -> None:
    ends = (4 / 8 + 1 / 4) / 2
    between = 1 / 8
    assert numbers.fast_at_the_ends(LENGTH) == pytest.approx(ends - between)
    two_layers = LENGTH[:2]
    assert math.isnan(numbers.fast_at_the_ends(two_layers))


def assert_pushes_of_long_planes() -> None:
    push = np.array([[1.0, 3]])
    slow = np.array([[0.0, 1]])
    assert numbers.push_of_long_planes(push, slow) == 0.75
    # The number needs slow and fast planes.
    only_fast = np.zeros((1, 2))
    only_slow = np.ones((1, 2))
    assert math.isnan(numbers.push_of_long_planes(push, only_fast))
    assert math.isnan(numbers.push_of_long_planes(push, only_slow))


def test_numbers_of_lengths_pushes_and_coherence():
    assert_slow_halves()
    assert_ranks_with_depth()
    assert_fast_planes_at_the_ends()
    predicted = np.array([1.0, 2.5, 0])
    assert numbers.distance_to_band(LENGTH, predicted) == pytest.approx(0.5)
    assert_pushes_of_long_planes()
    push = np.array([[1.0, 3], [np.nan, np.nan]])
    slow = np.array([[0.0, 1], [0, 1]])
    assert not numbers.why_no_sinks(push, slow), "one layer without sinks"
    coherence = np.array([[[0.96, 0.1], [0.96, 0.1]], [[0.1, 0.94], [0.1, 0.96]]])
    length = np.array([[[2.0, 1], [1, 2]], [[1, 2], [1, 2]]])
    assert numbers.fixed_in_longest(coherence, length) == 2 / 4


def counted_decay(number: float) -> float:
    return NAMED["decay"].count(np.array([number]))


def counted_values(query: float, key: float, value: float) -> float:
    arrays = (np.array([query]), np.array([key]), np.array([value]))
    return NAMED["flat_values"].count(*arrays)


def test_small_changes_count_as_none():
    losses = np.array([[1.0, 0.3], [2, 0]])
    tokens = np.array([10.0, 20])
    assert numbers.cost(losses, tokens) == 0.1
    equal_losses = np.array([[0.2, 0.2]])
    no_cost = numbers.cost(equal_losses, np.array([30.0]))
    assert math.isnan(no_cost)
    assert counted_decay(0.3) == 0.3
    assert counted_decay(-0.3) == -0.3
    assert counted_decay(0.1) == 0
    assert counted_decay(-0.1) == 0
    assert counted_values(3.0, 1.0, 1.5) == 0.5
    assert counted_values(2.0, 1.0, 1.45) == 0


def test_other_pairs_of_layers_come_first_and_last_once():
    layers = np.arange(5)
    drawn = nulls.PAIRS.draw((layers,), None, 0)
    orders = [order.tolist() for (order,) in drawn]
    for order in orders:
        assert sorted(order) == layers.tolist()
    ends = [(order[0], order[-1]) for order in orders]
    possible = math.comb(5, 2) - 1
    assert len(ends) == possible
    assert len(set(ends)) == possible
    assert (0, 4) not in ends


@pytest.mark.parametrize("null", [nulls.OFFSETS, nulls.QUARTERS, nulls.ORDERS])
def test_nulls_in_a_fixed_order_have_the_stated_number_of_draws(null: nulls.Null):
    by_entry = np.arange(42.0).reshape(2, 3, 7)
    versions = null.draw((by_entry,), None, 0)
    drawn = [first.tolist() for (first,) in versions]
    assert len(drawn) == null.possible(by_entry)
    assert by_entry.tolist() not in drawn


def test_layers_rotate_if_any_plane_does_and_planes_if_they_do_in_all_these_layers():
    profile, _ = synthetic_profile(layers=3)
    wavelength = profile["wavelength"].copy()
    wavelength[0, 2:] = np.inf
    wavelength[1] = np.inf
    profile = profile.assign_coords(wavelength=wavelength)
    rotating = rotating_in(profile)
    assert rotating.layers.tolist() == [0, 2]
    assert rotating.planes.tolist() == [0, 1]
    in_any_layer = LayersOfKind(profile, every=True, seed=0).rotating
    all_planes = profile["frequency"].values
    assert in_any_layer.tolist() == all_planes.tolist()


def test_copies_are_two_thirds_of_the_context_back_and_2048_tokens_at_most():
    assert distance_of_copies(300) == 200
    assert distance_of_copies(8192) == 2048


def test_copies_are_not_longer_than_their_distance():
    measurement = Measurement.of(tiny("llama_gqa"), TOKENS)
    copies = _copies_found(measurement, "0.0", 10, None)
    near = rl.reach(
        measurement.live.model, TOKENS, heads="0.0", copied=10, copies=[10], draws=RUNS
    )
    np.testing.assert_array_equal(copies, near["found_by_draw"])


def test_attention_is_not_read_if_heads_of_a_layer_rotate_differently():
    model = tiny("llama_gqa")
    with rl.edit_rope(model, rl.stop_slowest(0.5, heads="1.2")):
        measurement = Measurement.of(model, TOKENS)
        with pytest.raises(rl.BadArgument, match="heads of one layer rotate diff"):
            read_attention(measurement, Letters(), silent)


def test_too_few_different_draws_give_no_null():
    three_planes = np.array([[1.0, 2, 3]])
    row = judged("slow_norms", three_planes)
    assert row["verdict"] == "not testable"
    assert row["null_draws"] == 0
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
    row = judged("apostrophes", lead)
    assert row["verdict"] == verdict


def test_sinks_are_judged_if_they_explain_a_twentieth_of_the_bits():
    profile, _ = synthetic_profile(layers=3)
    for share, is_judged in ((0.07, True), (0.04, False)):
        sink_bits = share * profile["total_bits"]
        arrays = claim_arrays(profile.assign(sink_bits=sink_bits))
        assert np.isfinite(arrays["sink_push"]).all() == is_judged


def mean_unevenness(norms: np.ndarray) -> float:
    """Mean over heads of the variation over planes, for norms [head, plane]."""
    return (norms.std(-1) / norms.mean(-1)).mean()


def test_unevenness_is_the_mean_over_the_heads_that_a_layer_has():
    profile, _ = synthetic_profile(layers=2, heads=3)
    q_norm = profile["q_norm"].copy()
    q_norm[0, 2] = np.nan
    of_two_heads = q_norm.values[0, :2]
    of_three_heads = q_norm.values[1]
    expected = [mean_unevenness(of_two_heads), mean_unevenness(of_three_heads)]
    arrays = claim_arrays(profile.assign(q_norm=q_norm))
    np.testing.assert_allclose(arrays["q_uneven"], expected)


def test_a_page_has_the_ledger_of_the_default_seed():
    profile, _ = synthetic_profile(layers=4)
    of_page = ledger(profile, draws=60)
    tested = rl.test_claims(profile, draws=60)
    pd.testing.assert_frame_equal(of_page, tested)
    with_another_seed = rl.test_claims(profile, draws=60, seed=1)
    assert not of_page.equals(with_another_seed)


def tokens_with_apostrophes(counts: Sequence[int]) -> torch.Tensor:
    """Tokens [sequence, position] in which apostrophes have these counts, in random order.

    Before, 11 tokens have 10 or 11 places each. An apostrophe takes the places of one token.
    """
    tokens = torch.arange(120) % 11 + 40
    first_places = (10, 119)
    for token, count, first in zip(APOSTROPHES, counts, first_places, strict=False):
        tokens[first : first + 11 * count : 11] = token
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.randperm(120, generator=generator)
    return tokens[shuffled].view(4, 30)


def read_apostrophes(counts: Sequence[int]) -> RunArrays:
    tokens = tokens_with_apostrophes(counts)
    measurement = Measurement.of(tiny("llama_gqa"), tokens)
    return read_attention(measurement, Letters(), silent).apostrophes


def test_apostrophes_are_compared_with_words_that_are_equally_frequent():
    few = read_apostrophes([9])
    expected = "9 tokens have an apostrophe; a verdict needs 10"
    assert few.objections["apostrophes"] == expected
    assert not np.isfinite(few.arrays["token_lead"]).all()
    # The last axis has the apostrophes, and sets of words that are equally frequent.
    for counts, sets in (([10], 11), ([10, 1], 1)):
        enough = read_apostrophes(counts)
        lead = enough.arrays["token_lead"]
        assert enough.objections["apostrophes"] == ""
        assert np.isfinite(lead).all()
        assert lead.shape[-1] == sets
