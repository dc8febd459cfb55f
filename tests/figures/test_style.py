"""Tests of the elements that figures share, and figures of a sweep."""

import itertools
import re

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import xarray as xr
from oracles.ciede2000 import ciede2000
from synthetic_profile import synthetic_profile
from synthetic_truncation import synthetic_truncation

import ropelens as rl
from ropelens.errors import BadArgument
from ropelens.figures.formats import plotly_text, short_count, visible_token
from ropelens.figures.group_looks import variant_looks
from ropelens.figures.head_truncation import head_steps, plot_head_truncation
from ropelens.figures.planes import (
    common_columns,
    set_wavelengths,
    wavelength_positions,
)
from ropelens.figures.style import (
    COLORS,
    INK,
    LABEL_ORDER,
    MUTED,
    PAPER,
    SYMBOLS,
    VARIANT_COLORS,
)
from ropelens.interventions.truncation_table import summarize_truncation
from ropelens.report.render import TEMPLATES


def test_tokens_are_shown_literally():
    assert visible_token(" a\nb\t") == "␣a↵b⇥"
    assert visible_token("") == "∅"
    assert visible_token("a\u202eb\x00") == "a\\u202eb\\u0000"
    assert visible_token("\ud800") == "\\ud800"
    assert visible_token("x" * 50) == "x" * 23 + "…"
    assert plotly_text('<a href="x">&lt;$y$') == '&lt;a href="x"&gt;&amp;lt;&#36;y&#36;'


def without_repeats(planes: np.ndarray) -> list[int]:
    """The planes of columns from left to right; a run of one plane counts once."""
    return [plane for plane, _ in itertools.groupby(planes)]


def test_planes_without_rotation_have_their_own_place():
    wavelength = np.array(
        [[6.0, 60.0, 600.0, np.inf], [np.inf, np.inf, np.inf, np.nan]]
    )
    positions = wavelength_positions(wavelength)
    np.testing.assert_array_equal(positions[0, :3], wavelength[0, :3])
    without_rotation = positions[np.isinf(wavelength)]
    assert (without_rotation > 600 * 2).all()
    assert np.isnan(positions[1, 3])
    figure = go.Figure()
    set_wavelengths(figure, wavelength)
    assert figure.layout.xaxis.ticktext == ("10", "100", "∞")
    assert short_count(6.2832) == "6.28"
    assert short_count(1000) == "1k"
    assert short_count(2_512_345) == "2.51M"
    # Measured wavelengths of two layers differ in the last digits.
    measured = wavelength * (1 + 1e-6 * np.eye(2, 4))
    columns = common_columns(measured)
    assert (np.diff(columns.edges) > 0).all()
    assert without_repeats(columns.planes[0]) == [0, 1, 2, -1, 3, -1]
    assert without_repeats(columns.planes[1]) == [-1, 0, 1, 2]


def test_layers_with_two_bases_share_their_columns():
    steps = np.arange(8) / 8
    powers = np.array([10_000.0**steps, 1_000_000.0**steps])
    wavelength = 2 * np.pi * powers
    shared = common_columns(wavelength)
    edges = shared.edges
    for layer in range(2):
        for plane in range(8):
            columns = np.flatnonzero(shared.planes[layer] == plane)
            assert columns.size
            assert (np.diff(columns) == 1).all()
            start = edges[columns[0]]
            end = edges[columns[-1] + 1]
            assert start <= wavelength[layer, plane] <= end
    # Beyond its slowest plane, layer 0 has columns without a plane.
    left = edges[:-1]
    right = edges[1:]
    centres = np.sqrt(left * right)
    beyond = centres > 2 * wavelength[0, -1]
    assert (shared.planes[0][beyond] == -1).all()


# Machado, Oliveira & Fernandes 2009, severity 1, on linear RGB.
SIGHT = {
    "full": np.eye(3),
    "protanopia": [
        [0.152, 1.053, -0.205],
        [0.115, 0.786, 0.099],
        [-0.004, -0.048, 1.052],
    ],
    "deuteranopia": [
        [0.367, 0.861, -0.228],
        [0.280, 0.673, 0.047],
        [-0.012, 0.043, 0.969],
    ],
    "tritanopia": [
        [1.256, -0.077, -0.179],
        [-0.078, 0.931, 0.148],
        [0.005, 0.691, 0.304],
    ],
}
XYZ = np.array(
    [[0.4125, 0.3576, 0.1804], [0.2127, 0.7152, 0.0722], [0.0193, 0.1192, 0.9503]]
)
WHITE = np.array([0.9505, 1, 1.0888])


def linear(color: str) -> np.ndarray:
    """Linear values of red, green and blue (0 to 1) in a colour such as "#ff00ff"."""
    red = int(color[1:3], 16)
    green = int(color[3:5], 16)
    blue = int(color[5:7], 16)
    channel = np.array([red, green, blue]) / 255
    power = ((channel + 0.055) / 1.055) ** 2.4
    return np.where(channel <= 0.04045, channel / 12.92, power)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIELAB coordinates of a colour in linear RGB."""
    xyz = XYZ @ rgb.clip(0, 1) / WHITE
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize(
    ("one", "other", "distance"),
    [
        ([50, 2.6772, -79.7751], [50, 0, -82.7485], 2.0425),
        ([50, 2.5, 0], [73, 25, -18], 27.1492),
        ([60.2574, -34.0099, 36.2677], [60.4626, -34.1751, 39.4387], 1.2644),
        ([22.7233, 20.0904, -46.694], [23.0331, 14.973, -42.5619], 2.0373),
    ],
)
def test_distances_of_colours_are_those_of_sharma(one, other, distance):
    found = ciede2000(np.array(one), np.array(other))
    assert found == pytest.approx(distance, abs=1e-4)


@pytest.mark.parametrize("sight", SIGHT)
def test_lines_of_variants_differ_for_every_sight_on_both_pages(sight):
    simulation = np.array(SIGHT[sight])
    seen = {}
    for color in (*VARIANT_COLORS, MUTED):
        rgb = simulation @ linear(color)
        seen[color] = lab(rgb)
    least = 18 if sight == "full" else 12
    for one, other in itertools.combinations(seen, 2):
        assert ciede2000(seen[one], seen[other]) >= least, (one, other)
    looks = variant_looks(["p-rope:0.25", "nope"])
    quarter, none = [seen[look.line["color"]] for look in looks.values()]
    assert ciede2000(quarter, none) >= 20
    for color, theme in itertools.product(VARIANT_COLORS, PAPER):
        assert contrast(color, PAPER[theme]) >= 3


def contrast(color: str, paper: str) -> float:
    """Contrast ratio of two colours, by the formula of WCAG."""
    luminance = linear(color) @ XYZ[1]
    of_paper = linear(paper) @ XYZ[1]
    high = max(luminance, of_paper)
    low = min(luminance, of_paper)
    return (high + 0.05) / (low + 0.05)


def color_of_stopped_planes() -> str:
    script = (TEMPLATES / "page/live.js").read_text()
    match = re.search('STOPPED = "(#.+)"', script)
    return match[1]


def assert_colours_differ(colors: list[str], sight: str) -> None:
    """Any two of the colours have a CIELAB distance of 22 for people with this sight."""
    simulation = np.array(SIGHT[sight])
    seen = []
    for color in colors:
        rgb = simulation @ linear(color)
        seen.append(lab(rgb))
    for one, other in itertools.combinations(seen, 2):
        distance = np.linalg.norm(one - other)
        assert distance >= 22


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_differ_for_every_sight_and_contrast_with_the_page(sight):
    lines = [MUTED, *INK.values()]
    assert_colours_differ(list(COLORS.values()), sight)
    assert_colours_differ([*VARIANT_COLORS, *lines], sight)
    assert_colours_differ([color_of_stopped_planes(), *lines], sight)
    symbols = set(SYMBOLS.values())
    assert len(symbols) == len(SYMBOLS)
    for theme, label in itertools.product(PAPER, COLORS):
        # Diffuse heads have less contrast on purpose.
        least = 2.0 if label == "diffuse" else 3.0
        assert contrast(COLORS[label], PAPER[theme]) >= least, label


def test_variants_look_the_same_on_every_page():
    some = variant_looks(["p-rope:0.25", "yarn", "nope"])
    others = variant_looks(["ntk", "nope", "p-rope-0.75", "p-rope-0.25"])
    assert some["nope"] == others["nope"]
    assert some["p-rope:0.25"] == others["p-rope-0.25"]
    colors = {look.line["color"] for look in others.values()}
    assert len(colors) == 4


def test_variants_of_one_colour_have_other_symbols_and_dashes():
    looks = variant_looks([f"yarn:{factor}" for factor in range(10)])
    of_color: dict[str, list] = {}
    for look in looks.values():
        of_color.setdefault(look.line["color"], []).append(look)
    assert max(len(same) for same in of_color.values()) == 2
    for same in of_color.values():
        assert len({look.symbol for look in same}) == len(same)
        assert len({look.line["dash"] for look in same}) == len(same)


@pytest.mark.parametrize("measure", ["loss", "retrieval"])
def test_lines_show_changes_with_intervals(sweep, measure: str):
    table = summarize_truncation(sweep)
    figure = rl.plot_truncation(sweep, measures=[measure])
    lines = {trace.legendgroup: trace for trace in figure.data}
    for end in ("slow", "fast"):
        edits = table[table["kind"].isin(["none", end])]
        edits = edits.sort_values("kept", ascending=False)
        line = lines[end]
        np.testing.assert_array_equal(line.x, edits["kept"])
        change = edits[f"{measure}_change"]
        np.testing.assert_array_equal(line.y, change)
        low = edits[f"{measure}_change_low"]
        high = edits[f"{measure}_change_high"]
        np.testing.assert_allclose(line.error_y.array, high - change)
        np.testing.assert_allclose(line.error_y.arrayminus, change - low)
    assert "stopped: 14,15, wavelengths 19.9k to 35.3k tokens" in lines["slow"].text[1]


def test_the_control_line_is_the_mean_of_its_draws(sweep):
    table = summarize_truncation(sweep)
    random = table[table["kind"] == "random"]
    means = random.groupby("kept")["loss_change"].mean()
    figure = rl.plot_truncation(sweep)
    lines = list(figure.select_traces({"name": "random planes", "mode": "lines"}))
    assert len(lines) == 2
    assert [line.showlegend for line in lines] == [True, False]
    for line in lines:
        np.testing.assert_allclose(line.x, np.arange(9) / 8)
        np.testing.assert_allclose(line.y[1:-1], means)
        assert line.y[-1] == 0
    crosses = list(figure.select_traces({"name": "random planes", "mode": "markers"}))
    assert sorted(crosses[0].y) == sorted(random["loss_change"])


def test_the_trained_context_is_marked_at_its_plane(sweep):
    """With base b and D/2 planes, the wavelength L is at plane (D/2) log_b(L / 2 pi)."""
    log_ratio = np.log(512 / (2 * np.pi))
    index = 16 * log_ratio / np.log(10_000)
    share = (index + 0.5) / 16
    figure = rl.plot_truncation(sweep)
    lines = {shape.xref: shape.x0 for shape in figure.layout.shapes}
    assert lines["x"] == pytest.approx(share)
    assert lines["x2"] == pytest.approx(1 - share)
    words = {note.name: note.text for note in figure.layout.annotations}
    assert words["context"] == "wavelength = trained<br>context (512 tokens)"
    (line,) = rl.plot_truncation(sweep, by="band").layout.shapes
    assert line.x0 == 512


def assert_bars_cover_the_axis(figure: go.Figure, table: pd.DataFrame) -> None:
    bands = table[table["kind"] == "band"]
    (bars,) = figure.select_traces({"type": "bar"})
    np.testing.assert_array_equal(bars.y, bands["loss_change"])
    left = bars.x - bars.width / 2
    right = bars.x + bars.width / 2
    np.testing.assert_allclose(left[1:], right[:-1])
    assert (left < bands["wavelength_low"].to_numpy()).all()
    assert (right > bands["wavelength_high"].to_numpy()).all()


def assert_controls_are_dashed(figure: go.Figure, table: pd.DataFrame) -> None:
    """Each band has a dashed line, from its left to its right, at the mean of its controls."""
    controls = table[table["kind"] == "band control"]
    means = controls.groupby("band")["loss_change"].mean()
    scatters = list(figure.select_traces({"type": "scatter"}))
    dashed = next(trace for trace in scatters if trace.line.dash == "4px,3px")
    heights = [y for y in dashed.y if y is not None]
    np.testing.assert_allclose(heights[::2], means)


def test_bands_cover_the_axis(sweep):
    table = summarize_truncation(sweep)
    figure = rl.plot_truncation(sweep, by="band")
    assert_bars_cover_the_axis(figure, table)
    assert_controls_are_dashed(figure, table)


def assert_line_is_the_mean(
    line: go.Scatter, head: xr.Dataset, measure: str, *, planes: str
) -> None:
    """A line shows the mean of a measure over the edits with the same share of planes."""
    of_line = np.isin(head["kind"], ["none", planes])
    edits = head.isel(edit=of_line)
    shares = edits["kept"].values
    expected_shares = sorted(set(shares), reverse=True)
    np.testing.assert_array_equal(line.x, expected_shares)
    values = edits[measure].values
    means = [values[shares == share].mean() for share in expected_shares]
    np.testing.assert_allclose(line.y, means)


def test_a_head_has_a_line_per_end_and_labels_as_numbers(sweep):
    sweep = sweep.copy(deep=True)
    sweep["label"][:, 1, 2] = "mixed"
    edits = sweep["edit"].values
    sweep["label"][edits == "fast 0.25", 1, 2] = ""
    sweep["label"][edits == "fast 0", 1, 2] = "semantic"
    figure = plot_head_truncation(sweep, layer=1, head=2)
    head = sweep.isel(layer=1, head=2)
    for row, measure in enumerate(("attention_change", "induction"), start=1):
        slow, fast, random = figure.select_traces(row=row, col=1)
        assert_line_is_the_mean(slow, head, measure, planes="slow")
        assert_line_is_the_mean(fast, head, measure, planes="fast")
        assert_line_is_the_mean(random, head, measure, planes="random")
    steps = head_steps(sweep)
    mixed = LABEL_ORDER.index("mixed")
    semantic = LABEL_ORDER.index("semantic")
    no_label = len(LABEL_ORDER)
    slow_labels = steps["label_slow"][1, 2]
    fast_labels = steps["label_fast"][1, 2]
    assert set(slow_labels) == {mixed}
    assert list(fast_labels[-3:]) == [no_label, mixed, semantic]


def test_missing_parts_of_a_sweep_are_refused():
    fast = synthetic_truncation(ends=["fast"], controls=0, bands=0)
    (line,) = rl.plot_truncation(fast).data
    assert line.legendgroup == "fast"
    for context in (0, 10**6):
        sweep = synthetic_truncation(bands=2).assign_attrs(trained_context=context)
        assert len(rl.plot_truncation(sweep).layout.shapes) == 0
    losses = fast[["loss", "predicted_tokens", "wavelength"]]
    with pytest.raises(BadArgument, match="The sweep did not measure labels"):
        rl.plot_truncation(losses, measures=["labels"])
    with pytest.raises(BadArgument, match="The sweep stopped no bands"):
        rl.plot_truncation(fast, by="band")
    with pytest.raises(BadArgument, match="The sweep did not measure classes"):
        rl.plot_truncation(fast, by="class")
    profile, _ = synthetic_profile(layers=1, heads=2, kv_heads=1)
    with pytest.raises(BadArgument, match="The sweep has no steps"):
        rl.plot_truncation(profile)


def test_planes_without_attribution_are_refused():
    profile, _ = synthetic_profile(layers=1, heads=2, kv_heads=1)
    with pytest.raises(BadArgument, match="no attribution of planes"):
        rl.plot_top_planes(profile)
