"""The examples of README and docs/ run unchanged, and links have targets."""

import functools
import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest
from llms import llms
from only_in_repository import repository_path
from oracles.versions import skip_before

import ropelens as rl
from ropelens.claims.claims import CLAIMS

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
ANALYZE = functools.cache(rl.analyze)  # two pages analyze the bundled model
pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
LONG = ("guide", "tasks")  # their examples take as long as those of all other pages
BLOCK = re.compile(
    r"^```python\n(?P<code>.*?)^```(?:\n\n```text\n(?P<output>.*?)^```)?",
    re.MULTILINE | re.DOTALL,
)
SMALL = "rl.Options(context=48, sequences=4)"
# Replacements that make the work of an example small
SMALLER = {
    'analyze("bundled")': f'analyze("bundled", options={SMALL})',
    "rl.Options(context=128, sequences=12)": SMALL,
    "rl.Options(": "rl.Options(surrogates=2, ",
    "rl.profile(model, ": "rl.profile(model, budget=False, text=",
    "rl.reach(model, ": "rl.reach(model, copies=[48], text=",
    "range(16)": "range(2)",
}


def smaller(code: str) -> str:
    for example, replacement in SMALLER.items():
        code = code.replace(example, replacement)
    return code


def pages_with_examples() -> list[object]:
    cases: list[object] = []
    for page in PAGES:
        marks = [pytest.mark.thorough] if page.stem in LONG else []
        cases.append(pytest.param(page, id=page.stem, marks=marks))
    return cases


@pytest.mark.parametrize("page", pages_with_examples())
def test_examples_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In order, in one namespace. Blocks marked `python skip` need files of the reader."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rl, "analyze", ANALYZE)
    names: dict[str, object] = {}
    for block in BLOCK.finditer(page.read_text()):
        if page.stem == "tasks":  # it states the output of its examples
            with redirect_stdout(StringIO()) as printed:
                exec(compile(block["code"], page.name, "exec"), names)
            assert printed.getvalue() == block["output"]
        else:
            exec(compile(smaller(block["code"]), page.name, "exec"), names)


@pages
def test_names_are_public(page: Path):
    assert set(re.findall(r"\brl\.(\w+)", page.read_text())) <= set(rl.__all__)


def test_the_page_of_the_paper_names_all_claims():
    page = (ROOT / "docs/paper.md").read_text()
    assert {claim.name for claim in CLAIMS} <= {*re.findall(r"`(\w+)`", page)}


LINK = re.compile(r"\]\((?P<path>[^)#:]*)(?:#(?P<anchor>[^)]*))?\)")
WITH_LINKS = [*PAGES, ROOT / "reports/README.md", ROOT / "tools/README.md"]


def anchors_of(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    anchors = set()
    without_code = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    for heading in re.findall(r"^#+ (.+)$", without_code, re.M):
        letters = re.sub(r"[^\w\- ]", "", heading.lower())
        anchors.add(letters.replace(" ", "-"))
    return anchors


@pytest.mark.parametrize("page", WITH_LINKS, ids=str)
def test_links_have_targets(page: Path):
    if "reports" in page.parts:
        repository_path("reports/claims")
    for link in LINK.finditer(page.read_text()):
        if "reports/" in link["path"]:
            repository_path("reports/claims")  # an sdist has no reports
        target = page.parent / link["path"] if link["path"] else page
        assert target.exists(), link[0]
        if link["anchor"] and target.suffix == ".md":
            assert link["anchor"] in anchors_of(target), link[0]


def test_llms_txt_is_up_to_date_and_short(monkeypatch: pytest.MonkeyPatch):
    skip_before("typer", "0.29", "writes help with other words")
    monkeypatch.chdir(ROOT)
    text = (ROOT / "llms.txt").read_text()
    assert text == llms(), "run `make llms`"
    assert len(text.encode()) < 60_000
    title, summary = text.split("\n\n")[:2]
    assert title == "# ropelens"
    assert all(line.startswith("> ") for line in summary.splitlines())
    for name in rl.__all__:
        assert f"`rl.{name}" in text
