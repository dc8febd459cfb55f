"""Tests of the traces, values and marks of the figures of a sweep."""

import numpy as np
import plotly.graph_objects as go
import pytest
from synthetic_truncation import synthetic_truncation

import ropelens as rl
from ropelens.errors import BadArgument
from ropelens.figures.style import LABEL_ORDER
from ropelens.figures.truncated_heads import head_steps, plot_head_truncation
from ropelens.interventions.truncation_table import summarize_truncation


def named(figure: go.Figure, name: str) -> list:
    return [trace for trace in figure.data if trace.name == name]


@pytest.mark.parametrize("measure", ["loss", "retrieval"])
def test_lines_show_changes_with_intervals(sweep, measure: str):
    table = summarize_truncation(sweep)
    lines = {t.legendgroup: t for t in rl.plot_truncation(sweep, measures=[measure]).data}
    for end in ("slow", "fast"):
        rows = table[table["kind"].isin(["none", end])].sort_values("kept", ascending=False)
        line, change = lines[end], rows[f"{measure}_change"]
        np.testing.assert_array_equal(line.x, rows["kept"])
        np.testing.assert_array_equal(line.y, change)
        low, high = (rows[f"{measure}_change_{side}"] for side in ("low", "high"))
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
        np.testing.assert_allclose(line.y[1:-1], random.groupby("kept")["loss_change"].mean())
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
    left, right = bars.x - bars.width / 2, bars.x + bars.width / 2
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
    head, shares = sweep.isel(layer=1, head=2), sweep["kept"].values
    for row, name in enumerate(("attention_change", "induction"), start=1):
        slow, fast, random = figure.select_traces(row=row, col=1)
        for kind, line in (("slow", slow), ("fast", fast), ("random", random)):
            here = np.isin(sweep["kind"].values, ["none", kind])
            np.testing.assert_array_equal(line.x, sorted(set(shares[here]), reverse=True))
            means = [head[name].values[here & (shares == share)].mean() for share in line.x]
            np.testing.assert_allclose(line.y, means)
    slow, fast = (head_steps(sweep)[f"label_{end}"][1, 2] for end in ("slow", "fast"))
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
