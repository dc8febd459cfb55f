"""Two heads side by side on the page of a comparison, in a real browser."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from in_browser import Opened, playwright, values
from oracles.tiny import random_tokens, tiny
from synthetic_comparison import synthetic_comparison

import ropelens as rl
from ropelens.analysis.answer import Answer
from ropelens.figures.compared_heads import ComparedHead, plot_compared_head
from ropelens.report.comparison_page import chosen_heads
from ropelens.runtime.netcdf import save

READY = "#plot-second[data-head]"


@pytest.fixture(scope="module")
def profiles() -> list[xr.Dataset]:
    """Two layers of four heads, and three layers of two heads with 8 of 10 planes rotating."""
    rope = {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.8,
    }
    turns = {"rope_parameters": rope}
    shape = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    models = [tiny("llama_gqa"), tiny("llama_gqa", head_dim=20, **turns, **shape)]
    text = random_tokens(sequences=4, length=40)
    return [rl.profile(model, text, surrogates=0) for model in models]


@pytest.fixture(scope="module")
def opened(browser, profiles, tmp_path_factory):
    place: Path = tmp_path_factory.mktemp("compared")
    folders = [place / "one", place / "other"]
    for profile, folder in zip(profiles, folders, strict=True):
        save(profile, folder / "profile.nc")
    comparison = rl.compare(folders, cache=place / "cache")
    page = Answer().save(place / "out", comparison)
    with Opened(browser, page) as opened:
        yield opened


def shown(page: playwright.Page, first: str, second: str) -> None:
    """Waits until these heads are shown."""
    page.wait_for_selector(f"#plot-first[data-head='{first}']")
    page.wait_for_selector(f"#plot-second[data-head='{second}']")


def numbers(page: playwright.Page, name: str) -> list[str]:
    return page.locator(f"#head-numbers [data-number={name}]").all_text_contents()


@pytest.mark.thorough
def test_the_same_head_of_the_other_model_follows(opened, profiles):
    one, other = profiles
    page = opened.load("#heads=0.L0H1,1.same", ready=READY)
    shown(page, "one: L0 H1", "other: L0 H1")
    for number, name in enumerate(("selectivity_keys", "q_norm", "k_norm")):
        left = one[name][0, 0 if name == "k_norm" else 1]
        right = other[name][0, 0 if name == "k_norm" else 1]
        drawn = values(page, "plot-first", "y", number)
        np.testing.assert_allclose(drawn[: left.size], left, rtol=1e-5)
        assert np.isnan(drawn[left.size :]).all()
        drawn = values(page, "plot-second", "y", number)
        np.testing.assert_allclose(drawn, right, rtol=1e-5)
    wavelength = other["wavelength"][0]
    places = values(page, "plot-second", "x")
    np.testing.assert_allclose(places[:8], wavelength[:8], rtol=1e-5)
    assert np.isinf(wavelength[8:]).all()
    heads = [rl.classify_heads(profile, resamples=2) for profile in profiles]
    rows = [table.set_index(["layer", "head"]).loc[(0, 1)] for table in heads]
    assert numbers(page, "label") == [row["label"] for row in rows]
    assert numbers(page, "total_bits") == [f"{row['total_bits']:.2f}" for row in rows]
    for axis in ("yaxis", "yaxis2"):
        ends = [
            page.evaluate(f"document.getElementById('{name}')._fullLayout.{axis}.range")
            for name in ("plot-first", "plot-second")
        ]
        np.testing.assert_allclose(*ends)
    page.select_option("#first-head", "L0H2")
    shown(page, "one: L0 H2", "other: L0 H2 does not exist")
    assert numbers(page, "label")[1] == "–"
    assert values(page, "plot-second", "y").size == 0


def test_any_head_is_chosen_and_back_returns(opened):
    page = opened.load("#heads=0.L1H3,1.same", ready=READY)
    options = page.locator("#second-head option").evaluate_all(
        "(all) => all.map((o) => o.value)"
    )
    heads = ["L0H0", "L0H1", "L1H0", "L1H1", "L2H0", "L2H1"]
    assert options == ["same", *heads]
    page.select_option("#second-head", "L2H1")
    shown(page, "one: L1 H3", "other: L2 H1")
    assert page.url.endswith("#heads=0.L1H3,1.L2H1")
    page.select_option("#first-entry", "1")
    page.select_option("#first-head", "L0H0")
    shown(page, "other: L0 H0", "other: L2 H1")
    page.go_back()
    page.go_back()
    shown(page, "one: L1 H3", "other: L2 H1")
    assert page.input_value("#first-entry") == "0"
    page.go_back()
    page.wait_for_function(
        "() => document.getElementById('second-head').value === 'same'"
    )
    for unknown in ("#heads=0.L1H3,2.L0H0", "#words", ""):
        page = opened.load(unknown, ready=READY)
        assert page.input_value("#first-entry") == "0"
        assert page.input_value("#second-entry") == "1"


def test_the_page_begins_with_the_most_positional_head():
    comparison = synthetic_comparison()
    comparison["positional_fraction"] = comparison["mean_wavelength"] * 0
    comparison["positional_fraction"][0, 1, 0] = 0.9
    comparison["positional_fraction"][1, 0, 1] = 0.9
    comparison["label"][:2] = "mixed"
    first, second = chosen_heads(comparison)
    assert (first, second) == (ComparedHead(0, 1, 0), ComparedHead(1, 1, 0))
    comparison["label"][1, 1] = ""  # the second model has one layer
    assert chosen_heads(comparison)[1] == ComparedHead(1, 0, 1)
    figure = plot_compared_head(comparison, ComparedHead(1, 0, 1))
    drawn = {trace.meta["y"]: trace.y for trace in figure.data}
    np.testing.assert_allclose(
        drawn["selectivity_keys"], comparison["selectivity_keys"][1, 0, 1]
    )
    np.testing.assert_allclose(drawn["q_norm"], comparison["q_norm"][1, 0, 1])
    np.testing.assert_allclose(drawn["k_norm"], comparison["k_norm"][1, 0, 0])
