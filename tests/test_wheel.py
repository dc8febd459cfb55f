"""A wheel holds all that the package needs outside its checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_wheel_holds_code_templates_and_the_bundled_checkpoint(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(
        ROOT / "ropelens", source / "ropelens", ignore=shutil.ignore_patterns("__pycache__")
    )
    build = ["wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    command = [sys.executable, "-m", "pip", *build, "--wheel-dir", str(tmp_path), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("ropelens-*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    files = {
        path.relative_to(source).as_posix()
        for path in (source / "ropelens").rglob("*")
        if path.is_file()
    }
    assert files - held == set()
    assert {"ropelens/bundled/rope/model.safetensors", "ropelens/py.typed"} <= held
