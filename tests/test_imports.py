"""No file of the package imports itself through others, not even inside a function."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ropelens as rl

PACKAGE = Path(rl.__file__).parent


def module_files(package: Path) -> dict[str, Path]:
    """Files of a package by the name under which they are imported."""
    names = {}
    for path in package.rglob("*.py"):
        parts = path.relative_to(package.parent).with_suffix("").parts
        names[".".join(parts).removesuffix(".__init__")] = path
    return names


def import_graph(package: Path) -> dict[str, set[str]]:
    """Modules that each module imports, at any depth of its code."""
    files = module_files(package)

    def imported(module: str, node: ast.AST) -> set[str]:
        if isinstance(node, ast.Import):
            return {alias.name for alias in node.names}
        if not isinstance(node, ast.ImportFrom):
            return set()
        parent = node.module or ""
        if node.level:
            is_package = files[module].name == "__init__.py"
            parts = module.split(".")[: (1 if is_package else 0) - node.level or None]
            parent = ".".join([*parts, *([parent] if parent else [])])
        modules = {f"{parent}.{alias.name}" for alias in node.names}
        return {name if name in files else parent for name in modules}

    return {
        module: {
            name
            for node in ast.walk(ast.parse(path.read_text()))
            for name in imported(module, node)
            if name in files and name != module
        }
        for module, path in files.items()
    }


def check_no_cycle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import cycle: " + " -> ".join(reversed(error.args[1])))


def test_files_import_each_other_in_one_direction() -> None:
    graph = import_graph(PACKAGE)
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
        "from ..pkg.first import thing",
        "def function():\n    from pkg.first import thing",
        "if TYPE_CHECKING:\n    from pkg.first import thing",
    ],
)
def test_every_kind_of_import_closes_a_cycle(tmp_path: Path, statement: str) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "first.py").write_text("from pkg.second import other")
    (package / "second.py").write_text(statement)
    cycle = r"pkg\.(first|second) -> pkg\.(first|second) -> pkg\.(first|second)"
    with pytest.raises(pytest.fail.Exception, match=f"import cycle: {cycle}"):
        check_no_cycle(import_graph(package))
