"""Write docs/reference/: the public names, the examples with their output, the model families.

    make docs

The chapters are the groups of ropelens/__init__.pyi. An example runs before it is shown. A
failing example stops the build, and so does every warning of pdoc.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import get_type_hints

import pdoc.doc
import pdoc.render

import ropelens as rl

HERE = Path(__file__).parent
OUT = HERE / "reference"
FAMILIES = HERE / "families.md"
STUB = HERE.parent / "ropelens" / "__init__.pyi"
MODULE_PATH = re.compile(
    r'(?:<span class="n">\w+</span><span class="o">\.</span>)+(?=<span)'
)
"""The module before the name of a type in a signature, such as xarray.core.dataset."""


def chapters() -> dict[str, list[str]]:
    """The public names by group."""
    names: dict[str, list[str]] = {}
    for line in STUB.read_text().splitlines():
        if line.startswith("# "):
            title = line.removeprefix("# ")
        elif name := re.search(r" as (\w+)$", line):
            names.setdefault(title, []).append(name[1])
    return names


def reference() -> pdoc.doc.Module:
    """The package with its public names imported."""
    for name in rl.__all__:
        vars(rl)[name] = getattr(rl, name)  # pdoc does not import lazy names
    for kind in rl.Options.__mro__[
        :2
    ]:  # only types, without the help of the command line
        kind.__annotations__ = kind.__init__.__annotations__ = get_type_hints(kind)
    package = pdoc.doc.Module(rl)
    undescribed = [name for name in rl.__all__ if not package.members[name].docstring]
    assert not undescribed, undescribed
    return package


def example(script: Path) -> pdoc.doc.Module:
    """The title of a script, its code, its output, and links to the pages that it wrote."""
    before = set(OUT.iterdir())
    command = [sys.executable, "-W", "error", script]
    done = subprocess.run(
        command, cwd=OUT, stdout=subprocess.PIPE, text=True, check=True
    )
    code = script.read_text()
    title = ast.get_docstring(ast.parse(code)) or ""
    body = code.split('"""', 2)[2].strip()
    written = sorted(path.name for path in set(OUT.iterdir()) - before)
    links = [f"It wrote [{name}]({name})." for name in written]
    parts = [title, f"```python\n{body}\n```", f"```\n{done.stdout}```", *links]
    return pdoc.doc.Module(ModuleType(script.stem, "\n\n".join(parts)))


def main() -> None:
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir()
    os.environ["OMP_NUM_THREADS"] = "1"
    pdoc.render.configure(
        docformat="markdown",
        search=False,
        show_source=False,
        template_directory=HERE / "templates",
    )
    pdoc.render.env.globals["chapters"] = chapters()
    scripts = sorted((HERE / "examples").glob("*.py"))
    pages = {"ropelens": reference()} | {
        script.stem: example(script) for script in scripts
    }
    pages["families"] = pdoc.doc.Module(ModuleType("families", FAMILIES.read_text()))
    for name, module in pages.items():
        page = pdoc.render.html_module(module, pages)
        if name == "ropelens":
            page = MODULE_PATH.sub("", page)
        (OUT / f"{name}.html").write_text(page)
    (OUT / "index.html").write_text(pdoc.render.html_index(pages))
    print(OUT / "ropelens.html")


if __name__ == "__main__":
    main()
