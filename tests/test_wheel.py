"""A wheel holds all that the package needs outside its checkout, and is not large."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LARGEST = 25_000_000  # bytes


# As `python -m ropelens` for each: torch is imported once.
EACH_IN_TURN = """
import pathlib, runpy, sys
for command in sys.argv[1:]:
    sys.argv = ["ropelens", *command.split()]
    try:
        runpy.run_module("ropelens", run_name="__main__")
    except SystemExit as ended:
        import ropelens
        print(f"ended with {ended.code} of {pathlib.Path(ropelens.__file__).parents[1]}")
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "ropelens", source / "ropelens", ignore=shutil.ignore_patterns("__pycache__")
    )
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command = [sys.executable, "-m", "pip", *build, "--wheel-dir", str(place), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(place.glob("ropelens-*.whl"))


def test_a_wheel_holds_all_but_the_weights_of_early_models(wheel: Path) -> None:
    held = set(zipfile.ZipFile(wheel).namelist())
    files = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "ropelens").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    early = {f"ropelens/bundled/rope-step-{n}/model.safetensors" for n in (1000, 3000, 5000)}
    assert files - held == early
    assert {"ropelens/bundled/rope/model.safetensors", "ropelens/py.typed"} <= held


def test_a_wheel_is_small(wheel: Path) -> None:
    assert wheel.stat().st_size < LARGEST


def test_what_is_left_out_is_said(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    commands = ("list", "rope bundled:nope", "rope bundled:rope-step-1000")
    ended = subprocess.run(
        [sys.executable, "-c", EACH_IN_TURN, *commands],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    lines = ended.stdout.splitlines()
    left_out = [line.split()[0] for line in lines if "(in the repository alone)" in line]
    assert left_out == [f"bundled:rope-step-{step}" for step in (1000, 3000, 5000)]
    codes = re.findall(r"^ended with (\d+) of (.*)$", ended.stdout, re.MULTILINE)
    assert codes == [(code, str(tmp_path)) for code in ("0", "0", "1")]
    assert ended.stderr.startswith("ropelens: no checkpoint called 'rope-step-1000' is bundled")
