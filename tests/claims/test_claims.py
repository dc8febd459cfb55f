"""The ledger: planted claims, simulated nulls, and models of random weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from evaluated import telling
from planted import MODELS, Letters, row_of
from synthetic_profile import synthetic_profile
from transformers import LlamaConfig, LlamaForCausalLM

import ropelens as rl
from ropelens.claims.arrays import claim_arrays
from ropelens.claims.claim_runs import SETS, planes_at_random
from ropelens.claims.claims import CLAIMS
from ropelens.claims.nulls import FREQUENCIES
from ropelens.claims.numbers import correlations
from ropelens.claims.verdict import VERDICTS, Claim, judge

REPORTS = Path(__file__).parents[2] / "reports/positional_heads"
LAYERS, HEADS, PLANES, OFFSETS = 12, 4, 16, 64
RAMP = np.linspace(1, 4, PLANES)
OWN = np.broadcast_to(np.eye(HEADS), (LAYERS, HEADS, HEADS))
OF_ARRAYS = [claim for claim in CLAIMS if claim.null is not FREQUENCIES]
TRIED = CLAIMS[-6:]  # from slow_stop on
DRAWN_ALIKE = {(one.null.how, one.number.__qualname__): one for one in OF_ARRAYS}.values()


def by_plane(row: np.ndarray) -> np.ndarray:
    return np.broadcast_to(row, (LAYERS, PLANES))


def at(*layers: int) -> np.ndarray:
    """Planes that are even, but for the fastest in some layers."""
    length = np.ones((LAYERS, PLANES))
    length[list(layers), 0] = 9
    return length


def kernel(weights: dict[int, float], others: float = 0.01) -> np.ndarray:
    row = np.full(OFFSETS, others)
    row[list(weights)] = list(weights.values())
    return np.broadcast_to(row, (LAYERS, HEADS, OFFSETS))


ONES, OF_SETS = np.ones(LAYERS), (LAYERS, 1 + SETS)
LONG = ("previous_token", "diagonal", "slow_induction", "slow_reach", "apostrophes")


@pytest.fixture(scope="module")
def profile() -> xr.Dataset:
    return synthetic_profile(layers=6)[0]


@pytest.fixture(scope="module")
def shapes() -> dict[str, tuple[int, ...]]:
    """Of the arrays of claims: of a profile, and of what is tried."""
    of = claim_arrays(synthetic_profile(layers=LAYERS, heads=HEADS, kv_heads=HEADS)[0])
    tried = dict.fromkeys(("slow_loss", "fast_loss", "long_loss", "induction_lost"), OF_SETS)
    tried |= {"tokens": (LAYERS,), "once": (LAYERS,), "more_found": (8,)}
    return {name: x.shape for name, x in of.items()} | tried | {"token_lead": (3, *OF_SETS)}


def verdict(claim: Claim, *arrays: np.ndarray, seed: int = 0, draws: int = 400) -> dict:
    named = dict(zip(claim.arrays, arrays, strict=True))
    random = np.random.default_rng(seed)
    return judge(claim, named, random, draws)


LATER = [pytest.mark.slow]
BUILT = [
    pytest.param(name, of, marks=LATER * (name in LONG or (of and name != "slow_norms")))
    for name in MODELS
    for of in (0, 1)
]


@pytest.mark.parametrize(("name", "of"), BUILT)
def test_a_claim_holds_in_one_model_and_not_in_its_opposite(name: str, of: int) -> None:
    row = row_of(name, MODELS[name][of]())
    assert row["verdict"] == ("holds", "contradicted")[of], row["why"]


def test_every_claim_has_its_models_and_its_definition() -> None:
    assert [*MODELS] == [claim.name for claim in CLAIMS]
    measures = (Path(__file__).parents[2] / "docs/measures.md").read_text()
    assert all(f"`{name}`" in measures for name in MODELS)


@pytest.mark.parametrize("claim", DRAWN_ALIKE, ids=lambda claim: claim.name)
def test_where_chance_alone_speaks_a_claim_holds_in_a_fortieth_of_cases(
    claim: Claim, shapes: dict[str, tuple[int, ...]]
) -> None:
    random = np.random.default_rng(1)
    centre = float(claim.name in ("decay", "slow_reach"))  # as often below 0 as above

    def drawn(seed: int) -> dict:
        arrays = (random.gamma(4, 0.25, shapes[name]) - centre for name in claim.arrays)
        return verdict(claim, *arrays, seed=seed, draws=79)

    rows = [drawn(seed) for seed in range(80)]
    for word in ("holds", "contradicted"):  # 2.5 %, and 2.5 standard errors of 80 cases
        assert np.mean([row["verdict"] == word for row in rows]) <= 0.025 + 0.043


@pytest.mark.parametrize("claim", OF_ARRAYS, ids=lambda claim: claim.name)
def test_constant_numbers_are_not_testable(
    claim: Claim, shapes: dict[str, tuple[int, ...]]
) -> None:
    row = verdict(claim, *(np.full(shapes[name], 0.005) for name in claim.arrays))
    assert row["verdict"] == "not testable"
    assert row["why"]


def two(planes: int) -> np.ndarray:
    """The two slowest planes, in two layers."""
    return np.tile(np.arange(planes) >= planes - 2, (2, 1)).astype(float)


TAKES: list[tuple[str, str, Callable[[int], tuple[np.ndarray, ...]], tuple[int, int]]] = [
    ("slow_norms", "8 planes or more", lambda n: (by_plane(RAMP)[:, :n],), (7, 8)),
    ("fast_at_the_ends", "10 layers", lambda n: (at(0, -1)[[*range(n - 1), -1]],), (9, 10)),
    ("flat_values", "4 layers or more", lambda n: (ONES[:n], ONES[:n], 0 * ONES[:n]), (3, 4)),
    ("band", "or 50 planes", lambda n: (np.eye(n)[[2] * 9], np.full(9, 2.0)), (30, 70)),
    ("band", "10 planes and layers", lambda n: (np.eye(n)[[2, 3]], np.full(2, 2.5)), (9, 10)),
    ("massive_slow", "6 such planes", lambda n: (np.eye(64)[-n:],), (5, 6)),
    ("massive_not_in_values", "4 layers", lambda n: (ONES[:n], ONES[:n], 0 * ONES[:n]), (3, 4)),
    ("massive_not_in_values", "10 in one", lambda n: (np.ones(n), *np.zeros((2, n))), (9, 10)),
    ("sinks_slow", "1 of 50", lambda n: (np.eye(n)[-1:], np.eye(n)[-1:]), (30, 70)),
    ("sinks_slow", "2 of 10", lambda n: (np.eye(n)[-2:], two(n)), (9, 10)),
    ("positional_early", "5 layers", lambda n: (np.linspace(1, 0, n),), (4, 5)),
    ("mean_vectors_predict", "2 layers of 4", lambda n: (OWN[:n],), (1, 2)),
    ("mean_vectors_predict", "3 of 3", lambda n: (OWN[:n, :3, :3],), (2, 3)),
    ("mean_vectors_predict", "6 of 2", lambda n: (OWN[:n, :2, :2],), (5, 6)),
    ("decay", "6 layers or more", lambda n: (ONES[:n],), (5, 6)),
    ("previous_token", "a context of 42", lambda n: (kernel({1: 0.9})[..., :n],), (41, 42)),
    ("slow_reach", "6 draws", lambda n: (ONES[:n],), (5, 6)),
    ("fixed_vectors", "50 planes", lambda n: (0.99 * np.eye(n)[None, [2]],) * 2, (30, 70)),
    ("diagonal", "a context of 42", lambda n: (kernel({0: 0.9})[..., :n],), (41, 42)),
    ("slow_induction", "10 planes", lambda n: (np.eye(1, 1 + n), np.ones(1)), (39, 40)),
    ("apostrophes", "40 such sets", lambda n: (np.eye(1, 1 + n)[None],), (39, 40)),
]  # fmt: skip


@pytest.mark.parametrize(("name", "takes", "arrays", "sizes"), TAKES)
def test_what_it_takes_is_the_least_that_decides(
    name: str,
    takes: str,
    arrays: Callable[[int], tuple[np.ndarray, ...]],
    sizes: tuple[int, int],
) -> None:
    claim = next(one for one in OF_ARRAYS if one.name == name)
    fewer, enough = (verdict(claim, *arrays(n), draws=4000) for n in sizes)
    assert fewer["verdict"] == "not testable"
    assert takes in fewer["why"]
    assert np.isfinite(fewer["number"])  # which needs no null
    assert enough["verdict"] == "holds"


@pytest.mark.parametrize(("claim", "takes"), [*zip(TRIED[:3], (10, 10, 16), strict=True)])
def test_sets_of_planes_take_as_many_planes_as_they_say(claim: Claim, takes: int) -> None:
    assert claim.null.min_size == f"{takes} planes"
    for planes, testable in ((takes - 1, False), (takes, True)):
        ends = np.split(np.arange(planes), [planes // 4, planes - planes // 4])[::2]
        but = ends if takes == 10 else [np.arange(planes // 8)]
        drawn = planes_at_random(np.arange(planes), but, 0)
        assert (len(drawn) == SETS) == testable
        assert len({*drawn}) == len(drawn)
        assert not {*drawn} & {tuple(of) for of in but}


def test_the_ledger_has_a_row_a_claim_and_is_the_same_for_a_seed(profile: xr.Dataset) -> None:
    table = rl.test_claims(profile, draws=200)
    assert table["claim"].tolist() == [claim.name for claim in CLAIMS if claim not in TRIED]
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
def test_ledger_and_heads_give_the_same_verdict_on_a_saved_profile(model: str) -> None:
    saved = rl.open(REPORTS / model / "profile.nc")
    row = rl.test_claims(saved, draws=50).set_index("claim").loc["positional_fast"]
    claim = rl.classify_heads(saved, resamples=0).attrs["claim"]
    claim["number"] = claim.pop("rank_correlation")
    claim.pop("heads")
    assert row[[*claim]].to_dict() == claim
    assert (claim["verdict"], claim["null_draws"]) == ("holds", 40)


def test_surrogates_that_tie_leave_the_claim_unresolved(profile: xr.Dataset) -> None:
    """A correlation below the lowest surrogates is possible, even if several are equal."""
    tied = profile.copy(deep=True)
    numbers = [tied[f"surrogate_{x}"].values for x in ("offset_fraction", "log_wavelength")]
    lowest = np.argmin(correlations(*numbers)[1:]) + 1
    for of in numbers:
        of[1:9] = of[lowest]
    table = rl.test_claims(tied, draws=60).set_index("claim")
    row, claim = table.loc["positional_fast"], rl.classify_heads(tied).attrs["claim"]
    assert (row["verdict"], row["p_value"]) == ("unresolved", claim["p_value"])
    assert row["p_value"] >= 9 / 41
    assert (table["q_value"].isna() == table["p_value"].isna()).all()
    assert table["q_value"].notna().any()


def test_without_values_claims_about_them_are_not_testable(profile: xr.Dataset) -> None:
    made = profile.assign(v_norm=profile["k_norm"] ** 0.1)
    for of, testable in ((profile.assign(v_norm=np.nan * made["v_norm"]), False), (made, True)):
        row = rl.test_claims(of, draws=60).set_index("claim").loc["flat_values"]
        assert (row["verdict"] != "not testable") == testable, row["why"]


def test_without_a_plane_that_rotates_nothing_is_testable(profile: xr.Dataset) -> None:
    still = profile.assign_coords(wavelength=profile["wavelength"] * np.inf)
    table = rl.test_claims(still, draws=60).set_index("claim").drop("positional_fast")
    assert (table["why"] == "no plane of this model rotates").all()


SIZES = ((4, 4, 2, 16), (6, 4, 4, 32), (12, 4, 2, 16), (8, 6, 3, 32))
"""Layers, heads, kv heads and coordinates of a head."""


def random_model(seed: int) -> LlamaForCausalLM:
    """A LLaMA of random weights: four sizes, four initial scales."""
    layers, heads, kv_heads, size = SIZES[seed % 4]
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=heads * size,
        intermediate_size=2 * heads * size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=size,
        max_position_embeddings=256,
        initializer_range=(0.02, 0.1, 0.3, 1.0)[seed // 4 % 4],
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def random_tokens(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 96, (16, 96), generator=generator)
    tokens[:, 0] = 1
    return tokens


def random_profile(seed: int) -> xr.Dataset:
    return rl.profile(
        random_model(seed), rl.Text(random_tokens(seed), documents=list(range(16)))
    )


@pytest.mark.parametrize("seed", [0, 4])
def test_random_weights_earn_nothing(seed: int) -> None:
    table = rl.test_claims(random_profile(seed), draws=400)
    assert not (table["verdict"] == "holds").any(), table[table["verdict"] == "holds"]


def test_claims_of_edits_on_few_planes_have_numbers_and_say_what_it_takes() -> None:
    model, tokens = random_model(12), random_tokens()
    profile = rl.profile(model, tokens, surrogates=2)
    given = {"model": model, "tokens": tokens, "tokenizer": Letters()}
    told: list[int] = []
    made = rl.test_claims(profile, draws=50, progress=telling(told.append), **given)
    rows = made.set_index("claim")
    assert sum(told) > 30 * 4 * tokens.shape[1]  # dozens of edits on four sequences
    assert made["claim"].tolist() == [claim.name for claim in CLAIMS]
    tried = rows.loc[["slow_stop", "fast_stop", "long_planes"]]
    assert tried["number"].notna().all()
    assert tried["why"].str.contains("a verdict needs 1[06] planes or more").all()
    assert rows.loc["apostrophes", "null_draws"] == SETS
    on, control = rl.attention_on(tokens, "'", Letters())
    of = rl.profile(model, tokens, rows=64, statistics=(on, control), budget=False)
    lead = (of[on.name] - of[control.name]).max()
    assert rows.loc["apostrophes", "number"] == pytest.approx(float(lead), abs=1e-6)
    with pytest.raises(rl.BadArgument, match=r"text must be a Text|Token ids must be"):
        rl.test_claims(profile, model=model, text=None)


@pytest.mark.slow
def test_the_bundled_model_needs_its_fastest_planes_and_not_its_slowest() -> None:
    made = rl.analyze("bundled", options=rl.Options(context=512, sequences=16))
    read = {"model": made.model, "text": made.text}
    rows = rl.test_claims(made.profile, draws=50, **read).set_index("claim")
    assert rows.loc[["slow_stop", "fast_stop"], "verdict"].tolist() == ["holds", "holds"]
    assert rows.loc["slow_induction", "null_draws"] == SETS
    assert rows.loc["slow_reach", "number"] > -1
    names = vars(made) | {"rl": rl, "found": "2.3", "planes": [0, 1]}
    for call in rows["call"]:
        eval(call, names | {"text": made.text[:2]})


@pytest.mark.slow
def test_of_forty_random_models_a_claim_holds_in_one_at_most() -> None:
    tables = [rl.test_claims(random_profile(seed), draws=999) for seed in range(40)]
    held = sum((table.set_index("claim")["verdict"] == "holds").astype(int) for table in tables)
    assert held.max() <= 1, held
