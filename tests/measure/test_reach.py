"""The reach of heads, held to real distances and to loops over every row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xarray as xr
from oracles.recording import attention_calls
from oracles.tiny import TEN, random_tokens, tiny
from transformers import PreTrainedModel

import ropelens as rl
from ropelens.errors import BadArgument
from ropelens.measure import batches

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


def against_real_runs(found: xr.Dataset, model: PreTrainedModel, tokens: torch.Tensor) -> None:
    """Row 3 of four tokens is the only one with a choice: between positions 1 and 2."""
    distances = [d for d in found["distance"].values.astype(int).tolist() if d]
    query = int(tokens[0, 3])
    for head in found["head"].values:
        of_head = found.sel(layer=0, head=head).squeeze("variant")
        back = int(of_head["picked_distance"])
        picked, other = int(tokens[0, 3 - back]), int(tokens[0, back])
        real = real_scores(model, query, picked, distances)[head].numpy()
        moved = of_head["moved_score"].sel(distance=distances).values
        spread = np.abs(real).max() + 1
        np.testing.assert_allclose(moved, real, rtol=0, atol=2e-5 * spread)
        rival = float(real_scores(model, query, other, [3 - back])[head, 0])
        for name in ("others_level", "others_best"):
            assert float(of_head[name]) == pytest.approx(rival, abs=2e-5 * spread)
        clear = np.abs(moved - rival) > 1e-4 * spread
        won = of_head["win_share"].sel(distance=distances).values
        np.testing.assert_array_equal(won[clear], (moved > rival)[clear])
        if clear[distances.index(back)]:
            stays = of_head["win_share"].sel(distance=back)
            assert float(of_head["unmoved_win_share"]) == float(stays)


REAL_DISTANCES = (1, 2, 3, 5, 11, 40, 200)


@pytest.mark.parametrize("name", TEN)
def test_a_moved_key_scores_as_in_a_real_run(name: str):
    model = tiny(name)
    tokens = torch.from_numpy(random_tokens(sequences=1, length=4))
    found = rl.reach(model, tokens, variants=("own",), distances=REAL_DISTANCES, rows="all")
    against_real_runs(found, model, tokens)


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
    found = rl.reach(model, tokens, variants=(variant,), distances=REAL_DISTANCES, rows="all")
    picks = rl.reach(model, tokens, variants=("own",), distances=REAL_DISTANCES, rows="all")
    xr.testing.assert_equal(found["picked_distance"], picks["picked_distance"])
    against_real_runs(found, other, tokens)


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
        rows="all",
    ).squeeze("variant")
    sums = dict.fromkeys(("rows", "distance", "level", "best"), 0.0)
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
                others = [scores[head, row, j] for j in choice if j != picked]
                total = totals[layer][head]
                total["rows"] += 1
                total["distance"] += row - picked
                total["level"] += np.mean(others)
                total["best"] += max(others)
    names = {"distance": "picked_distance", "level": "others_level", "best": "others_best"}
    for key, variable in names.items():
        expected = [[total[key] / total["rows"] for total in layer] for layer in totals]
        np.testing.assert_allclose(found[variable], expected, rtol=1e-4, atol=1e-4)


def test_sampled_rows_expect_what_all_rows_give():
    """Samples of unequal weights lie around the numbers of all rows, not to one side."""
    model = tiny("llama_gqa")
    tokens = torch.from_numpy(random_tokens(sequences=24, length=33))
    lengths = torch.tensor([9, 17, 33] * 8)

    def measured(rows: int | str, seed: int) -> xr.Dataset:
        return rl.reach(
            model,
            tokens,
            lengths=lengths,
            variants=("own",),
            distances=(0, 10),
            rows=rows,
            resamples=0,
            seed=seed,
        )

    every = measured("all", 0)
    samples = xr.concat([measured(12, seed) for seed in range(9)], "seed")
    for name in ("moved_score", "others_level", "others_best", "win_share", "picked_distance"):
        off = samples[name].mean("seed") - every[name]
        error = samples[name].std("seed", ddof=1) / 3
        assert float(np.abs(off / error).max()) < 4.5, name
    assert every["horizon_low"].isnull().all()


def test_numbers_do_not_depend_on_the_batches(monkeypatch: pytest.MonkeyPatch):
    model, tokens = tiny("llama_gqa"), torch.from_numpy(random_tokens(sequences=8, length=20))
    lengths = torch.tensor([20, 9, 14, 20, 6, 20, 11, 16])
    given = {"lengths": lengths, "rows": 5, "distances": (0, 9, 5000)}
    whole = rl.reach(model, tokens, **given)
    monkeypatch.setattr(batches, "TOKENS_PER_BATCH", {"cpu": 40})
    parts = rl.reach(model, tokens, **given)
    assert whole["horizon_low"].notnull().all()
    few = rl.reach(model, tokens[:7], lengths=lengths[:7], rows=5, distances=(0, 9))
    assert few["horizon_low"].isnull().all(), "of too few groups to draw from"
    xr.testing.assert_allclose(whole, parts, rtol=1e-4)


@pytest.mark.parametrize("name", ["smollm3", "gemma2", "deepseek_v3"])
def test_every_family_has_the_default_variants(name: str):
    tokens = torch.from_numpy(random_tokens(sequences=2, length=12))
    found = rl.reach(tiny(name), tokens, distances=(0, 1, 1000), resamples=0)
    assert found.sizes["variant"] == 6
    assert np.isfinite(found["moved_score"]).all()
    still = found.sel(variant="nope")
    np.testing.assert_allclose(still["moved_score"].std("distance"), 0, atol=1e-9)
    np.testing.assert_allclose(still["lowest_score"], still["moved_score"][..., 0])
    below = found["lowest_score"] - 1e-9 <= found["moved_score"]
    assert below.all()


# what cannot be asked


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"variants": ("rope", "rope")}, "Variants are named once each, at least one; seen: "),
        ({"distances": (4, -1)}, "Distances are numbers of tokens that a key stands back"),
        ({"variants": ("longrope:2/1,1/1,1",)}, "LongRoPE needs a factor for every plane"),
    ],
)
def test_what_cannot_be_asked_is_one_clear_line(options: dict, line: str):
    tokens = torch.from_numpy(random_tokens(sequences=1, length=6))
    with pytest.raises(BadArgument) as raised:
        rl.reach(tiny("llama_gqa"), tokens, **options)
    assert raised.value.line.startswith(line)


def test_rows_without_a_choice_are_refused():
    tokens = torch.from_numpy(random_tokens(sequences=2, length=3))
    with pytest.raises(BadArgument, match="No row has two keys to choose from"):
        rl.reach(tiny("llama_gqa"), tokens)


def test_under_an_edit_only_the_edited_rotation_is_measured():
    model = tiny("llama_gqa")
    tokens = torch.from_numpy(random_tokens(sequences=2, length=12))
    with rl.edit_rope(model, "nope"):
        found = rl.reach(model, tokens, variants="own", distances=(0, 1, 1000))
        with pytest.raises(BadArgument, match="Variants are put to a model as it is"):
            rl.reach(model, tokens, variants=("own", "p-rope:0.5"))
    assert (found["moved_score"].std("distance") < 1e-9).all()
