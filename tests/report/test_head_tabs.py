"""Tabs of the chosen head with a sentence and a table of numbers, in a real browser."""

import re

import numpy as np
import pytest
import xarray as xr
from in_browser import Opened, playwright, values
from oracles.tiny import random_tokens, tiny
from synthetic_profile import synthetic_profile
from synthetic_truncation import synthetic_truncation

import ropelens as rl
from ropelens.errors import BadArgument
from ropelens.figures.reach import plot_reach

LAYER = 1
HEAD = 3
VARIANTS = ("own", "p-rope:0.5", "nope")


@pytest.fixture(scope="module")
def reach() -> xr.Dataset:
    return rl.reach(
        tiny("llama_gqa"),
        random_tokens(sequences=8, length=16),
        heads=f"0.*,{LAYER}.{HEAD}",
        variants=VARIANTS,
        copies=[48, 60],
    )


@pytest.fixture(scope="module")
def profile(reach: xr.Dataset) -> xr.Dataset:
    profile, _ = synthetic_profile(
        layers=reach.sizes["layer"], heads=reach.sizes["head"], kv_heads=2
    )
    return profile


@pytest.fixture(scope="module")
def sweep(reach: xr.Dataset) -> xr.Dataset:
    sweep = synthetic_truncation(layers=reach.sizes["layer"], heads=reach.sizes["head"])
    sweep["label"][:, LAYER, HEAD] = "mixed"
    sweep["label"][sweep["edit"].values == "fast 0.5", LAYER, HEAD] = "diffuse"
    sweep["label"][sweep["edit"].values == "fast 0", LAYER, HEAD] = ""
    return sweep


@pytest.fixture(scope="module")
def opened(browser, profile, sweep, reach, tmp_path_factory):
    path = tmp_path_factory.mktemp("tabs") / "page.html"
    rl.write_report(profile, path, truncation=sweep, reach=reach)
    assert path.stat().st_size < 1.5e6
    with Opened(browser, path) as opened:
        yield opened


def table(page: playwright.Page, name: str) -> list[list[str]]:
    rows = f"[...document.querySelectorAll('#rows-{name} tr')]"
    return page.evaluate(
        f"{rows}.map((row) => [...row.cells].map((cell) => cell.textContent))"
    )


@pytest.mark.thorough
def test_the_head_as_planes_stop(opened, sweep):
    page = opened.at(f"#L{LAYER}H{HEAD}&tab=stopped")
    slow, fast, *_ = page.evaluate(
        """document.getElementById("plot-stopped")._fullData.map(({ x, y, marker }) =>
             ({ x: Array.from(x), y: Array.from(y), marks: marker?.symbol }))"""
    )
    of_head = sweep.isel(layer=LAYER, head=HEAD)
    edits = ["none", *(f"fast {share:g}" for share in fast["x"][1:])]
    change = of_head["attention_change"].sel(edit=edits).values
    np.testing.assert_allclose(fast["y"], change, rtol=1e-5)
    half = fast["x"].index(0.5)
    marks = ["diamond"] * (len(edits) - 1)
    marks[half] = "x"
    assert fast["marks"] == [*marks, "circle-open"]
    assert set(slow["marks"]) == {"diamond"}
    words = "The mark shows the label of the head at this step."
    assert page.inner_text("#one-stopped figcaption") == words
    ends = "document.getElementById('plot-stopped')._fullLayout.yaxis2.range"
    np.testing.assert_allclose(page.evaluate(ends), [-0.03, 1.03])
    rows = table(page, "stopped")
    assert len(rows) == 2 * len(edits)
    assert rows[-1][:3] == ["fastest", "0%", "–"]
    row = rows[len(edits) + half]
    assert row[:3] == ["fastest", "50%", "diffuse"]
    assert float(row[3]) == pytest.approx(change[half], abs=5.1e-4)


@pytest.mark.thorough
def test_reach_is_that_of_the_figure(opened, reach):
    page = opened.at("#L0H2&tab=reach")
    expected_lines = plot_reach(reach, layer=0, head=2).data
    for trace, expected in enumerate(expected_lines):
        np.testing.assert_allclose(values(page, "plot-reach", "y", trace), expected.y)
    of_head = reach.isel(layer=0, head=2).sel(variant="own")
    near, far = [in_percent(share) for share in of_head["found_share"].values]
    words = f"{near} of copies 48 tokens back, and {far} of copies 60 tokens back"
    assert page.inner_text("#reach-words") == f"The head finds {words}."
    rows = table(page, "reach")
    assert [row[0] for row in rows] == np.repeat(VARIANTS, 2).tolist()
    assert rows[1][1:3] == ["60", far]
    assert rows[0][5] == "–"
    page = opened.at(f"#L{LAYER}H0&tab=reach")
    heads = reach.sizes["head"] + 1
    assert page.inner_text("#reach-words") == (
        f"This head is not among the {heads} heads that were run."
    )
    empty = page.get_attribute("#plot-reach", "data-empty")
    assert empty.endswith("this head was not run")


def in_percent(share: float) -> str:
    """A share in percent with three digits, without zeros at its end."""
    three_digits = f"{100 * share:.3g}"
    return f"{float(three_digits):g}%"


def test_results_of_another_model_are_refused(profile, reach, tmp_path):
    sweep = synthetic_truncation(layers=3, heads=4)
    with pytest.raises(BadArgument, match="of the profile's model") as raised:
        rl.write_report(profile, tmp_path / "page.html", truncation=sweep)
    assert f"(3, 4); the profile has ({reach.sizes['layer']}, " in str(raised.value)
    with pytest.raises(BadArgument, match=r"This is not a reach[^$]*seen:  profile, "):
        rl.write_report(profile, tmp_path / "page.html", reach=profile)


def test_a_reach_in_the_folder_of_a_profile_is_shown(profile, reach, tmp_path):
    rl.save(profile, tmp_path / "profile.nc")
    rl.save(reach, tmp_path / "reach.nc")
    record = '{"kind": "analysis", "command": "ropelens moved"}'
    (tmp_path / "run.json").write_text(record)
    analysis = rl.open(tmp_path)
    xr.testing.assert_identical(analysis.reach["found_share"], reach["found_share"])
    page = analysis.page()
    assert 'id="plot-reach"' in page
    assert "<code>ropelens moved<" in page


@pytest.mark.parametrize("place", [{}, {"layer": LAYER, "head": HEAD}])
def test_each_variant_has_two_lines(reach: xr.Dataset, place: dict[str, int]):
    figure = plot_reach(reach, **place)
    for axis in [*figure.select_xaxes(), *figure.select_yaxes()]:
        assert re.search(r"\(.+\)$", axis.title.text)
    measured_lines = figure.data[::2]
    lines_beyond = figure.data[1::2]
    for name, measured, beyond in zip(
        reach["variant"].values, measured_lines, lines_beyond, strict=True
    ):
        for line, variable, dim in (
            (measured, "found_share", "run_distance"),
            (beyond, "extrapolated_share", "distance"),
        ):
            of_variant = reach[variable].sel(variant=name).isel(place)
            expected = of_variant if place else of_variant.mean(("layer", "head"))
            assert line.name == name
            np.testing.assert_array_equal(line.x, reach[dim])
            np.testing.assert_allclose(line.y, expected)
    styles = {(line.line.color, line.line.dash) for line in measured_lines}
    assert len(styles) == len(measured_lines)
