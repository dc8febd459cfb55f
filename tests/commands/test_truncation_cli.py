"""`ropelens truncate`, and the page that `ropelens report` makes from its files."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import xarray as xr
from cli_runs import NAMES, Ended

import ropelens as rl
from ropelens.interventions.truncation_table import COLUMNS
from ropelens.report.page import render_page

FILES = tuple(sorted((*NAMES, "truncation.csv", "truncation.nc")))
FEW = ("--keep", "1,0.5", "--controls", 1, "--sequences", 4, "--surrogates", 2)
FEW += ("--measures", "loss")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("texts") / "text.txt"
    letters = np.random.default_rng(0).choice(list("abcdefghijklmnop"), size=2000)
    path.write_text("".join(letters))
    return path


@pytest.fixture
def swept(ropelens, model: Path, text: Path, tmp_path: Path) -> Path:
    """A copy of a sweep with FEW, which runs once."""
    first = text.parent / "swept"
    if not first.exists():
        assert (
            ropelens("truncate", model, "--text", text, *FEW, "--out", first).code == 0
        )
    return Path(shutil.copytree(first, tmp_path / "swept"))


@pytest.mark.thorough
def test_the_bundled_model_is_swept_to_six_files_and_a_page(ropelens, tmp_path: Path):
    out = tmp_path / "out"
    small = ("--context", 96, "--sequences", 3, "--keep", "1,0.75", "--bands", 2)
    only = ("--controls", 1, "--measures", "loss", "--surrogates", 2)
    ended = ropelens("truncate", *small, *only, "--out", out)
    assert ended.code == 0
    assert ended.out == f"{out / 'index.html'}\n"
    assert tuple(sorted(path.name for path in out.iterdir())) == FILES
    table = pd.read_csv(out / "truncation.csv", keep_default_na=False)
    assert table.columns.tolist() == list(COLUMNS)
    edits = ["none", "slow 0.75", "fast 0.75", "random 0.75 #0"]
    edits += ["band 0", "band 0 control #0", "band 1", "band 1 control #0"]
    assert table["edit"].tolist() == edits
    change = table["loss_change"].astype(float)
    assert abs(change[1]) < 0.01 < 0.2 < change[2]
    sweep = rl.open(out / "truncation.nc")
    record = json.loads((out / "run.json").read_text())
    assert record["arguments"]["keep"] == [1.0, 0.75]
    assert record["arguments"]["ends"] == ["slow", "fast"]
    assert sweep.attrs["rows"] == rl.open(out).profile.attrs["rows"] == 64
    assert re.match(r"ropelens truncate --context 96 .* --out ", record["command"])
    assert sweep.attrs["command"] == record["command"]
    assert "Stopping planes" in (out / "index.html").read_text()
    planned = ropelens("truncate", *small, *only, "--plan").out
    assert f"{len(table) - 1} edits (loss), trained for 512 tokens" in planned


@pytest.mark.thorough
def test_report_makes_the_same_page_and_needs_the_sweep(ropelens, swept: Path):
    page, sweep = [
        (swept / name).read_bytes() for name in ("index.html", "truncation.nc")
    ]
    others = {
        name: (swept / name).read_bytes() for name in FILES if name != "index.html"
    }
    (swept / "index.html").unlink()
    ended = ropelens("report", swept)
    assert ended == Ended(0, f"{swept / 'index.html'}\n", "")
    assert (swept / "index.html").read_bytes() == page
    assert {name: (swept / name).read_bytes() for name in others} == others
    (swept / "truncation.nc").write_bytes(sweep[: len(sweep) // 2])
    ended = ropelens("report", swept)
    assert ended.code == 1
    assert "truncation.nc is not a truncation" in ended.problem
    assert (swept / "index.html").read_bytes() == page


@pytest.mark.thorough
@pytest.mark.usefixtures("pageless")
def test_a_sweep_joins_an_analysis_and_stays(
    ropelens, model, text, tmp_path, monkeypatch
):
    out = tmp_path / "out"
    other = tmp_path / "other.txt"
    analyze = ("analyze", model, "--text", text, "--surrogates", 2, "--out", out)
    search = ("--prompt", "abcabc abc", "--attention-on", "repeated")
    assert ropelens(*analyze, "--sequences", 6, *search).code == 0
    single = rl.open(out)
    heads = (out / "heads.csv").read_bytes()
    apart = Path(shutil.copytree(out, tmp_path / "apart"))
    sweep = ("truncate", model, "--out", out, *FEW)
    with monkeypatch.context() as patch:  # the saved profile is not measured again
        patch.setattr("ropelens.analysis.run_plan.measure", None)
        assert ropelens(*sweep, "--text", text).code == 0
    joined = rl.open(out)
    assert (out / "heads.csv").read_bytes() == heads
    xr.testing.assert_identical(joined.profile, single.profile)
    assert joined.truncation is not None
    assert joined.provenance["kind"] == "truncation"
    assert joined.provenance["arguments"] == single.provenance["arguments"]
    with monkeypatch.context() as patch:
        patch.setattr("ropelens.analysis.analysis_result.render_page", render_page)
        assert ropelens(*analyze, "--sequences", 5).code == 0
    again = rl.open(out)
    assert again.profile.attrs["sequences"] == 5
    xr.testing.assert_identical(again.truncation, joined.truncation)
    page = (out / "index.html").read_text()
    assert "Stopping planes" in page
    assert f"Measured on {joined.truncation.attrs['text']}." in page
    other.write_text("ponmlkjihgfedcba" * 200)
    assert ropelens(*sweep[:3], apart, *FEW, "--text", other).code == 0
    other_text = rl.open(apart)
    assert other_text.profile.attrs["sequences"] == 4, (
        "another text needs another profile"
    )
    assert other_text.provenance["command"] == other_text.truncation.attrs["command"]


@pytest.mark.usefixtures("pageless")
def test_a_sweep_with_other_options_is_not_replaced(
    ropelens, swept, model, text, tmp_path
):
    other = tmp_path / "other.txt"
    before = (swept / "truncation.nc").read_bytes()
    other.write_text("ponmlkjihgfedcba" * 200)
    again = ("truncate", model, *FEW, "--out", swept, "--text")
    for options, words in (
        ((*again, text, "--keep", "0.25"), "keep: [1.0, 0.5], now [0.25]"),
        ((*again, text, "--keep", "", "--bands", 2), "keep: [1.0, 0.5], now []"),
        ((*again, text, "--heads", "0.*"), "heads: None, now 0.*"),
        ((*again, other), f"text: ['{text}'], now ['{other}']"),
    ):
        ended = ropelens(*options)
        assert ended.code == 1
        assert f"{swept} has a sweep with other options" in ended.problem
        assert words in ended.problem
        assert (swept / "truncation.nc").read_bytes() == before
    assert "tokens  " in ropelens(*again, text, "--heads", "0.*", "--plan").out
    assert (swept / "truncation.nc").read_bytes() == before
    ended = ropelens(*again, text)
    assert ended.code == 0
    lines = [
        line for line in ended.err.splitlines() if line.startswith("Within 64 tokens, ")
    ]
    assert any("changes the loss by" in line for line in lines)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--heads", "9.9"), "The model has no head '9.9'"),
        (("--keep", "nan"), "A fraction of planes is from 0 to 1, not nan"),
        (("--keep", ""), "No planes are to be stopped"),
    ],
)
def test_a_plan_refuses_what_a_run_refuses(
    ropelens, model, text, tmp_path, options, words
):
    for last in (("--plan",), ("--out", tmp_path / "out")):
        ended = ropelens("truncate", model, "--text", text, *options, *last)
        assert ended.code == 1
        assert words in ended.problem
    assert not (tmp_path / "out").exists()
