"""Tests of the parts of all figures, and of the figures of a sweep."""

import itertools
import re

import numpy as np
import plotly.graph_objects as go
import pytest
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


def test_planes_without_rotation_have_their_own_place():
    wavelength = np.array(
        [[6.0, 60.0, 600.0, np.inf], [np.inf, np.inf, np.inf, np.nan]]
    )
    positions = wavelength_positions(wavelength)
    np.testing.assert_array_equal(positions[0, :3], wavelength[0, :3])
    assert (positions[np.isinf(wavelength)] > 600 * 2).all()
    assert np.isnan(positions[1, 3])
    figure = go.Figure()
    set_wavelengths(figure, wavelength)
    assert figure.layout.xaxis.ticktext == ("10", "100", "∞")
    assert [short_count(v) for v in (6.2832, 1000, 2_512_345)] == [
        "6.28",
        "1k",
        "2.51M",
    ]
    # as measured
    columns = common_columns(wavelength * (1 + 1e-6 * np.eye(2, 4)))
    edges = columns.edges
    planes = columns.planes
    assert (np.diff(edges) > 0).all()
    assert [plane for plane, _ in itertools.groupby(planes[0])] == [0, 1, 2, -1, 3, -1]
    assert [plane for plane, _ in itertools.groupby(planes[1])] == [-1, 0, 1, 2]


def test_layers_with_two_bases_share_their_columns():
    steps = np.arange(8) / 8
    wavelength = 2 * np.pi * np.array([10_000.0**steps, 1_000_000.0**steps])
    shared = common_columns(wavelength)
    edges = shared.edges
    planes = shared.planes
    centres = np.sqrt(edges[1:] * edges[:-1])
    for layer in range(2):
        for plane in range(8):
            columns = np.flatnonzero(planes[layer] == plane)
            assert columns.size
            assert (np.diff(columns) == 1).all()
            assert (
                edges[columns[0]] <= wavelength[layer, plane] <= edges[columns[-1] + 1]
            )
    assert (planes[0][centres > 2 * wavelength[0, -1]] == -1).all()


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


def linear(color: str) -> np.ndarray:
    channel = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(
        channel <= 0.04045, channel / 12.92, ((channel + 0.055) / 1.055) ** 2.4
    )


def lab(rgb: np.ndarray) -> np.ndarray:
    xyz = XYZ @ rgb.clip(0, 1) / np.array([0.9505, 1, 1.0888])
    x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("sight", SIGHT)
def test_colours_differ_for_every_sight_and_contrast_with_the_page(sight):
    stopped = re.search('STOPPED = "(#.+)"', (TEMPLATES / "page/live.js").read_text())
    lines = (MUTED, *INK.values())
    for colors in (COLORS.values(), (*VARIANT_COLORS, *lines), (stopped[1], *lines)):
        seen = [lab(np.array(SIGHT[sight]) @ linear(color)) for color in colors]
        for one, other in itertools.combinations(seen, 2):
            assert np.linalg.norm(one - other) >= 22
    assert len(set(SYMBOLS.values())) == len(SYMBOLS)
    for theme, label in itertools.product(PAPER, COLORS):
        low, high = sorted(linear(c) @ XYZ[1] for c in (COLORS[label], PAPER[theme]))
        # Diffuse heads have less contrast on purpose.
        assert (high + 0.05) / (low + 0.05) >= (2.0 if label == "diffuse" else 3.0), (
            label
        )


def test_variants_look_the_same_on_every_page():
    some = variant_looks(["p-rope:0.25", "yarn", "nope"])
    others = variant_looks(["ntk", "nope", "p-rope-0.75", "p-rope-0.25"])
    assert some["nope"] == others["nope"]
    assert some["p-rope:0.25"] == others["p-rope-0.25"]
    assert len({look.line["color"] for look in others.values()}) == 4


def named(figure: go.Figure, name: str) -> list:
    return [trace for trace in figure.data if trace.name == name]


@pytest.mark.parametrize("measure", ["loss", "retrieval"])
def test_lines_show_changes_with_intervals(sweep, measure: str):
    table = summarize_truncation(sweep)
    lines = {
        t.legendgroup: t for t in rl.plot_truncation(sweep, measures=[measure]).data
    }
    for end in ("slow", "fast"):
        rows = table[table["kind"].isin(["none", end])].sort_values(
            "kept", ascending=False
        )
        line = lines[end]
        change = rows[f"{measure}_change"]
        np.testing.assert_array_equal(line.x, rows["kept"])
        np.testing.assert_array_equal(line.y, change)
        low, high = [rows[f"{measure}_change_{side}"] for side in ("low", "high")]
        np.testing.assert_allclose(line.error_y.array, high - change)
        np.testing.assert_allclose(line.error_y.arrayminus, change - low)
    assert "stopped: 14,15, wavelengths 19.9k to 35.3k tokens" in lines["slow"].text[1]


def test_the_control_line_is_the_mean_of_its_draws(sweep):
    table = summarize_truncation(sweep)
    random = table[table["kind"] == "random"]
    figure = rl.plot_truncation(sweep)
    lines = [t for t in named(figure, "random planes") if t.mode == "lines"]
    assert len(lines) == 2
    assert [line.showlegend for line in lines] == [True, False]
    for line in lines:
        np.testing.assert_allclose(line.x, np.arange(9) / 8)
        np.testing.assert_allclose(
            line.y[1:-1], random.groupby("kept")["loss_change"].mean()
        )
        assert line.y[-1] == 0
    crosses = [t for t in named(figure, "random planes") if t.mode == "markers"]
    assert sorted(crosses[0].y) == sorted(random["loss_change"])


def test_the_trained_context_is_marked_at_its_plane(sweep):
    """With base b and D/2 planes, the wavelength L is at plane (D/2) log_b(L / 2 pi)."""
    index = 16 * np.log(512 / (2 * np.pi)) / np.log(10_000)
    figure = rl.plot_truncation(sweep)
    lines = {shape.xref: shape.x0 for shape in figure.layout.shapes}
    assert lines["x"] == pytest.approx((index + 0.5) / 16)
    assert lines["x2"] == pytest.approx(1 - (index + 0.5) / 16)
    words = {note.name: note.text for note in figure.layout.annotations}
    assert words["context"] == "wavelength = trained<br>context (512 tokens)"
    (line,) = rl.plot_truncation(sweep, by="band").layout.shapes
    assert line.x0 == 512


def test_bands_cover_the_axis(sweep):
    table = summarize_truncation(sweep)
    rows = table[table["kind"] == "band"]
    figure = rl.plot_truncation(sweep, by="band")
    (bars,) = [trace for trace in figure.data if trace.type == "bar"]
    np.testing.assert_array_equal(bars.y, rows["loss_change"])
    left = bars.x - bars.width / 2
    right = bars.x + bars.width / 2
    np.testing.assert_allclose(left[1:], right[:-1])
    assert (left < rows["wavelength_low"].to_numpy()).all()
    assert (right > rows["wavelength_high"].to_numpy()).all()
    means = table[table["kind"] == "band control"].groupby("band")["loss_change"].mean()
    scatters = (t for t in figure.data if t.type == "scatter")
    dashed = next(t for t in scatters if t.line.dash == "4px,3px")
    np.testing.assert_allclose([y for y in dashed.y if y is not None][::2], means)


def test_a_head_has_a_line_per_end_and_labels_as_numbers(sweep):
    sweep = sweep.copy(deep=True)
    sweep["label"][:, 1, 2] = "mixed"
    sweep["label"][sweep["edit"].values == "fast 0.25", 1, 2] = ""
    sweep["label"][sweep["edit"].values == "fast 0", 1, 2] = "semantic"
    figure = plot_head_truncation(sweep, layer=1, head=2)
    head = sweep.isel(layer=1, head=2)
    shares = sweep["kept"].values
    for row, name in enumerate(("attention_change", "induction"), start=1):
        slow, fast, random = figure.select_traces(row=row, col=1)
        for kind, line in (("slow", slow), ("fast", fast), ("random", random)):
            here = np.isin(sweep["kind"].values, ["none", kind])
            np.testing.assert_array_equal(
                line.x, sorted(set(shares[here]), reverse=True)
            )
            means = [
                head[name].values[here & (shares == share)].mean() for share in line.x
            ]
            np.testing.assert_allclose(line.y, means)
    slow, fast = [head_steps(sweep)[f"label_{end}"][1, 2] for end in ("slow", "fast")]
    mixed, semantic = map(LABEL_ORDER.index, ("mixed", "semantic"))
    assert set(slow) == {mixed}
    assert [*fast[-3:]] == [len(LABEL_ORDER), mixed, semantic]


def test_missing_parts_of_a_sweep_are_refused():
    one = synthetic_truncation(ends=["fast"], controls=0, bands=0)
    assert [trace.legendgroup for trace in rl.plot_truncation(one).data] == ["fast"]
    for context in (0, 10**6):
        far = synthetic_truncation(bands=2).assign_attrs(trained_context=context)
        assert len(rl.plot_truncation(far).layout.shapes) == 0
    losses = one[["loss", "predicted_tokens", "wavelength"]]
    for message, sweep, options in (
        ("The sweep did not measure labels", losses, {"measures": ["labels"]}),
        ("The sweep stopped no bands", one, {"by": "band"}),
        ("The sweep did not measure classes", one, {"by": "class"}),
    ):
        with pytest.raises(BadArgument, match=message):
            rl.plot_truncation(sweep, **options)
