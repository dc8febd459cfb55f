"""The examples of README and docs/ run unchanged, and links have targets."""

import functools
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from llms import llms

import ropelens as rl

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
ANALYZE = functools.cache(rl.analyze)  # two pages analyze the bundled model
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


@pages
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In order, in one namespace. Blocks marked `python skip` need files of the reader."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rl, "analyze", ANALYZE)
    names: dict[str, object] = {}
    block = r"^```python\n(.*?)^```(?:\n\n```text\n(.*?)^```)?"
    for code, output in re.findall(block, page.read_text(), re.M | re.S):
        if page.stem == "tasks":
            with redirect_stdout(StringIO()) as printed:
                exec(compile(code, page.name, "exec"), names)
            assert printed.getvalue() == output
            continue
        small = "rl.Options(context=48, sequences=4)"
        code = code.replace(
            'analyze("bundled")', f'analyze("bundled", options={small})'
        )
        code = code.replace("rl.Options(context=128, sequences=12)", small)
        code = code.replace("rl.Options(", "rl.Options(surrogates=2, ")
        code = code.replace(
            "rl.profile(model, ", "rl.profile(model, budget=False, text="
        )
        code = code.replace("rl.reach(model, ", "rl.reach(model, copies=[48], text=")
        code = code.replace("range(16)", "range(2)")
        exec(compile(code, page.name, "exec"), names)


@pages
def test_names_are_public(page: Path):
    assert set(re.findall(r"\brl\.(\w+)", page.read_text())) <= set(rl.__all__)


@pages
def test_links_have_targets(page: Path):
    for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text()):
        assert (page.parent / link).exists(), link


def test_llms_txt_is_up_to_date_and_short(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(ROOT)
    text = (ROOT / "llms.txt").read_text()
    assert text == llms(), "run `make llms`"
    assert len(text.encode()) < 60_000
    title, summary = text.split("\n\n")[:2]
    assert title == "# ropelens"
    assert all(line.startswith("> ") for line in summary.splitlines())
    for name in rl.__all__:
        assert f"`rl.{name}" in text
