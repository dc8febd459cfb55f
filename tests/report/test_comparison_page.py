"""Figures, sentences, table and page of a comparison, and the page of an answer."""

import numpy as np
import plotly.graph_objects as go
import pytest
import xarray as xr
from in_browser import Opened, fits
from scipy import stats
from synthetic_comparison import CONTEXT, STEPS, synthetic_comparison

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
from ropelens.interventions.changes import best_head
from ropelens.report.columns import comparison_columns as shown_columns
from ropelens.report.columns import comparison_rows as table_rows
from ropelens.report.sentences.comparison import comparison_sentences

HOSTILE = '<img src=x onerror=alert(1)><a href="https://evil.example/">%{y}</a>'


def findings(comparison: xr.Dataset) -> list[str]:
    return comparison_sentences(comparison, summarize_comparison(comparison))


@pytest.fixture
def comparison() -> xr.Dataset:
    return synthetic_comparison()


def lines(figure: go.Figure, unit: str) -> dict[str, go.Scatter]:
    for row, axis in enumerate(figure.select_yaxes(), start=1):
        if axis.title.text.replace("<br>", " ") == unit:
            return {
                t.name: t
                for t in figure.select_traces({"mode": "lines+markers"}, row=row)
            }
    raise KeyError(unit)


def test_loss_changes_are_pairs_means_and_intervals(comparison: xr.Dataset):
    table = summarize_comparison(comparison)
    figure = figures.plot_loss_change(comparison, table)
    pairs = {t.y[0]: t.x for t in figure.data if t.marker.symbol == "circle-open"}
    np.testing.assert_allclose(pairs["p-rope:0.5"], [0.1, 0.11])
    np.testing.assert_allclose(pairs["nope"], [0.2, 0.22])
    (mean,) = [
        t for t in figure.data if t.error_x.array is not None and t.y[0] == "nope"
    ]
    row = table.set_index("group").loc["nope"]
    assert mean.x[0] + mean.error_x.array[0] == pytest.approx(row["high"])
    assert mean.x[0] - mean.error_x.arrayminus[0] == pytest.approx(row["low"])


def test_loss_by_position_and_its_difference(comparison: xr.Dataset):
    figure = figures.plot_position_loss(comparison)
    losses = comparison["position_loss"].values
    means = lines(figure, "loss (nats/token)")
    change = lines(figure, "difference from rope (nats/token)")
    np.testing.assert_allclose(means["rope"].y, losses[[0, 3]].mean(0))
    differences, nope = losses[[2, 5]] - losses[[0, 3]], change["nope"]
    np.testing.assert_allclose(nope.y, differences.mean(0))
    np.testing.assert_allclose(nope.y + nope.error_y.array, differences.max(0))
    np.testing.assert_allclose(nope.y - nope.error_y.arrayminus, differences.min(0))
    assert "rope" not in change
    assert figure.layout.shapes[0].x0 == CONTEXT
    (words,) = [a for a in figure.layout.annotations if "trained context" in a.text]
    assert 10**words.x == pytest.approx(
        CONTEXT
    )  # a logarithmic axis takes the exponent
    start, stop = (comparison[f"position_{end}"].values for end in ("start", "stop"))
    assert ((start <= means["rope"].x) & (means["rope"].x < stop)).all()


def test_copying_by_distance_and_needles_by_length(comparison: xr.Dataset):
    figure = figures.plot_copying(comparison)
    for name, of, unit in (
        ("copy_loss", "copy_distance", "loss of copied tokens (nats/token)"),
        ("far_retrieval", "prompt_length", "needles found (share)"),
    ):
        drawn = lines(figure, unit)
        assert [*drawn] == ["rope", "p-rope:0.5", "nope"]
        values = comparison[name].isel(entry=[2, 5])
        values = values.mean({"trial"} & {*values.dims})
        np.testing.assert_allclose(drawn["nope"].y, values.mean("entry"))
        assert drawn["nope"].x.tolist() == comparison[of].values.tolist()
    marks = [(line.x0, line.y0) for line in figure.layout.shapes]
    assert (0, 1 / 8) in marks
    assert CONTEXT in [x for x, _ in marks]


def test_planes_that_do_not_rotate_are_drawn_where_they_rotate_elsewhere(comparison):
    places = comparison_planes.plane_places(comparison, "p-rope:0.5")
    place = places.wavelength
    turning = places.rotates
    np.testing.assert_array_equal(place, comparison["wavelength"][0, 0])
    assert turning.tolist() == [True] * 4 + [False] * 4
    figure = comparison_planes.plot_comparison_planes(comparison)
    rings = [*figure.select_traces({"name": "does not rotate"})]
    for (unit, name), ring in zip(
        comparison_planes.PLANE_PANELS.items(), rings, strict=True
    ):
        rows = lines(figure, unit.replace("<br>", " "))
        dims = [dim for dim in comparison[name].dims if dim != "frequency"]
        np.testing.assert_array_equal(rows["p-rope:0.5"].x, place)
        means = [comparison[name][[entry, entry + 3]].mean(dims) for entry in (1, 2)]
        for variant, mean in zip(("p-rope:0.5", "nope"), means, strict=True):
            np.testing.assert_allclose(rows[variant].y, mean)
        seeds = comparison[name][[1, 4]].mean([dim for dim in dims if dim != "entry"])
        highest = rows["p-rope:0.5"].y + rows["p-rope:0.5"].error_y.array
        np.testing.assert_allclose(highest, seeds.max("entry"))
        np.testing.assert_allclose(ring.y, [*means[0][4:], *means[1]])


def test_growth_counts_heads_by_step(comparison: xr.Dataset):
    figure = figures.plot_growth(comparison)
    loss = lines(figure, "loss (nats/token)")["rope"]
    np.testing.assert_allclose(loss.y, comparison["growth_loss"][[0, 3]].mean("entry"))
    np.testing.assert_allclose(loss.error_y.array, 0.005)
    nope = comparison.isel(entry=[2, 5])
    best = best_head(nope["growth_trial_induction"]).transpose("entry", "step", "trial")
    by_bin = nope["growth_position_loss"].values
    for unit, values in {
        "positional heads (count)": (nope["growth_label"].values == "positional").sum(
            (2, 3)
        ),
        "previous-token head (0 to 1)": nope["growth_previous_token"].values.max(
            (2, 3)
        ),
        "induction head (0 to 1)": best.values,
        "gain of repeats (nats/token)": nope["growth_first_loss"]
        - nope["growth_repeat_loss"],
        "retrieval (share)": nope["growth_retrieval"],
        "loss past context (nats/token)": by_bin[..., 5:] @ [1 / 3, 2 / 3],
    }.items():
        by_entry = np.asarray(values).reshape(2, len(STEPS), -1).mean(2)
        line = lines(figure, unit)["nope"]
        np.testing.assert_allclose(line.y, by_entry.mean(0))
        np.testing.assert_allclose(
            line.error_y.array, by_entry.max(0) - by_entry.mean(0)
        )
    assert len({axis.title.text for axis in figure.select_yaxes()}) == 8


def find(comparison: xr.Dataset, begin: str) -> str:
    (sentence,) = [line for line in findings(comparison) if line.startswith(begin)]
    return sentence


def test_findings_list_loss_changes_in_order(comparison: xr.Dataset):
    first, *_, last = findings(comparison)
    begin = "Change of the loss from rope, in nats per token with 95% intervals: "
    assert first.startswith(f"{begin}p-rope:0.5 +0.105 (")
    assert "; nope +0.210 (" in first
    assert first.endswith(", over 2 pairs of seeds).")
    assert last == "A finding."
    assert find(
        comparison, "No plane rotates in nope. No head there can be positional through"
    )
    words = find(comparison.isel(entry=[0, 2]), "Change of the loss")
    end = "over the text of one seed). An interval over the text of one seed does not include"
    assert f"{end} the variation between training runs." in words
    assert "not finished" not in " ".join(findings(comparison))
    fewer = comparison.isel(entry=[0, 1, 2, 3]).assign_attrs(
        unfinished="tiny/nope/seed-1"
    )
    assert find(fewer, "These runs of the study are not finished: tiny/nope/seed-1.")


def test_losses_without_pairs_are_listed_with_the_reason(comparison: xr.Dataset):
    alone = comparison.assign_coords(partner=("entry", [0, -1, -1, 3, -1, -1]))
    words = find(alone, "The loss is 3.005 (rope), 3.110 (p-rope:0.5), 3.215 (nope)")
    reason = "no run of another variant has the size and seed of a run of rope."
    assert words.endswith(f"There are no paired differences, because {reason}")


def test_findings_name_changes_beyond_chance(comparison: xr.Dataset):
    def repeats(*losses: list[float]) -> str:
        for entry, values in enumerate(losses, start=1):
            comparison["repeat_loss"][entry::3] = xr.DataArray(values, dims="entry")
        return find(comparison, "If random tokens are repeated")

    comparison["first_loss"][:] = 10.0
    comparison["repeat_loss"][:] = 5.0
    comparison["retrieval_hit"][:] = 1.0
    words, spread = repeats([5, 5], [4.5, 4.49]), stats.t.ppf(0.975, 1) * 0.005
    bounds = f"+{0.505 - spread:.3f} to +{0.505 + spread:.3f}"
    alike = "no interval, because all pairs show the same change."
    nope = f"+0.505 ({bounds}, over 2 pairs of seeds); p-rope:0.5: {alike} Share of needles"
    assert (
        f"; the 95% interval of the change from rope excludes 0 for nope {nope}"
        in words
    )
    assert words.endswith(f"(chance 12.5%); p-rope:0.5, nope: {alike}")
    assert "for nope −0.505 (" in repeats([4.5, 5.51], [5.5, 5.51])
    words = repeats([4.5, 5.51], [4.5, 5.51])
    assert "; no 95% interval of a change from rope excludes 0. Share" in words
    past = find(comparison.isel(entry=[0, 2]), "Beyond the trained context")
    assert past.endswith("nope: no interval, because there is only one pair.")


def test_numbers_of_heads_are_means(comparison: xr.Dataset):
    comparison["previous_token"][:] = 0.4
    comparison["previous_token"][0, 1] = comparison["previous_token"][2, 1, 0] = 0.5
    table = summarize_comparison(comparison)
    assert find(comparison, "Heads with") == (
        "Heads with at least half of their attention on the previous token: 1 (rope), "
        "0 (p-rope:0.5), 0.5 (nope); in the first layer: 0 (rope), 0 (p-rope:0.5), 0 (nope)."
    )
    index = [column.name for column in shown_columns(table)].index(
        "previous_token_heads"
    )
    assert [row.cells[index] for row in table_rows(table)] == ["1", "0", "0.5"]


def test_the_table_marks_unknown_numbers(comparison: xr.Dataset):
    comparison["label"][:] = "mixed"
    table = summarize_comparison(comparison)
    names = [column.name for column in shown_columns(table)]
    assert "positional_wavelength" not in names
    rows = [dict(zip(names, row.cells, strict=True)) for row in table_rows(table)]
    assert [row["worse"] for row in rows] == ["–", "2 of 2", "2 of 2"]
    spread = stats.t.ppf(0.975, 1) * 0.005
    change = f"+0.105\n+{0.105 - spread:.3f} to +{0.105 + spread:.3f}"
    assert [row["loss_change"] for row in rows[:2]] == ["–", change]


@pytest.mark.thorough
def test_the_page_shows_all_and_does_no_harm(browser, tmp_path):
    comparison = synthetic_comparison(groups=("rope", f"p-rope:{HOSTILE}", "nope"))
    page = Answer(f"{HOSTILE}?", [HOSTILE], {}).save(tmp_path / "out", comparison)
    with Opened(browser, page) as opened:
        shown = opened.load(ready="html.ready")
        assert shown.locator(".plot .main-svg").count() >= 6
        assert HOSTILE in shown.locator("h1").inner_text()
        assert shown.locator(".lines tbody tr").count() == 3
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
    facts = {"command": "", "backend": "hf", "warnings": ""}
    record = {name: profile.attrs[name] for name in ("seed", "created")}
    record |= {"command": "", "model": {"name": profile.attrs["model"]}, "versions": {}}
    analysis = Analysis(profile.assign_attrs(facts), heads, record)
    return write_answer(
        tmp_path_factory.mktemp("reports") / "analysis", analysis, answer
    )


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
        legends = shown.locator(".legend")
        assert legends.count() == 4
        for number in range(legends.count()):
            legend = legends.nth(number).bounding_box()
            plot = legends.nth(number).locator(
                "xpath=ancestor::*[@class='main-svg'][1]"
            )
            around = plot.bounding_box()
            assert around["y"] <= legend["y"]
            assert legend["y"] + legend["height"] <= around["y"] + around["height"]
