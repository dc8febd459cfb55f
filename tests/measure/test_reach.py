"""The reach of heads, held to real distances and to loops over every row."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
import xarray as xr
from oracles.recording import attention_calls
from oracles.tiny import TEN, random_tokens, tiny
from scipy.optimize import brentq
from transformers import PreTrainedModel

import ropelens as rl
from ropelens.errors import BadArgument
from ropelens.measure import measurement
from ropelens.measure.capture import look
from ropelens.measure.copied import copies, run_distances, won
from ropelens.measure.measurement import Measurement
from ropelens.models.subject import as_subject
from ropelens.statistics.call import AttentionCall

ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


# against distances that exist: in layer 0 a token is the same wherever it stands


def real_scores(
    model: PreTrainedModel, query: int, key: int, distances: list[int]
) -> torch.Tensor:
    """[head, distance]: scores of a run of transformers in which `key` stands that far back."""
    last = max(distances)
    sequence = np.full(last + 1, 5)
    sequence[last] = query
    for distance in distances:
        sequence[last - distance] = key
    call = attention_calls(model, sequence)[0][0]
    keys = call.key.repeat_interleave(len(call.query) // len(call.key), dim=0)
    scores = call.scale * torch.einsum("hd,hjd->hj", call.query[:, last], keys)
    return scores[:, [last - distance for distance in distances]]


def against_real_runs(found: xr.Dataset, model: PreTrainedModel, tokens: torch.Tensor) -> int:
    """Row 3 of four tokens is the only one with a choice: between positions 1 and 2.

    Returns for how many heads position 0 does not score higher than both.
    """
    distances = [d for d in found["distance"].values.astype(int).tolist() if d]
    query = int(tokens[0, 3])
    for head in found["head"].values:
        of_head = found.sel(layer=0, head=head).squeeze("variant")
        if float(of_head["acting_share"]) == 0:
            assert of_head["horizon"].isnull()
            continue
        back = int(of_head["picked_distance"])
        picked, other = int(tokens[0, 3 - back]), int(tokens[0, back])
        real = real_scores(model, query, picked, distances)[head].numpy()
        moved = of_head["moved_score"].sel(distance=distances).values
        spread = np.abs(real).max() + 1
        np.testing.assert_allclose(moved, real, rtol=0, atol=2e-5 * spread)
        rival = float(real_scores(model, query, other, [3 - back])[head, 0])
        assert float(of_head["others_level"]) == pytest.approx(rival, abs=2e-5 * spread)
        clear = np.abs(moved - rival) > 1e-4 * spread
        won = of_head["win_share"].sel(distance=distances).values
        np.testing.assert_array_equal(won[clear], (moved > rival)[clear])
        if clear[distances.index(back)]:
            stays = of_head["win_share"].sel(distance=back)
            assert float(of_head["unmoved_win_share"]) == float(stays)
    return int((found["acting_share"].sel(layer=0) > 0).sum())


REAL = {"distances": (1, 2, 3, 5, 11, 40, 200), "copies": (), "rows": "all"}


@pytest.mark.parametrize("name", TEN)
def test_a_moved_key_scores_as_in_a_real_run(name: str):
    model, acted = tiny(name), 0
    for seed in range(3):
        tokens = torch.from_numpy(random_tokens(sequences=1, length=4, seed=seed))
        acted += against_real_runs(
            rl.reach(model, tokens, variants=("own",), **REAL), model, tokens
        )
    assert acted


@pytest.mark.parametrize(
    "variant", ["p-rope:0.5", "p-rope-reversed:0.5", "nope", "linear:4", "abf:500000", "yarn:4"]
)
def test_under_a_variant_it_scores_as_in_the_model_of_that_variant(variant: str):
    """The other model is transformers', from a config with the variant and the same weights."""
    model = tiny("llama_gqa", rope_parameters=ROPE)
    other = type(model)(rl.variant_config(model.config, variant)).eval()
    other.load_state_dict(model.state_dict())
    other.set_attn_implementation("eager")
    tokens = torch.from_numpy(random_tokens(sequences=1, length=4, seed=3))
    found = rl.reach(model, tokens, variants=(variant,), **REAL)
    picks = rl.reach(model, tokens, variants=("own",), **REAL)
    xr.testing.assert_equal(found["picked_distance"], picks["picked_distance"])
    assert against_real_runs(found, other, tokens)


# every row, in loops


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "glm"])
def test_every_number_of_text_against_loops(name: str):
    model = tiny(name)
    tokens, lengths = random_tokens(sequences=3, length=24), [24, 15, 20]
    distances = (0, 4, 100)
    found = rl.reach(
        model,
        torch.from_numpy(tokens),
        lengths=torch.tensor(lengths),
        variants=("own",),
        distances=distances,
        copies=(),
        rows="all",
    ).squeeze("variant")
    sums = dict.fromkeys(("rows", "distance", "level"), 0.0)
    totals = [[dict(sums) for _ in found["head"]] for _ in found["layer"]]
    for sequence, length in zip(tokens, lengths, strict=True):
        calls = attention_calls(model, sequence[:length])[0]
        for layer, call in enumerate(calls):
            keys = call.key.repeat_interleave(len(call.query) // len(call.key), dim=0)
            scores = (call.scale * call.query @ keys.mT).numpy()
            for head, row in np.ndindex(len(scores), length):
                seen = np.flatnonzero(call.visible[row])
                choice = [j for j in seen if 0 < j < row]
                if len(choice) < 2:
                    continue
                picked = max(choice, key=lambda j: scores[head, row, j])
                if 0 in seen and scores[head, row, 0] > scores[head, row, picked]:
                    continue
                others = [scores[head, row, j] for j in choice if j != picked]
                total = totals[layer][head]
                total["rows"] += 1
                total["distance"] += row - picked
                total["level"] += np.mean(others)
    names = {"distance": "picked_distance", "level": "others_level"}
    for key, variable in names.items():
        expected = [[total[key] / total["rows"] for total in layer] for layer in totals]
        np.testing.assert_allclose(found[variable], expected, rtol=1e-4, atol=1e-4)


def test_numbers_do_not_depend_on_the_batches(monkeypatch: pytest.MonkeyPatch):
    model, tokens = tiny("llama_gqa"), torch.from_numpy(random_tokens(sequences=8, length=20))
    lengths = torch.tensor([20, 9, 14, 20, 6, 20, 11, 16])
    given = {"lengths": lengths, "rows": 5, "distances": (0, 9, 5000), "copies": ()}
    whole = rl.reach(model, tokens, **given)
    monkeypatch.setattr(measurement, "TOKENS_PER_BATCH", {"cpu": 40})
    parts = rl.reach(model, tokens, **given)
    assert whole["horizon_low"].notnull().all()
    few = rl.reach(model, tokens[:7], lengths=lengths[:7], rows=5, distances=(0, 9), copies=())
    assert few["horizon_low"].isnull().all(), "of too few groups to draw from"
    xr.testing.assert_allclose(whole, parts, rtol=1e-4)


# horizons, ties, intervals


def first_fall(
    product: np.ndarray, w: np.ndarray, level: float, *, within: int, farthest: int
) -> float:
    """Where a score first falls to a level: every whole distance, then scipy's root."""

    def above(d: float) -> float:
        return float((product * np.exp(1j * w * d)).sum().real - level)

    scores = (np.exp(1j * np.outer(np.arange(farthest + 1), w)) @ product).real
    higher = scores > level
    if not higher[:within].any():
        return 0.0
    falls = np.flatnonzero(higher[:-1] & ~higher[1:])
    return brentq(above, falls[0], falls[0] + 1, xtol=1e-12) if len(falls) else math.inf


def test_the_horizon_follows_from_the_scores_by_scipy():
    model, far = tiny("llama_gqa", rope_parameters=ROPE), 5000
    tokens = torch.from_numpy(random_tokens(sequences=6, length=40))
    variants = ("own", "p-rope:0.5", "yarn:4")
    found = rl.reach(
        model, tokens, variants=variants, distances=(0, far), copies=(), resamples=0
    )
    for variant, layer, head in np.ndindex(found["horizon"].shape):
        of_head = found.isel(variant=variant, layer=layer, head=head)
        product = of_head["product_real"].values + 1j * of_head["product_imag"].values
        turning = np.isfinite(product)
        product = (product * of_head["variant_gain"].values)[turning]
        w = of_head["variant_inv_freq"].values[turning]
        level = float(of_head["others_level"])
        expected = first_fall(product, w, level, within=40, farthest=far)
        assert float(of_head["horizon"]) == pytest.approx(expected, abs=1e-6)


def test_copies_of_a_token_tie_where_nothing_rotates():
    """In layer 0 equal tokens have equal keys: no one of them scores above all others."""
    model = tiny("llama_gqa")
    tokens = torch.full((2, 40), 7)
    tokens[:, 0] = 3
    found = rl.reach(model, tokens, variants=("own", "nope"), copies=(), rows="all").sel(
        layer=0
    )
    still, own = found.sel(variant="nope"), found.sel(variant="own")
    assert (still["win_share"] == 0).all()
    assert (still["unmoved_win_share"] == 0).all()
    assert (own["unmoved_win_share"] == 1).all()


def test_what_a_variant_leaves_unmoved():
    """All under the model's own rotation; where nothing rotates, what any distance leaves."""
    tokens = torch.from_numpy(random_tokens(sequences=4, length=40))
    variants = ("own", "p-rope:0.5", "nope")
    found = rl.reach(tiny("llama_gqa"), tokens, variants=variants, copies=(), rows="all")
    unmoved = found["unmoved_win_share"]
    np.testing.assert_allclose(unmoved.sel(variant="own"), 1)
    still = found["win_share"].sel(variant="nope")
    same = np.broadcast_to(unmoved.sel(variant="nope").values[..., None], still.shape)
    np.testing.assert_allclose(still, same, atol=0.02)
    assert (unmoved.sel(variant="p-rope:0.5") < 1).any()


def test_some_heads_are_those_heads_of_all():
    tokens = torch.from_numpy(random_tokens(sequences=3, length=30))
    model = tiny("llama_gqa")
    every = rl.reach(model, tokens, rows=8, seed=-1, copies=())
    some = rl.reach(model, tokens, rows=8, seed=-1, copies=(), heads="0.3,1.1,1.2")
    assert int(some["picked_distance"].notnull().sum()) == 3
    for layer, head in ((0, 3), (1, 1), (1, 2)):
        one = {"layer": layer, "head": head}
        xr.testing.assert_allclose(some.sel(one), every.sel(one), rtol=1e-5)


def test_the_interval_is_of_horizons_with_sequences_drawn_again():
    """The percentile bootstrap: 2.5 % of the resampled horizons lie beyond either end."""
    model, count, length, far = tiny("llama_gqa"), 10, 24, 3000
    tokens = torch.from_numpy(random_tokens(sequences=count, length=length))
    options = {"variants": ("own",), "rows": "all", "distances": (0, far), "copies": ()}
    found = rl.reach(model, tokens, resamples=400, seed=3, **options).squeeze("variant")
    alone = xr.concat(
        [rl.reach(model, one[None], resamples=0, **options) for one in tokens], "sequence"
    ).squeeze("variant")
    draws = np.random.default_rng(3).multinomial(count, np.full(count, 1 / count), size=400)
    for layer, head in ((0, 2), (1, 1)):
        one = alone.sel(layer=layer, head=head)
        product = one["product_real"].values + 1j * one["product_imag"].values
        there, w = np.isfinite(product[0]), one["variant_inv_freq"].values[0]
        weight = draws * one["acting_share"].values
        weight = weight / weight.sum(1, keepdims=True)
        drawn = weight @ product[:, there], weight @ one["others_level"].values
        horizon = [
            first_fall(mean, w[there], level, within=length, farthest=far)
            for mean, level in zip(*drawn, strict=True)
        ]
        ends = [found[f"horizon_{end}"].sel(layer=layer, head=head) for end in ("low", "high")]
        expected = np.sort(horizon)[[9, 389]]
        np.testing.assert_allclose(ends, expected, rtol=1e-4)


# what cannot be asked


def test_rows_without_a_choice_are_refused():
    tokens = torch.from_numpy(random_tokens(sequences=2, length=3))
    with pytest.raises(BadArgument, match="No row has two keys to choose from"):
        rl.reach(tiny("llama_gqa"), tokens, copies=())


def test_under_an_edit_only_the_edited_rotation_is_measured():
    model = tiny("llama_gqa")
    tokens = torch.from_numpy(random_tokens(sequences=2, length=12))
    with rl.edit_rope(model, "nope"):
        found = rl.reach(model, tokens, variants=["own"], distances=(0, 1, 1000), copies=())
        with pytest.raises(BadArgument, match="Variants are put to a model as it is"):
            rl.reach(model, tokens, variants=("own", "p-rope:0.5"))
    assert (found["moved_score"].std("distance") < 1e-9).all()


# copies at real distances


@pytest.mark.parametrize("name", ["llama_gqa", "gemma2", "gpt_oss", "phi"])
def test_copies_are_found_as_loops_over_a_run_find_them(name: str) -> None:
    model, tokens = tiny(name), torch.from_numpy(random_tokens(sequences=2, length=40))
    apart, draws = (48, 96), 2
    found = rl.reach(model, tokens, variants=("own",), copies=apart, draws=draws, rows=4)
    measured = Measurement.of(model, tokens)
    copied = run_distances(measured.subject.context, None)[0]
    shares = np.zeros((draws, *found["found_share"].shape[1:]))
    for draw, (at, distance) in itertools.product(range(draws), enumerate(apart)):
        sequence = copies(measured, distance, copied, draw)[0].numpy()
        assert (sequence[1 : copied + 1] == sequence[-copied:]).all()
        assert len(sequence) == 1 + distance + copied
        for layer, call in enumerate(attention_calls(model, sequence)[0]):
            keys = call.key.repeat_interleave(len(call.query) // len(call.key), dim=0)
            scores = (call.query @ keys.mT).numpy() * np.sign(call.scale)
            for head, row in np.ndindex(len(scores), copied - 1):
                i = len(sequence) - copied + row
                seen = [j for j in np.flatnonzero(call.visible[i]) if 0 < j < i]
                right = 2 + row
                won = right in seen and right == max(seen, key=lambda j: scores[head, i, j])
                shares[draw, layer, head, at] += won / (copied - 1)
    there = found["found_share"].isel(run=0)
    assert there.notnull().any()
    np.testing.assert_allclose(
        there, np.where(there.isnull(), np.nan, shares.mean(0)), atol=1e-6
    )


def test_turned_to_where_it_stands_a_copy_wins_as_it_does() -> None:
    model = tiny("phi")
    subject = as_subject(model)
    sequence = copies(Measurement.of(model, torch.arange(40)[None]), 12, 12, 0)

    def see(call: AttentionCall) -> torch.Tensor:
        planes, there = subject.planes()[call.layer], torch.tensor([12.0])
        call = call.of_heads(torch.arange(call.query.shape[1]))
        return won(call, planes, copied=12, distance=12, further=there)

    seen = look(subject, sequence, see)
    for share in seen.values():
        torch.testing.assert_close(share[:, 0], share[:, 1])
    assert max(float(share.max()) for share in seen.values()) > 0


def test_the_induction_head_finds_copies() -> None:
    model, _ = rl.load("bundled")
    text = torch.randint(5, model.config.vocab_size, (4, 100), generator=torch.manual_seed(0))
    found = rl.reach(model, text, heads="4.4,2.0", runs=("own", "nope"), rows=4)
    of_head = found.sel(layer=4, head=4)
    assert (of_head["found_share"].sel(run="own", run_distance=[48, 96]) > 0.5).all()
    assert (of_head["found_low"].sel(run="own") <= of_head["found_share"].sel(run="own")).all()
    assert (found["found_share"].sel(layer=2, head=0) < 0.1).all()
    assert (of_head["found_share"].sel(run="nope") < 0.1).all()
    assert found["found_share"].sel(layer=0).isnull().all()
    foretold = of_head["foretold_share"].sel(run="own").values
    assert math.isnan(foretold[0])
    assert (abs(foretold[1:] - of_head["found_share"].sel(run="own")[1:]) < 0.3).all()


def test_copies_lie_in_the_context() -> None:
    model = tiny("llama_gqa")
    context = model.config.max_position_embeddings
    with pytest.raises(BadArgument, match="must lie in the context"):
        rl.reach(model, torch.arange(40)[None], copies=(context,))
