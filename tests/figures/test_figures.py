"""Tests of the traces, values and axis titles of figures, without pixels."""

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
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

AT = {"layer": 1, "head": 2}
FAMILIES: dict[str, Draw] = {
    "head_map": lambda p, h: rl.plot_head_map(p, h, selected=(1, 2)),
    "head_wavelengths": lambda p, h: plot_head_wavelengths(p, h, selected=(1, 2)),
    "claim": lambda p, h: rl.plot_claim(p, h, selected=(1, 2)),
    "follow": lambda p, h: rl.plot_follow(p, h, selected=(1, 2)),
    "norms": lambda p, h: rl.plot_norms(p),
    "norms of a layer": lambda p, h: rl.plot_norms(p, layer=1),
    "kernel": lambda p, h: rl.plot_kernel(p, **AT),
    "selectivity": lambda p, h: rl.plot_selectivity(p, **AT),
    "attention": lambda p, h: rl.plot_attention(p, **AT),
    "pair": lambda p, h: pair_figure(p),
}
LARGE = {"layers": 26, "heads": 26, "kv_heads": 13, "excerpt": 36}
SHAPES = {"small": {}, "partial rotary": LARGE | {"unrotated": True, "context": 4096}}


@pytest.fixture(scope="module", params=SHAPES)
def synthetic(request: pytest.FixtureRequest) -> tuple[xr.Dataset, pd.DataFrame]:
    return synthetic_profile(**SHAPES[request.param])


def test_head_map_holds_the_bits_of_each_head_under_its_label(synthetic):
    profile, heads = synthetic
    figure = rl.plot_head_map(profile, heads, selected=(1, 2))
    maps = {
        trace.name: np.array(trace.z, float)
        for trace in figure.select_traces("heatmap")
    }
    assert set(maps) == set(LABEL_ORDER)
    for row in heads.itertuples():
        for label, z in maps.items():
            value = z[row.layer, row.head]
            assert value == row.total_bits if label == row.label else np.isnan(value)
    for trace in figure.select_traces("heatmap"):  # cells differ without colour too
        if trace.name in set(heads["label"]) - {"positional"}:
            assert set(np.array(trace.text).ravel()) == {"", SIGNS[trace.name]}
    frame = figure.layout.shapes[0]
    assert (frame.x0, frame.x1, frame.y0, frame.y1) == (1.5, 2.5, 0.5, 1.5)


def test_claim_shows_the_heads_that_count_and_the_surrogates(small):
    profile, heads = small
    figure = rl.plot_claim(profile, heads, selected=(1, 2))
    *labelled, chosen, surrogates, model = figure.data
    names = ("surrogate_offset_fraction", "surrogate_log_wavelength")
    fraction, wavelength = [profile[name].values for name in names]
    for trace in labelled:
        heads_drawn = tuple(trace.customdata.T)
        np.testing.assert_allclose(trace.x, np.exp(wavelength[0][heads_drawn]))
        np.testing.assert_array_equal(trace.y, fraction[0][heads_drawn])
    shown = np.concatenate([trace.customdata for trace in labelled])
    assert len(shown) == np.isfinite(fraction[0]).sum()
    assert chosen.y[0] == fraction[0, 1, 2]
    assert figure.layout.xaxis.type == "log"
    counts = np.isfinite(fraction[0])
    pairs = zip(fraction, wavelength, strict=True)
    rho = [spearmanr(f[counts], w[counts]).statistic for f, w in pairs]
    np.testing.assert_allclose([*model.x, *surrogates.x], rho)
    claim = heads.attrs["claim"]
    numbers = (
        number(claim[name]) for name in ("rank_correlation", "null_low", "null_high")
    )
    title = "Rank correlation {}; surrogates {} to {}".format(*numbers)
    assert figure.layout.title.text == title
    assert claim_title(dict.fromkeys(claim, float("nan"))).startswith("Too few heads")
    assert "orrelation" not in claim_title(None)


def test_follow_shows_what_stays_and_what_moves_of_heads_that_choose_keys(small):
    profile, heads = small
    x, y, chance = np.random.default_rng(0).uniform(size=(3, len(heads)))
    heads = heads.assign(follows_content=x, follows_position=y, follows_chance=chance)
    across, down, *labelled, chosen = rl.plot_follow(
        profile, heads, selected=(1, 2)
    ).data
    choose = heads["label"].isin(("positional", "mixed", "semantic"))
    assert across.y[0] == down.x[0] == np.median(chance[choose])
    drawn = np.concatenate(
        [np.column_stack([t.customdata, t.x, t.y]) for t in labelled]
    )
    shown = heads.loc[choose, ["layer", "head", "follows_content", "follows_position"]]
    assert sorted(drawn.tolist()) == sorted(shown.to_numpy(float).tolist())
    assert [chosen.x[0], chosen.y[0]] == [x[10], y[10]]


@pytest.mark.parametrize("layer", [None, 1])
def test_norms_of_layers_or_of_a_layers_heads(synthetic, layer):
    profile, _ = synthetic
    finite = np.isfinite(profile.wavelength.values[0])
    figure = rl.plot_norms(profile, layer=layer)
    for trace, (side, name) in zip(figure.data, NORM_PANELS.items(), strict=True):
        dim = "head" if side == "query" else "kv_head"
        values = profile[name].transpose("layer", dim, "frequency")
        expected = (values.mean(dim) if layer is None else values[layer]).values
        np.testing.assert_allclose(trace.z[:, : finite.sum()], expected[:, finite])
        np.testing.assert_allclose(trace.z[:, -1], expected[:, -1])
        assert len(trace.x) == trace.z.shape[1] + 1
    assert figure.layout.xaxis.type == figure.layout.xaxis3.type == "log"
    unlike = rl.plot_norms(
        profile.assign(v_norm=profile["v_norm"] * np.nan), layer=layer
    )
    assert len(unlike.data) == 2, "values and keys have different sizes"


def test_kernel_is_measured_and_predicted_with_the_same_total(synthetic):
    profile, _ = synthetic
    first, second = rl.plot_kernel(profile, layer=1, head=2).data
    np.testing.assert_array_equal(first.y, profile.kernel.values[1, 2])
    np.testing.assert_array_equal(first.x, profile.offset_start + 1)
    width = (profile.offset_stop - profile.offset_start).values
    assert (second.y * width).sum() == pytest.approx((first.y * width).sum())
    score = profile.predicted_kernel.values[1, 2]
    np.testing.assert_allclose(np.diff(np.log(second.y)), np.diff(score), atol=1e-9)
    assert [line.meta["y"] for line in (first, second)] == list(kernel_arrays(profile))


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
    for trace in figure.data:
        name = trace.meta["y"]
        values = profile[name].values[1, kv_head if name.startswith("k") else 2]
        np.testing.assert_array_equal(trace.y, values)
        np.testing.assert_array_equal(trace.customdata, profile.wavelength.values[1])
    assert len({trace.meta["y"] for trace in figure.data}) == 6


def test_attention_names_tokens_and_leaves_the_future_empty(small):
    profile, _ = small
    figure = rl.plot_attention(profile, layer=1, head=2)
    weights = profile.excerpt_attention.values[0, 1, 2]
    below = np.tril(np.ones_like(weights, dtype=bool))
    np.testing.assert_array_equal(figure.data[0].z[below], weights[below])
    assert np.isnan(figure.data[0].z[~below]).all()
    assert figure.layout.xaxis.ticktext[:3] == ("&lt;s&gt;", "␣Once", "␣upon")
    assert figure.layout.yaxis.ticktext == figure.layout.xaxis.ticktext


def missing(
    data: xr.Dataset, names: Sequence[str], layers: Sequence[int]
) -> xr.Dataset:
    present = xr.Variable("layer", ~np.isin(np.arange(data.sizes["layer"]), layers))
    changed = {}
    for name, variable in data.variables.items():
        if variable.dtype.kind == "f" and name not in data.dims:
            measured = name not in names
            condition = measured & present if "layer" in variable.dims else measured
            changed[name] = variable.where(condition)
    return data.assign(changed)


SMALL = synthetic_profile(layers=3, heads=3, kv_heads=3, frequencies=5, excerpt=6)
SWEEP = synthetic_truncation(layers=3, heads=3, frequencies=8)
RUNS = synthetic_comparison()
OTHERS: dict[str, tuple[xr.Dataset, Callable[[xr.Dataset], go.Figure]]] = {
    "head of a sweep": (SWEEP, lambda ds: plot_head_truncation(ds, **AT)),
    "position": (RUNS, comparison.plot_position_loss),
    "copying": (RUNS, comparison.plot_copying),
    "planes": (RUNS, comparison_planes.plot_comparison_planes),
    "growth": (RUNS, comparison.plot_growth),
    "losses": (
        RUNS,
        lambda ds: comparison.plot_loss_change(ds, summarize_comparison(ds)),
    ),
    "silenced": (RUNS, lambda _: plot_silenced(pd.DataFrame(columns=SILENCED))),
}
PLOTS = {
    name: (SMALL[0], lambda ds, f=f: f(ds, heads_of(ds)))
    for name, f in FAMILIES.items()
}
SWEPT = {
    "shares": (
        SWEEP,
        lambda ds: rl.plot_truncation(ds, measures=get_args(MeasureName)),
    ),
    "bands": (SWEEP, lambda ds: rl.plot_truncation(ds, by="band")),
    "head of a sweep": OTHERS["head of a sweep"],
}
AXES = PLOTS | SWEPT
PLOTS = PLOTS | OTHERS


def heads_of(profile: xr.Dataset) -> pd.DataFrame:
    """Table of `SMALL`, with NaN for heads without bits. Head 1.2 is selected, so it stays."""
    heads = SMALL[1].copy()
    bits = profile["total_bits"].values
    known = np.isfinite(bits[heads["layer"], heads["head"]])
    heads.loc[~known, heads.columns.drop(["layer", "head", "label"])] = np.nan
    return heads


@pytest.mark.parametrize("name", AXES)
def test_axes_have_units_and_arguments_stay_unchanged(name: str):
    data, plot = AXES[name]
    before = data.copy(deep=True)
    table = SMALL[1].copy(deep=True)
    figure = FAMILIES[name](*SMALL) if name in FAMILIES else plot(data)
    titles = [axis.title.text for axis in figure.select_xaxes() if axis.title.text]
    shown = [axis for axis in figure.select_yaxes() if axis.visible is not False]
    titles += [
        axis.title.text for axis in shown if axis.title.text or name not in SWEPT
    ]
    for title in titles:
        assert re.search(r"\(.+\)$", title), f"{title!r} has no unit"
    assert figure.to_json()
    xr.testing.assert_identical(data, before)
    pd.testing.assert_frame_equal(SMALL[1], table)


@pytest.mark.thorough
@pytest.mark.parametrize("name", PLOTS)
@hypothesis.settings(max_examples=4)
@hypothesis.given(drawn=st.data())
def test_missing_variables_and_layers_are_no_error(name: str, drawn: st.DataObject):
    data, plot = PLOTS[name]
    names = sorted(map(str, data.data_vars))
    layers = range(data.sizes["layer"])
    absent = drawn.draw(st.lists(st.sampled_from(names), max_size=9))
    figure = plot(missing(data, absent, drawn.draw(st.sets(st.sampled_from(layers)))))
    assert "NaN" not in figure.to_json(engine="json")


@pytest.mark.parametrize("name", PLOTS)
def test_a_figure_without_numbers_has_a_note(name: str):
    data, plot = PLOTS[name]
    empty = plot(
        missing(data, sorted(map(str, data.data_vars)), range(data.sizes["layer"]))
    )
    words = [note.text for note in empty.layout.annotations if note.text]
    by_script = name == "pair"  # the script of the page draws it
    assert by_script or [text for text in words if text.startswith("no data: ")], words


def two_kinds() -> xr.Dataset:
    """`SMALL` with two layers of a window of 16 tokens, and a layer with other wavelengths."""
    profile = SMALL[0].copy(deep=True)
    kinds = {"layer_type": ["sliding", "sliding", "full"], "reach": [16, 16, 4096]}
    kinds["base"] = [1e4, 1e4, 1e6]
    kinds["scaling"] = [""] * 3
    wavelength = profile["wavelength"].copy()
    wavelength[2] = wavelength[2] ** 1.5
    kinds = {name: ("layer", values) for name, values in kinds.items()}
    return profile.assign_coords(kinds | {"wavelength": wavelength})


def marks(figure: go.Figure) -> dict[str, list[float]]:
    """Lengths (tokens) of the marked windows and contexts."""
    lengths: dict[str, list[float]] = {}
    for note in figure.select_annotations({"name": "context"}):
        lengths.setdefault(note.text, []).append(float(round(10**note.x)))
    return lengths


def test_figures_of_wavelengths_are_split_by_kind_of_layers():
    profile = two_kinds()
    heads = SMALL[1]
    context = float(profile.attrs["context"])
    figure = plot_head_wavelengths(profile, heads)
    titles = [axis.title.text for axis in figure.select_yaxes()]
    assert [title.split(":")[0] for title in titles[:2]] == [
        "sliding layers",
        "full layers",
    ]
    assert marks(figure) == {"window": [16.0], "context": [context]}
    for row, layers in (("", [0, 1]), ("2", [2])):
        places = {*np.log(profile["wavelength"].values[layers]).ravel().round(3)}
        for line in figure.select_traces({"yaxis": f"y{row}", "type": "scatter"}):
            assert {round(x, 3) for x in np.log(line.x) if np.isfinite(x)} <= places
    kind_of_row = [
        "full" if name.startswith("L2") else "sliding" for name in figure.data[0].y
    ]
    assert kind_of_row == sorted(kind_of_row, reverse=True)
    figure = rl.plot_norms(profile)
    maps = [*figure.select_traces({"type": "heatmap"})]
    assert [[*trace.y] for trace in maps] == [[0, 1], [2]] * (len(maps) // 2)
    lengths = {name: {*values} for name, values in marks(figure).items()}
    assert lengths == {"window": {16.0}, "context": {context}}
    assert rl.plot_head_map(profile, heads).layout.yaxis.ticktext == (
        "0 sliding",
        "2 full",
    )
    assert "context" in marks(rl.plot_selectivity(profile, layer=2, head=0))
    assert "window" in marks(rl.plot_selectivity(profile, layer=0, head=0))


def test_planes_of_layers_that_rotate_differently_have_their_own_lines():
    runs = RUNS.copy(deep=True)
    wavelength = runs["wavelength"].transpose("entry", "layer", "frequency").copy()
    wavelength[:, -1] = wavelength[:, -1] ** 1.5
    figure = comparison_planes.plot_comparison_planes(
        runs.assign_coords(wavelength=wavelength)
    )
    names = {trace.name for trace in figure.data if " tokens)" in (trace.name or "")}
    assert len(names) == 2 * len({*runs["group"].values} - {"nope"})
    values = runs["q_norm"].mean("head").transpose("entry", "layer", "frequency")
    group = runs["group"].values[0]
    last = values[runs["group"].values == group, -1].mean("entry").values
    begin = f"{group}, layers {runs.sizes['layer'] - 1} "
    line = next(x for x in figure.data if x.name.startswith(begin))
    np.testing.assert_allclose(line.y, last, rtol=1e-6)


def test_layers_without_attention_are_grey():
    kinds = ("layer", ["conv", "full_attention", "conv"])
    profile = missing(SMALL[0], [], [0, 2]).assign_coords(layer_type=kinds)
    heads = SMALL[1][SMALL[1]["layer"] == 1].reset_index(drop=True)
    figure = rl.plot_head_map(profile, heads, selected=(1, 0))
    (grey,) = figure.select_traces({"name": "no attention", "type": "heatmap"})
    assert grey.customdata[0].tolist() == ["conv"] * 3
    assert np.isfinite(grey.z).tolist() == [[True] * 3, [False] * 3, [True] * 3]
    assert grey.hovertemplate.startswith("layer %{y}: %{customdata}, no attention")
    assert "no attention" in [t.name for t in figure.select_traces("scatter")]
    assert (describe(heads)[0]).startswith("Of 3 heads, ")
    assert idle_sentence(profile) == "2 of 3 layers have no attention (layers 0 and 2)."


def test_tables_of_other_models_are_refused(small):
    profile, heads = small
    wrong = [heads.assign(layer=heads.layer + 1), heads.assign(label="odd"), heads[:0]]
    for table in [*wrong, pd.concat([heads, heads])]:
        with pytest.raises(BadArgument, match="do not describe the same model"):
            rl.plot_head_map(profile, table)
    with pytest.raises(IndexError, match="index 7 is out of bounds"):
        rl.plot_kernel(profile, layer=7, head=0)


def test_layers_of_unequal_width():
    profile, heads = synthetic_profile(layers=3, heads=4, kv_heads=2)
    profile["q_norm"][1, 2:] = np.nan
    profile["k_norm"][1, 1:] = np.nan
    heads = heads[(heads.layer != 1) | (heads["head"] < 2)]
    np.testing.assert_array_equal(kv_heads(profile)[0], [0, 0, 1, 1])
    np.testing.assert_array_equal(kv_heads(profile)[1, :2], [0, 0])
    with pytest.raises(ValueError, match=r"\(1, 2\) is not in list"):
        rl.plot_claim(profile, heads, selected=(1, 2))
    figure = rl.plot_head_map(profile, heads)
    cells = np.isfinite([trace.z for trace in figure.select_traces("heatmap")]).sum(0)
    np.testing.assert_array_equal(cells[1], [1, 1, 0, 0])
    assert np.isfinite(rl.plot_norms(profile).data[0].z).all()


def test_heads_are_in_the_order_of_their_positional_fraction(synthetic):
    profile, heads = synthetic
    figure = plot_head_wavelengths(profile, heads, selected=(1, 2))
    (cells,) = figure.select_traces("heatmap")
    known = heads[heads["label"].isin(["positional", "mixed", "semantic"])]
    ordered = known.sort_values("positional_fraction", ascending=False, kind="stable")
    names = [f"L{row.layer} H{row.head}" for row in ordered.itertuples()]
    assert list(cells.y) == names
    pushes = profile["selectivity_keys"].clip(min=0)
    first = ordered.iloc[0]
    push = pushes.isel(layer=first.layer, head=first["head"]).values
    shown = cells.z[0][
        np.isfinite(cells.z[0])
    ]  # without the gap before planes that stand
    np.testing.assert_allclose(shown, 100 * push / push.sum(), rtol=1e-5)
    frame = next(shape for shape in figure.layout.shapes if shape.name == "selected")
    row = names.index("L1 H2") if "L1 H2" in names else -2  # outside the panel
    assert (frame.y0, frame.y1) == (row - 0.5, row + 0.5)
    (signs,) = figure.select_traces({"mode": "markers"})
    assert list(signs.y) == names
    assert list(signs.marker.symbol) == [SYMBOLS[label] for label in ordered["label"]]


def test_changes_have_intervals_by_kind_of_token():
    changes = {"all": {"change": 1.0, "low": 0.0, "high": 3.0}}
    changes["new"] = {"change": 3.0, "low": 2.0, "high": 5.0}
    heads = [{"what": "a", "label": "positional"}, {"what": "b", "label": ""}]
    rows = [
        head | {"tokens": kind} | changes[kind] for head in heads for kind in changes
    ]
    figure = plot_silenced(pd.DataFrame(rows))
    assert [note.text for note in figure.layout.annotations] == ["all", "new"]
    for trace, row in zip(figure.data, rows, strict=True):
        assert (trace.x[0], trace.y[0]) == (row["change"], row["what"])
        assert (trace.error_x.arrayminus[0], trace.error_x.array[0]) == (1, 2)
    assert figure.layout.yaxis.categoryarray == ("b", "a")


@pytest.mark.thorough
def test_an_error_has_plain_words_in_a_new_process():
    code = "import ropelens as rl\ntry: rl.plot_effects(3)\nexcept ValueError as e: print(e)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.startswith("plot_effects: results must be results, such as")
