"""The scripts run as their docstrings say, and use nothing that a user could not."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
from cli_runs import Command, python
from tiny_checkpoints import save_tiny
from trained import story

import ropelens as rl

__all__ = ["python"]

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "analyses").glob("*.py"))
MORE = {
    "causal": {"causal.csv"},
    "reach": {"reach.nc"},
    "truncation": {"truncation.nc", "truncation.csv"},
}
"""What an analysis writes beside the four files of every answer."""
LEADS = {
    "causal": "Against random heads of their layers, silencing the 4 heads that go most by"
}
"""How answers begin that lead with a sentence without intervals."""
ON_THE_BUNDLED = [s for s in SCRIPTS if s.stem not in ("variants", "truncation", "copying")]
names = pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)


@names
def test_uses_the_public_api_only(script: Path) -> None:
    tree = ast.parse(script.read_text())
    imported = [
        name
        for node in ast.walk(tree)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [str(node.module)]
            if isinstance(node, ast.ImportFrom)
            else []
        )
    ]
    assert [name for name in imported if name.startswith("ropelens")] == ["ropelens"]
    used = {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "rl"
    }
    assert used
    assert used <= set(rl.__all__)


def run_copy(python: Command, script: Path, place: Path, *options: object) -> Path:
    """Run a copy of `script` in a project of its own at `place`; its reports."""
    (place / "analyses").mkdir()
    copy = shutil.copy(script, place / "analyses")
    ended = python(copy, *options, "--context", 48, "--sequences", 4)
    assert ended.code == 0, ended.err
    reports = place / "reports"
    (folder,) = (reports / script.stem).iterdir()
    assert ended.out == f"{folder / 'index.html'}\n"
    common = {"index.html", "profile.nc", "heads.csv", "run.json"}
    files = {path.name for path in folder.iterdir()}
    assert files == common | MORE.get(script.stem, set())
    assert (reports / "index.html").exists()
    return folder


@pytest.mark.parametrize("script", ON_THE_BUNDLED, ids=lambda path: path.stem)
def test_runs_on_the_bundled_checkpoint(script: Path, tmp_path: Path, python: Command) -> None:
    folder = run_copy(python, script, tmp_path)
    assert folder.name == "bundled-rope"
    lead, *_ = json.loads((folder / "run.json").read_text())["findings"]
    assert lead.startswith(LEADS.get(script.stem, ""))
    assert script.stem not in LEADS or "nats" not in lead, "intervals come below"


def test_a_sweep_of_a_model_and_text_of_ones_own(tmp_path: Path, python: Command) -> None:
    """Of a model with few planes: that of the bundled checkpoint takes a minute."""
    model = save_tiny(tmp_path / "my-model")
    (tmp_path / "story.txt").write_text(story(40))
    script = ROOT / "analyses" / "truncation.py"
    text = ("--text", tmp_path / "story.txt")
    folder = run_copy(python, script, tmp_path, model, *text)
    assert folder.name == "my-model"
    record = json.loads((folder / "run.json").read_text())
    assert record["rows"] == 64
    assert "may stop for nothing; stopping the fastest" in record["findings"][0]
    assert "interval" not in record["findings"][0]
    swept = rl.open_truncation(folder / "truncation.nc")
    assert set(swept["kind"].values) >= {"none", "slow", "fast", "random", "band"}


@names
def test_says_what_it_is_for_and_what_went_wrong(
    script: Path, tmp_path: Path, python: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    told = python(script, "--help")
    title = (ast.get_docstring(ast.parse(script.read_text())) or "").splitlines()[0]
    assert (told.code, told.err) == (0, "")
    assert title in told.out
    option, of = ("--runs", "folder") if script.stem == "copying" else ("--text", "text")
    failed = python(script, option, "nowhere")
    assert failed.code == 1
    assert failed.problem.startswith(f"There is no {of} ")
    assert "nowhere" in failed.problem
    assert not list(tmp_path.iterdir())


STUDY = """\
variants = ["rope", "p-rope:0.5", "nope"]
sizes = ["2x32x2x1"]
context = 32
vocabulary = 300
steps = 2
"""


def test_variants_are_trained_and_compared(tmp_path: Path) -> None:
    (tmp_path / "analyses").mkdir()
    script = shutil.copy(ROOT / "analyses" / "variants.py", tmp_path / "analyses")
    (tmp_path / "small.toml").write_text(STUDY)
    (tmp_path / "story.txt").write_text(story(900), encoding="utf-8")
    options = ("--text", "story.txt", "--study", "small.toml", "--sequences", "2")
    done = subprocess.run(
        [sys.executable, script, *options],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "reports" / "variants" / "small"
    assert done.stdout.strip() == str(folder / "index.html")
    said = json.loads((folder / "run.json").read_text())["findings"]
    assert said[0].startswith("Loss against that of rope, nats per token")
    (peaks,) = [sentence for sentence in said if "largest share" in sentence]
    assert peaks.endswith("evenly spread: 12%.")
    assert "% (one that stands still); evenly" in peaks
    found = rl.open_comparison(folder / "comparison.nc")
    rope = found.isel(entry=0)
    product = (rope["q_norm"].mean("head") * rope["k_norm"][:, 0]).values
    share = (product / product.sum(1, keepdims=True)).mean(0)
    wavelength = rope["wavelength"][0, share.argmax()].item()
    assert f"rope {share.max():.0%} ({wavelength:,.0f} tokens), p-rope:0.5" in peaks
    (still,) = [sentence for sentence in said if "stops carry" in sentence]
    assert still.startswith("The 4 planes of 8 that p-rope:0.5 stops carry ")
    assert "% of the squared query norm" in still
    assert "small" in (tmp_path / "reports" / "index.html").read_text()
    copying_of_the_same_runs(tmp_path)


def copying_of_the_same_runs(place: Path) -> None:
    """Of two steps no head copies; what was measured stands for weights that are deleted."""
    script = shutil.copy(ROOT / "analyses" / "copying.py", place / "analyses")
    folder = place / "reports" / "copying" / "variants"
    tables = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, script, "--runs", "runs/variants", "--sequences", "2"],
            capture_output=True,
            text=True,
            cwd=place,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr
        tables.append((folder / "costs.csv").read_text())
        for weights in (place / "runs").glob("**/model.safetensors"):
            weights.unlink()
    assert tables[0] == tables[1]
    said = json.loads((folder / "run.json").read_text())["findings"]
    assert any("rope 0 of 1; p-rope:0.5 0 of 1; nope 0 of 1." in line for line in said)
    assert any(line.startswith("No run has an induction head") for line in said)
    costs = pd.read_csv(folder / "costs.csv")
    assert costs["what"].unique().tolist() == ["none"]
    assert len(costs) == 3
