"""A wheel has all files that the package needs outside its checkout, and is small."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from ropelens.checkpoints.bundled import BUNDLED, bundled_facts, bundled_path
from ropelens.errors import BadArgument

ROOT = Path(__file__).parents[1]
LARGEST = 25_000_000  # bytes


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("wheel")
    source = place / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignore = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "ropelens", source / "ropelens", ignore=ignore)
    build = f"from setuptools.build_meta import build_wheel; build_wheel({str(place)!r})"
    command = [sys.executable, "-c", build]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return next(place.glob("ropelens-*.whl"))


def test_a_wheel_has_all_files_except_the_weights_of_early_models(wheel: Path):
    contents = set(zipfile.ZipFile(wheel).namelist())
    paths = [path for path in (ROOT / "ropelens").rglob("*") if path.is_file()]
    paths = [path for path in paths if "__pycache__" not in path.parts]
    files = {path.relative_to(ROOT).as_posix() for path in paths}
    early = {f"ropelens/bundled/rope-step-{n}/model.safetensors" for n in (1000, 3000, 5000)}
    assert files - contents == early
    assert {"ropelens/bundled/rope/model.safetensors", "ropelens/py.typed"} <= contents


def test_missing_weights_are_reported(wheel, tmp_path, monkeypatch):
    assert wheel.stat().st_size < LARGEST
    zipfile.ZipFile(wheel).extractall(tmp_path)
    monkeypatch.setattr("ropelens.checkpoints.bundled.files", lambda _: tmp_path / "ropelens")
    facts = {name: bundled_facts(name)["what"] for name in BUNDLED}
    left_out = [name for name, what in facts.items() if "(only in the repository)" in what]
    assert left_out == [f"rope-step-{step}" for step in (1000, 3000, 5000)]
    with pytest.raises(BadArgument, match="a wheel does not contain the early steps"):
        bundled_path("rope-step-1000")
    assert bundled_path("nope") == tmp_path / "ropelens" / "bundled" / "nope"
