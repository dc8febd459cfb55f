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

LAYER, HEAD = 1, 3


@pytest.fixture(scope="module")
def reach() -> xr.Dataset:
    tokens = random_tokens(sequences=8, length=16)
    heads, variants = f"0.*,{LAYER}.{HEAD}", ("own", "p-rope:0.5", "nope")
    return rl.reach(
        tiny("llama_gqa"), tokens, heads=heads, variants=variants, copies=[48, 60]
    )


@pytest.fixture(scope="module")
def profile(reach: xr.Dataset) -> xr.Dataset:
    layers, heads = (reach.sizes[name] for name in ("layer", "head"))
    return synthetic_profile(kv_heads=2, layers=layers, heads=heads)[0]


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
    traces = page.evaluate(
        """document.getElementById("plot-stopped")._fullData.map(({ x, y, marker }) =>
             ({ x: Array.from(x), y: Array.from(y), marks: marker?.symbol }))"""
    )
    of_head = sweep.isel(layer=LAYER, head=HEAD)
    edits = ["none", *(f"fast {share:g}" for share in traces[1]["x"][1:])]
    change = of_head["attention_change"].sel(edit=edits).values
    np.testing.assert_allclose(traces[1]["y"], change, rtol=1e-5)
    half = traces[1]["x"].index(0.5)
    marks = ["x" if step == half else "diamond" for step in range(len(edits) - 1)]
    assert traces[1]["marks"] == [*marks, "circle-open"]
    assert set(traces[0]["marks"]) == {"diamond"}
    words = "The mark shows the label of the head at this step."
    assert page.inner_text("#one-stopped figcaption") == words
    ends = "document.getElementById('plot-stopped')._fullLayout.yaxis2.range"
    np.testing.assert_allclose(page.evaluate(ends), [-0.03, 1.03])
    rows = table(page, "stopped")
    assert len(rows) == 2 * len(edits)
    assert rows[-1][:3] == ["fastest", "0%", "–"]
    assert rows[len(edits) + half][:3] == ["fastest", "50%", "diffuse"]
    assert float(rows[len(edits) + half][3]) == pytest.approx(change[half], abs=5.1e-4)


def test_reach_is_that_of_the_figure(opened, reach):
    page = opened.at("#L0H2&tab=reach")
    of_head = reach.isel(layer=0, head=2)
    for trace, expected in enumerate(plot_reach(reach, layer=0, head=2).data):
        np.testing.assert_allclose(values(page, "plot-reach", "y", trace), expected.y)
    shares = of_head["found_share"].sel(variant="own").values
    words = [f"{float(f'{100 * share:.3g}'):g}%" for share in shares]
    near, far = (
        f"{words[0]} of copies 48 tokens back",
        f"{words[1]} of copies 60 tokens back",
    )
    assert page.inner_text("#reach-words") == f"The head finds {near}, and {far}."
    rows = table(page, "reach")
    assert [row[0] for row in rows] == [
        n for n in ("own", "p-rope:0.5", "nope") for _ in "ab"
    ]
    assert rows[1][1:3] == ["60", words[1]]
    assert rows[0][5] == "–"
    page = opened.at(f"#L{LAYER}H0&tab=reach")
    sentence = (
        f"This head is not among the {reach.sizes['head'] + 1} heads that were run."
    )
    assert page.inner_text("#reach-words") == sentence
    assert page.get_attribute("#plot-reach", "data-empty").endswith(
        "this head was not run"
    )


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
    (tmp_path / "run.json").write_text(
        '{"kind": "analysis", "command": "ropelens moved"}'
    )
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
    names = reach["variant"].values.tolist()
    for name, measured, beyond in zip(
        names, figure.data[::2], figure.data[1::2], strict=True
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
    lines = figure.data[::2]
    assert len({(line.line.color, line.line.dash) for line in lines}) == len(lines)
