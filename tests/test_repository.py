"""Rules of the project that a test can hold."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import ropelens as rl

ROOT = Path(__file__).parents[1]


def test_public_names_stand_where_the_table_says() -> None:
    for name in rl.__all__:
        assert getattr(rl, name) is not None
    stub = (ROOT / "ropelens/__init__.pyi").read_text()
    assert sorted(re.findall(r"import (\w+) as \1\n", stub)) == sorted(rl.__all__)


def test_errors_that_docstrings_name_are_public() -> None:
    known = {
        name
        for file in (ROOT / "ropelens").rglob("*.py")
        for name in re.findall(
            r"^class (\w+)\((?:RopelensError|BadArgument)\)", file.read_text(), re.M
        )
    }
    assert {"BadText", "Busy"} <= known
    named = " ".join(str(getattr(rl, name).__doc__) for name in rl.__all__)
    assert {error for error in known if error in named} <= set(rl.__all__)


def test_no_module_takes_the_place_of_a_public_name() -> None:
    modules = {path.stem for path in (ROOT / "ropelens").iterdir()}
    assert modules & set(rl.__all__) == set()


def test_every_figure_is_public() -> None:
    files = (ROOT / "ropelens/figures").glob("*.py")
    drawn = {
        name
        for file in files
        for name in re.findall(r"^def (plot_\w+)", file.read_text(), re.M)
    }
    assert {name for name in rl.__all__ if name.startswith("plot_")} == drawn


def test_constraints_pin_what_the_package_needs() -> None:
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


def test_what_is_installed_is_pinned_by_its_hashes() -> None:
    """All but torch, whose wheel differs from index to index; no index is named."""
    pinned = re.findall(r"^\S+==\S+$", (ROOT / "constraints.txt").read_text(), re.M)
    locked: list[str] = []
    for file in ("run.txt", "work.txt"):
        text = (ROOT / "requirements" / file).read_text()
        assert "://" not in text
        found = re.findall(r"^(\S+==\S+) \\\n    --hash=sha256:[0-9a-f]{64}", text, re.M)
        assert len(found) == text.count("==")
        locked += found
    known = {pin.lower().replace("_", "-") for pin in pinned}
    assert {pin.lower().replace("_", "-") for pin in locked} == known - {"torch==2.13.0"}


def test_no_file_grows_past_comfort() -> None:
    long = {
        str(path.relative_to(ROOT)): lines
        for folder in ("ropelens", "analyses", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if (lines := len(path.read_text().splitlines())) > 400
    }
    assert not long


def test_readme_names_commands_that_exist() -> None:
    readme = (ROOT / "README.md").read_text()
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^\s*make (\w+)", readme, re.MULTILINE):
        assert f"\n{target}:" in makefile, target
    for script in re.findall(r"(?:analyses|benchmarks)/\w+\.py", readme):
        assert (ROOT / script).exists(), script


def test_figures_and_pages_load_neither_torch_nor_transformers() -> None:
    script = (
        "import sys, ropelens.figures, ropelens.report\n"
        "assert not {'torch', 'transformers', 'transformer_lens'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
