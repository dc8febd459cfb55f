"""A second model on a page, in a real browser."""

import re

import numpy as np
import pytest
from in_browser import Opened, idle, playwright, values, view
from oracles.tiny import random_tokens, tiny

import ropelens as rl
from ropelens.report.payload import same_text

TEXT = random_tokens(sequences=4, length=40)
BOTH = TEXT[1, :12]
"""A text that both models read. It is the second and the first of their excerpts."""


@pytest.fixture(scope="module")
def models():
    """Two layers of four heads, and three layers of two heads with 8 of 10 planes rotating."""
    rope = {
        "rope_type": "proportional",
        "rope_theta": 1e6,
        "partial_rotary_factor": 0.8,
    }
    turns = {"rope_parameters": rope}
    shape = {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    return [tiny("llama_gqa"), tiny("llama_gqa", head_dim=20, **turns, **shape)]


@pytest.fixture(scope="module")
def analyses(models) -> list[rl.Analysis]:
    pieces = [TEXT[0, :16], BOTH], [BOTH, TEXT[2, :9]]
    analyses = []
    for name, model, excerpts in zip(("one", "other"), models, pieces, strict=True):
        profile = rl.profile(model, TEXT, excerpts=list(excerpts), surrogates=0)
        profile.attrs["model"] = name
        analyses.append(
            rl.Analysis(profile, rl.classify_heads(profile, resamples=2), {})
        )
    return analyses


@pytest.fixture(scope="module")
def opened(browser, analyses, tmp_path_factory):
    one, other = analyses
    page = tmp_path_factory.mktemp("beside") / "page.html"
    with Opened(browser, one.report(page, beside=other)) as opened:
        yield opened


def second_words(page: playwright.Page) -> str:
    return page.inner_text("#beside-now")


@pytest.mark.thorough
def test_the_same_head_of_the_other_model_follows(opened, analyses):
    one, other = (analysis.profile["selectivity_keys"] for analysis in analyses)
    page = opened.at("#L0H1&beside=same")
    np.testing.assert_allclose(
        values(page, "plot-selectivity", "y"), one[0, 1], rtol=1e-5
    )
    np.testing.assert_allclose(
        values(page, "pinned-selectivity", "y"), other[0, 1], rtol=1e-5
    )
    wavelength = analyses[1].profile["wavelength"][0]
    places = values(page, "pinned-selectivity", "x")
    np.testing.assert_allclose(places[:8], wavelength[:8], rtol=1e-5)
    assert np.isinf(wavelength[8:]).all()
    label = analyses[1].heads.set_index(["layer", "head"]).loc[(0, 1), "label"]
    assert second_words(page).startswith(f"other, layer 0, head 1: {label}")
    panes = page.locator("#head .plot:visible")
    titles = panes.evaluate_all("(all) => all.map((p) => p.dataset.head)")
    assert titles == ["one: L0 H1", "other: L0 H1"]
    ends = "document.getElementById('{}-selectivity')._fullLayout.yaxis.range"
    np.testing.assert_allclose(
        *(page.evaluate(ends.format(n)) for n in ("plot", "pinned"))
    )
    page.click("#next")
    page.wait_for_selector("html[data-shown=L0H2]")
    idle(page)
    assert second_words(page) == "other has no layer 0, head 2."
    assert not page.locator("#pinned-selectivity").is_visible()


def test_any_head_of_the_other_model_is_chosen_and_back_returns(opened, analyses):
    page = opened.at("#L1H3&beside=same")
    options = page.locator("#beside option").evaluate_all(
        "(all) => all.map((o) => o.value)"
    )
    assert options == ["", "same", "0,0", "0,1", "1,0", "1,1", "2,0", "2,1"]
    page.select_option("#beside", "2,1")
    page.wait_for_selector("#pinned-selectivity[data-head='other: L2 H1']")
    assert page.url.endswith("#L1H3&beside=L2H1")
    page.click("#pin")
    page.wait_for_selector("#pinned-selectivity[data-head='one: L1 H3']")
    pinned = analyses[0].profile["selectivity_keys"][1, 3]
    np.testing.assert_allclose(
        values(page, "pinned-selectivity", "y"), pinned, rtol=1e-5
    )
    assert page.url.endswith("#L1H3&pin=L1H3")
    assert page.input_value("#beside") == ""
    page.go_back()
    page.wait_for_selector("#pinned-selectivity[data-head='other: L2 H1']")
    page.go_back()
    page.wait_for_function("() => document.getElementById('beside').value === 'same'")
    page.select_option("#beside", "")
    assert page.url.endswith("#L1H3")
    assert not page.locator("#pinned-selectivity").is_visible()
    assert not page.locator("#beside-now").is_visible()
    page = opened.at("#L1H3&beside=L9H9")
    assert not page.locator("#pinned-selectivity").is_visible()


def test_pair_score_and_text_show_both_models(opened, models, analyses):
    page = opened.at("#L1H3&tab=pair&text=2&pair=9-4&beside=L2H1")
    pairs = zip(models, ("1.3", "2.1"), strict=True)
    seen = [rl.capture(model, BOTH, heads=head).isel(head=0) for model, head in pairs]
    for pane, captured in zip(("plot", "pinned"), seen, strict=True):
        pushes = captured["contrast"].values[:, 9, 4]
        shown = values(page, f"{pane}-pair", "y")
        np.testing.assert_allclose(shown, pushes, atol=2 * 5e-3)  # two rounded terms
    scores = [
        f"{captured['score'].values[9, 4]:+.2f}".replace("-", "−") for captured in seen
    ]
    words = f"Score at distance 5: {scores[0]} nats; other: L2 H1: {scores[1]}"
    assert page.inner_text("#pair-score") == words
    view(page, "text")
    weights = seen[1]["attention"].values[9]
    looks = r"other: L2 H1: .* attends to \S+ (\d+)% .*"
    words = re.fullmatch(looks, page.inner_text("#looks-beside"))
    assert int(words[1]) == pytest.approx(100 * weights.max(), abs=1)
    page.select_option("#pick-excerpt", "0")
    idle(page)
    assert page.inner_text("#looks-beside") == "other: L2 H1 did not read these tokens."


@pytest.mark.parametrize("mode", ["stop", "drop"])
def test_planes_of_the_same_wavelengths_stop_in_both(opened, models, analyses, mode):
    page = opened.at(f"#L1H3&tab=attention&text=2&{mode}=2-4&beside=L2H1")
    one, other = (analysis.profile["wavelength"].values for analysis in analyses)
    planes = np.flatnonzero((one[1, 2] <= other[2]) & (other[2] <= one[1, 4])).tolist()
    assert 0 < len(planes) < 10
    edit = {"stop": rl.stop, "drop": rl.drop}[mode](
        rl.PlaneNumbers(tuple(planes)), heads="2.1"
    )
    untouched = rl.capture(models[1], BOTH, heads="2.1")["attention"].isel(head=0)
    with rl.edit_rope(models[1], edit):
        expected = rl.capture(models[1], BOTH, heads="2.1")["attention"].isel(head=0)
    shown = np.nan_to_num(values(page, "pinned-attention", "z"))
    np.testing.assert_allclose(shown, expected, atol=5e-3)
    assert np.abs(shown - untouched).max() > 0.05
    assert f" {len(planes)} planes (" in second_words(page)
    page.select_option("#pick-excerpt", "0")
    assert "This model did not read this piece of text" in second_words(page)
    assert not page.locator("#pinned-attention").is_visible()


def test_texts_with_other_tokens_are_the_same_text():
    shown = [["<s>", "One", ",", " two"], ["Three"], ["", ""]]
    others = [["", ""], ["Four"], ["One, ", "two"], ["<bos>", " One", ", two"]]
    assert same_text(shown, others) == [2, -1, -1]
    assert same_text([["<bos>", *others[2]]], others) == [2]
    assert same_text(shown[:1], others[3:]) == [0]
