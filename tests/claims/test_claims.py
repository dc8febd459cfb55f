"""The ledger of claims on planted models, on draws of nulls, and on random weights."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from only_in_repository import repository_path
from planted import MODELS, Letters, row_of
from small_measurements import old_rule, token_progress
from synthetic_profile import synthetic_profile
from transformers import LlamaConfig, LlamaForCausalLM

import ropelens as rl
from ropelens.claims.arrays import claim_arrays
from ropelens.claims.claim import Claim
from ropelens.claims.claims import CLAIMS
from ropelens.claims.layers_of_kind import planes_at_random
from ropelens.claims.nulls import EIGHTHS, FREQUENCIES, QUARTERS, Null
from ropelens.claims.numbers import correlations
from ropelens.claims.run_arrays import SETS
from ropelens.claims.verdict import VERDICTS, judge

REPOSITORY = Path(__file__).parents[2]
LAYERS = 12
HEADS = 4
PLANES = 16
OFFSETS = 64
RAMP = np.linspace(1, 4, PLANES)
ROW = np.arange(8.0)[None]
EIGHT = ROW.reshape(2, 4)
AGREEMENT = np.broadcast_to(np.eye(HEADS), (LAYERS, HEADS, HEADS))
DRAWN = [claim for claim in CLAIMS if claim.null is not FREQUENCIES]
SETS_OF_PLANES = [claim for claim in CLAIMS if claim.null in (QUARTERS, EIGHTHS)]


def with_different_tests() -> list[Claim]:
    """A claim for each null and number."""
    claims = {}
    for claim in DRAWN:
        test = (claim.null.how, str(claim.number))
        claims[test] = claim
    return list(claims.values())


def by_plane(lengths: np.ndarray) -> np.ndarray:
    return np.broadcast_to(lengths, (LAYERS, PLANES))


def spike(*layers: int) -> np.ndarray:
    """Lengths [layer, plane]: the fastest plane of `layers` is long."""
    length = np.ones((LAYERS, PLANES))
    length[list(layers), 0] = 9
    return length


def kernel(weights: dict[int, float], others: float = 0.01) -> np.ndarray:
    by_offset = np.full(OFFSETS, others)
    for offset, weight in weights.items():
        by_offset[offset] = weight
    return np.broadcast_to(by_offset, (LAYERS, HEADS, OFFSETS))


ONES = np.ones(LAYERS)
BY_SET = (LAYERS, 1 + SETS)
LONG = ("previous_token", "diagonal", "slow_induction", "slow_reach", "apostrophes")
LONG += ("norms_not_worth", "retrieval_planes", "preferences_reverse")


@pytest.fixture(scope="module")
def profile() -> xr.Dataset:
    profile, _ = synthetic_profile(layers=6)
    return profile


@pytest.fixture(scope="module")
def shapes() -> dict[str, tuple[int, ...]]:
    """Shape of each array of a claim, in a profile or in runs of a model."""
    profile, _ = synthetic_profile(layers=LAYERS, heads=HEADS, kv_heads=HEADS)
    shapes = {name: array.shape for name, array in claim_arrays(profile).items()}
    shapes["slow_loss"] = BY_SET
    shapes["fast_loss"] = BY_SET
    shapes["long_loss"] = BY_SET
    shapes["induction_lost"] = BY_SET
    shapes["retrieval_lost"] = BY_SET
    shapes["reversal"] = (LAYERS, HEADS, 1 + SETS)
    shapes["tokens"] = (LAYERS,)
    shapes["once"] = (LAYERS,)
    shapes["more_found"] = (8,)
    shapes["stopped_sets"] = (42, PLANES)
    shapes["stop_loss"] = (LAYERS, 42)
    shapes["token_lead"] = (3, *BY_SET)
    return shapes


def verdict(claim: Claim, *arrays: np.ndarray, seed: int = 0, draws: int = 400) -> dict:
    named = dict(zip(claim.arrays, arrays, strict=True))
    random = np.random.default_rng(seed)
    return judge(claim, named, random, draws)


def planted_cases() -> list:
    """The name of each claim, with the index of a model: 0 for it, and 1 against it."""
    cases = []
    for name in MODELS:
        for index in (0, 1):
            is_slow = name in LONG or (index == 1 and name != "slow_norms")
            marks = [pytest.mark.slow] if is_slow else []
            cases.append(pytest.param(name, index, marks=marks))
    return cases


@pytest.mark.thorough
@pytest.mark.parametrize(("name", "index"), planted_cases())
def test_a_claim_holds_in_one_model_and_not_in_its_opposite(name: str, index: int):
    expected = ("holds", "contradicted")[index]
    make = MODELS[name][index]
    row = row_of(name, make())
    assert row["verdict"] == expected, row["why"]


def test_every_claim_has_two_models_and_a_definition():
    assert set(MODELS) == {claim.name for claim in CLAIMS}
    measures = (REPOSITORY / "docs/measures.md").read_text()
    for name in MODELS:
        assert f"`{name}`" in measures


@pytest.mark.thorough
@pytest.mark.parametrize("claim", with_different_tests(), ids=lambda claim: claim.name)
def test_on_draws_of_its_null_a_claim_holds_in_a_fortieth_of_cases(claim, shapes):
    random = np.random.default_rng(1)
    # The numbers of these two claims are equally often below and above 0.
    centre = 1.0 if claim.name in ("decay", "slow_reach") else 0.0
    verdicts = []
    for seed in range(80):
        arrays = [random.gamma(4, 0.25, shapes[name]) - centre for name in claim.arrays]
        judged = verdict(claim, *arrays, seed=seed, draws=79)
        verdicts.append(judged["verdict"])
    # 2.5 %, and 2.5 standard errors of a share of 80 cases
    most = 0.025 + 0.043
    assert verdicts.count("holds") / 80 <= most
    assert verdicts.count("contradicted") / 80 <= most


@pytest.mark.parametrize("claim", DRAWN, ids=lambda claim: claim.name)
def test_constant_numbers_are_not_testable(
    claim: Claim, shapes: dict[str, tuple[int, ...]]
):
    constant = [np.full(shapes[name], 0.005) for name in claim.arrays]
    judged = verdict(claim, *constant)
    assert judged["verdict"] == "not testable"
    assert judged["why"]


@dataclass(frozen=True)
class MinSize:
    """The smallest size that decides a claim, in one respect.

    `arrays` makes arrays of a size. If the size is `fewer`, the claim is not testable, and the
    reason contains `needs`. If the size is `enough`, the claim holds.
    """

    claim: str
    needs: str
    arrays: Callable[[int], tuple[np.ndarray, ...]]
    fewer: int
    enough: int


def ramps(planes: int) -> tuple[np.ndarray, ...]:
    return (by_plane(RAMP)[:, :planes],)


def spikes_at_the_ends(layers: int) -> tuple[np.ndarray, ...]:
    """The first and the last layer have a long fast plane."""
    length = spike(0, -1)
    last = length[[-1]]
    return (np.concatenate([length[: layers - 1], last]),)


def flat_values(layers: int) -> tuple[np.ndarray, ...]:
    uneven = ONES[:layers]
    return (uneven, uneven, np.zeros(layers))


def flat_values_of_heads(heads: int) -> tuple[np.ndarray, ...]:
    return (np.ones(heads), np.zeros(heads), np.zeros(heads))


def bands(
    planes: int, *, longest: list[int], predicted: float
) -> tuple[np.ndarray, ...]:
    """Each layer has one long plane, and the same predicted plane."""
    length = np.eye(planes)[longest]
    return (length, np.full(len(longest), predicted))


def slowest_planes(planes: int, *, slow: int) -> np.ndarray:
    """For each of `slow` layers, whether a plane is one of the `slow` slowest planes."""
    is_slow = np.arange(planes) >= planes - slow
    return np.tile(is_slow, (slow, 1)).astype(float)


def sinks_in_slowest_planes(planes: int, *, layers: int) -> tuple[np.ndarray, ...]:
    push = np.eye(planes)[-layers:]
    return (push, slowest_planes(planes, slow=layers))


def only_set_0(sets: int) -> np.ndarray:
    """A number for the tested set, which is 1, and for `sets` random sets, which are 0."""
    return np.eye(1, 1 + sets)


def coherent_in_plane_2(planes: int) -> tuple[np.ndarray, ...]:
    coherence = 0.99 * np.eye(planes)[None, [2]]
    return (coherence, coherence)


MIN_SIZES = [
    MinSize("slow_norms", "8 planes or more", ramps, fewer=7, enough=8),
    MinSize("fast_at_the_ends", "10 layers", spikes_at_the_ends, fewer=9, enough=10),
    MinSize("flat_values", "4 layers or more", flat_values, fewer=3, enough=4),
    MinSize(
        "band",
        "or 50 planes",
        lambda planes: bands(planes, longest=[2] * 9, predicted=2.0),
        fewer=30,
        enough=70,
    ),
    MinSize(
        "band",
        "10 planes and layers",
        lambda planes: bands(planes, longest=[2, 3], predicted=2.5),
        fewer=9,
        enough=10,
    ),
    MinSize(
        "massive_slow",
        "6 such planes",
        lambda massive: (np.eye(64)[-massive:],),
        fewer=5,
        enough=6,
    ),
    MinSize("massive_not_in_values", "4 layers", flat_values, fewer=3, enough=4),
    MinSize(
        "massive_not_in_values", "10 in one", flat_values_of_heads, fewer=9, enough=10
    ),
    MinSize(
        "sinks_slow",
        "1 of 50",
        lambda planes: sinks_in_slowest_planes(planes, layers=1),
        fewer=30,
        enough=70,
    ),
    MinSize(
        "sinks_slow",
        "2 of 10",
        lambda planes: sinks_in_slowest_planes(planes, layers=2),
        fewer=9,
        enough=10,
    ),
    MinSize(
        "sinks_shorten",
        "2 layers of 4",
        lambda layers: (EIGHT[:layers], -EIGHT[:layers]),
        fewer=1,
        enough=2,
    ),
    MinSize(
        "sinks_shorten",
        "5 heads",
        lambda heads: (ROW[:, :heads], -ROW[:, :heads]),
        fewer=4,
        enough=5,
    ),
    MinSize(
        "preferences_reverse",
        "5 planes",
        lambda sets: (only_set_0(sets)[None],),
        fewer=39,
        enough=40,
    ),
    MinSize(
        "retrieval_planes",
        "10 planes",
        lambda sets: (only_set_0(sets), np.ones(1)),
        fewer=39,
        enough=40,
    ),
    MinSize(
        "positional_early",
        "5 layers",
        lambda layers: (np.linspace(1, 0, layers),),
        fewer=4,
        enough=5,
    ),
    MinSize(
        "mean_vectors_predict",
        "2 layers of 4",
        lambda layers: (AGREEMENT[:layers],),
        fewer=1,
        enough=2,
    ),
    MinSize(
        "mean_vectors_predict",
        "3 of 3",
        lambda layers: (AGREEMENT[:layers, :3, :3],),
        fewer=2,
        enough=3,
    ),
    MinSize(
        "mean_vectors_predict",
        "6 of 2",
        lambda layers: (AGREEMENT[:layers, :2, :2],),
        fewer=5,
        enough=6,
    ),
    MinSize(
        "decay",
        "6 layers or more",
        lambda layers: (ONES[:layers],),
        fewer=5,
        enough=6,
    ),
    MinSize(
        "previous_token",
        "a context of 42",
        lambda offsets: (kernel({1: 0.9})[..., :offsets],),
        fewer=41,
        enough=42,
    ),
    MinSize("slow_reach", "6 draws", lambda draws: (ONES[:draws],), fewer=5, enough=6),
    MinSize("fixed_vectors", "50 planes", coherent_in_plane_2, fewer=30, enough=70),
    MinSize(
        "slow_induction",
        "10 planes",
        lambda sets: (only_set_0(sets), np.ones(1)),
        fewer=39,
        enough=40,
    ),
    MinSize(
        "apostrophes",
        "40 such sets",
        lambda sets: (only_set_0(sets)[None],),
        fewer=39,
        enough=40,
    ),
]


@pytest.mark.thorough
@pytest.mark.parametrize(
    "size", MIN_SIZES, ids=lambda size: f"{size.claim}: {size.needs}"
)
def test_the_smallest_size_that_decides_is_the_stated_size(size: MinSize):
    claim = next(claim for claim in DRAWN if claim.name == size.claim)
    fewer = verdict(claim, *size.arrays(size.fewer), draws=4000)
    enough = verdict(claim, *size.arrays(size.enough), draws=4000)
    assert fewer["verdict"] == "not testable"
    assert size.needs in fewer["why"]
    # The number does not need a null.
    assert np.isfinite(fewer["number"])
    assert enough["verdict"] == "holds"


def stopped_sets(planes: int, null: Null) -> list[np.ndarray]:
    """The sets of planes that the claims with this null stop."""
    if null is EIGHTHS:
        return [np.arange(planes // 8)]
    quarter = planes // 4
    fastest = np.arange(quarter)
    slowest = np.arange(planes - quarter, planes)
    return [fastest, slowest]


@pytest.mark.parametrize("claim", SETS_OF_PLANES, ids=lambda claim: claim.name)
def test_random_sets_of_planes_need_the_stated_number_of_planes(claim: Claim):
    needs = int(claim.null.min_size.removesuffix(" planes"))
    for planes, testable in ((needs - 1, False), (needs, True)):
        stopped = stopped_sets(planes, claim.null)
        drawn = planes_at_random(np.arange(planes), stopped, 0)
        assert (len(drawn) == SETS) == testable
        different = set(drawn)
        assert len(different) == len(drawn)
        for numbers in stopped:
            assert tuple(numbers) not in different


def assert_numbers_agree_with_verdicts(table: pd.DataFrame) -> None:
    decided = table[table["verdict"] != "not testable"]
    assert (decided["q_value"] >= decided["p_value"] - 1e-12).all()
    assert (decided["p_value"] <= 1).all()
    holds = table[table["verdict"] == "holds"]
    assert (holds["p_value"] <= 0.025).all()
    beyond = holds["side"] * (holds["number"] - holds["threshold"])
    assert (beyond > 0).all()


def test_the_ledger_has_a_row_per_claim_and_is_the_same_for_a_seed(profile: xr.Dataset):
    table = rl.test_claims(profile, draws=200)
    measured = claim_arrays(profile).keys()
    expected = [claim.name for claim in CLAIMS if measured >= set(claim.arrays)]
    assert table["claim"].tolist() == expected
    assert "slow_norms" in expected
    assert "apostrophes" not in expected
    assert set(table["verdict"]) <= set(VERDICTS)
    again = rl.test_claims(profile, draws=200)
    assert table.equals(again)
    assert_numbers_agree_with_verdicts(table)
    texts = table[["statement", "source", "what", "null", "why", "call"]]
    lengths = texts.map(len)
    assert lengths.to_numpy().min() > 0


@pytest.mark.parametrize("model", ["babyllama105", "bundled-rope"])
def test_ledger_and_heads_give_the_same_verdict_on_a_saved_profile(model: str):
    saved = rl.open(repository_path(f"reports/positional_heads/{model}/profile.nc"))
    ledger = rl.test_claims(saved, draws=50).set_index("claim")
    of_ledger = ledger.loc["positional_fast"]
    of_heads = rl.classify_heads(saved, resamples=0).attrs["claim"]
    # The ledger has another name for the number, and no number of heads.
    of_heads["number"] = of_heads.pop("rank_correlation")
    of_heads.pop("heads")
    columns = list(of_heads)
    assert of_ledger[columns].to_dict() == of_heads
    assert of_heads["verdict"] == "holds"
    assert of_heads["null_draws"] == 40


def test_surrogates_that_tie_leave_the_claim_unresolved(profile: xr.Dataset):
    tied = profile.copy(deep=True)
    fraction = tied["surrogate_offset_fraction"].values
    log_wavelength = tied["surrogate_log_wavelength"].values
    of_surrogates = correlations(fraction, log_wavelength)[1:]
    lowest = 1 + np.argmin(of_surrogates)
    fraction[1:9] = fraction[lowest]
    log_wavelength[1:9] = log_wavelength[lowest]
    table = rl.test_claims(tied, draws=60).set_index("claim")
    of_ledger = table.loc["positional_fast"]
    of_heads = rl.classify_heads(tied).attrs["claim"]
    assert of_ledger["verdict"] == "unresolved"
    assert of_ledger["p_value"] == of_heads["p_value"]
    assert of_ledger["p_value"] >= 9 / 41
    assert (table["q_value"].isna() == table["p_value"].isna()).all()
    assert table["q_value"].notna().any()


def test_without_values_claims_about_them_are_not_testable(profile: xr.Dataset):
    values = profile["k_norm"] ** 0.1
    for v_norm, testable in ((np.nan * values, False), (values, True)):
        with_values = profile.assign(v_norm=v_norm)
        table = rl.test_claims(with_values, draws=60).set_index("claim")
        judged = table.loc["flat_values"]
        assert (judged["verdict"] != "not testable") == testable, judged["why"]


def test_without_a_plane_that_rotates_nothing_is_testable(profile: xr.Dataset):
    still = profile.assign_coords(wavelength=profile["wavelength"] * np.inf)
    table = rl.test_claims(still, draws=60).set_index("claim").drop("positional_fast")
    assert (table["why"] == "no plane of this model rotates").all()


@dataclass(frozen=True)
class Size:
    """The size of a random model; `coordinates` are of one head."""

    layers: int
    heads: int
    kv_heads: int
    coordinates: int


SIZES = (
    Size(layers=4, heads=4, kv_heads=2, coordinates=16),
    Size(layers=6, heads=4, kv_heads=4, coordinates=32),
    Size(layers=12, heads=4, kv_heads=2, coordinates=16),
    Size(layers=8, heads=6, kv_heads=3, coordinates=32),
)
SCALES = (0.02, 0.1, 0.3, 1.0)
"""Standard deviations of the weights."""


def random_model(seed: int) -> LlamaForCausalLM:
    """A model without training; 16 seeds have all sizes with all scales."""
    size = SIZES[seed % 4]
    hidden_size = size.heads * size.coordinates
    config = LlamaConfig(
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.coordinates,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        vocab_size=96,
        max_position_embeddings=256,
        initializer_range=SCALES[seed // 4 % 4],
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).eval()


def random_tokens(seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(3, 96, (16, 96), generator=generator)
    tokens[:, 0] = 1
    return tokens


def random_profile(seed: int, **options: int) -> xr.Dataset:
    documents = list(range(16))
    text = rl.Text(random_tokens(seed), documents=documents)
    return rl.profile(random_model(seed), text, **options)


@pytest.mark.parametrize("seed", [0, 4])
def test_no_claim_holds_with_random_weights(seed: int):
    table = rl.test_claims(random_profile(seed), draws=400)
    holds = table[table["verdict"] == "holds"]
    assert holds.empty, holds


def lead_of_apostrophes(model: LlamaForCausalLM, tokens: torch.Tensor) -> float:
    """Largest lead of a head in attention on apostrophes, by statistics of a profile."""
    on, control = rl.attention_on(tokens, "'", Letters())
    measured = rl.profile(
        model, tokens, rows=64, statistics=(on, control), budget=False
    )
    lead = measured[on.name] - measured[control.name]
    return float(lead.max())


def test_claims_of_edits_on_few_planes_have_numbers_and_state_what_they_need():
    model = random_model(12)
    tokens = random_tokens()
    profile = rl.profile(model, tokens, surrogates=2)
    steps: list[int] = []
    table = rl.test_claims(
        profile,
        draws=50,
        model=model,
        text=tokens,
        tokenizer=Letters(),
        progress=token_progress(steps.append),
    )
    # Dozens of edits run on four sequences.
    assert sum(steps) > 30 * 4 * tokens.shape[1]
    assert table["claim"].tolist() == [claim.name for claim in CLAIMS]
    table = table.set_index("claim")
    edited = table.loc[["slow_stop", "fast_stop", "long_planes"]]
    assert edited["number"].notna().all()
    needs_more = edited["why"].str.contains("a verdict needs 1[06] planes or more")
    assert needs_more.all()
    assert table.loc["apostrophes", "null_draws"] == SETS
    expected = lead_of_apostrophes(model, tokens)
    assert table.loc["apostrophes", "number"] == pytest.approx(expected, abs=1e-6)
    with pytest.raises(rl.BadArgument, match="need model and text"):
        rl.test_claims(profile, model=model)


@pytest.mark.slow
def test_the_bundled_model_needs_its_fastest_planes_and_not_its_slowest():
    options = rl.Options(context=512, sequences=16)
    analysis = rl.analyze("bundled", options=options)
    table = rl.test_claims(
        analysis.profile, draws=50, model=analysis.model, text=analysis.text
    )
    table = table.set_index("claim")
    assert table.loc["slow_stop", "verdict"] == "holds"
    assert table.loc["fast_stop", "verdict"] == "holds"
    assert table.loc["slow_induction", "null_draws"] == SETS
    assert table.loc["slow_reach", "number"] > -1
    names = dict(vars(analysis))
    names["rl"] = rl
    names["induction"] = "2.3"
    names["planes"] = [0, 1]
    names["text"] = analysis.text[:2]
    for call in table["call"]:
        eval(call, dict(names))


def assert_labels_of_the_old_rule(profile: xr.Dataset) -> None:
    expected = old_rule(profile)[0]
    labels = rl.classify_heads(profile)["label"]
    assert labels.tolist() == expected.flatten().tolist()
    assert labels.isin(["diffuse", "mixed"]).all()


@pytest.mark.parametrize("seed", [0, 8])
def test_exchanged_keys_give_random_weights_no_label(seed: int):
    assert_labels_of_the_old_rule(random_profile(seed, surrogates=0))


@pytest.mark.slow
def test_of_forty_random_models_a_claim_holds_in_one_at_most():
    profiles = [random_profile(seed) for seed in range(40)]
    for profile in profiles:
        assert_labels_of_the_old_rule(profile)
    verdicts = []
    for profile in profiles:
        table = rl.test_claims(profile, draws=999).set_index("claim")
        verdicts.append(table["verdict"])
    # Number of models in which each claim holds
    models = (pd.DataFrame(verdicts) == "holds").sum()
    assert models.max() <= 1
