"""The page of an answer: a question, findings and figures in one harmless file."""

from pathlib import Path

import plotly.graph_objects as go
import pytest
from in_browser import Opened, fits

from ropelens import plot_claim, plot_norms
from ropelens.analysis.analysis import Analysis, Answer, rewrite_page, write_answer
from ropelens.errors import BadArgument
from ropelens.figures.planes import plot_head_wavelengths
from ropelens.figures.style import new_figure

HOSTILE = "<script>alert(1)</script>"


def drawn_with_legend(**place: object) -> go.Figure:
    figure = new_figure("Lines", height=400)
    for name in ("a line", "another line"):
        figure.add_scatter(x=[1, 2], y=[1, 2], name=name)
    return figure.update_layout(legend=place)


@pytest.fixture(scope="module")
def page(small, tmp_path_factory):
    profile, heads = small
    profile = profile.assign_attrs(model=f"some/{HOSTILE}")
    answer = Answer(
        question=f"Does {HOSTILE} run?",
        findings=[f"No: {HOSTILE} is text.", "0.5 bits"],
        figures={
            f"Captions: {HOSTILE}": plot_head_wavelengths(profile, heads),
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
    return write_answer(tmp_path_factory.mktemp("reports") / "analysis", analysis, answer)


def test_a_page_of_an_analysis_is_not_replaced(page: Path):
    names = {"index.html", "profile.nc", "heads.csv", "run.json"}
    assert {path.name for path in page.parent.iterdir()} == names
    assert page.parent.name == "some--script-alert-1---script"
    before = page.read_bytes()
    with pytest.raises(BadArgument, match="Only the script that wrote") as caught:
        rewrite_page(page.parent)
    assert caught.value.parts["seen"] == f"Does {HOSTILE} run?"
    assert page.read_bytes() == before


def test_shows_every_figure_and_does_no_harm(browser, page: Path):
    with Opened(browser, page) as opened:
        shown = opened.load(ready="html.ready")
        assert shown.locator(".plot .main-svg").count() >= 3
        assert HOSTILE in shown.locator("h1").inner_text()
        assert not shown.get_by_text("0.5 bits").is_visible()
        shown.locator(".more summary").click()
        assert shown.get_by_text("0.5 bits").is_visible()
        assert HOSTILE in shown.locator(".lead").inner_text()
        fits(shown)
        legends = shown.locator(".legend")
        assert legends.count() == 4
        for number in range(legends.count()):
            legend = legends.nth(number).bounding_box()
            plot = legends.nth(number).locator("xpath=ancestor::*[@class='main-svg'][1]")
            around = plot.bounding_box()
            assert legend is not None
            assert around is not None
            assert around["y"] <= legend["y"]
            assert legend["y"] + legend["height"] <= around["y"] + around["height"]
