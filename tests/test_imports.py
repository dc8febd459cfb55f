"""No file of the package imports itself through others, not even inside a function."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import ropelens as rl

PACKAGE = Path(rl.__file__).parent


def import_graph(package: Path) -> dict[str, set[str]]:
    """Modules that each module imports, at any depth of its code."""
    graph = {}
    paths = package.rglob("*.py")
    files = {path: path.relative_to(package.parent).with_suffix("").parts for path in paths}
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
        "def function():\n    from pkg.first import thing",
        "if TYPE_CHECKING:\n    from pkg.first import thing",
    ],
)
def test_every_kind_of_import_closes_a_cycle(tmp_path: Path, statement: str) -> None:
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "first.py").write_text("from pkg.second import other")
    (package / "second.py").write_text(statement)
    with pytest.raises(pytest.fail.Exception, match=r"import cycle: pkg\.\w+ -> pkg\.\w+"):
        check_no_cycle(import_graph(package))
