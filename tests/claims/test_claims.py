"""The ledger of claims on planted models, on draws of nulls, and on random weights."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from planted import MODELS, Letters, row_of
from small_measurements import old_rule, token_progress
from synthetic_profile import synthetic_profile
from transformers import LlamaConfig, LlamaForCausalLM

import ropelens as rl
from ropelens.claims.arrays import claim_arrays
from ropelens.claims.claim import Claim
from ropelens.claims.claims import CLAIMS
from ropelens.claims.layers_of_kind import planes_at_random
from ropelens.claims.nulls import EIGHTHS, FREQUENCIES, QUARTERS
from ropelens.claims.numbers import correlations
from ropelens.claims.run_arrays import SETS
from ropelens.claims.verdict import VERDICTS, judge

REPORTS = Path(__file__).parents[2] / "reports/positional_heads"
LAYERS = 12
HEADS = 4
PLANES = 16
OFFSETS = 64
RAMP = np.linspace(1, 4, PLANES)
ROW = np.arange(8.0)[None]
EIGHT = ROW.reshape(2, 4)
AGREEMENT = np.broadcast_to(np.eye(HEADS), (LAYERS, HEADS, HEADS))
DRAWN = [claim for claim in CLAIMS if claim.null is not FREQUENCIES]
DIFFERENT = {(claim.null.how, str(claim.number)): claim for claim in DRAWN}.values()
SETS_OF_PLANES = [claim for claim in CLAIMS if claim.null in (QUARTERS, EIGHTHS)]


def by_plane(row: np.ndarray) -> np.ndarray:
    return np.broadcast_to(row, (LAYERS, PLANES))


def spike(*layers: int) -> np.ndarray:
    length = np.ones((LAYERS, PLANES))
    length[list(layers), 0] = 9
    return length


def kernel(weights: dict[int, float], others: float = 0.01) -> np.ndarray:
    row = np.full(OFFSETS, others)
    row[list(weights)] = list(weights.values())
    return np.broadcast_to(row, (LAYERS, HEADS, OFFSETS))


ONES = np.ones(LAYERS)
BY_SET = (LAYERS, 1 + SETS)
LONG = ("previous_token", "diagonal", "slow_induction", "slow_reach", "apostrophes")
LONG += ("norms_not_worth", "retrieval_planes", "preferences_reverse")


@pytest.fixture(scope="module")
def profile() -> xr.Dataset:
    return synthetic_profile(layers=6)[0]


@pytest.fixture(scope="module")
def shapes() -> dict[str, tuple[int, ...]]:
    arrays = claim_arrays(
        synthetic_profile(layers=LAYERS, heads=HEADS, kv_heads=HEADS)[0]
    )
    names = ("slow_loss", "fast_loss", "long_loss", "induction_lost", "retrieval_lost")
    runs = dict.fromkeys(names, BY_SET) | {"reversal": (LAYERS, HEADS, 1 + SETS)}
    runs["tokens"] = (LAYERS,)
    runs["once"] = (LAYERS,)
    runs["more_found"] = (8,)
    runs["stopped_sets"] = (42, PLANES)
    runs["stop_loss"] = (LAYERS, 42)
    return (
        {name: x.shape for name, x in arrays.items()}
        | runs
        | {"token_lead": (3, *BY_SET)}
    )


def verdict(claim: Claim, *arrays: np.ndarray, seed: int = 0, draws: int = 400) -> dict:
    named = dict(zip(claim.arrays, arrays, strict=True))
    return judge(claim, named, np.random.default_rng(seed), draws)


SLOW = [pytest.mark.slow]
PLANTED = [
    pytest.param(
        name, index, marks=SLOW * (name in LONG or (index and name != "slow_norms"))
    )
    for name in MODELS
    for index in (0, 1)
]


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "index"), PLANTED)
def test_a_claim_holds_in_one_model_and_not_in_its_opposite(name: str, index: int):
    row = row_of(name, MODELS[name][index]())
    assert row["verdict"] == ("holds", "contradicted")[index], row["why"]


def test_every_claim_has_two_models_and_a_definition():
    assert {*MODELS} == {claim.name for claim in CLAIMS}
    measures = (Path(__file__).parents[2] / "docs/measures.md").read_text()
    assert all(f"`{name}`" in measures for name in MODELS)


@pytest.mark.thorough
@pytest.mark.parametrize("claim", DIFFERENT, ids=lambda claim: claim.name)
def test_on_draws_of_its_null_a_claim_holds_in_a_fortieth_of_cases(claim, shapes):
    random = np.random.default_rng(1)
    centre = float(
        claim.name in ("decay", "slow_reach")
    )  # equally often below and above 0

    def drawn(seed: int) -> dict:
        arrays = (random.gamma(4, 0.25, shapes[name]) - centre for name in claim.arrays)
        return verdict(claim, *arrays, seed=seed, draws=79)

    rows = [drawn(seed) for seed in range(80)]
    for word in ("holds", "contradicted"):  # 2.5 %, and 2.5 standard errors of 80 cases
        assert np.mean([row["verdict"] == word for row in rows]) <= 0.025 + 0.043


@pytest.mark.parametrize("claim", DRAWN, ids=lambda claim: claim.name)
def test_constant_numbers_are_not_testable(
    claim: Claim, shapes: dict[str, tuple[int, ...]]
):
    row = verdict(claim, *(np.full(shapes[name], 0.005) for name in claim.arrays))
    assert row["verdict"] == "not testable"
    assert row["why"]


def two(planes: int) -> np.ndarray:
    return np.tile(np.arange(planes) >= planes - 2, (2, 1)).astype(float)


MIN_SIZES = [
    ("slow_norms", "8 planes or more", lambda n: (by_plane(RAMP)[:, :n],), (7, 8)),
    ("fast_at_the_ends", "10 layers", lambda n: (spike(0, -1)[[*range(n - 1), -1]],), (9, 10)),
    ("flat_values", "4 layers or more", lambda n: (ONES[:n], ONES[:n], 0 * ONES[:n]), (3, 4)),
    ("band", "or 50 planes", lambda n: (np.eye(n)[[2] * 9], np.full(9, 2.0)), (30, 70)),
    ("band", "10 planes and layers", lambda n: (np.eye(n)[[2, 3]], np.full(2, 2.5)), (9, 10)),
    ("massive_slow", "6 such planes", lambda n: (np.eye(64)[-n:],), (5, 6)),
    ("massive_not_in_values", "4 layers", lambda n: (ONES[:n], ONES[:n], 0 * ONES[:n]), (3, 4)),
    ("massive_not_in_values", "10 in one", lambda n: (np.ones(n), *np.zeros((2, n))), (9, 10)),
    ("sinks_slow", "1 of 50", lambda n: (np.eye(n)[-1:], np.eye(n)[-1:]), (30, 70)),
    ("sinks_slow", "2 of 10", lambda n: (np.eye(n)[-2:], two(n)), (9, 10)),
    ("sinks_shorten", "2 layers of 4", lambda n: (EIGHT[:n], -EIGHT[:n]), (1, 2)),
    ("sinks_shorten", "5 heads", lambda n: (ROW[:, :n], -ROW[:, :n]), (4, 5)),
    ("preferences_reverse", "5 planes", lambda n: (np.eye(1, 1 + n)[None],), (39, 40)),
    ("retrieval_planes", "10 planes", lambda n: (np.eye(1, 1 + n), np.ones(1)), (39, 40)),
    ("positional_early", "5 layers", lambda n: (np.linspace(1, 0, n),), (4, 5)),
    ("mean_vectors_predict", "2 layers of 4", lambda n: (AGREEMENT[:n],), (1, 2)),
    ("mean_vectors_predict", "3 of 3", lambda n: (AGREEMENT[:n, :3, :3],), (2, 3)),
    ("mean_vectors_predict", "6 of 2", lambda n: (AGREEMENT[:n, :2, :2],), (5, 6)),
    ("decay", "6 layers or more", lambda n: (ONES[:n],), (5, 6)),
    ("previous_token", "a context of 42", lambda n: (kernel({1: 0.9})[..., :n],), (41, 42)),
    ("slow_reach", "6 draws", lambda n: (ONES[:n],), (5, 6)),
    ("fixed_vectors", "50 planes", lambda n: (0.99 * np.eye(n)[None, [2]],) * 2, (30, 70)),
    ("slow_induction", "10 planes", lambda n: (np.eye(1, 1 + n), np.ones(1)), (39, 40)),
    ("apostrophes", "40 such sets", lambda n: (np.eye(1, 1 + n)[None],), (39, 40)),
]  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "needs", "arrays", "sizes"), MIN_SIZES)
def test_the_smallest_size_that_decides_is_the_stated_size(name, needs, arrays, sizes):
    claim = next(claim for claim in DRAWN if claim.name == name)
    fewer, enough = [verdict(claim, *arrays(n), draws=4000) for n in sizes]
    assert fewer["verdict"] == "not testable"
    assert needs in fewer["why"]
    assert np.isfinite(fewer["number"])  # the number does not need a null
    assert enough["verdict"] == "holds"


@pytest.mark.parametrize("claim", SETS_OF_PLANES, ids=lambda claim: claim.name)
def test_random_sets_of_planes_need_the_stated_number_of_planes(claim: Claim):
    needs = int(claim.null.min_size.removesuffix(" planes"))
    for planes, testable in ((needs - 1, False), (needs, True)):
        ends = np.split(np.arange(planes), [planes // 4, planes - planes // 4])[::2]
        excluded = ends if needs == 10 else [np.arange(planes // 8)]
        drawn = planes_at_random(np.arange(planes), excluded, 0)
        assert (len(drawn) == SETS) == testable
        assert len({*drawn}) == len(drawn)
        assert not {*drawn} & {tuple(planes) for planes in excluded}


def test_the_ledger_has_a_row_per_claim_and_is_the_same_for_a_seed(profile: xr.Dataset):
    table = rl.test_claims(profile, draws=200)
    arrays = claim_arrays(profile).keys()
    known = [claim.name for claim in CLAIMS if arrays >= {*claim.arrays}]
    assert table["claim"].tolist() == known
    assert {"slow_norms", "apostrophes"} & {*known} == {"slow_norms"}
    assert set(table["verdict"]) <= set(VERDICTS)
    assert table.equals(rl.test_claims(profile, draws=200))
    decided = table[table["verdict"] != "not testable"]
    assert (decided["q_value"] >= decided["p_value"] - 1e-12).all()
    assert (decided["p_value"] <= 1).all()
    holds = table[table["verdict"] == "holds"]
    assert holds["p_value"].le(0.025).all()
    assert (holds["side"] * (holds["number"] - holds["threshold"])).gt(0).all()
    texts = table[["statement", "source", "what", "null", "why", "call"]]
    assert texts.map(len).to_numpy().min() > 0


@pytest.mark.parametrize("model", ["stories260k", "bundled-rope"])
def test_ledger_and_heads_give_the_same_verdict_on_a_saved_profile(model: str):
    saved = rl.open(REPORTS / model / "profile.nc")
    row = rl.test_claims(saved, draws=50).set_index("claim").loc["positional_fast"]
    claim = rl.classify_heads(saved, resamples=0).attrs["claim"]
    claim["number"] = claim.pop("rank_correlation")
    claim.pop("heads")
    assert row[[*claim]].to_dict() == claim
    assert (claim["verdict"], claim["null_draws"]) == ("holds", 40)


def test_surrogates_that_tie_leave_the_claim_unresolved(profile: xr.Dataset):
    tied = profile.copy(deep=True)
    numbers = [
        tied[f"surrogate_{x}"].values for x in ("offset_fraction", "log_wavelength")
    ]
    lowest = np.argmin(correlations(*numbers)[1:]) + 1
    for draws in numbers:
        draws[1:9] = draws[lowest]
    table = rl.test_claims(tied, draws=60).set_index("claim")
    row = table.loc["positional_fast"]
    claim = rl.classify_heads(tied).attrs["claim"]
    assert (row["verdict"], row["p_value"]) == ("unresolved", claim["p_value"])
    assert row["p_value"] >= 9 / 41
    assert (table["q_value"].isna() == table["p_value"].isna()).all()
    assert table["q_value"].notna().any()


def test_without_values_claims_about_them_are_not_testable(profile: xr.Dataset):
    values = profile["k_norm"] ** 0.1
    for v_norm, testable in ((np.nan * values, False), (values, True)):
        table = rl.test_claims(profile.assign(v_norm=v_norm), draws=60)
        row = table.set_index("claim").loc["flat_values"]
        assert (row["verdict"] != "not testable") == testable, row["why"]


def test_without_a_plane_that_rotates_nothing_is_testable(profile: xr.Dataset):
    still = profile.assign_coords(wavelength=profile["wavelength"] * np.inf)
    table = rl.test_claims(still, draws=60).set_index("claim").drop("positional_fast")
    assert (table["why"] == "no plane of this model rotates").all()


SIZES = ((4, 4, 2, 16), (6, 4, 4, 32), (12, 4, 2, 16), (8, 6, 3, 32))
"""Layers, heads, kv heads and coordinates of a head."""


def random_model(seed: int) -> LlamaForCausalLM:
    layers, heads, kv_heads, size = SIZES[seed % 4]
    scale = (0.02, 0.1, 0.3, 1.0)[seed // 4 % 4]
    shape = {"num_hidden_layers": layers, "hidden_size": heads * size, "head_dim": size}
    shape["num_attention_heads"] = heads
    shape["num_key_value_heads"] = kv_heads
    shape["vocab_size"] = 96
    shape["intermediate_size"] = 2 * heads * size
    shape["max_position_embeddings"] = 256
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(LlamaConfig(**shape, initializer_range=scale)).eval()


def random_tokens(seed: int = 0) -> torch.Tensor:
    tokens = torch.randint(
        3, 96, (16, 96), generator=torch.Generator().manual_seed(seed)
    )
    tokens[:, 0] = 1
    return tokens


def random_profile(seed: int, **options: int) -> xr.Dataset:
    text = rl.Text(random_tokens(seed), documents=list(range(16)))
    return rl.profile(random_model(seed), text, **options)


@pytest.mark.parametrize("seed", [0, 4])
def test_no_claim_holds_with_random_weights(seed: int):
    table = rl.test_claims(random_profile(seed), draws=400)
    assert not (table["verdict"] == "holds").any(), table[table["verdict"] == "holds"]


def test_claims_of_edits_on_few_planes_have_numbers_and_state_what_they_need():
    model = random_model(12)
    tokens = random_tokens()
    profile = rl.profile(model, tokens, surrogates=2)
    arguments = {"model": model, "text": tokens, "tokenizer": Letters()}
    steps: list[int] = []
    arguments["progress"] = token_progress(steps.append)
    table = rl.test_claims(profile, draws=50, **arguments)
    rows = table.set_index("claim")
    assert sum(steps) > 30 * 4 * tokens.shape[1]  # dozens of edits on four sequences
    assert table["claim"].tolist() == [claim.name for claim in CLAIMS]
    edited = rows.loc[["slow_stop", "fast_stop", "long_planes"]]
    assert edited["number"].notna().all()
    assert edited["why"].str.contains("a verdict needs 1[06] planes or more").all()
    assert rows.loc["apostrophes", "null_draws"] == SETS
    on, control = rl.attention_on(tokens, "'", Letters())
    measured = rl.profile(
        model, tokens, rows=64, statistics=(on, control), budget=False
    )
    lead = (measured[on.name] - measured[control.name]).max()
    assert rows.loc["apostrophes", "number"] == pytest.approx(float(lead), abs=1e-6)
    with pytest.raises(rl.BadArgument, match="need model and text"):
        rl.test_claims(profile, model=model)


@pytest.mark.slow
def test_the_bundled_model_needs_its_fastest_planes_and_not_its_slowest():
    analysis = rl.analyze("bundled", options=rl.Options(context=512, sequences=16))
    rows = rl.test_claims(
        analysis.profile, draws=50, model=analysis.model, text=analysis.text
    ).set_index("claim")
    assert rows.loc[["slow_stop", "fast_stop"], "verdict"].tolist() == [
        "holds",
        "holds",
    ]
    assert rows.loc["slow_induction", "null_draws"] == SETS
    assert rows.loc["slow_reach", "number"] > -1
    names = vars(analysis) | {"rl": rl, "induction": "2.3", "planes": [0, 1]}
    for call in rows["call"]:
        eval(call, names | {"text": analysis.text[:2]})


def assert_labels_of_the_old_rule(profile: xr.Dataset) -> None:
    labels = rl.classify_heads(profile)["label"]
    assert labels.tolist() == old_rule(profile)[0].flatten().tolist()
    assert labels.isin(["diffuse", "mixed"]).all()


@pytest.mark.parametrize("seed", [0, 8])
def test_exchanged_keys_give_random_weights_no_label(seed: int):
    assert_labels_of_the_old_rule(random_profile(seed, surrogates=0))


@pytest.mark.slow
def test_of_forty_random_models_a_claim_holds_in_one_at_most():
    profiles = [random_profile(seed) for seed in range(40)]
    for profile in profiles:
        assert_labels_of_the_old_rule(profile)
    tables = [rl.test_claims(profile, draws=999) for profile in profiles]
    verdicts = pd.DataFrame([table.set_index("claim")["verdict"] for table in tables])
    assert (verdicts == "holds").sum().max() <= 1
