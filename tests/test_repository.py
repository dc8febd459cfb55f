"""Rules of the project that a test can check, and the files of a wheel and an sdist."""

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from graphlib import CycleError, TopologicalSorter
from itertools import chain
from pathlib import Path

import pytest
from checked_modules import IN_FITS, WITH_WARNINGS, modules_of_rooms
from only_in_repository import repository_path
from packaging.version import Version

import ropelens as rl
from ropelens.checkpoints.bundled import BUNDLED, bundled_facts, bundled_path
from ropelens.compatibility import OLDEST_TRANSFORMERS
from ropelens.errors import BadArgument

ROOT = Path(__file__).parents[1]
NAMES = 62  # public names, at most
WORDS = {
    "README.md": 9_000,
    "CONTRIBUTING.md": 6_000,
    "CHANGELOG.md": 5_000,
    "reports/README.md": 17_000,
}
"""Largest size in bytes of pages for readers in a hurry."""


MOST_BYTES_OF_REPORTS = 25_000_000


def test_reports_stay_small():
    reports = repository_path("reports/index.html").parent
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=reports, capture_output=True, text=True
    )
    if listed.returncode:
        pytest.skip("git lists the committed files")
    files = [reports / name for name in listed.stdout.split("\0") if name]
    sizes = [file.stat().st_size for file in files if file.is_file()]
    assert sum(sizes) <= MOST_BYTES_OF_REPORTS


def test_public_names_stand_where_the_table_says():
    for name in rl.__all__:
        assert getattr(rl, name) is not None
    stub = (ROOT / "ropelens/__init__.pyi").read_text()
    assert sorted(re.findall(r"import (\w+) as \1\n", stub)) == sorted(rl.__all__)


def test_no_module_takes_the_place_of_a_public_name():
    modules = {path.stem for path in (ROOT / "ropelens").iterdir()}
    assert modules & set(rl.__all__) == set()


def test_constraints_pin_what_the_package_needs():
    pinned = dict(
        line.lower().replace("_", "-").split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    assert pinned["torch"] == "2.13.0"
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for need in [*project["dependencies"], *chain.from_iterable(extras.values())]:
        assert re.split(r"[<>=\[]", need)[0].lower() in pinned, need


def test_the_citation_has_the_version_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = (ROOT / "CITATION.cff").read_text()
    assert f"\nversion: {project['version']}\n" in citation
    assert f"\nlicense: {project['license']}\n" in citation


def test_what_is_installed_is_pinned_by_its_hashes():
    """Except torch, whose wheels differ between indexes. No file names an index."""
    pinned = re.findall(r"^\S+==\S+$", (ROOT / "constraints.txt").read_text(), re.M)
    locked: list[str] = []
    for file in ("run.txt", "work.txt"):
        text = (ROOT / "requirements" / file).read_text()
        assert "://" not in text
        found = re.findall(
            r"^(\S+==\S+) \\\n    --hash=sha256:[0-9a-f]{64}", text, re.M
        )
        assert len(found) == text.count("==")
        locked += found
    known = {pin.lower().replace("_", "-") for pin in pinned}
    assert {pin.lower().replace("_", "-") for pin in locked} == known - {
        "torch==2.13.0"
    }


def test_the_oldest_versions_are_those_that_the_package_allows():
    """Except torch, which `make test-oldest` installs after them."""
    lock = (ROOT / "requirements/oldest.txt").read_text()
    assert "://" not in lock
    pins = dict(
        re.findall(r"^([\w-]+)==(\S+) \\\n    --hash=sha256:[0-9a-f]{64}", lock, re.M)
    )
    assert len(pins) == lock.count("==")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needs = [*project["dependencies"], *extras["transformer-lens"], *extras["gguf"]]
    for need in [*needs, *extras["test"]]:
        name, oldest = need.split(">=")
        if name != "torch":
            same = Version(pins[name]).release[: len(Version(oldest).release)]
            assert same == Version(oldest).release, need
    minimum = project["dependencies"][1]
    assert minimum == f"transformers>={OLDEST_TRANSFORMERS}"


def test_the_hook_for_commits_has_the_version_of_ruff_that_is_pinned():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    (pinned,) = re.findall(r"^ruff==\S+$", (ROOT / "constraints.txt").read_text(), re.M)
    assert set(re.findall(r"ruff==[\d.]+", hooks)) == {pinned}


def test_public_names_and_pages_keep_their_size():
    assert len(rl.__all__) <= NAMES
    for name, most in WORDS.items():
        assert (ROOT / name).stat().st_size <= most, name


def test_modules_whose_shapes_are_not_checked_exist():
    assert modules_of_rooms() >= WITH_WARNINGS | IN_FITS


def test_readme_names_commands_that_exist():
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^\s*make (\w+)", readme, re.MULTILINE):
        assert f"\n{target}:" in makefile, target
    for script in re.findall(r"(?:analyses|benchmarks)/\w+\.py", readme):
        assert (ROOT / script).exists(), script


def import_graph(package: Path) -> dict[str, set[str]]:
    """Modules that each module imports, at any depth of its code."""
    graph = {}
    paths = package.rglob("*.py")
    files = {
        path: path.relative_to(package.parent).with_suffix("").parts for path in paths
    }
    names = {".".join(parts).removesuffix(".__init__") for parts in files.values()}
    for path, parts in files.items():
        imported = set()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            if isinstance(node, ast.ImportFrom):
                base = parts[: -node.level] if node.level else ()
                parent = ".".join([*base, *filter(None, [node.module])])
                modules = {f"{parent}.{alias.name}" for alias in node.names}
                imported |= {name if name in names else parent for name in modules}
        module = ".".join(parts).removesuffix(".__init__")
        graph[module] = imported & names - {module}
    return graph


def check_no_cycle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(reversed(error.args[1])))


def test_files_import_each_other_in_one_direction():
    graph = import_graph(ROOT / "ropelens")
    assert "ropelens.model.live_model" in graph["ropelens.model.bridge"]
    check_no_cycle(graph)


@pytest.mark.parametrize(
    "statement",
    [
        "from pkg.first import thing",
        "import pkg.first",
        "from pkg import first",
        "from .first import thing",
        "from . import first",
        "def function():\n    from pkg.first import thing",
        "if TYPE_CHECKING:\n    from pkg.first import thing",
    ],
)
def test_every_kind_of_import_closes_a_cycle(tmp_path: Path, statement: str):
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "first.py").write_text("from pkg.second import other")
    (package / "second.py").write_text(statement)
    with pytest.raises(
        pytest.fail.Exception, match=r"import cycle: pkg\.\w+ -> pkg\.\w+"
    ):
        check_no_cycle(import_graph(package))


LARGEST = 12_000_000  # bytes
WEIGHTS = "ropelens/bundled/rope/model.safetensors"
FOLDERS = (
    "ropelens",
    "tests",
    "tools",
    "benchmarks",
    "analyses",
    "docs",
    "requirements",
)
FILES = (
    "MANIFEST.in",
    "pyproject.toml",
    "README.md",
    "LICENSE",
    "Makefile",
    "llms.txt",
)
FILES += ("CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "constraints.txt")


def run_build(source: Path, kind: str, place: Path) -> Path:
    """Build a wheel or an sdist of the folder `source`, as `python -m build` does."""
    code = f"from setuptools.build_meta import build_{kind} as build; "
    code += f"build({str(place)!r})"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = place.glob("ropelens-*")
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution."""
    place = tmp_path_factory.mktemp("sdist")
    source = place / "source"
    source.mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, source)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name)
    archive = run_build(source, "sdist", place / "built")
    assert archive.stat().st_size < LARGEST
    with tarfile.open(archive) as opened:
        opened.extractall(place, filter="data")
    return place / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_build(sdist, "wheel", tmp_path_factory.mktemp("wheel"))


def files_in(folder: Path) -> set[str]:
    """The files in a folder of the project, except files that Python makes."""
    paths = {path for path in folder.rglob("*") if path.is_file()}
    return {
        path.relative_to(folder.parent).as_posix()
        for path in paths
        if "__pycache__" not in path.parts
    }


def test_a_wheel_has_the_package_with_one_checkpoint(wheel: Path):
    contents = set(zipfile.ZipFile(wheel).namelist())
    missing = files_in(ROOT / "ropelens") - contents
    for file in missing:
        assert file.startswith("ropelens/bundled/")
        assert not file.startswith("ropelens/bundled/rope/")
    assert {WEIGHTS, "ropelens/py.typed", "ropelens/__init__.pyi"} <= contents
    weights = {file for file in contents if file.endswith(".safetensors")}
    assert weights == {WEIGHTS}
    assert not any(file.startswith("tests/") for file in contents)
    assert wheel.stat().st_size < LARGEST


def test_an_sdist_has_the_files_of_the_build_and_of_the_tests(sdist: Path):
    for name in FOLDERS[1:]:
        expected = {
            file
            for file in files_in(ROOT / name)
            if not file.startswith(("tools/study/", "docs/reference/"))
        }
        assert files_in(sdist / name) == expected
    assert {*FILES} <= {path.name for path in sdist.iterdir()}
    weights = [
        path.relative_to(sdist).as_posix()
        for path in (sdist / "ropelens").rglob("*.safetensors")
    ]
    assert weights == [WEIGHTS]


def test_missing_checkpoints_are_reported(wheel, tmp_path, monkeypatch):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    monkeypatch.setattr(
        "ropelens.checkpoints.bundled.files", lambda _: tmp_path / "ropelens"
    )
    facts = {name: bundled_facts(name)["what"] for name in BUNDLED}
    here = [
        name for name, what in facts.items() if "(only in the repository)" not in what
    ]
    assert here == ["rope"]
    assert bundled_path("rope") == tmp_path / "ropelens" / "bundled" / "rope"
    with pytest.raises(BadArgument) as error:
        bundled_path("nope")
    lines = str(error.value).splitlines()
    assert lines == [
        "The checkpoint bundled:nope is only in the repository of ropelens.",
        f"  seen:  this installation has no weights in {tmp_path}/ropelens/bundled/nope",
        "  try:   bundled; or the folder ropelens/bundled/nope of the repository",
    ]
