"""The scripts run as their docstrings say, and use nothing that a user could not."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import ropelens as rl

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "analyses").glob("*.py"))
MORE = {"reach": {"reach.nc"}, "truncation": {"truncation.nc", "truncation.csv"}}
"""What an analysis writes beside the four files of every answer."""
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


@names
def test_runs_on_the_bundled_checkpoint(script: Path, tmp_path: Path) -> None:
    (tmp_path / "analyses").mkdir()
    copy = shutil.copy(script, tmp_path / "analyses")
    command = [sys.executable, copy, "--context", "96", "--sequences", "6"]
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
