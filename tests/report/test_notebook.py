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
HOSTILE = "<script>alert(1)</script>\"'&"


class Read(HTMLParser):
    """The tags of some HTML with their attributes, and its text."""

    def __init__(self, html: str):
        super().__init__()
        self.tags, self.text = [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


@pytest.mark.parametrize(("layers", "heads"), [(5, 8), (40, 10), (50, 32), (126, 128)])
def test_a_map_is_small_and_shows_each_head_under_its_label(layers: int, heads: int):
    profile, table = synthetic_profile(
        layers=layers, heads=heads, frequencies=4, excerpt=4
    )
    profile.attrs["model"] = HOSTILE
    html = display([HOSTILE], table, profile).html
    assert len(html.encode()) < 300_000
    read, drawn = Read(html), Counter[str]()
    for tag, attrs in read.tags:
        assert tag not in ("script", "link", "img", "iframe", "style")
        assert not [
            name for name in attrs if name.startswith("on") or name in ("src", "href")
        ]
        if tag == "path":
            drawn[attrs["stroke"]] += attrs["d"].count("M")
    assert drawn == {COLORS[k]: n for k, n in table["label"].value_counts().items()}
    assert read.text.count(HOSTILE) == 2
    hovers = Counter(tag for tag, _ in read.tags)["title"]
    assert hovers == (len(table) if len(table) <= 1_600 else 0)


def test_a_profile_its_heads_and_its_claims_are_shown():
    profile, heads = synthetic_profile()
    claims = rl.test_claims(profile)
    for shown in (rl.show(profile), rl.show(heads)):
        assert shown.sentences[0] in Read(shown._repr_html_()).text
        assert "<svg" in shown.html
        assert "html" not in repr(shown)
    claims.loc[0, "statement"] = claims.loc[1, "what"] = HOSTILE
    read = Read(rl.show(claims).html)
    assert HOSTILE in read.text
    rows = [
        attrs["title"] for tag, attrs in read.tags if tag == "tr" and "title" in attrs
    ]
    assert len(rows) == len(claims)
    assert any(row.startswith(HOSTILE) for row in rows)
    counts = Counter(
        re.findall("holds|contradicted|unresolved|not testable", read.text)
    )
    assert all(counts[k] >= n for k, n in claims["verdict"].value_counts().items())
    with pytest.raises(
        BadArgument, match=r"(?s)cannot be shown.*try: +a profile, or a table"
    ):
        rl.show(heads[["layer", "head"]])


def test_an_analysis_shows_the_path_of_its_last_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    analysis = rl.Analysis(*synthetic_profile(), {})
    assert "Page:" not in Read(analysis._repr_html_()).text
    analysis.report(tmp_path / "first.html")
    read = Read(analysis._repr_html_())
    assert f"Page: {tmp_path / 'first.html'}" in read.text
    assert "a" not in dict(read.tags)
    analysis.save("new: 1 & 2")
    for opened in (analysis, rl.open("new: 1 & 2")):
        links = [
            attrs["href"]
            for tag, attrs in Read(opened._repr_html_()).tags
            if tag == "a"
        ]
        assert links == ["new%3A%201%20%26%202/index.html"]


def test_figures_are_dark_with_a_dark_template_of_plotly(monkeypatch):
    profile, _ = synthetic_profile()
    for name, theme in (("plotly", "light"), ("plotly_dark", "dark")):
        monkeypatch.setattr(pio.templates, "default", name)
        template = rl.plot_norms(profile).layout.template
        assert template.layout.paper_bgcolor == PAPER[theme]


def test_the_tour_runs_and_its_committed_outputs_are_small(tmp_path):
    file = ROOT / "docs/tour.ipynb"
    # In its own process, because the client of the kernel leaves sockets open.
    code = "import sys, nbformat, pathlib, tour; to = pathlib.Path(sys.argv[1]); "
    code += "nbformat.write(tour.run(to), to / 'run.ipynb')"
    command = [sys.executable, "-c", code, str(tmp_path)]
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tools")))
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    written, run = (
        nbformat.read(f, as_version=4) for f in (file, tmp_path / "run.ipynb")
    )
    assert file.stat().st_size < 500_000
    assert not re.search(r"/(work|home|root|tmp|Users)/", file.read_text())
    assert (tmp_path / "tour-out/index.html").exists()
    for before, after in zip(written.cells, run.cells, strict=True):
        outputs = before.get("outputs", ()), after.get("outputs", ())
        for old, new in zip(*outputs, strict=True):
            assert [*old.get("data", ())] == [*new.get("data", ())]
    progress, shown = run.cells[1].outputs
    assert re.fullmatch("measuring: 100% █+ [0-9:]+\n", progress.text)
    assert "Page: tour-out/index.html" in Read(shown.data["text/html"]).text
    assert "<script" not in shown.data["text/html"]
