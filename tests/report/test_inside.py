"""Computations of the page: attention without planes, and pairs of tokens by plane."""

import contextlib
import csv
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from in_browser import Opened, broken, idle, playwright, values, view
from oracles.tiny import random_tokens, tiny
from torch import nn

import ropelens as rl
from ropelens.checkpoints.bundled import sample_path
from ropelens.figures.attention import farthest_distance
from ropelens.figures.formats import visible_token
from ropelens.interventions.plane_edits import Edit
from ropelens.text.tokenize import prompt_tokens

LAYER = 2
HEAD = 3
HEAD_NAME = f"{LAYER}.{HEAD}"
PROMPTS = ["The old man said that the old man said no.", "One, two, three."]


@dataclass(frozen=True, eq=False)
class Bundled:
    """The bundled model, and its profile with two excerpts."""

    model: nn.Module
    tokenizer: object
    profile: xr.Dataset


@pytest.fixture(scope="module")
def bundled() -> Bundled:
    model, tokenizer = rl.load("bundled")
    text = rl.tokenize(rl.read_documents([sample_path()]), tokenizer, context=64)
    prompts = [prompt_tokens(prompt, tokenizer) for prompt in PROMPTS]
    profile = rl.profile(
        model, text.ids[:6], tokenizer=tokenizer, excerpts=prompts, surrogates=0
    )
    profile["excerpt_lead"][1] = np.nan  # as if logits had overflowed
    return Bundled(model, tokenizer, profile)


@pytest.fixture(scope="module")
def opened(browser, bundled, tmp_path_factory):
    path = tmp_path_factory.mktemp("inside") / "page.html"
    rl.write_report(bundled.profile, path)
    with Opened(browser, path) as opened:
        yield opened


def captured(
    bundled: Bundled,
    excerpt: int,
    edit: Edit | None = None,
    runner_up: int | None = None,
) -> xr.Dataset:
    """Capture of the head of these tests on a prompt, by plane and by pair of tokens."""
    edited = contextlib.nullcontext()
    if edit is not None:
        edited = rl.edit_rope(bundled.model, edit)
    with edited:
        heads = rl.capture(
            bundled.model,
            PROMPTS[excerpt],
            heads=HEAD_NAME,
            tokenizer=bundled.tokenizer,
            runner_up=runner_up,
        )
    return heads.isel(head=0)


@pytest.fixture(scope="module")
def unedited(bundled) -> xr.Dataset:
    """Capture of the head on the first prompt."""
    return captured(bundled, 0)


def drawn_weights(page: playwright.Page) -> np.ndarray:
    """Attention [query, key] of the figure. Later keys are empty there, and 0 here."""
    return np.nan_to_num(values(page, "plot-attention", "z"))


def with_minus(number: str) -> str:
    """A number as the page writes it, with the sign of mathematics."""
    return number.replace("-", "−")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("address", "change", "excerpt"),
    [
        ("stop=9-15", rl.stop, 1),
        ("drop=9-15", rl.drop, 0),
        ("scale=9-15x1.7", partial(rl.scale, by=1.7), 0),
    ],
)
def test_attention_agrees_with_the_edited_model(
    opened, bundled, address, change, excerpt
):
    edit = change(rl.PlaneNumbers(range(9, 16)), heads=HEAD_NAME)
    expected = captured(bundled, excerpt, edit)["attention"]
    page = opened.at(f"#L{LAYER}H{HEAD}&tab=attention&text={excerpt + 1}&{address}")
    np.testing.assert_allclose(drawn_weights(page), expected, atol=1e-3)


def test_a_pair_is_the_sum_of_its_planes(opened, bundled: Bundled, unedited):
    page = opened.at(f"#L{LAYER}H{HEAD}&tab=pair&pair=9-4")
    compared_with_key_2 = captured(bundled, 0, runner_up=2)
    for option, expected in (("", unedited), ("2", compared_with_key_2)):
        page.select_option("#pair-against", option)
        idle(page)
        pushes = values(page, "plot-pair", "y")
        contrast = expected["contrast"].values[:, 9, 4]
        np.testing.assert_allclose(pushes, contrast, atol=2e-3)
    weights = unedited["attention"].values[9]
    odds = np.log(weights[4] / weights[2])
    assert sum(pushes) == pytest.approx(odds, abs=1e-2)
    assert page.locator("#dials svg").count() == 16
    score = float(unedited["score"][9, 4])
    shown_score = page.inner_text("#pair-score")
    assert with_minus(f"Score at distance 5: {score:+.2f}") in shown_score
    away = values(page, "plot-pair", "y", trace=1)
    expected = scores_by_distance(unedited, query=9, key=4, count=len(away))
    np.testing.assert_allclose(away, expected, atol=5e-3)
    page.locator("#pair-distance").fill("40")
    shown_score = page.inner_text("#pair-score")
    assert with_minus(f"distance 40: {away[40]:+.2f}") in shown_score
    page.select_option("#pair-key", "2")
    idle(page)
    assert page.url.endswith("&pair=9-2")


def test_a_pinned_head_is_described_too(opened, bundled: Bundled):
    pinned = rl.capture(
        bundled.model, PROMPTS[0], heads="1.2", tokenizer=bundled.tokenizer
    ).isel(head=0)
    page = opened.at(f"#L{LAYER}H{HEAD}&tab=pair&pair=9-4&pin=L1H2")
    score = float(pinned["score"][9, 4])
    words = page.inner_text("#pair-score")
    assert words.endswith(with_minus(f" nats; L1 H2: {score:+.2f}"))
    view(page, "text")
    shown = re.fullmatch(
        r"L1 H2: .* attends to \S+ (\d+)% .*", page.inner_text("#looks-pinned")
    )
    largest = float(pinned["attention"].values[9].max())
    assert int(shown[1]) == pytest.approx(100 * largest, abs=1)
    page.click("#pin")
    idle(page)
    assert page.inner_text("#looks-pinned") == ""
    view(page, "pair")
    assert page.inner_text("#pair-score").endswith(" nats")


def scores_by_distance(
    seen: xr.Dataset, *, query: int, key: int, count: int
) -> np.ndarray:
    """Score of a query and a key that RoPE moves to each distance from 0 to count - 1.

    A plane of a vector is a complex number, which RoPE turns by inv_freq per token.
    """
    still_query = seen["q_still"].values[query] @ [1, 1j]
    still_key = seen["k_still"].values[key] @ [1, 1j]
    product = float(seen["scale"]) * still_query * still_key.conj()
    angles = np.multiply.outer(np.arange(count), seen["inv_freq"].values)
    return (product * np.exp(1j * angles)).real.sum(-1)


def test_the_effect_of_a_pair_agrees_with_the_attribution_of_its_planes(
    opened, bundled, unedited
):
    answer = bundled.profile["excerpt_answer"][0].values.tolist()
    effects = rl.attribute_planes(
        bundled.model,
        PROMPTS[0],
        tuple(answer),
        pairs=HEAD_NAME,
        tokenizer=bundled.tokenizer,
    )
    of_scores = effects["pair_attribution"][0].sum("frequency")
    slopes = of_scores / unedited["score"].values
    early_keys = abs(slopes.fillna(0)).isel(key=slice(4))
    largest = early_keys.argmax(...)
    query = int(largest["query"])
    key = int(largest["key"])
    page = opened.at(f"#L{LAYER}H{HEAD}&tab=pair&pair={query}-{key}")
    pushes = unedited["contrast"].values[:, query, key]
    expected = float(slopes[query, key]) * pushes
    assert abs(expected).max() > 0.01
    # The page shows two digits.
    np.testing.assert_allclose(effects_of_planes(page), expected, rtol=0.1, atol=6e-4)
    words = page.inner_text("#pair-lead")
    assert f"{effects.attrs['answer']:.2f} nats ahead of" in words
    assert all(visible_token(token) in words for token in answer)
    page.locator("#live-p").fill("12")
    idle(page)
    assert page.inner_text("#pair-lead") == ""
    page.click("#live-reset")
    page = opened.at("#tab=pair&text=2")
    assert page.inner_text("#pair-lead") == ""


def effects_of_planes(page: playwright.Page) -> list[float]:
    """The effect of each plane, which begins the second line of its hover."""
    hovers = page.evaluate("document.getElementById('plot-pair').data[0].customdata")
    second_lines = [words.split("<br>")[1] for _, words in hovers]
    numbers = [line.split()[0] for line in second_lines]
    return [float(number.replace("−", "-")) for number in numbers]


def test_the_slider_and_the_lists_stop_planes(opened, bundled: Bundled):
    planes = rl.PlaneNumbers((3, 4, 5))
    page = opened.at(f"#L{LAYER}H{HEAD}&tab=attention")
    page.locator("#live-p").fill("12")
    idle(page)
    assert page.inner_text("#live-words").startswith("p = 0.75: 4 planes (")
    assert page.url.endswith("&stop=12-15")

    page.select_option("#live-from", "3")
    page.select_option("#live-to", "5")
    page.select_option("#live-mode", "drop")
    idle(page)
    assert page.url.endswith("&drop=3-5")
    assert "3 planes (" in page.inner_text("#live-words")
    view(page, "kernel")
    dropped = captured(bundled, 0, rl.drop(planes, heads=HEAD_NAME))
    weights = dropped["attention"].values
    by_distance = [np.diagonal(weights, -d).mean() for d in range(len(weights))]
    shown = values(page, "plot-kernel", "y", trace=3)
    np.testing.assert_allclose(shown, by_distance, atol=1e-3)

    page.select_option("#live-mode", "scale")
    page.locator("#live-by").fill("0.25")
    view(page, "pair")
    assert page.url.endswith("&scale=3-5x0.25")
    assert "are scaled by 0.25" in page.inner_text("#live-words")
    scaled = captured(bundled, 0, rl.scale(planes, by=0.25, heads=HEAD_NAME))
    query = int(page.input_value("#pair-query"))
    key = int(page.input_value("#pair-key"))
    expected = scaled["contrast"].values[:, query, key]
    pushes = values(page, "plot-pair", "y")
    np.testing.assert_allclose(pushes, expected, atol=2e-3)

    view(page, "kernel")
    page.click("#live-reset")
    idle(page)
    assert "scale" not in page.url
    assert page.evaluate("document.getElementById('plot-kernel').data.length") == 2


def test_dragging_over_planes_stops_them(opened: Opened):
    page = opened.at(f"#L{LAYER}H{HEAD}")
    box = page.locator("#plot-selectivity .nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 20)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.95 * box["width"], box["y"] + 60, steps=5)
    page.mouse.up()
    page.wait_for_function("() => location.hash.includes('stop=')")
    first, last = page.url.split("stop=")[1].split("-")
    assert 7 <= int(first) <= 11
    assert 13 <= int(last) <= 15
    shapes = page.evaluate("document.getElementById('plot-selectivity').layout.shapes")
    assert [shape["name"] for shape in shapes].count("band") == 1
    cleared = "data.every((trace) => !trace.selectedpoints)"
    page.wait_for_function(
        f"() => document.getElementById('plot-selectivity').{cleared}"
    )


def test_the_address_holds_the_choice_and_back_returns_to_it(opened: Opened):
    page = opened.load("")
    title = "(title) => document.getElementById('head-title').innerText === title"
    view(page, "list")
    page.locator("#list [data-row]").nth(4).click()
    page.wait_for_selector("#list [data-row='4'][aria-current]")
    idle(page)
    chosen = page.inner_text("#head-title")
    address = page.url
    assert "&view=list" in address
    page.click("#next")
    page.wait_for_function("(url) => location.href !== url", arg=address)
    page.go_back()
    page.wait_for_function(title, arg=chosen)
    assert page.url == address
    again = opened.load(address.partition(".html")[2])
    assert again.inner_text("#head-title") == chosen
    assert again.get_attribute("#all-tab-list", "aria-selected") == "true"
    page = opened.at("#L2H3&text=9&pair=900-3&stop=5-99&tab=no&pin=L7H7<b>")
    assert page.locator("#head-title").is_visible()


def saved_rows(page: playwright.Page, button: str) -> list[dict[str, str]]:
    """The rows of the CSV file that a click on the button saves."""
    with page.expect_download() as download:
        page.click(button)
    text = Path(download.value.path()).read_text()
    return list(csv.DictReader(text.splitlines()))


def test_numbers_are_saved_as_csv(opened, bundled: Bundled, unedited):
    page = opened.at(f"#L{LAYER}H{HEAD}&view=list")
    heads = rl.classify_heads(bundled.profile).to_dict("records")
    rows = saved_rows(page, "#save-table")
    for row, expected in zip(rows, heads, strict=True):
        assert int(row["layer"]) == expected["layer"]
        assert row["label"] == expected["label"]
        bits = float(row["total_bits"])
        assert bits == pytest.approx(expected["total_bits"], rel=1e-5)
    view(page, "attention")
    page.hover("#plot-attention")
    rows = saved_rows(page, "#plot-attention [data-title^='Save the numbers']")
    weights = np.nan_to_num(unedited["attention"])
    tokens = unedited["key_token"].values.astype(str)
    names = [token.replace(" ", "␣") for token in tokens]
    assert len(rows) == len(weights) * (len(weights) + 1) // 2
    for row in rows[5:9]:
        query = int(row["y"])
        key = int(row["x"])
        assert row["query"] == names[query]
        assert row["key"] == names[key]
        assert float(row["value"]) == pytest.approx(weights[query, key], abs=1e-3)


@pytest.mark.thorough
def test_on_a_phone_the_head_is_a_sheet_and_axe_finds_nothing(browser, opened):
    with Opened(
        browser,
        opened.path,
        viewport={"width": 400, "height": 800},
        has_touch=True,
        bypass_csp=True,
        color_scheme="dark",
    ) as phone:
        page = phone.load()
        assert not page.locator("#head").is_visible()
        page.evaluate("location.hash = '#L1H1'")
        page.wait_for_selector("#head.open")
        page.go_back()
        page.wait_for_selector("#head:not(.open)", state="attached")
        view(page, "list")
        page.locator("#list [data-row] td:nth-child(2)").nth(2).tap()
        page.wait_for_selector("#plot-selectivity .main-svg")
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        page.click("#close")
        assert not page.locator("#head").is_visible()
        phone.at("#L2H3&tab=pair&stop=12-15")
        panels = "(all) => all.forEach((panel) => { panel.hidden = false; })"
        page.locator("#head [role=tabpanel]").evaluate_all(panels)
        assert broken(page, "#head") == set()
        page.set_viewport_size({"width": 1280, "height": 800})
        page.emulate_media(color_scheme="light")
        phone.at("#L2H3&tab=pair&view=list")
        assert broken(page) == set()


def test_no_vectors_are_saved_if_the_rotation_depends_on_the_length():
    """An excerpt rotates with other frequencies than the longer text."""
    tokens = random_tokens(sequences=2, length=80)
    model = tiny("phi3_longrope", original_max_position_embeddings=50)
    profile = rl.profile(model, tokens, budget=False)
    assert profile["excerpt_query_still"].isnull().all()
    assert profile["excerpt_attention"].notnull().any()
    same_length = rl.profile(model, tokens, excerpts=[tokens[0, :80]], budget=False)
    assert same_length["excerpt_query_still"].notnull().any()


def test_one_sequence_gives_several_unchanged_pieces():
    tokens = random_tokens(sequences=1, length=200)
    tokens[0, 0] = 50  # no BOS
    profile = rl.profile(tiny("llama_gqa"), tokens, budget=False)
    assert profile.sizes["excerpt"] == 3
    text = "".join(f"#{token}" for token in tokens[0].tolist())
    for names in profile["excerpt_token"].values:
        assert "".join(names) in text


def test_no_key_leaves_a_sliding_window():
    tokens = random_tokens(sequences=2, length=40)
    model = tiny("mistral_sliding")
    profile = rl.profile(model, tokens, excerpts=[tokens[0, :8]], budget=False)
    window = model.config.sliding_window
    for layer in (0, 1):
        assert farthest_distance(profile, layer) == window - 1
    full = profile.assign(farthest_offset=profile["farthest_offset"] * 0 + 39)
    assert farthest_distance(full, 0) == 39


@pytest.mark.thorough
def test_planes_that_do_not_rotate_do_not_count(browser, tmp_path):
    edits = [rl.stop(rl.Fastest(0.25), heads="2.*"), rl.stop_slowest(1, heads="0.*")]
    model = tiny("llama_gqa", num_hidden_layers=3, head_dim=32)
    text = random_tokens(length=12)
    with rl.edit_rope(model, *edits):
        profile = rl.profile(model, text, excerpts=[text[0]], surrogates=0)
    with Opened(browser, rl.write_report(profile, tmp_path / "page.html")) as opened:
        page = opened.load(f"#L{LAYER}H{HEAD}&tab=attention")
        assert page.get_attribute("#live-p", "max") == "12"
        page.locator("#live-p").fill("11")
        idle(page)
        assert page.url.endswith("&stop=15-15")
        assert page.inner_text("#live-words").startswith("p = 0.92: the plane of 35,")
        page = opened.at("#L0H0")
        words = page.inner_text("#live-words")
        assert words.startswith(("This layer does not", "No plane of"))
        assert page.is_disabled("#live-p")


def test_a_pair_under_the_pointer_is_described_and_a_click_opens_it(opened, unedited):
    page = opened.at(f"#L{LAYER}H{HEAD}&tab=attention&text=1")
    emit = "(event) => document.getElementById('plot-attention').emit(event, "
    emit += "{ points: [{ x: 4, y: 9 }] })"
    page.evaluate(emit, "plotly_hover")
    pushes = unedited["contrast"].values[:, 9, 4]
    sizes = np.abs(pushes)
    height = "(all) => all.map(({ height }) => height.baseVal.value)"
    bars = np.array(page.locator("#pair-pushes rect").evaluate_all(height))
    expected_bars = 18 * sizes / sizes.max()
    large = expected_bars > 1
    np.testing.assert_allclose(bars[large], expected_bars[large], atol=0.1)
    words = page.inner_text("#pair-words").replace("−", "-")
    push = r"this key, compared with the other keys, is ([+-][\d.]+) nats. The largest pushes"
    push += r" are ([+-][\d.]+) from wavelength [\d.,]+"
    total, largest = re.search(push, words).groups()
    assert float(total) == pytest.approx(pushes.sum(), abs=0.01)
    assert float(largest) == pytest.approx(pushes[sizes.argmax()], abs=0.01)
    page.evaluate(emit, "plotly_click")
    page.wait_for_selector("#one-tab-pair[aria-selected=true]")
    assert page.url.endswith("&tab=pair&pair=9-4")
    page.go_back()
    page.wait_for_selector("#one-tab-attention[aria-selected=true]")
