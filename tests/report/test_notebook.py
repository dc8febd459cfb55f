"""Tests of the displays in notebooks, and a run of docs/tour.ipynb."""

import os
import re
import subprocess
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import nbformat
import plotly.io as pio
import pytest
from synthetic_profile import synthetic_profile

import ropelens as rl
from ropelens.errors import BadArgument
from ropelens.figures.style import COLORS, PAPER
from ropelens.report.notebook import display

ROOT = Path(__file__).parents[2]
TOUR = ROOT / "docs/tour.ipynb"
HOSTILE = "<script>alert(1)</script>\"'&"


class Read(HTMLParser):
    """The tags of some HTML with their attributes, and its text."""

    def __init__(self, html: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data

    def attributes_of(self, name: str) -> list[dict[str, str]]:
        """The attributes of each tag with this name."""
        return [attributes for tag, attributes in self.tags if tag == name]


def heads_by_color(map_of_heads: Read) -> dict[str, int]:
    """Number of squares of each color. Each square is a part of a path, from an M on."""
    drawn = Counter[str]()
    for path in map_of_heads.attributes_of("path"):
        drawn[path["stroke"]] += path["d"].count("M")
    return drawn


@pytest.mark.parametrize(("layers", "heads"), [(5, 8), (40, 10), (50, 32), (126, 128)])
def test_a_map_is_small_and_shows_each_head_under_its_label(layers: int, heads: int):
    profile, table = synthetic_profile(
        layers=layers, heads=heads, frequencies=4, excerpt=4
    )
    profile.attrs["model"] = HOSTILE
    html = display([HOSTILE], table, profile).html
    assert len(html.encode()) < 300_000
    read = Read(html)
    assert read.text.count(HOSTILE) == 2
    for tag, attributes in read.tags:
        assert tag not in ("script", "link", "img", "iframe", "style")
        for name in attributes:
            assert not name.startswith("on")
            assert name not in ("src", "href")
    heads_by_label = table["label"].value_counts()
    expected = {COLORS[label]: number for label, number in heads_by_label.items()}
    assert heads_by_color(read) == expected
    hovers = read.attributes_of("title")
    assert len(hovers) == (len(table) if len(table) <= 1_600 else 0)


def test_a_profile_its_heads_and_its_claims_are_shown():
    profile, heads = synthetic_profile()
    for shown in (rl.show(profile), rl.show(heads)):
        assert shown.sentences[0] in Read(shown._repr_html_()).text
        assert "<svg" in shown.html
        assert "html" not in repr(shown)
    claims = rl.test_claims(profile)
    claims.loc[0, "statement"] = HOSTILE
    claims.loc[1, "what"] = HOSTILE
    read = Read(rl.show(claims).html)
    assert HOSTILE in read.text
    titles = [row["title"] for row in read.attributes_of("tr") if "title" in row]
    assert len(titles) == len(claims)
    assert any(title.startswith(HOSTILE) for title in titles)
    verdicts = re.findall("holds|contradicted|unresolved|not testable", read.text)
    shown_verdicts = Counter(verdicts)
    for verdict, number in claims["verdict"].value_counts().items():
        assert shown_verdicts[verdict] >= number
    with pytest.raises(
        BadArgument, match=r"(?s)cannot be shown.*try: +a profile, or a table"
    ):
        rl.show(heads[["layer", "head"]])


def test_an_analysis_shows_the_path_of_its_last_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    profile, heads = synthetic_profile()
    analysis = rl.Analysis(profile, heads, {})
    assert "Page:" not in Read(analysis._repr_html_()).text
    analysis.report(tmp_path / "first.html")
    read = Read(analysis._repr_html_())
    assert f"Page: {tmp_path / 'first.html'}" in read.text
    assert read.attributes_of("a") == []
    analysis.save("new: 1 & 2")
    for opened in (analysis, rl.open("new: 1 & 2")):
        (link,) = Read(opened._repr_html_()).attributes_of("a")
        assert link["href"] == "new%3A%201%20%26%202/index.html"


def test_figures_are_dark_with_a_dark_template_of_plotly(monkeypatch):
    profile, _ = synthetic_profile()
    for name, theme in (("plotly", "light"), ("plotly_dark", "dark")):
        monkeypatch.setattr(pio.templates, "default", name)
        template = rl.plot_norms(profile).layout.template
        assert template.layout.paper_bgcolor == PAPER[theme]


def test_the_committed_outputs_of_the_tour_are_small():
    assert TOUR.stat().st_size < 500_000
    assert not re.search(r"/(work|home|root|tmp|Users)/", TOUR.read_text())


@pytest.mark.thorough
def test_the_tour_runs(tmp_path):
    new = run_tour(tmp_path)
    assert (tmp_path / "tour-out/index.html").exists()
    committed = nbformat.read(TOUR, as_version=4)
    for before, after in zip(committed.cells, new.cells, strict=True):
        assert formats_of_outputs(before) == formats_of_outputs(after)
    progress, shown = new.cells[1].outputs
    assert re.fullmatch("measuring: 100% █+ [0-9:]+\n", progress.text)
    assert "Page: tour-out/index.html" in Read(shown.data["text/html"]).text
    assert "<script" not in shown.data["text/html"]


RUN_TOUR = """\
import pathlib, sys
import nbformat, tour
folder = pathlib.Path(sys.argv[1])
nbformat.write(tour.run(folder), folder / "run.ipynb")
"""


def run_tour(folder: Path) -> nbformat.NotebookNode:
    """Run in its own process, because the client of the kernel leaves sockets open."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tools")])
    done = subprocess.run(
        [sys.executable, "-c", RUN_TOUR, str(folder)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return nbformat.read(folder / "run.ipynb", as_version=4)


def formats_of_outputs(cell: nbformat.NotebookNode) -> list[list[str]]:
    """The media types of each output of a cell. A cell of text has no outputs."""
    return [list(output.get("data", ())) for output in cell.get("outputs", ())]
