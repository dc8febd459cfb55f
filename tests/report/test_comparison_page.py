"""Figures, sentences, table and page of a comparison, and the page of an answer."""

from pathlib import Path

import numpy as np
import plotly.graph_objects as go
import pytest
import xarray as xr
from in_browser import Opened, fits
from scipy import stats
from synthetic_comparison import CONTEXT, synthetic_comparison

from ropelens import plot_claim, plot_norms
from ropelens.analysis.analysis_result import Analysis
from ropelens.analysis.answer import Answer, write_answer
from ropelens.analysis.open_folder import rewrite_page
from ropelens.comparison.summary import summarize_comparison
from ropelens.errors import BadArgument
from ropelens.figures import comparison as figures
from ropelens.figures import comparison_planes
from ropelens.figures.head_wavelengths import plot_head_wavelengths
from ropelens.figures.style import new_figure
from ropelens.report.columns import GroupTable, comparison_tables
from ropelens.report.comparison_page import (
    map_payload,
    page_addresses,
    render_comparison,
)
from ropelens.report.sentences.comparison import comparison_sentences
from ropelens.runtime.netcdf import open_results

HOSTILE = '<img src=x onerror=alert(1)><a href="https://evil.example/">%{y}</a>'


def findings(comparison: xr.Dataset) -> list[str]:
    return comparison_sentences(comparison, summarize_comparison(comparison))


@pytest.fixture
def comparison() -> xr.Dataset:
    return synthetic_comparison()


def lines(figure: go.Figure, unit: str) -> dict[str, go.Scatter]:
    """The lines of the panel whose axis has this unit, by the name of each line."""
    for row, axis in enumerate(figure.select_yaxes(), start=1):
        if axis.title.text.replace("<br>", " ") == unit:
            traces = figure.select_traces({"mode": "lines+markers"}, row=row)
            return {trace.name: trace for trace in traces}
    raise KeyError(unit)


def test_loss_changes_are_pairs_means_and_intervals(comparison: xr.Dataset):
    table = summarize_comparison(comparison)
    figure = figures.plot_loss_change(comparison, table)
    pairs = {t.y[0]: t.x for t in figure.data if t.marker.symbol == "circle-open"}
    np.testing.assert_allclose(pairs["p-rope:0.5"], [0.1, 0.11])
    np.testing.assert_allclose(pairs["nope"], [0.2, 0.22])
    means = [t for t in figure.data if t.error_x.array is not None]
    (nope,) = [t for t in means if t.y[0] == "nope"]
    row = table.set_index("group").loc["nope"]
    assert nope.x[0] + nope.error_x.array[0] == pytest.approx(row["high"])
    assert nope.x[0] - nope.error_x.arrayminus[0] == pytest.approx(row["low"])


def test_loss_by_position_and_its_difference(comparison: xr.Dataset):
    figure = figures.plot_position_loss(comparison)
    losses = comparison["position_loss"].values
    rope = lines(figure, "loss (nats/token)")["rope"]
    np.testing.assert_allclose(rope.y, losses[[0, 3]].mean(0))
    start = comparison["position_start"].values
    stop = comparison["position_stop"].values
    assert ((start <= rope.x) & (rope.x < stop)).all()

    change = lines(figure, "difference from rope (nats/token)")
    assert "rope" not in change
    nope = change["nope"]
    differences = losses[[2, 5]] - losses[[0, 3]]
    np.testing.assert_allclose(nope.y, differences.mean(0))
    np.testing.assert_allclose(nope.y + nope.error_y.array, differences.max(0))
    np.testing.assert_allclose(nope.y - nope.error_y.arrayminus, differences.min(0))

    assert figure.layout.shapes[0].x0 == CONTEXT
    (words,) = [a for a in figure.layout.annotations if "trained context" in a.text]
    position = 10**words.x  # a logarithmic axis takes the exponent
    assert position == pytest.approx(CONTEXT)


def test_copying_by_distance_and_needles_by_length(comparison: xr.Dataset):
    figure = figures.plot_copying(comparison)
    for name, of, unit in (
        ("copy_loss", "copy_distance", "loss of copied tokens (nats/token)"),
        ("far_retrieval", "prompt_length", "needles found (share)"),
    ):
        drawn = lines(figure, unit)
        assert list(drawn) == ["rope", "p-rope:0.5", "nope"]
        of_nope = comparison[name].isel(entry=[2, 5])
        other_dims = [dim for dim in of_nope.dims if dim != of]
        np.testing.assert_allclose(drawn["nope"].y, of_nope.mean(other_dims))
        assert drawn["nope"].x.tolist() == comparison[of].values.tolist()
    marks = [(line.x0, line.y0) for line in figure.layout.shapes]
    assert (0, 1 / 8) in marks
    assert CONTEXT in [x for x, _ in marks]


def test_planes_that_do_not_rotate_are_drawn_where_they_rotate_elsewhere(comparison):
    places = comparison_planes.plane_places(comparison, "p-rope:0.5")
    np.testing.assert_array_equal(places.wavelength, comparison["wavelength"][0, 0])
    assert places.rotates.tolist() == [True] * 4 + [False] * 4
    figure = comparison_planes.plot_comparison_planes(comparison)
    rings = list(figure.select_traces({"name": "does not rotate"}))
    panels = comparison_planes.PLANE_PANELS
    for (unit, name), ring in zip(panels.items(), rings, strict=True):
        drawn = lines(figure, unit.replace("<br>", " "))
        values = comparison[name]
        by_entry = values.mean(set(values.dims) - {"entry", "frequency"})
        half = by_entry[[1, 4]]
        none = by_entry[[2, 5]].mean("entry")
        np.testing.assert_array_equal(drawn["p-rope:0.5"].x, places.wavelength)
        np.testing.assert_allclose(drawn["p-rope:0.5"].y, half.mean("entry"))
        np.testing.assert_allclose(drawn["nope"].y, none)
        highest = drawn["p-rope:0.5"].y + drawn["p-rope:0.5"].error_y.array
        np.testing.assert_allclose(highest, half.max("entry"))
        still = [*half.mean("entry")[4:], *none]
        np.testing.assert_allclose(ring.y, still)


def test_growth_counts_heads_by_step(comparison: xr.Dataset):
    figure = figures.plot_growth(comparison)
    loss = lines(figure, "loss (nats/token)")["rope"]
    np.testing.assert_allclose(loss.y, comparison["growth_loss"][[0, 3]].mean("entry"))
    np.testing.assert_allclose(loss.error_y.array, 0.005)
    for unit, expected in growth_of(comparison.isel(entry=[2, 5])).items():
        line = lines(figure, unit)["nope"]
        mean = expected.mean("entry")
        highest = expected.max("entry")
        np.testing.assert_allclose(line.y, mean)
        np.testing.assert_allclose(line.error_y.array, highest - mean)
    assert len({axis.title.text for axis in figure.select_yaxes()}) == 8


def test_growth_of_an_earlier_version_has_its_best_induction_heads(comparison):
    trials = np.zeros((6, 4, 8, 2, 2))
    trials[..., 1, 0] = 0.5
    trials[:, :, 1::2, 0, 1] = 1  # the best head of odd trials only
    dims = ("entry", "step", "trial", "layer", "head")
    earlier = comparison.drop_dims("trial")
    for name in ("first", "repeat"):
        earlier[f"growth_{name}_loss"] = comparison["growth_loss"]
    earlier = earlier.drop_vars("growth_best_induction")
    earlier["growth_trial_induction"] = dims, trials
    line = lines(figures.plot_growth(earlier), "induction head (0 to 1)")["rope"]
    assert line.y.tolist() == [0.5] * 4


def growth_of(entries: xr.Dataset) -> dict[str, xr.DataArray]:
    """The number [entry, step] of each panel."""
    positional = entries["growth_label"] == "positional"
    repeat_gain = entries["growth_first_loss"] - entries["growth_repeat_loss"]
    # The last two bins are past the context. The second has two thirds of their tokens.
    past_context = entries["growth_position_loss"][..., 5:] @ xr.DataArray(
        [1 / 3, 2 / 3], dims="position_bin"
    )
    return {
        "positional heads (count)": positional.sum(("layer", "head")),
        "previous-token head (0 to 1)": entries["growth_previous_token"].max(
            ("layer", "head")
        ),
        "induction head (0 to 1)": entries["growth_best_induction"],
        "gain of repeats (nats/token)": repeat_gain.mean("trial"),
        "retrieval (share)": entries["growth_retrieval"].mean(
            ("retrieval_length", "depth")
        ),
        "loss past context (nats/token)": past_context,
    }


def find(comparison: xr.Dataset, begin: str) -> str:
    """The only sentence about the comparison that begins in this way."""
    (sentence,) = [line for line in findings(comparison) if line.startswith(begin)]
    return sentence


def test_findings_list_loss_changes_in_order(comparison: xr.Dataset):
    sentences = findings(comparison)
    begin = "Change of the loss from rope, in nats per token with 95% intervals: "
    changes = find(comparison, "Change of the loss")
    assert changes.startswith(f"{begin}p-rope:0.5 +0.105 (")
    assert "; nope +0.210 (" in changes
    assert changes.endswith(", over 2 pairs of seeds).")
    assert sentences[-1] == "A finding."
    assert find(
        comparison, "No plane rotates in nope. No head there can be positional through"
    )
    words = find(comparison.isel(entry=[0, 2]), "Change of the loss")
    end = "over the text of one seed). An interval over the text of one seed does not include"
    assert f"{end} the variation between training runs." in words
    assert "not finished" not in " ".join(sentences)
    fewer = comparison.isel(entry=[0, 1, 2, 3]).assign_attrs(
        unfinished="tiny/nope/seed-1"
    )
    assert find(fewer, "These runs of the study are not finished: tiny/nope/seed-1.")


def test_different_numbers_of_runs_are_named(comparison: xr.Dataset):
    begin = (
        "The numbers of runs differ: 2 (rope), 2 (p-rope:0.5), 1 (nope). A mean is over"
    )
    assert not [words for words in findings(comparison) if words.startswith(begin)]
    assert comparison["group"].values[-1] == "nope"
    assert find(comparison.isel(entry=slice(None, -1)), begin)


def test_losses_without_pairs_are_listed_with_the_reason(comparison: xr.Dataset):
    alone = comparison.assign_coords(partner=("entry", [0, -1, -1, 3, -1, -1]))
    words = find(alone, "The loss is 3.005 (rope), 3.110 (p-rope:0.5), 3.215 (nope)")
    reason = "no run of another variant has the size and seed of a run of rope."
    assert words.endswith(f"There are no paired differences, because {reason}")


def with_repeat_losses(
    comparison: xr.Dataset, *, p_rope: list[float], nope: list[float]
) -> xr.Dataset:
    """The comparison with losses of repeated tokens for the two seeds of two variants."""
    changed = comparison.copy(deep=True)
    changed["repeat_loss"][1::3] = xr.DataArray(p_rope, dims="entry")
    changed["repeat_loss"][2::3] = xr.DataArray(nope, dims="entry")
    return changed


def half_width(*, of_spread: float) -> float:
    """Half of the 95% t-interval of two numbers that differ by `of_spread`."""
    return stats.t.ppf(0.975, 1) * of_spread / 2


def test_findings_name_changes_beyond_chance(comparison: xr.Dataset):
    comparison["first_loss"][:] = 10.0
    comparison["repeat_loss"][:] = 5.0
    comparison["retrieval_hit"][:] = 1.0
    begin = "If random tokens are repeated"

    nope_gains = with_repeat_losses(comparison, p_rope=[5, 5], nope=[4.5, 4.49])
    words = find(nope_gains, begin)
    half = half_width(of_spread=0.01)
    bounds = f"+{0.505 - half:.3f} to +{0.505 + half:.3f}"
    alike = "no interval, because all pairs show the same change."
    nope = f"nope +0.505 ({bounds}, over 2 pairs of seeds)"
    excludes = "the 95% interval of the change from rope excludes 0 for"
    assert f"; {excludes} {nope}; p-rope:0.5: {alike} Share of needles" in words
    assert words.endswith(f"(chance 12.5%); p-rope:0.5, nope: {alike}")

    nope_loses = with_repeat_losses(comparison, p_rope=[4.5, 5.51], nope=[5.5, 5.51])
    assert "for nope −0.505 (" in find(nope_loses, begin)

    none_beyond_chance = with_repeat_losses(
        comparison, p_rope=[4.5, 5.51], nope=[4.5, 5.51]
    )
    words = find(none_beyond_chance, begin)
    assert "; no 95% interval of a change from rope excludes 0. Share" in words
    past = find(none_beyond_chance.isel(entry=[0, 2]), "Beyond the trained context")
    assert past.endswith("nope: no interval, because there is only one pair.")


def test_numbers_of_heads_are_means(comparison: xr.Dataset):
    previous_token = comparison["previous_token"]
    previous_token[:] = 0.4
    previous_token[0, 1] = 0.5
    previous_token[2, 1, 0] = 0.5
    assert find(comparison, "Heads with") == (
        "Heads with at least half of their attention on the previous token: 1 (rope), "
        "0 (p-rope:0.5), 0.5 (nope); in the first layer: 0 (rope), 0 (p-rope:0.5), 0 (nope)."
    )
    assert column_of(comparison, "previous_token_heads") == ["1", "0", "0.5"]


def tables_of(comparison: xr.Dataset) -> list[GroupTable]:
    return comparison_tables(summarize_comparison(comparison))


def column_of(comparison: xr.Dataset, name: str) -> list[str]:
    """The cells of a column of the tables, from the first group to the last."""
    for table in tables_of(comparison):
        for index, column in enumerate(table.columns):
            if column.name == name:
                return [row.cells[index] for row in table.rows]
    raise KeyError(name)


def test_the_table_marks_unknown_numbers(comparison: xr.Dataset):
    comparison["label"][:] = "mixed"
    with pytest.raises(KeyError):
        column_of(comparison, "positional_wavelength")
    half = half_width(of_spread=0.01)
    change = f"+0.105\n+{0.105 - half:.3f} to +{0.105 + half:.3f}"
    assert column_of(comparison, "loss_change")[:2] == ["–", change]


def test_the_table_counts_each_head_once(comparison: xr.Dataset):
    """Heads that are diffuse were missing once."""
    comparison["label"][:] = "diffuse"
    comparison["label"][:, 0, 0] = "mixed"
    assert column_of(comparison, "diffuse") == ["3", "3", "3"]
    counted = np.zeros(3)
    for label in ("positional", "mixed", "semantic", "sink", "diffuse"):
        counted += np.array(column_of(comparison, label), dtype=float)
    assert counted.tolist() == [4, 4, 4]


def test_numbers_with_different_definitions_have_different_names(comparison):
    comparison = comparison.assign_coords(bytes_per_token=("entry", np.full(6, 3.0)))
    titles = []
    for table in tables_of(comparison):
        titles += [column.title for column in table.columns]
    assert "loss per byte" in titles
    assert "loss per token" in titles
    assert len(set(titles)) == len(titles)


def test_wavelengths_of_variants_that_stop_planes_have_their_limits(comparison):
    comparison["label"][:] = "positional"
    fastest, *_, slowest = comparison["wavelength"].values[1, 0, :4]
    limits = f"within {fastest:.3g}–{slowest:.3g}"
    rope, half, nope = column_of(comparison, "positional_wavelength")
    assert half.endswith(f"\n{limits}")
    assert "within" not in rope + nope
    words = find(comparison, "A variant that stops planes limits")
    assert (
        f"p-rope:0.5 stops 4 of 8 planes, and the others have wavelengths from {fastest:.3g}"
        in words
    )


def first_sentence(losses: dict[str, list[float]]) -> str:
    """The first sentence about variants with these losses, one for each seed."""
    comparison = synthetic_comparison(groups=tuple(losses))
    by_seed = np.array(list(losses.values()))
    comparison["loss"][:] = by_seed.T.ravel()
    return findings(comparison)[0]


def test_the_page_begins_with_the_best_variant_and_its_certainty():
    low, high = stats.ttest_1samp([-0.1, -0.11], 0).confidence_interval(0.95)
    assert first_sentence({"rope": [3, 3], "a": [2.9, 2.89], "nope": [3.5, 3.2]}) == (
        "After 1,024 training tokens, a has the lowest loss: 0.105 nats/token below rope "
        f"(95% interval −{-low:.3f} to −{-high:.3f}, over 2 seeds), which is certain; "
        "nope is worst, 0.350 above rope (not certain)."
    )
    words = first_sentence({"rope": [3, 3], "a": [2.9, 2.89], "b": [2.95, 2.96]})
    assert words.endswith("; rope is worst.")
    words = first_sentence({"rope": [3, 3], "a": [2.9, 3.05]})
    assert words.endswith("over 2 seeds), which is not certain.")


def test_the_baseline_may_be_the_best():
    words = first_sentence({"rope": [3, 3], "a": [3.1, 3.3], "b": [3.4, 3.41]})
    begin = "After 1,024 training tokens, rope, the baseline, has the lowest loss: the next, a,"
    assert words.startswith(f"{begin} is 0.200 nats/token above it (95% interval")
    assert words.endswith("b is worst, 0.405 above rope (certain).")


@pytest.mark.parametrize("rounding", [0, 2.5e-7, -2.5e-7])
def test_equal_losses_are_named_as_equal(rounding: float):
    begin = (
        "After 1,024 training tokens, rope, the baseline, has the lowest loss, together"
    )
    words = first_sentence({"rope": [3, 3], "p-rope:1": [3, 3 + rounding]})
    assert words == f"{begin} with p-rope:1."
    losses = {"rope": [3, 3], "p-rope:1": [3, 3 + rounding], "yarn:1": [3, 3]}
    names = ["p-rope:1 and yarn:1", "yarn:1 and p-rope:1"]
    words = first_sentence(losses)
    assert words in [f"{begin} with {both}." for both in names]
    words = first_sentence(losses | {"nope": [4, 4]})
    worst = "nope is worst, 1.000 above rope"
    assert words.startswith(tuple(f"{begin} with {both}; {worst}" for both in names))
    words = first_sentence({"rope": [3, 3], "p-rope:1": [3, 3 + rounding], "a": [2, 2]})
    assert words.startswith("After 1,024 training tokens, a has the lowest loss: 1.000")
    assert words.endswith("; rope and p-rope:1 are worst.")


def test_each_size_has_its_best_variant(comparison: xr.Dataset):
    small = comparison.isel(entry=[0, 1, 3, 4])
    large = comparison.isel(entry=[0, 2, 3, 5])
    groups = [f"small {name}" for name in small["group"].values]
    groups += [f"large {name}" for name in large["group"].values]
    both = xr.concat([small, large], "entry").assign_coords(
        group=("entry", groups),
        size=("entry", ["small"] * 4 + ["large"] * 4),
        partner=("entry", [0, 0, 2, 2, 4, 4, 6, 6]),
    )
    both = both.assign_coords(entry=[f"{name} {i}" for i, name in enumerate(groups)])
    first, second, *_ = findings(both)
    assert (
        "of the runs of size small, small rope, the baseline, has the lowest" in first
    )
    assert "the next, large nope, is 0.210 nats/token above it" in second


def test_one_seed_is_never_certain(comparison: xr.Dataset):
    one_seed = comparison.isel(entry=[0, 1])
    one_seed["loss"][1] = 2.0
    one_seed["sequence_loss"][1] = one_seed["sequence_loss"][0] - 1
    words = findings(one_seed)[0]
    assert "p-rope:0.5 has the lowest loss: 1.000 nats/token below rope" in words
    assert words.endswith("which is not certain, because other seeds may differ.")
    assert column_of(one_seed, "certain") == ["–", "no (one seed)"]


def test_the_second_variant_is_compared_with_the_best():
    comparison = synthetic_comparison(groups=("rope", "a", "b"))
    comparison["loss"][:] = [3, 2.5, 2.6, 3, 2.5, 2.61]
    low, high = stats.ttest_1samp([-0.1, -0.11], 0).confidence_interval(0.95)
    words = find(comparison, "b is second")
    interval = f"95% interval −{-low:.3f} to −{-high:.3f}, over 2 seeds"
    assert words == (
        f"b is second: a is 0.105 nats/token below it ({interval}), which is certain."
    )


def test_the_lines_of_losses_end_with_the_numbers_of_the_table(comparison):
    table = summarize_comparison(comparison).set_index("group")
    figure = figures.plot_loss_lines(comparison, table.reset_index())
    nope = next(figure.select_traces({"name": "nope", "mode": "lines+markers"}))
    assert nope.x.tolist() == [128, 256, 512, 1024]
    early = comparison["growth_loss"].values
    pairs = early[[2, 5]] - early[[0, 3]]
    np.testing.assert_allclose(nope.y[:-1], pairs.mean(0)[:-1])
    assert nope.y[-1] == table.loc["nope", "loss_change"]
    low, high = stats.ttest_1samp(pairs[:, 0], 0).confidence_interval(0.95)
    band = next(figure.select_traces({"name": "nope", "fill": "toself"}))
    assert band.y[0] == pytest.approx(high)
    assert band.y[-1] == pytest.approx(low)
    (bar,) = figure.select_traces({"name": "nope", "meta": {"role": "last"}})
    assert bar.x[0] > nope.x[-1]
    assert bar.y[0] + bar.error_y.array[0] == pytest.approx(table.loc["nope", "high"])
    assert bar.y[0] - bar.error_y.arrayminus[0] == pytest.approx(
        table.loc["nope", "low"]
    )
    ends = {note.text.split("<br>")[0] for note in figure.layout.annotations}
    assert ends == {"<b>rope</b>", "<b>p-rope:0.5</b>", "<b>nope</b>"}


def test_checkpoints_at_powers_of_two_are_on_a_log_scale(comparison: xr.Dataset):
    tokens = 1000 * np.array([1, 4, 16, 64]) * np.ones((6, 1))
    geometric = comparison.assign_coords(tokens_seen=(("entry", "step"), tokens))
    table = summarize_comparison(comparison)
    figure = figures.plot_loss_lines(geometric, table)
    assert figure.layout.xaxis.type == "log"
    assert list(figure.layout.xaxis.ticktext) == ["1k", "10k"]
    linear = figures.plot_loss_lines(comparison, table)
    assert list(linear.layout.xaxis.ticktext)[:3] == ["0", "200", "400"]
    assert max(linear.layout.xaxis.tickvals) <= 1024


def test_a_line_of_one_seed_has_no_interval(comparison: xr.Dataset):
    one_seed = comparison.isel(entry=[0, 1, 2])
    figure = figures.plot_loss_lines(one_seed, summarize_comparison(one_seed))
    assert not list(figure.select_traces({"fill": "toself"}))
    for bar in figure.select_traces({"meta": {"role": "last"}}):
        assert bar.error_y.array.tolist() == [0]


def test_the_map_pairs_each_run_with_its_baseline(comparison: xr.Dataset):
    payload = map_payload(comparison)
    assert payload["partners"] == [0, 0, 0, 3, 3, 3]
    assert payload["pages"] == [""] * 6
    alone = comparison.assign_coords(partner=("entry", [0, -1, 0, 3, 3, 3]))
    assert map_payload(alone)["partners"][1] == 0


def test_pages_of_models_are_paths_in_folders(comparison: xr.Dataset):
    pages = [
        "../a b/index.html",
        "",
        "javascript:alert(1)",
        "//evil.example/",
        "c",
        "d",
    ]
    found = page_addresses(comparison.assign_coords(page=("entry", pages)))
    assert found[:4] == ["../a%20b/index.html", "", "javascript%3Aalert%281%29", ""]


def test_a_page_may_begin_with_another_picture(browser, tmp_path, comparison):
    answer = Answer()
    page = answer.save(
        tmp_path / "needles", comparison, lead="Needles first.", picture="copying"
    )
    with Opened(browser, page) as opened:
        shown = opened.load(ready="html.ready")
        assert shown.locator(".lead").inner_text() == "Needles first."
        picture = shown.locator(".picture")
        assert "Copying and retrieval by distance" in picture.inner_text()
        titles = shown.locator("h2, h3").all_inner_texts()
        assert titles.count("Copying and retrieval by distance") == 1
        assert titles.count("Validation loss compared with rope") == 1
        best = shown.get_by_text("has the lowest loss")
        assert not best.is_visible()
        shown.get_by_text("More findings").click()
        assert best.is_visible()
    page = answer.save(tmp_path / "losses", comparison)
    with Opened(browser, page) as opened:
        shown = opened.load(ready="html.ready")
        assert "has the lowest loss" in shown.locator(".lead").inner_text()
        picture = shown.locator(".picture")
        assert "Validation loss compared with rope" in picture.inner_text()


def test_a_comparison_of_an_earlier_version_is_drawn():
    """Earlier versions did not save the pages of runs."""
    folder = Path(__file__).parents[2] / "reports" / "copying" / "copying"
    if not folder.exists():
        pytest.skip("the reports are only in the repository")
    comparison = open_results(folder / "comparison.nc", "comparison")
    earlier = comparison.drop_vars("page")
    page = render_comparison(earlier, summarize_comparison(earlier))
    assert "p-rope:0.5 has the lowest loss: 0.005 nats/token below rope" in page


def test_no_column_is_cut_off_at_800_pixels(browser, tmp_path, comparison):
    page = Answer().save(tmp_path / "out", comparison)
    with Opened(browser, page, viewport={"width": 800, "height": 800}) as opened:
        shown = opened.load(ready="html.ready")
        width = "(table) => table.scrollWidth - table.parentElement.clientWidth"
        tables = shown.locator("table.groups").all()
        assert len(tables) == 3
        assert [table.evaluate(width) <= 0 for table in tables] == [True] * 3
        fits(shown)
        shown.select_option("#map-entry", "5")
        cells = shown.locator("#label-map a")
        assert cells.count() == 4
        assert (
            "of 4 heads have another label in nope seed 1"
            in shown.locator("#map-counts").inner_text()
        )
        words = cells.first.get_attribute("aria-label")
        before = comparison["label"].values[3, 0, 0]
        after = comparison["label"].values[5, 0, 0]
        assert words == f"L0 H0; rope seed 1: {before}; nope seed 1: {after}"
        cells.first.click()
        shown.wait_for_selector("#plot-second[data-head='nope seed 1: L0 H0']")


@pytest.mark.thorough
def test_the_page_shows_all_and_does_no_harm(browser, tmp_path):
    comparison = synthetic_comparison(groups=("rope", f"p-rope:{HOSTILE}", "nope"))
    page = Answer(f"{HOSTILE}?", [HOSTILE], {}).save(tmp_path / "out", comparison)
    with Opened(browser, page) as opened:
        shown = opened.load(ready="html.ready")
        assert shown.locator(".plot .main-svg").count() >= 6
        assert HOSTILE in shown.locator("h1").inner_text()
        assert shown.locator(".groups tbody tr").count() == 9
        assert shown.locator(".plot img, .plot a[href]").count() == 0
        fits(shown)


SCRIPT = "<script>alert(1)</script>"


def drawn_with_legend(**place: object) -> go.Figure:
    figure = new_figure("Lines", height=400)
    for name in ("a line", "another line"):
        figure.add_scatter(x=[1, 2], y=[1, 2], name=name)
    return figure.update_layout(legend=place)


@pytest.fixture(scope="module")
def page(small, tmp_path_factory):
    profile, heads = small
    profile = profile.assign_attrs(model=f"some/{SCRIPT}")
    answer = Answer(
        question=f"Does {SCRIPT} run?",
        findings=[f"No: {SCRIPT} is text.", "0.5 bits"],
        figures={
            f"Captions: {SCRIPT}": plot_head_wavelengths(profile, heads),
            "Heads of layer 1": plot_norms(profile, layer=1),
            "The claim": plot_claim(profile, heads),
            "Words above": drawn_with_legend(yref="container", y=0.9),
            "Words below": drawn_with_legend(yref="container", y=0, yanchor="bottom"),
        },
    )
    record = {
        "seed": profile.attrs["seed"],
        "created": profile.attrs["created"],
        "command": "",
        "model": {"name": profile.attrs["model"]},
        "versions": {},
    }
    profile = profile.assign_attrs(command="", backend="hf", warnings="")
    folder = tmp_path_factory.mktemp("reports") / "analysis"
    return write_answer(folder, Analysis(profile, heads, record), answer)


def test_a_page_of_an_analysis_is_not_replaced(page):
    names = {"index.html", "profile.nc", "heads.csv", "run.json"}
    assert {path.name for path in page.parent.iterdir()} == names
    assert page.parent.name == "some--script-alert-1---script"
    before = page.read_bytes()
    with pytest.raises(BadArgument, match="Only the script that wrote") as caught:
        rewrite_page(page.parent)
    assert caught.value.parts["seen"] == f"Does {SCRIPT} run?"
    assert page.read_bytes() == before


def test_shows_every_figure_and_does_no_harm(browser, page):
    with Opened(browser, page) as opened:
        shown = opened.load(ready="html.ready")
        assert shown.locator(".plot .main-svg").count() >= 3
        assert SCRIPT in shown.locator("h1").inner_text()
        assert not shown.get_by_text("0.5 bits").is_visible()
        shown.locator(".more summary").click()
        assert shown.get_by_text("0.5 bits").is_visible()
        assert SCRIPT in shown.locator(".lead").inner_text()
        fits(shown)
        legends = shown.locator(".legend").all()
        assert len(legends) == 4
        for legend in legends:
            plot = legend.locator("xpath=ancestor::*[@class='main-svg'][1]")
            inner = legend.bounding_box()
            outer = plot.bounding_box()
            assert outer["y"] <= inner["y"]
            assert inner["y"] + inner["height"] <= outer["y"] + outer["height"]
