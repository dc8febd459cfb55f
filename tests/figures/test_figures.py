"""Tests of the traces, values and axis titles of figures, without pixels."""

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import get_args

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
import xarray as xr
from scipy.stats import spearmanr
from synthetic_comparison import synthetic_comparison
from synthetic_profile import synthetic_profile
from synthetic_truncation import synthetic_truncation

import ropelens as rl
from ropelens.comparison.summary import summarize_comparison
from ropelens.errors import BadArgument
from ropelens.figures import comparison, comparison_planes
from ropelens.figures.claim import claim_title
from ropelens.figures.difference_lines import EndLabels
from ropelens.figures.formats import number
from ropelens.figures.head_planes import pair_figure
from ropelens.figures.head_truncation import plot_head_truncation
from ropelens.figures.head_wavelengths import plot_head_wavelengths
from ropelens.figures.inputs import kv_heads
from ropelens.figures.kernel import kernel_arrays
from ropelens.figures.norms import NORM_PANELS
from ropelens.figures.silenced import plot_silenced
from ropelens.figures.style import LABEL_ORDER, SIGNS, SYMBOLS
from ropelens.figures.truncation import MeasureName
from ropelens.report import describe
from ropelens.report.sentences.profile import idle_sentence

SILENCED = ("what", "label", "tokens", "change", "low", "high")
Draw = Callable[[xr.Dataset, pd.DataFrame], go.Figure]

FAMILIES: dict[str, Draw] = {
    "head_map": lambda p, h: rl.plot_head_map(p, h, selected=(1, 2)),
    "head_wavelengths": lambda p, h: plot_head_wavelengths(p, h, selected=(1, 2)),
    "claim": lambda p, h: rl.plot_claim(p, h, selected=(1, 2)),
    "follow": lambda p, h: rl.plot_follow(p, h, selected=(1, 2)),
    "norms": lambda p, h: rl.plot_norms(p),
    "norms of a layer": lambda p, h: rl.plot_norms(p, layer=1),
    "kernel": lambda p, h: rl.plot_kernel(p, layer=1, head=2),
    "selectivity": lambda p, h: rl.plot_selectivity(p, layer=1, head=2),
    "attention": lambda p, h: rl.plot_attention(p, layer=1, head=2),
    "pair": lambda p, h: pair_figure(p),
}


@pytest.fixture(scope="module", params=["small", "partial rotary"])
def synthetic(request: pytest.FixtureRequest) -> tuple[xr.Dataset, pd.DataFrame]:
    if request.param == "small":
        return synthetic_profile()
    return synthetic_profile(
        layers=26, heads=26, kv_heads=13, excerpt=36, unrotated=True, context=4096
    )


def test_labels_at_the_ends_of_lines_do_not_overlap():
    heights = {"a": 0.0, "b": 0.1, "c": 5.0, "d": 0.2}
    sizes = {"a": 1.0, "b": 2.0, "c": 1.0, "d": 1.0}
    placed = EndLabels(heights, sizes, bottom=-9, top=9).apart()
    assert placed["c"] == 5.0
    assert placed["b"] - placed["a"] == pytest.approx(1.5)
    assert placed["d"] - placed["b"] == pytest.approx(1.5)
    block = [placed[name] for name in "abd"]
    assert np.mean(block) == pytest.approx(0.1)


def test_labels_at_the_ends_of_lines_stay_within_the_axis():
    heights = {"a": 0.0, "b": 0.1, "c": 3.0, "d": 0.2}
    sizes = dict.fromkeys(heights, 1.0)
    placed = EndLabels(heights, sizes, bottom=-0.5, top=9).apart()
    # The block of a, b and d begins at the bottom, and has no room below c.
    assert placed == {"a": 0.0, "b": 1.0, "d": 2.0, "c": 3.0}
    placed = EndLabels(heights, sizes, bottom=-0.25, top=4.0).apart()
    middles = [placed[name] for name in "abdc"]
    assert np.diff(middles).tolist() == [1.0, 1.0, 1.0]
    assert middles[0] - 0.5 >= -0.25
    assert middles[-1] + 0.5 <= 4.0
    crowded = EndLabels(heights, sizes, bottom=0, top=3).apart()
    assert np.mean([*crowded.values()]) == pytest.approx(1.5)


def assert_cells_hold_the_bits(
    cells: dict[str, np.ndarray], heads: pd.DataFrame
) -> None:
    """The cells [layer, head] of each label have bits only for heads with this label."""
    for head in heads.itertuples():
        for label, bits in cells.items():
            value = bits[head.layer, head.head]
            if label == head.label:
                assert value == head.total_bits
            else:
                assert np.isnan(value)


def test_head_map_holds_the_bits_of_each_head_under_its_label(synthetic):
    profile, heads = synthetic
    figure = rl.plot_head_map(profile, heads, selected=(1, 2))
    maps = list(figure.select_traces("heatmap"))
    cells = {trace.name: np.array(trace.z, float) for trace in maps}
    assert set(cells) == set(LABEL_ORDER)
    assert_cells_hold_the_bits(cells, heads)
    # The cells differ without colour too.
    labels_with_a_sign = set(heads["label"]) - {"positional"}
    for trace in maps:
        if trace.name in labels_with_a_sign:
            texts = np.array(trace.text).ravel()
            assert set(texts) == {"", SIGNS[trace.name]}
    # The frame surrounds head 2 of layer 1.
    frame = figure.layout.shapes[0]
    assert (frame.x0, frame.x1) == (1.5, 2.5)
    assert (frame.y0, frame.y1) == (0.5, 1.5)


def title_of_claim(claim: dict[str, float]) -> str:
    rank_correlation = number(claim["rank_correlation"])
    low = number(claim["null_low"])
    high = number(claim["null_high"])
    return f"Rank correlation {rank_correlation}; surrogates {low} to {high}"


def rank_correlations(fraction: np.ndarray, log_wavelength: np.ndarray) -> list[float]:
    """Rank correlation of each draw over the heads that count."""
    counts = np.isfinite(fraction[0])
    correlations = []
    for fractions, logs in zip(fraction, log_wavelength, strict=True):
        correlation = spearmanr(fractions[counts], logs[counts])
        correlations.append(correlation.statistic)
    return correlations


def assert_points_are_heads(
    traces: Sequence[go.Scatter], fraction: np.ndarray, wavelength: np.ndarray
) -> None:
    """The traces show the heads with a fraction, at their wavelength and fraction."""
    shown = 0
    for trace in traces:
        heads_drawn = tuple(trace.customdata.T)
        np.testing.assert_allclose(trace.x, wavelength[heads_drawn])
        np.testing.assert_array_equal(trace.y, fraction[heads_drawn])
        shown += len(trace.customdata)
    assert shown == np.isfinite(fraction).sum()


def test_claim_shows_the_heads_that_count_and_the_surrogates(small):
    profile, heads = small
    figure = rl.plot_claim(profile, heads, selected=(1, 2))
    *labelled, chosen, surrogates, model = figure.data
    # Draw 0 is the model. Later draws are surrogates.
    fraction = profile["surrogate_offset_fraction"].values
    log_wavelength = profile["surrogate_log_wavelength"].values
    assert_points_are_heads(labelled, fraction[0], np.exp(log_wavelength[0]))
    assert chosen.y[0] == fraction[0, 1, 2]
    assert figure.layout.xaxis.type == "log"
    expected = rank_correlations(fraction, log_wavelength)
    np.testing.assert_allclose([*model.x, *surrogates.x], expected)
    claim = heads.attrs["claim"]
    assert figure.layout.title.text == title_of_claim(claim)
    without_numbers = dict.fromkeys(claim, float("nan"))
    assert claim_title(without_numbers).startswith("Too few heads")
    assert "orrelation" not in claim_title(None)


def choose_keys(heads: pd.DataFrame) -> pd.Series:
    """Whether the label of each head says that it chooses keys."""
    return heads["label"].isin(["positional", "mixed", "semantic"])


def points_of(traces: Sequence[go.Scatter]) -> list[list[float]]:
    """Layer, head, x and y of each point, sorted."""
    points = []
    for trace in traces:
        of_trace = np.column_stack([trace.customdata, trace.x, trace.y])
        points += of_trace.tolist()
    return sorted(points)


def test_follow_shows_what_stays_and_what_moves_of_heads_that_choose_keys(small):
    profile, heads = small
    size = (3, len(heads))
    content, position, chance = np.random.default_rng(0).uniform(size=size)
    heads = heads.assign(
        follows_content=content,
        follows_position=position,
        follows_chance=chance,
    )
    figure = rl.plot_follow(profile, heads, selected=(1, 2))
    across, down, *labelled, chosen = figure.data
    choose = choose_keys(heads)
    median = np.median(chance[choose])
    assert across.y[0] == median
    assert down.x[0] == median
    columns = ["layer", "head", "follows_content", "follows_position"]
    expected = heads.loc[choose, columns].to_numpy(float)
    assert points_of(labelled) == sorted(expected.tolist())
    # Layers have 8 heads, so head 2 of layer 1 has the index 10.
    assert chosen.x[0] == content[10]
    assert chosen.y[0] == position[10]


def norms_of(profile: xr.Dataset, side: str, layer: int | None) -> np.ndarray:
    """Mean norms [layer, frequency] over heads, or norms [head, frequency] of a layer."""
    head_dim = "head" if side == "query" else "kv_head"
    norms = profile[NORM_PANELS[side]].transpose("layer", head_dim, "frequency")
    if layer is None:
        return norms.mean(head_dim).values
    return norms[layer].values


@pytest.mark.parametrize("layer", [None, 1])
def test_norms_of_layers_or_of_a_layers_heads(synthetic, layer):
    profile, _ = synthetic
    finite = np.isfinite(profile.wavelength.values[0])
    figure = rl.plot_norms(profile, layer=layer)
    for trace, side in zip(figure.data, NORM_PANELS, strict=True):
        expected = norms_of(profile, side, layer)
        rotating_cells = trace.z[:, : finite.sum()]
        np.testing.assert_allclose(rotating_cells, expected[:, finite])
        last_column = trace.z[:, -1]
        np.testing.assert_allclose(last_column, expected[:, -1])
        columns = trace.z.shape[1]
        assert len(trace.x) == columns + 1
    assert figure.layout.xaxis.type == "log"
    assert figure.layout.xaxis3.type == "log"
    without_values = profile.assign(v_norm=profile["v_norm"] * np.nan)
    unlike = rl.plot_norms(without_values, layer=layer)
    assert len(unlike.data) == 2, "values and keys have different sizes"


def test_kernel_is_measured_and_predicted_with_the_same_total(synthetic):
    profile, _ = synthetic
    measured, predicted = rl.plot_kernel(profile, layer=1, head=2).data
    np.testing.assert_array_equal(measured.y, profile.kernel.values[1, 2])
    np.testing.assert_array_equal(measured.x, profile.offset_start + 1)
    width = (profile.offset_stop - profile.offset_start).values
    predicted_total = (predicted.y * width).sum()
    measured_total = (measured.y * width).sum()
    assert predicted_total == pytest.approx(measured_total)
    score = profile.predicted_kernel.values[1, 2]
    log_ratios = np.diff(np.log(predicted.y))
    np.testing.assert_allclose(log_ratios, np.diff(score), atol=1e-9)
    arrays = list(kernel_arrays(profile))
    assert measured.meta["y"] == arrays[0]
    assert predicted.meta["y"] == arrays[1]
    assert len(arrays) == 2


def test_offsets_without_rows_have_no_weight(small):
    profile = small[0].copy(deep=True)
    profile.kernel[1, 2, -3:] = np.nan
    profile.predicted_kernel[2, 3] = np.nan
    predicted = kernel_arrays(profile)["kernel_predicted"]
    assert np.isnan(predicted[1, 2, -3:]).all()
    assert np.isfinite(predicted[1, 2, :-3]).all()
    assert np.isnan(predicted[2, 3]).all()


def test_selectivity_shows_one_head_and_the_keys_it_reads(synthetic):
    profile, _ = synthetic
    figure = rl.plot_selectivity(profile, layer=1, head=2)
    kv_head = kv_heads(profile)[1, 2]
    wavelength = profile.wavelength.values[1]
    arrays = [trace.meta["y"] for trace in figure.data]
    for trace, array in zip(figure.data, arrays, strict=True):
        head = kv_head if array.startswith("k") else 2
        expected = profile[array].values[1, head]
        planes = trace.meta.get("planes")
        if planes == "rotating":
            expected = np.where(np.isinf(wavelength), np.nan, expected)
        if planes == "stopped":
            expected = np.where(np.isinf(wavelength), expected, np.nan)
        np.testing.assert_array_equal(trace.y, expected)
        np.testing.assert_array_equal(trace.customdata, wavelength)
    assert len(set(arrays)) == 6


def test_attention_names_tokens_and_leaves_the_future_empty(small):
    profile, _ = small
    figure = rl.plot_attention(profile, layer=1, head=2)
    weights = profile.excerpt_attention.values[0, 1, 2]
    cells = figure.data[0].z
    visible = np.tril(np.ones_like(weights, dtype=bool))
    np.testing.assert_array_equal(cells[visible], weights[visible])
    assert np.isnan(cells[~visible]).all()
    tokens = figure.layout.xaxis.ticktext
    assert tokens[:3] == ("&lt;s&gt;", "␣Once", "␣upon")
    assert figure.layout.yaxis.ticktext == tokens


def missing(
    results: xr.Dataset, names: Sequence[str], layers: Sequence[int]
) -> xr.Dataset:
    """Replace the variables `names`, and all variables of `layers`, by NaN."""
    indices = np.arange(results.sizes["layer"])
    measured_layers = xr.Variable("layer", ~np.isin(indices, layers))
    changed = {}
    for name, variable in results.variables.items():
        if variable.dtype.kind != "f" or name in results.dims:
            continue
        measured = name not in names
        if "layer" in variable.dims:
            measured = measured & measured_layers
        changed[name] = variable.where(measured)
    return results.assign(changed)


def nothing_measured(results: xr.Dataset) -> xr.Dataset:
    every_layer = range(results.sizes["layer"])
    return missing(results, list(results.data_vars), every_layer)


SMALL_PROFILE, SMALL_HEADS = synthetic_profile(
    layers=3, heads=3, kv_heads=3, frequencies=5, excerpt=6
)
SWEEP = synthetic_truncation(layers=3, heads=3, frequencies=8)
RUNS = synthetic_comparison()


def heads_of(profile: xr.Dataset) -> pd.DataFrame:
    """`SMALL_HEADS`, with NaN for heads without bits. Head 1.2 is selected, so it stays."""
    heads = SMALL_HEADS.copy()
    bits = profile["total_bits"].values[heads["layer"], heads["head"]]
    numbers = heads.columns.drop(["layer", "head", "label"])
    heads.loc[~np.isfinite(bits), numbers] = np.nan
    return heads


@dataclass(frozen=True, eq=False)
class Drawing:
    """Results, and a function that draws a figure of such results."""

    results: xr.Dataset
    draw: Callable[[xr.Dataset], go.Figure]


def drawing_of_profile(draw: Draw) -> Drawing:
    def draw_with_heads(profile: xr.Dataset) -> go.Figure:
        return draw(profile, heads_of(profile))

    return Drawing(SMALL_PROFILE, draw_with_heads)


def draw_head_of_sweep(sweep: xr.Dataset) -> go.Figure:
    return plot_head_truncation(sweep, layer=1, head=2)


def draw_loss_change(runs: xr.Dataset) -> go.Figure:
    return comparison.plot_loss_change(runs, summarize_comparison(runs))


def draw_loss_lines(runs: xr.Dataset) -> go.Figure:
    return comparison.plot_loss_lines(runs, summarize_comparison(runs))


def draw_silenced(_: xr.Dataset) -> go.Figure:
    return plot_silenced(pd.DataFrame(columns=SILENCED))


def draw_shares(sweep: xr.Dataset) -> go.Figure:
    return rl.plot_truncation(sweep, measures=get_args(MeasureName))


def draw_bands(sweep: xr.Dataset) -> go.Figure:
    return rl.plot_truncation(sweep, by="band")


OF_PROFILE = {name: drawing_of_profile(draw) for name, draw in FAMILIES.items()}
OTHERS = {
    "head of a sweep": Drawing(SWEEP, draw_head_of_sweep),
    "position": Drawing(RUNS, comparison.plot_position_loss),
    "copying": Drawing(RUNS, comparison.plot_copying),
    "planes": Drawing(RUNS, comparison_planes.plot_comparison_planes),
    "growth": Drawing(RUNS, comparison.plot_growth),
    "losses": Drawing(RUNS, draw_loss_change),
    "loss lines": Drawing(RUNS, draw_loss_lines),
    "silenced": Drawing(RUNS, draw_silenced),
}
SWEPT = {
    "shares": Drawing(SWEEP, draw_shares),
    "bands": Drawing(SWEEP, draw_bands),
    "head of a sweep": Drawing(SWEEP, draw_head_of_sweep),
}
AXES = OF_PROFILE | SWEPT
PLOTS = OF_PROFILE | OTHERS


def titles_of_axes(figure: go.Figure, *, may_lack_title: bool) -> list[str]:
    """Titles of the axes that are shown: "" for a y axis that lacks a title it must have."""
    titles = []
    for axis in figure.select_xaxes():
        if axis.title.text:
            titles.append(axis.title.text)
    for axis in figure.select_yaxes():
        if axis.visible is False:
            continue
        if axis.title.text or not may_lack_title:
            titles.append(axis.title.text or "")
    return titles


@pytest.mark.parametrize("name", AXES)
def test_axes_have_units_and_arguments_stay_unchanged(name: str):
    drawing = AXES[name]
    results_before = drawing.results.copy(deep=True)
    heads_before = SMALL_HEADS.copy(deep=True)
    if name in FAMILIES:
        figure = FAMILIES[name](SMALL_PROFILE, SMALL_HEADS)
    else:
        figure = drawing.draw(drawing.results)
    for title in titles_of_axes(figure, may_lack_title=name in SWEPT):
        assert re.search(r"\(.+\)$", title), f"{title!r} has no unit"
    assert figure.to_json()
    xr.testing.assert_identical(drawing.results, results_before)
    pd.testing.assert_frame_equal(SMALL_HEADS, heads_before)


@pytest.mark.thorough
@pytest.mark.parametrize("name", PLOTS)
@hypothesis.settings(max_examples=4)
@hypothesis.given(drawn=st.data())
def test_missing_variables_and_layers_are_no_error(name: str, drawn: st.DataObject):
    drawing = PLOTS[name]
    names = sorted(map(str, drawing.results.data_vars))
    layers = range(drawing.results.sizes["layer"])
    some_names = st.lists(st.sampled_from(names), max_size=9)
    some_layers = st.sets(st.sampled_from(layers))
    missing_names = drawn.draw(some_names)
    missing_layers = drawn.draw(some_layers)
    results = missing(drawing.results, missing_names, missing_layers)
    figure = drawing.draw(results)
    assert "NaN" not in figure.to_json(engine="json")


@pytest.mark.parametrize("name", PLOTS)
def test_a_figure_without_numbers_has_a_note(name: str):
    drawing = PLOTS[name]
    figure = drawing.draw(nothing_measured(drawing.results))
    texts = [note.text for note in figure.layout.annotations if note.text]
    # The script of the page draws the figure of a pair.
    if name != "pair":
        assert any(text.startswith("no data: ") for text in texts), texts


def two_kinds() -> xr.Dataset:
    """Two layers with a window of 16 tokens, and a layer with other wavelengths."""
    profile = SMALL_PROFILE.copy(deep=True)
    wavelength = profile["wavelength"].copy()
    wavelength[2] = wavelength[2] ** 1.5
    return profile.assign_coords(
        layer_type=("layer", ["sliding", "sliding", "full"]),
        reach=("layer", [16, 16, 4096]),
        base=("layer", [1e4, 1e4, 1e6]),
        scaling=("layer", ["", "", ""]),
        wavelength=wavelength,
    )


def marks(figure: go.Figure) -> dict[str, list[float]]:
    """Lengths (tokens) of the marked windows and contexts."""
    lengths: dict[str, list[float]] = {}
    for note in figure.select_annotations({"name": "context"}):
        length = float(round(10**note.x))
        lengths.setdefault(note.text, []).append(length)
    return lengths


def assert_lines_are_at(
    figure: go.Figure, wavelength: np.ndarray, *, yaxis: str
) -> None:
    """The lines of a panel have points only at the wavelengths of its layers."""
    allowed = set(np.log(wavelength).ravel().round(3))
    for line in figure.select_traces({"yaxis": yaxis, "type": "scatter"}):
        logs = np.log(line.x)
        drawn = {round(x, 3) for x in logs if np.isfinite(x)}
        assert drawn <= allowed


def assert_wavelengths_of_heads_are_split(profile: xr.Dataset) -> None:
    figure = plot_head_wavelengths(profile, SMALL_HEADS)
    titles = [axis.title.text for axis in figure.select_yaxes()]
    assert titles[0].split(":")[0] == "sliding layers"
    assert titles[1].split(":")[0] == "full layers"
    context = float(profile.attrs["context"])
    assert marks(figure) == {"window": [16.0], "context": [context]}
    wavelength = profile["wavelength"].values
    assert_lines_are_at(figure, wavelength[[0, 1]], yaxis="y")
    assert_lines_are_at(figure, wavelength[[2]], yaxis="y2")
    # The heads of the sliding layers come before the heads of the full layer.
    in_full_layer = [name.startswith("L2") for name in figure.data[0].y]
    assert in_full_layer == sorted(in_full_layer)


def assert_norms_are_split(profile: xr.Dataset) -> None:
    figure = rl.plot_norms(profile)
    maps = figure.select_traces({"type": "heatmap"})
    layers_of_maps = [list(trace.y) for trace in maps]
    layers_of_side = [[0, 1], [2]]
    assert layers_of_maps == layers_of_side * len(NORM_PANELS)
    lengths = marks(figure)
    assert set(lengths) == {"window", "context"}
    assert set(lengths["window"]) == {16.0}
    assert set(lengths["context"]) == {float(profile.attrs["context"])}


def test_figures_of_wavelengths_are_split_by_kind_of_layers():
    profile = two_kinds()
    assert_wavelengths_of_heads_are_split(profile)
    assert_norms_are_split(profile)
    head_map = rl.plot_head_map(profile, SMALL_HEADS)
    assert head_map.layout.yaxis.ticktext == ("0 sliding", "2 full")
    of_full_layer = rl.plot_selectivity(profile, layer=2, head=0)
    assert "context" in marks(of_full_layer)
    of_sliding_layer = rl.plot_selectivity(profile, layer=0, head=0)
    assert "window" in marks(of_sliding_layer)


def test_planes_of_layers_that_rotate_differently_have_their_own_lines():
    runs = RUNS.copy(deep=True)
    wavelength = runs["wavelength"].transpose("entry", "layer", "frequency").copy()
    wavelength[:, -1] = wavelength[:, -1] ** 1.5
    runs = runs.assign_coords(wavelength=wavelength)
    figure = comparison_planes.plot_comparison_planes(runs)
    names = {trace.name for trace in figure.data if trace.name}
    lines = [name for name in names if " tokens)" in name]
    groups = runs["group"].values
    rotating_groups = set(groups) - {"nope"}
    assert len(lines) == 2 * len(rotating_groups)
    group = groups[0]
    norms = runs["q_norm"].mean("head").transpose("entry", "layer", "frequency")
    of_last_layer = norms[groups == group, -1]
    expected = of_last_layer.mean("entry").values
    begin = f"{group}, layers {runs.sizes['layer'] - 1} "
    line = next(trace for trace in figure.data if trace.name.startswith(begin))
    np.testing.assert_allclose(line.y, expected, rtol=1e-6)


def test_layers_without_attention_are_grey():
    profile = missing(SMALL_PROFILE, [], [0, 2])
    layer_types = ["conv", "full_attention", "conv"]
    profile = profile.assign_coords(layer_type=("layer", layer_types))
    heads = SMALL_HEADS[SMALL_HEADS["layer"] == 1].reset_index(drop=True)
    figure = rl.plot_head_map(profile, heads, selected=(1, 0))
    (grey,) = figure.select_traces({"name": "no attention", "type": "heatmap"})
    assert grey.customdata[0].tolist() == ["conv", "conv", "conv"]
    is_grey = np.isfinite(grey.z).tolist()
    assert is_grey == [[True] * 3, [False] * 3, [True] * 3]
    assert grey.hovertemplate.startswith("layer %{y}: %{customdata}, no attention")
    names = [trace.name for trace in figure.select_traces("scatter")]
    assert "no attention" in names
    assert describe(heads)[0].startswith("Of 3 heads, ")
    assert idle_sentence(profile) == "2 of 3 layers have no attention (layers 0 and 2)."


def test_tables_of_other_models_are_refused(small):
    profile, heads = small
    of_other_layers = heads.assign(layer=heads.layer + 1)
    with_unknown_labels = heads.assign(label="odd")
    empty = heads[:0]
    twice = pd.concat([heads, heads])
    for table in (of_other_layers, with_unknown_labels, empty, twice):
        with pytest.raises(BadArgument, match="do not describe the same model"):
            rl.plot_head_map(profile, table)
    with pytest.raises(IndexError, match="index 7 is out of bounds"):
        rl.plot_kernel(profile, layer=7, head=0)


def test_layers_of_unequal_width():
    """Layer 1 has two heads and one key-value head; a wider layer has four and two."""
    profile, heads = synthetic_profile(layers=3, heads=4, kv_heads=2)
    profile["q_norm"][1, 2:] = np.nan
    profile["k_norm"][1, 1:] = np.nan
    heads = heads[(heads["layer"] != 1) | (heads["head"] < 2)]
    kv_head_of = kv_heads(profile)
    np.testing.assert_array_equal(kv_head_of[0], [0, 0, 1, 1])
    np.testing.assert_array_equal(kv_head_of[1, :2], [0, 0])
    with pytest.raises(ValueError, match=r"\(1, 2\) is not in list"):
        rl.plot_claim(profile, heads, selected=(1, 2))
    figure = rl.plot_head_map(profile, heads)
    values = [trace.z for trace in figure.select_traces("heatmap")]
    cells = np.isfinite(values).sum(0)
    np.testing.assert_array_equal(cells[1], [1, 1, 0, 0])
    norms = rl.plot_norms(profile).data[0].z
    assert np.isfinite(norms).all()


def by_positional_fraction(heads: pd.DataFrame) -> pd.DataFrame:
    """The heads that choose keys, from the largest positional fraction to the smallest."""
    chosen = heads[choose_keys(heads)]
    return chosen.sort_values("positional_fraction", ascending=False, kind="stable")


def shares_of_push(profile: xr.Dataset, *, layer: int, head: int) -> np.ndarray:
    """Share (%) of each plane in the push of a head towards its keys."""
    pushes = profile["selectivity_keys"].clip(min=0)
    push = pushes.isel(layer=layer, head=head).values
    return 100 * push / push.sum()


def assert_frame_is_around(figure: go.Figure, name: str, names: list[str]) -> None:
    """A head that the panel does not show has its frame outside of the panel."""
    index = names.index(name) if name in names else -2
    (frame,) = figure.select_shapes({"name": "selected"})
    assert frame.y0 == index - 0.5
    assert frame.y1 == index + 0.5


def test_heads_are_in_the_order_of_their_positional_fraction(synthetic):
    profile, heads = synthetic
    figure = plot_head_wavelengths(profile, heads, selected=(1, 2))
    (cells,) = figure.select_traces("heatmap")
    ordered = by_positional_fraction(heads)
    names = [f"L{entry.layer} H{entry.head}" for entry in ordered.itertuples()]
    assert list(cells.y) == names
    first = ordered.iloc[0]
    expected = shares_of_push(profile, layer=first["layer"], head=first["head"])
    # The gap before planes that do not rotate is NaN.
    of_first = cells.z[0]
    shown = of_first[np.isfinite(of_first)]
    np.testing.assert_allclose(shown, expected, rtol=1e-5)
    assert_frame_is_around(figure, "L1 H2", names)
    (signs,) = figure.select_traces({"mode": "markers"})
    assert list(signs.y) == names
    symbols = [SYMBOLS[label] for label in ordered["label"]]
    assert list(signs.marker.symbol) == symbols


def test_changes_have_intervals_by_kind_of_token():
    records = [
        ("a", "positional", "all", 1.0, 0.0, 3.0),
        ("a", "positional", "new", 3.0, 2.0, 5.0),
        ("b", "", "all", 1.0, 0.0, 3.0),
        ("b", "", "new", 3.0, 2.0, 5.0),
    ]
    table = pd.DataFrame(records, columns=SILENCED)
    figure = plot_silenced(table)
    assert [note.text for note in figure.layout.annotations] == ["all", "new"]
    alone = table[:1].assign(tokens="random tokens, repeated")
    (title,) = plot_silenced(alone).layout.annotations
    assert title.text == "random tokens, repeated", "a third line would be cut"
    for trace, record in zip(figure.data, table.itertuples(), strict=True):
        assert trace.x[0] == record.change
        assert trace.y[0] == record.what
        assert trace.error_x.arrayminus[0] == 1
        assert trace.error_x.array[0] == 2
    assert figure.layout.yaxis.categoryarray == ("b", "a")


@pytest.mark.thorough
def test_an_error_has_plain_words_in_a_new_process():
    code = "import ropelens as rl\ntry: rl.plot_effects(3)\nexcept ValueError as e: print(e)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.startswith("plot_effects: results must be results, such as")
