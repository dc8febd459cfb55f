"""The page in a real browser (Chromium without a window)."""

import re
import struct
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from in_browser import Opened, idle, playwright, shown, values, view
from synthetic_profile import synthetic_profile

from ropelens.report import write_report
from ropelens.report.page import first_head

HOSTILE = "<script>alert(1)</script>"
SEARCHED = "attention_on_apostrophe"
BOLD = "<b>bold</b><a href='https://example.com'>x</a>&lt;"


@pytest.fixture(scope="module")
def small():
    profile, heads = synthetic_profile()
    searched = np.random.default_rng(0).uniform(0, 1, profile["total_bits"].shape)
    words = {
        "units": "1",
        "long_name": f"mean attention on tokens {BOLD}",
        "column": "score",
    }
    profile[SEARCHED] = (("layer", "head"), searched, words)
    tokens = [HOSTILE, BOLD, "{{ 7 * 7 }}", "%{x}", "\u202e</title>", "$x$", "`${1}`"]
    profile["excerpt_token"].values[0, : len(tokens)] = tokens
    for name in ("text", "command", "revision", "warnings"):
        profile.attrs[name] = f"{HOSTILE}{BOLD}'\"\u2028"
    profile.attrs["model"] = HOSTILE
    heads[SEARCHED] = searched[heads["layer"], heads["head"]]
    return profile, heads


POINT = """([name, x, y]) => {
  const {xaxis, yaxis} = document.getElementById(name)._fullLayout;
  const box = document.getElementById(name).getBoundingClientRect();
  return [box.left + xaxis._offset + xaxis.d2p(x), box.top + yaxis._offset + yaxis.d2p(y)];
}"""
RING = (
    "document.getElementById('plot-claim').data.findIndex((trace) => trace.meta?.role)"
)
NORMS = "Array.from(document.getElementById('plot-norms')._fullData[0].z, (z) => Array.from(z))"


def place(page: playwright.Page, name: str, x: float, y: float) -> list[float]:
    page.locator(f"#{name}").scroll_into_view_if_needed()
    return page.evaluate(POINT, [name, x, y])


@pytest.fixture(scope="module")
def report(tmp_path_factory, small) -> Path:
    profile, heads = small
    return write_report(
        profile, tmp_path_factory.mktemp("page") / "page.html", heads=heads
    )


@pytest.fixture(scope="module")
def opened(browser, report, small):
    _, heads = small
    layer, head = first_head(heads)
    with Opened(browser, report) as opened:
        page = opened.load()
        assert page.url == opened.url
        title = page.inner_text("#head-title")
        assert title.startswith(f"Layer {layer}, head {head}: ")
        yield opened


def test_a_click_on_the_map_shows_the_head_everywhere(opened, small):
    profile, heads = small
    page = opened.page
    view(page, "map")
    page.mouse.click(*place(page, "plot-map", 3, 1))
    shown(page, 1, 3)
    row = heads[(heads.layer == 1) & (heads["head"] == 3)].iloc[0]
    assert page.url.endswith("#L1H3&view=map")
    assert page.input_value("#pick-layer") == "1"
    title_and_sentences_describe(page, row)
    shared_bits_are_hatched(page, row)
    view(page, "list")
    assert page.inner_text("tr[aria-current] th") == "L1 H3"
    view(page, "map")
    for tab, trace, expected in (
        ("kernel", 0, profile.kernel[1, 3]),
        ("selectivity", 0, profile.selectivity_keys[1, 3]),
        ("selectivity", 3, profile.k_norm[1, 1]),
        ("selectivity", 5, profile.k_coherence[1, 1]),
    ):
        view(page, tab)
        drawn = values(page, f"plot-{tab}", "y", trace)
        np.testing.assert_allclose(drawn, expected, rtol=1e-6)
    attention_is_drawn(page, profile.excerpt_attention.values[0, 1, 3])
    a_frame_is_around_the_square(page, 3, 1)
    view(page, "claim")
    trace = page.evaluate(RING)
    ring = values(page, "plot-claim", "y", trace)
    fraction = float(profile.surrogate_offset_fraction[0, 1, 3])
    assert ring[0] == pytest.approx(fraction)


def title_and_sentences_describe(page: playwright.Page, row: pd.Series) -> None:
    title = page.inner_text("#head-title")
    assert title.startswith(f"Layer {row.layer}, head {row['head']}: ")
    assert row.label in title
    assert ("uncertain" in title) == bool(row.uncertain)
    words = page.inner_text("#now")
    assert f"{row.total_bits:.2f} bits" in words
    follows = (
        f"{row.follows_position:.0%} of its attention on them stays at the same positions"
        f" and {row.follows_content:.0%} moves with the contents"
        f" (chance {row.follows_chance:.0%})."
    )
    assert follows in words


def shared_bits_are_hatched(page: playwright.Page, row: pd.Series) -> None:
    """The third bar of the budget."""
    look = "(bars) => bars.map(({ style }) => [style.flexGrow, style.background])"
    bars = page.locator("#budget span").evaluate_all(look)
    width, background = bars[2]
    assert float(width) == pytest.approx(row.shared_bits / row.total_bits, abs=0.01)
    assert "gradient" in background


def attention_is_drawn(page: playwright.Page, weights: np.ndarray) -> None:
    view(page, "attention")
    drawn = values(page, "plot-attention", "z")
    up_to_the_query = np.tril(np.nan_to_num(drawn))
    np.testing.assert_allclose(up_to_the_query, np.tril(weights), atol=0.001)
    assert np.isnan(drawn[0, 1])


def a_frame_is_around_the_square(page: playwright.Page, x: int, y: int) -> None:
    """The frame of the chosen head has the place of the layout."""
    left, top = page.evaluate(POINT, ["plot-map", x - 0.5, y - 0.5])
    box = page.locator("#plot-map .shapelayer path[data-index='0']").bounding_box()
    assert abs(box["x"] - left) < 12
    assert abs(box["y"] - top) < 12


@pytest.mark.thorough
def test_the_other_ways_to_choose_a_head(opened, small):
    _, heads = small
    page = opened.page
    row = heads[heads.label == "mixed"].iloc[0]
    for tab, x, y in (
        ("follow", row.follows_content, row.follows_position),
        ("claim", row.mean_wavelength, row.positional_fraction),
    ):
        opened.at("#L0H5")
        view(page, tab)
        page.mouse.click(*place(page, f"plot-{tab}", float(x), float(y)))
        shown(page, row.layer, row["head"])
    page.select_option("#pick-layer", "2")
    shown(page, 2, row["head"])
    page.select_option("#pick-head", "7")
    shown(page, 2, 7)
    page.click("#next")
    shown(page, 3, 0)

    view(page, "map")
    page.focus("#plot-map")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    shown(page, 2, 1)

    opened.at("#L0H5")
    page.evaluate("location.hash = '#L99H5'")
    assert page.inner_text("#head-title").startswith("Layer 0, head 5")

    view(page, "claims")
    page.click("#claim-decay summary")
    page.click("#claim-decay a")
    page.wait_for_selector("#one-kernel:visible")
    assert page.is_visible("#all-claims")
    page.click("#claim-positional_fast summary")
    page.click("#claim-positional_fast a")
    page.wait_for_selector("#all-claim:visible")
    shown(page, 0, 5)

    view(page, "list")
    page.click("#list button[data-sort=total_bits]")
    falling = heads.sort_values("total_bits", ascending=False)
    first = falling.iloc[0]
    second = falling.iloc[1]
    page.click(f"#list [data-row='{first.name}'] td:nth-child(3)")
    shown(page, first.layer, first["head"])
    page.keyboard.press("ArrowDown")
    shown(page, second.layer, second["head"])
    page.click("#list button[data-sort=head]")


def test_a_click_on_a_point_chooses_and_back_returns(opened, small):
    _, heads = small
    page = opened.at("#L0H0&view=claim")
    row = heads.loc[heads["positional_fraction"].idxmax()]
    page.click("#pin")
    x = float(row.mean_wavelength)
    y = float(row.positional_fraction)
    page.mouse.click(*place(page, "plot-claim", x, y))
    shown(page, row.layer, row["head"])
    assert page.url.endswith("&view=claim&pin=L0H0")
    page.go_back()
    shown(page, 0, 0)
    page.go_back()
    page.wait_for_selector("#pin[aria-pressed=false]")
    assert not page.locator("#pinned-selectivity").is_visible()
    page.set_viewport_size({"width": 1100, "height": 900})
    page.wait_for_function(
        """() => [...document.querySelectorAll("#explore .plot")].every((plot) =>
             !plot.offsetParent || Math.abs(plot._fullLayout.width - plot.clientWidth) <= 1)"""
    )


def test_a_row_of_the_wavelengths_is_a_head(opened, small):
    profile, _ = small
    page = opened.page
    view(page, "wavelengths")
    cells = "document.getElementById('plot-wavelengths').data.find((t) => t.type === 'heatmap')"
    names = page.evaluate(f"Array.from({cells}.y)")
    index = len(names) // 2
    fastest = float(profile["wavelength"][0, 0])
    page.locator("#plot-wavelengths").scroll_into_view_if_needed()
    point = POINT.replace("{xaxis, yaxis}", "{xaxis2: xaxis, yaxis2: yaxis}")
    x, y = page.evaluate(point, ["plot-wavelengths", fastest, names[index]])
    page.mouse.click(x, y)
    layer, head = names[index].split()
    shown(page, int(layer.removeprefix("L")), int(head.removeprefix("H")))
    shapes = page.evaluate("document.getElementById('plot-wavelengths').layout.shapes")
    (frame,) = [shape for shape in shapes if shape["name"] == "selected"]
    assert frame["y0"] == index - 0.5
    assert frame["y1"] == index + 0.5


def test_the_map_is_coloured_by_a_number(opened, small):
    _, heads = small
    page = opened.page
    view(page, "map")
    last = page.evaluate("document.getElementById('plot-map').data.length - 1")
    labels = f"document.getElementById('plot-map').data.slice(0, {last}).map((t) => t.visible)"
    for column in ("total_bits", "induction", "top_wavelength", SEARCHED):
        page.select_option("#map-by", column)
        expected = heads[column]
        if column == "top_wavelength":
            expected = np.log10(expected)
        drawn = values(page, "plot-map", "z", last)
        of_heads = drawn[heads["layer"], heads["head"]]
        np.testing.assert_allclose(of_heads, expected, rtol=1e-5)
        assert set(page.evaluate(labels)) == {False}
    page.evaluate("Plotly.Fx.hover('plot-map', { xval: 3, yval: 1 })")
    page.wait_for_selector("#plot-map .hoverlayer text")
    assert f"attention on tokens {BOLD}" in page.text_content("#plot-map .hoverlayer")
    page.select_option("#map-by", "")
    assert set(page.evaluate(labels)) == {True}
    page.mouse.click(*place(page, "plot-map", 2, 1))
    shown(page, 1, 2)


def test_the_table_sorts_and_filters(opened, small):
    _, heads = small
    page = opened.page
    view(page, "list")

    def listed() -> list[str]:
        return page.locator("tbody tr:not(.gap) th").all_inner_texts()

    page.click("button[data-sort=position_bits]")
    falling = heads.sort_values("position_bits", ascending=False)
    names = names_of(falling)
    rows = listed()
    assert len(rows) > 20
    assert rows == names[: len(rows)]
    sorted_column = "th:has([data-sort=position_bits])"
    assert page.get_attribute(sorted_column, "aria-sort") == "descending"
    searched = page.locator("#table [data-row] td:last-child").all_inner_texts()
    assert searched == [f"{value:.2f}" for value in falling[SEARCHED]][: len(rows)]
    assert "bits that only the offset explains" in page.inner_text("#column-words")
    assert page.get_attribute("#table", "aria-rowcount") == "41"
    page.click("button[data-sort=position_bits]")
    assert listed() == names[::-1][: len(rows)]

    page.uncheck("input[value=semantic]")
    others = heads[heads.label != "semantic"]
    assert page.inner_text("#count") == f"{len(others)} of 40 heads"
    page.fill("#find", "L2")
    in_layer_2 = others[others.layer == 2]
    assert sorted(listed()) == names_of(in_layer_2)
    page.check("input[value=semantic]")
    page.fill("#find", "")
    page.click("button[data-sort=head]")
    assert listed()[:2] == ["L0 H0", "L0 H1"]


def names_of(heads: pd.DataFrame) -> list[str]:
    return [f"L{row.layer} H{row.head}" for row in heads.itertuples()]


def test_offers_no_upload(opened):
    buttons = opened.page.locator("[id^=plot-] .modebar-btn")
    titles = buttons.evaluate_all("(all) => all.map((b) => b.dataset.title)")
    known = {
        "Save the picture (SVG)",
        "Save the picture (PNG)",
        "Save the numbers (CSV)",
        "Zoom",
        "Pan",
        "Reset axes",
    }
    assert {title.partition(":")[0] for title in titles} <= known
    named = [title for title in titles if title.startswith("Save")]
    assert len(named) == len(set(named)), "each button names its figure"


def test_pictures_are_on_white_paper(opened):
    page = opened.at("#L1H1&tab=planes")
    page.emulate_media(color_scheme="dark")
    svg = saved_picture(page, "SVG").decode()
    png = saved_picture(page, "PNG")
    page.emulate_media(color_scheme="light")
    assert "fill: rgb(255, 255, 255)" in svg
    assert "rgb(29, 33, 38)" in svg, "the ink of a light page"
    assert "rgb(232, 230, 225)" not in svg, "the ink of a dark page"
    assert png.startswith(b"\x89PNG")
    svg_size = re.search(r'width="([\d.]+)" height="([\d.]+)"', svg).groups()
    png_size = struct.unpack(">II", png[16:24])
    assert png_size == tuple(int(3 * float(side)) for side in svg_size)


def saved_picture(page: playwright.Page, kind: str) -> bytes:
    button = page.locator(f"#plot-selectivity [data-title*='({kind})']")
    with page.expect_download() as download:
        button.evaluate("(button) => button.click()")
    return Path(download.value.path()).read_bytes()


def test_hostile_names_are_text(opened):
    page = opened.at("#L1H1&tab=text")
    assert page.inner_text("#tokens button:first-child") == f"{HOSTILE[:23]}…"
    assert HOSTILE in page.inner_text("h1")
    assert page.locator("h1 *").count() == 0
    assert HOSTILE in page.inner_text(".run")
    view(page, "attention")
    ticks = page.locator("#plot-attention .ytick text").all_text_contents()
    assert ticks[:2] == ["<script>ale…", "<b>bold</b>…"]
    made_by_names = "#plot-attention a, #plot-attention tspan[style*=bold]"
    assert page.locator(made_by_names).count() == 0
    page.evaluate("Plotly.Fx.hover('plot-attention', { xval: 0, yval: 1 })")
    page.wait_for_selector("#plot-attention .hoverlayer text")
    assert "<b>bold</b>" in page.text_content("#plot-attention .hoverlayer")
    emit = "(event) => document.getElementById('plot-attention').emit(event, "
    emit += "{ points: [{ x: 0, y: 1 }] })"
    page.evaluate(emit, "plotly_hover")
    assert "<b>bold</b>" in page.inner_text("#pair-words")
    page.evaluate(emit, "plotly_click")
    page.wait_for_selector("#one-tab-pair[aria-selected=true]")
    assert "<b>bold</b>" in page.inner_text("#pair-query")
    view(page, "text")
    page.locator("#tokens button").nth(1).click()
    assert page.inner_text("#looks code:first-child").startswith("<b>bold</b>")


DAMAGED = {"a damaged file": 'id="payload">', "a damaged script": 'id="plotly">'}


@pytest.mark.parametrize("why", ["no scripts", "an old browser", *DAMAGED])
def test_a_page_without_figures_has_the_table(browser, report, why, tmp_path):
    path = report
    if why in DAMAGED:
        path = tmp_path / "page.html"
        text = report.read_text()
        begin = text.index(DAMAGED[why]) + 2000
        path.write_text(text[:begin] + "A" * 400 + text[begin + 400 :])
    with Opened(browser, path, java_script_enabled=why != "no scripts") as opened:
        page = opened.page
        if why == "an old browser":
            page.add_init_script("delete window.DecompressionStream")
        page.goto(opened.url)
        page.wait_for_selector("tbody tr:nth-child(40)")
        assert not page.is_visible("#head")
        assert "need JavaScript" in page.inner_text(".finding")
        assert ("cannot be read" in page.inner_text("header")) == (why != "no scripts")


@pytest.mark.thorough
def test_missing_heads_are_skipped(browser, tmp_path):
    profile, heads = with_missing_heads()
    path = write_report(profile, tmp_path / "page.html", heads=heads)
    with Opened(browser, path) as opened:
        page = opened.load("#L1H1&view=map&tab=kernel")
        legend = page.inner_text(".legend")
        assert "1 of 4 layers has no attention (layer 3)" in legend
        assert "? 1 untested" in " ".join(legend.split())
        assert page.is_disabled("#pick-layer option:nth-child(4)")
        page.select_option("#map-by", "total_bits")
        page.mouse.click(*place(page, "plot-map", 2, 3))
        page.wait_for_selector("#plot-map .hoverlayer text")
        hover = page.text_content("#plot-map .hoverlayer")
        assert "layer 3: conv, no attention" in hover

        page.click("#next")
        shown(page, 2, 0)
        assert page.get_attribute("#plot-kernel", "data-empty") == ""
        page.evaluate("location.hash = '#L1H3'")
        assert page.inner_text("#head-title").startswith("Layer 2, head 0")
        page.click("#next")
        shown(page, 2, 1)
        empty = page.get_attribute("#plot-kernel", "data-empty")
        assert empty.startswith("no data: no kernel")

        page.evaluate("dispatchEvent(new Event('beforeprint'))")
        idle(page)
        drawn = np.array(page.evaluate(NORMS), float)[:3, :15]
        norms = profile.q_norm.values[:3, :, :15]
        np.testing.assert_allclose(drawn, np.nanmean(norms, 1), rtol=1e-5)


def with_missing_heads() -> tuple[xr.Dataset, pd.DataFrame]:
    """Layer 1 has two heads, head 2.1 has no kernel, and layer 3 has no attention."""
    profile, heads = synthetic_profile(layers=4, heads=4, kv_heads=2, unrotated=True)
    profile["q_norm"][1, 2:] = np.nan
    profile["k_norm"][1, 1:] = np.nan
    profile["kernel"][2, 1] = np.nan
    profile["predicted_kernel"][2, 1] = np.nan
    attends = xr.DataArray(np.arange(4) < 3, dims="layer")
    for name, variable in profile.variables.items():
        if "layer" in variable.dims and variable.dtype.kind == "f":
            profile[name] = profile[name].where(attends)
    layer_types = ["full_attention"] * 3 + ["conv"]
    profile = profile.assign_coords(layer_type=("layer", layer_types))
    in_layer_1 = (heads.layer == 1) & (heads["head"] < 2)
    rows = heads[(heads.layer % 2 == 0) | in_layer_1]
    rows = rows.assign(label=np.where(rows.index == 1, "untested", rows.label))
    return profile, rows.reset_index(drop=True)


def test_keys_open_the_first_and_the_last_tab(opened):
    page = opened.at("#L0H0")
    page.focus("#all-tab-wavelengths")
    for key, name in (("ArrowLeft", "list"), ("Home", "wavelengths"), ("End", "list")):
        page.keyboard.press(key)
        assert page.get_attribute(f"#all-tab-{name}", "aria-selected") == "true"
        assert page.evaluate("document.activeElement.id") == f"all-tab-{name}"
    idle(page)


def test_figures_below_the_window_are_drawn_when_the_browser_is_idle(opened):
    """A screenshot of the whole page does not scroll."""
    page = opened.at("#L0H0&view=list")
    norms = "document.querySelector('#plot-norms')"
    page.wait_for_function(f"() => {norms}.querySelector('.main-svg')")
    assert page.evaluate(f"{norms}.getBoundingClientRect().top > innerHeight")


def test_a_printed_page_is_complete_and_light(opened):
    page = opened.at("#L0H0&view=list")
    # A4 between margins of a centimetre
    page.set_viewport_size({"width": 718, "height": 1000})
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    page.wait_for_function(
        "() => document.querySelectorAll('#list [data-row]').length === 40"
    )
    page.wait_for_function("() => document.querySelector('#plot-norms [viewBox]')")
    page.emulate_media(media="print", color_scheme="dark", reduced_motion="reduce")
    for fault in (
        "!element.closest('svg') && element.getBoundingClientRect().right > innerWidth + 1",
        "style.overflowX !== 'visible' && element.scrollWidth > element.clientWidth",
        "parseFloat(style.transitionDuration) + parseFloat(style.animationDuration) > 0",
    ):
        assert visible_elements(page, fault) == [], fault
    assert page.evaluate("getComputedStyle(document.body).color") == "rgb(29, 33, 38)"
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    page.emulate_media(
        media="screen", color_scheme="light", reduced_motion="no-preference"
    )
    page.set_viewport_size({"width": 1280, "height": 800})


def visible_elements(page: playwright.Page, condition: str) -> list[str]:
    """The HTML of visible elements that meet a condition on `element` and `style`."""
    return page.evaluate(
        f"""() => [...document.querySelectorAll("body, body *")].filter(
            (element) => element.getClientRects().length && !element.closest(".modebar"))
          .filter((element) => {{
            const style = getComputedStyle(element);
            return {condition};
          }})
          .map((element) => element.outerHTML.slice(0, 99))"""
    )
