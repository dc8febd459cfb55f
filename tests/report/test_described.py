"""Sentences about a sweep and about the reach of heads, against the numbers they tell."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import xarray as xr
from oracles.tiny import random_tokens, tiny
from synthetic_truncation import synthetic_truncation

import ropelens as rl
from ropelens.measure.truncation_table import summarize_truncation


def sentence(said: list[str], words: str) -> str:
    (found,) = [one for one in said if words in one]
    return found


def test_a_sweep_tells_both_ends_and_the_random_planes_beside() -> None:
    sweep = synthetic_truncation()
    table = summarize_truncation(sweep).set_index("edit")
    random = table[(table["kind"] == "random") & (table["kept"] == 0.75)]["loss_change"]
    short, told, *_ = rl.describe(sweep)
    numbers = [float(n) for n in re.findall(r"by ([+-][\d.]+)", told.replace("−", "-"))]
    expected = [*table.loc[["slow 0.75", "fast 0.75"], "loss_change"], random.mean()]
    np.testing.assert_allclose(numbers, expected, atol=6e-4)
    assert "slowest 25%" in told
    assert "fastest 25%" in told
    fast = f"stopping the fastest 25% changes the loss by +{expected[1]:.3f} nats/token."
    assert short == f"The slowest 50% of the planes can stop at almost no cost; {fast}"
    (slow,) = rl.describe(synthetic_truncation(bands=0, controls=0, ends=["slow"]))[:1]
    assert slow.startswith("Stopping the slowest 25%"), "nothing to set beside it"


def test_planes_are_free_up_to_the_first_that_is_not() -> None:
    sweep = synthetic_truncation()
    slow = [f"slow {kept:.4g}" for kept in (0.875, 0.75, 0.625)]
    loss = sweep["loss"].sel(edit="none").values
    for edit in (name for name in sweep["edit"].values if name.startswith("slow")):
        sweep["loss"].loc[{"edit": edit}] = loss + (0.001 if edit in slow else 0.5)
    sweep["loss"].loc[{"edit": "slow 0.25"}] = loss  # free again, too late
    told = sentence(rl.describe(sweep), "almost no cost (the interval")
    assert "until 62.5% still rotate" in told
    sweep["loss"].loc[{"edit": "slow 0.875"}] = loss + 0.2
    told = sentence(rl.describe(sweep), "may cost up to")
    assert told.startswith("Stopping the slowest 12.5% of the planes may cost up to +")


@pytest.fixture(scope="module")
def found() -> xr.Dataset:
    tokens = torch.from_numpy(random_tokens(sequences=4, length=16))
    distances = np.geomspace(1, 3000, 40).round()
    return rl.reach(
        tiny("llama_gqa"),
        tokens,
        rows="all",
        variants=["nope", "own"],
        distances=distances,
    )


def test_reach_is_told_by_variant(found: xr.Dataset) -> None:
    said = rl.describe(found)
    trained, far = found.attrs["trained_context"], slice(300, None)
    for variant, under in (("nope", "nope"), ("own", "the model's rotation")):
        of_variant = found.sel(variant=variant)
        horizon = of_variant["horizon"].values
        lost = horizon[np.isfinite(horizon) & (horizon > 0)]
        begin = f"With {under}, {len(lost)} of {horizon.size} heads lose the key"
        told = sentence(said, f"{begin} they picked within 3,000 tokens")
        assert not len(lost) or f"at {np.median(lost):,.0f} tokens" in told
        never = int((horizon == 0).sum())
        assert (f"{never} never score it" in told) == bool(never)
        within = f"; {(lost <= trained).sum()} within the trained context of {trained:,} tokens"
        assert (within in told) == (variant == "own")
        moved = float(of_variant["win_share"].sel(distance=far).mean())
        still = float(of_variant["unmoved_win_share"].mean())
        assert f"in {still:.0%} of rows where it stands, and in {moved:.0%} when moved" in told


def test_heads_with_a_new_label_are_counted_with_their_interval() -> None:
    sweep = synthetic_truncation()
    row = summarize_truncation(sweep).set_index("edit").loc["fast 0.75"]
    told = sentence(rl.describe(sweep), "heads have a new label")
    low, high = row["labels_changed_low"], row["labels_changed_high"]
    count = (
        f"{row['labels_changed']:.0f} heads have a new label ({row['labels_changed_share']:.0%}"
    )
    assert (
        f"fastest 25% of the planes stopped, {count}; 95% interval {low:.0f} to {high:.0f}"
        in told
    )
    assert f"most in {row['changed_most']} (" in told
