"""Two heads side by side on the page of a comparison, in a real browser."""

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
from ropelens.runtime.digits import FOUR_DIGITS, rounded
from ropelens.runtime.netcdf import save

READY = "#plot-second[data-head]"
EIGHT_OF_TEN_PLANES = {
    "rope_type": "proportional",
    "rope_theta": 1e6,
    "partial_rotary_factor": 0.8,
}


@pytest.fixture(scope="module")
def profiles() -> list[xr.Dataset]:
    """Two layers of four heads, and three layers of two heads with 8 of 10 planes rotating."""
    one = tiny("llama_gqa")
    other = tiny(
        "llama_gqa",
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=20,
        rope_parameters=EIGHT_OF_TEN_PLANES,
    )
    text = random_tokens(sequences=4, length=40)
    return [rl.profile(model, text, surrogates=0) for model in (one, other)]


@pytest.fixture(scope="module")
def opened(browser, profiles, tmp_path_factory):
    place = tmp_path_factory.mktemp("compared")
    folders = [place / "one", place / "other"]
    for profile, folder in zip(profiles, folders, strict=True):
        save(profile, folder / "profile.nc")
    (place / "other" / "index.html").touch()
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
    # Head 1 shares key-value head 0 in both models.
    for trace, (name, head) in enumerate(
        (("selectivity_keys", 1), ("q_norm", 1), ("k_norm", 0))
    ):
        expected = rounded(one[name].values[0, head], FOUR_DIGITS)
        drawn = values(page, "plot-first", "y", trace)
        np.testing.assert_array_equal(drawn[: expected.size], expected)
        assert np.isnan(drawn[expected.size :]).all()
        rotating = values(page, "plot-second", "y", trace)
        stopped = values(page, "plot-second", "y", trace + 3)
        drawn = [*rotating[:8], *stopped[8:]]
        expected = rounded(other[name].values[0, head], FOUR_DIGITS)
        np.testing.assert_array_equal(drawn, expected)
    wavelength = other["wavelength"][0]
    places = values(page, "plot-second", "x")
    np.testing.assert_allclose(places[:8], wavelength[:8], rtol=1e-5)
    assert np.isinf(wavelength[8:]).all()
    rows = [row_of_head(profile, layer=0, head=1) for profile in profiles]
    assert numbers(page, "label") == [row["label"] for row in rows]
    assert numbers(page, "total_bits") == [f"{row['total_bits']:.2f}" for row in rows]
    for axis in ("yaxis", "yaxis2"):
        first = range_of_axis(page, "plot-first", axis)
        second = range_of_axis(page, "plot-second", axis)
        np.testing.assert_allclose(first, second)
    page.select_option("#first-head", "L0H2")
    shown(page, "one: L0 H2", "other: L0 H2 does not exist")
    assert numbers(page, "label")[1] == "–"
    assert values(page, "plot-second", "y").size == 0


def row_of_head(profile: xr.Dataset, *, layer: int, head: int):
    heads = rl.classify_heads(profile, resamples=2)
    return heads.set_index(["layer", "head"]).loc[(layer, head)]


def range_of_axis(page: playwright.Page, plot: str, axis: str) -> list[float]:
    return page.evaluate(f"document.getElementById('{plot}')._fullLayout.{axis}.range")


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
    page = opened.load("#heads=0.L9H9,1.same", ready=READY)
    assert page.input_value("#first-head") == "L9H9"
    chosen = page.locator("#first-head option:checked").text_content()
    assert chosen == "L9 H9 does not exist"
    aligned = "(cell) => getComputedStyle(cell).textAlign"
    sides = page.locator("#head-numbers [data-number=total_bits]")
    assert [sides.nth(side).evaluate(aligned) for side in (0, 1)] == ["right"] * 2
    for unknown in ("#heads=0.L1H3,2.L0H0", "#words", ""):
        page = opened.load(unknown, ready=READY)
        assert page.input_value("#first-entry") == "0"
        assert page.input_value("#second-entry") == "1"


def test_heads_of_models_with_a_page_are_linked(opened):
    page = opened.load("#heads=0.L1H3,1.L2H1", ready=READY)
    shown(page, "one: L1 H3", "other: L2 H1")
    assert page.locator("#first-page").is_hidden(), "this model has no page"
    link = page.locator("#second-page")
    assert link.get_attribute("href") == "../other/index.html#L2H1"
    assert page.locator("#map-page").get_attribute("href") == "../other/index.html"


def test_the_page_begins_with_the_most_positional_head():
    comparison = synthetic_comparison()
    comparison["positional_fraction"] = comparison["mean_wavelength"] * 0
    comparison["positional_fraction"][0, 1, 0] = 0.9
    comparison["positional_fraction"][1, 0, 1] = 0.9
    comparison["label"][:2] = "mixed"
    first, second = chosen_heads(comparison)
    assert first == ComparedHead(0, 1, 0)
    assert second == ComparedHead(1, 1, 0)
    comparison["label"][1, 1] = ""  # the second model has one layer
    _, second = chosen_heads(comparison)
    assert second == ComparedHead(1, 0, 1)
    figure = plot_compared_head(comparison, second)
    drawn = {}
    for trace in figure.data:
        name = trace.meta["y"]
        drawn[name] = np.fmax(drawn.get(name, np.nan), trace.y)
    for name, head in (("selectivity_keys", 1), ("q_norm", 1), ("k_norm", 0)):
        np.testing.assert_allclose(drawn[name], comparison[name][1, 0, head])
