"""The scripts run as their docstrings say, and use nothing that a user could not."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from trained import story

import ropelens as rl

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "analyses").glob("*.py"))
MORE = {
    "causal": {"causal.csv"},
    "reach": {"reach.nc"},
    "truncation": {"truncation.nc", "truncation.csv"},
}
"""What an analysis writes beside the four files of every answer."""
ON_A_MODEL = [script for script in SCRIPTS if script.stem != "variants"]
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


@pytest.mark.parametrize("script", ON_A_MODEL, ids=lambda path: path.stem)
def test_runs_on_the_bundled_checkpoint(script: Path, tmp_path: Path) -> None:
    (tmp_path / "analyses").mkdir()
    copy = shutil.copy(script, tmp_path / "analyses")
    command = [sys.executable, copy, "--context", "48", "--sequences", "4"]
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "reports" / script.stem / "bundled-rope"
    assert done.stdout.strip() == str(folder / "index.html")
    files = {path.name for path in folder.iterdir()}
    common = {"index.html", "profile.nc", "heads.csv", "run.json"}
    assert files == common | MORE.get(script.stem, set())
    assert (tmp_path / "reports" / "index.html").exists()


@names
def test_says_what_it_is_for_and_what_went_wrong(script: Path, tmp_path: Path) -> None:
    def run(*options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, script, *options]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)

    told = run("--help")
    title = (ast.get_docstring(ast.parse(script.read_text())) or "").splitlines()[0]
    assert (told.returncode, told.stderr) == (0, "")
    assert title in told.stdout
    failed = run("--text", "nowhere")
    assert (failed.returncode, failed.stdout) == (1, "")
    assert failed.stderr.startswith("ropelens: There is no text at nowhere")
    assert len(failed.stderr.splitlines()) == 1
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
