"""Speed and table of a page with a thousand heads."""

from collections.abc import Callable

import numpy as np
import pytest
from in_browser import Opened, playwright, shown, values
from synthetic_profile import synthetic_profile

from ropelens.report import write_report

pytestmark = pytest.mark.thorough
LAYERS = 32
HEADS = 32


@pytest.fixture(scope="module")
def large(browser, tmp_path_factory):
    """1,024 heads of 64 planes. The page has the weights of most heads in whole percents."""
    profile, heads = synthetic_profile(
        layers=LAYERS, heads=HEADS, kv_heads=8, frequencies=64, excerpt=16
    )
    profile["excerpt_query_still"][:, 2:] = np.nan
    path = tmp_path_factory.mktemp("large") / "page.html"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ropelens.report.excerpt_payload.FINE_CELLS", 0)
        write_report(profile, path, heads=heads)
    assert path.stat().st_size < 5e6
    with Opened(browser, path) as opened:
        opened.weights = profile["excerpt_attention"].values
        yield opened


# Work that took 0.15 CPU seconds on the idle machine on which the bounds below were set.
YARDSTICK = (
    "Array.from({length: 4e5}, (_, i) => String(i * 7919 % 400009)).sort().length"
)


def clock(page: playwright.Page) -> Callable[[], float]:
    """A function that returns the CPU seconds of a page so far."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable")

    def spent() -> float:
        for metric in session.send("Performance.getMetrics")["metrics"]:
            if metric["name"] == "ThreadTime":
                return metric["value"]
        raise LookupError("ThreadTime")

    return spent


def test_a_thousand_heads_are_quick(large):
    """CPU seconds until the page is ready and from a click to the picture, by the yardstick."""
    blank = large.context.new_page()
    spent = clock(blank)
    blank.evaluate(YARDSTICK)
    slow = max(1, spent() / 0.15)
    blank.close()
    spent = clock(large.page)
    large.load("#L0H0&view=map")
    assert spent() < 2 * slow
    large.at("#L5H3&view=map")  # compile and cache
    clicks = []
    for head in ("#L20H30", "#L1H1", "#L8H2", "#L31H31", "#L16H5"):
        begin = spent()
        large.at(f"{head}&view=map")
        clicks.append(spent() - begin)
    assert np.median(clicks) < 0.1 * slow  # 0.04 on an idle machine


def test_weights_in_whole_percents_agree_with_the_head(large):
    page = large.at("#L20H30&tab=attention")
    drawn = np.nan_to_num(values(page, "plot-attention", "z"))
    expected = np.tril(large.weights[0, 20, 30]).round(2)
    np.testing.assert_allclose(drawn, expected, atol=1e-6)


def test_the_table_has_only_the_visible_rows(large):
    page = large.at("#L0H0&view=list")
    rows = page.locator("#table tbody tr:not(.gap)")

    def numbers_of_rows() -> dict[str, int]:
        """The number that each row in the table has for a screen reader, by its head."""
        cells = (
            "(all) => all.map((row) => [row.cells[0].textContent, row.ariaRowIndex])"
        )
        return {head: int(number) for head, number in rows.evaluate_all(cells)}

    def number_of_row(layer: int, head: int) -> int:
        """Row 1 has the names of the columns."""
        return layer * HEADS + head + 2

    assert 15 < rows.count() < 120
    assert page.get_attribute("#table", "aria-rowcount") == "1025"
    second = list(numbers_of_rows().items())[1]
    assert second == ("L0 H1", 3)
    table = page.get_by_role("region", name="Table of heads")
    table.evaluate("(box) => { box.scrollTop = box.scrollHeight / 2; }")
    page.wait_for_selector("#table a[href='#L16H0']")
    assert rows.count() < 120
    assert numbers_of_rows()["L16 H0"] == number_of_row(16, 0)
    page.click("a[href='#L16H0']")
    shown(page, 16, 0)
    down = "new KeyboardEvent('keydown', {key: 'ArrowDown', bubbles: true})"
    for_each = "for (let i = 0; i < 60; i++) document.activeElement.dispatchEvent"
    page.evaluate(f"{for_each}({down})")  # beyond the first visible rows
    shown(page, 17, 28)
    chosen = page.get_attribute("tr[aria-current]", "aria-rowindex")
    assert chosen == str(number_of_row(17, 28))
