"""Draw the pages in reports/ again from their stored results. No model runs.

    python tools/redraw.py [FOLDER]...

Without FOLDER, all pages are drawn, the claims of all models after the claims of each model.
Numbers are written again as `ropelens` saves them now. Answers of scripts that need only stored
numbers get new figures. Other answers keep the figures in their page.
"""

import base64
import gzip
import html
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import xarray as xr

import ropelens as rl
from ropelens.analysis.answer import without_excerpts
from ropelens.analysis.open_folder import rewrite_page
from ropelens.interventions.truncation_table import summarize_truncation
from ropelens.report.claims_page import read_ledger, render_claims
from ropelens.report.figure_page import render_figures
from ropelens.report.run_facts import PageFacts
from ropelens.report.sentences.claims import claims_sentences
from ropelens.runtime.digits import in_float32
from ropelens.runtime.folder import PAGE, RECORD, write_whole
from ropelens.runtime.netcdf import open_results, save
from ropelens.runtime.result_folder import CELL_FORMAT, ResultFolder
from ropelens.runtime.run_record import read_record

ROOT = Path(__file__).parents[1]
REPORTS = ROOT / "reports"
ALL_MODELS = REPORTS / "claims" / "models"
LONG_NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d{6,}(e[-+]\d+)?(?![\w.])")


def main() -> None:
    folders = [Path(name) for name in sys.argv[1:]]
    if not folders:
        pages = sorted(REPORTS.glob(f"*/*/{PAGE}"))
        folders = [page.parent for page in pages if page.parent != ALL_MODELS]
        folders.append(ALL_MODELS)
    for folder in folders:
        redraw(folder)
        print(folder, flush=True)


def redraw(folder: Path) -> None:
    kind = read_record(folder).get("kind")
    if folder.resolve() == ALL_MODELS:
        redraw_all_claims()
    elif kind == "claims":
        redraw_claims(folder)
    elif kind == "answer":
        redraw_answer(folder)
        save_again(folder, change=in_float32)
    else:
        save_again(folder)
        if kind == "comparison" or (folder / "profile.nc").exists():
            rewrite_page(folder)
        else:
            command = read_record(folder)["command"]
            print(f"The profile is not stored. The page needs a measurement: {command}")


def save_again(
    folder: Path, change: Callable[[xr.Dataset], xr.Dataset] | None = None
) -> None:
    """Write the datasets and tables in `folder` again, perhaps with fewer digits."""
    for path in folder.glob("*.nc"):
        results = open_results(path)
        if change is not None:
            results = change(without_excerpts(results))
        save(results, path)
    for path in folder.glob("*.csv"):
        text = path.read_text(encoding="utf-8")
        write_whole(path, LONG_NUMBER.sub(rounded, text))


def rounded(match: re.Match[str]) -> str:
    return CELL_FORMAT % float(match[0])


# claims


def redraw_claims(folder: Path) -> None:
    """Write the ledger of a model and its page again, with its new findings."""
    table, runs = read_ledger(str(folder), folder)
    record = read_record(folder)
    record["runs"] = runs
    record["findings"] = claims_sentences(table)
    results = ResultFolder(
        kind="claims",
        findings=record["findings"],
        files={"claims.csv": table, "claims.json": table},
        record=record,
        page=lambda: render_claims(table, record),
    )
    results.write(folder)


def redraw_all_claims() -> None:
    folders = []
    for path in script_named("claims").ledgers(ALL_MODELS.parent):
        folders.append(path.relative_to(ROOT).as_posix())
    out = ALL_MODELS.relative_to(ROOT).as_posix()
    command = [sys.executable, "-m", "ropelens", "claims", *folders, "--out", out]
    subprocess.run(command, check=True, cwd=ROOT, stderr=subprocess.DEVNULL)


# answers


@dataclass(frozen=True)
class StoredAnswer:
    """The contents of the page of an answer. `figures` have captions as keys."""

    question: str
    findings: list[str]
    figures: Mapping[str, go.Figure]
    about: PageFacts


def redraw_answer(folder: Path) -> None:
    answer = stored_answer((folder / PAGE).read_text(encoding="utf-8"))
    script = folder.parent.name
    if script in NEW_ANSWERS:
        answer = NEW_ANSWERS[script](folder, answer)
    page = render_figures(
        "answer.html",
        answer.figures,
        question=answer.question,
        findings=answer.findings,
        about=answer.about,
    )
    write_whole(folder / PAGE, page)
    write_findings(folder, answer)


def write_findings(folder: Path, answer: StoredAnswer) -> None:
    """Write the question and the findings of the page to run.json."""
    record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
    record["question"] = answer.question
    record["findings"] = [*answer.findings]
    if answer.about.scope:
        record["findings"].append(answer.about.scope)
    write_whole(folder / RECORD, json.dumps(record, indent=2) + "\n")


def stored_answer(page: str) -> StoredAnswer:
    captions = texts_in(page, r'<p class="explain">')
    titles = re.findall(r'id="plot-\d+" role="group" aria-label="([^"]*)"', page)
    drawn = payload(page)["figures"]
    figures = {}
    for number, caption in enumerate(captions):
        figure = go.Figure(drawn[str(number)])
        title = html.unescape(titles[number])
        figures[caption] = figure.update_layout(title_text=title)
    brand = text_in(page, r'<p class="brand">')
    return StoredAnswer(
        question=text_in(page, "<h1>"),
        findings=[text_in(page, r'<p class="lead">'), *texts_in(page, "<li>")],
        figures=figures,
        about=stored_facts(page, model=brand.partition(" · ")[2]),
    )


def stored_facts(page: str, *, model: str) -> PageFacts:
    header = page[page.index("<header") : page.index("</header>")]
    lines = re.findall(r'<p class="facts">(.*?)</p>', header, re.DOTALL)
    scope = html.unescape(lines[1]) if len(lines) > 1 else ""
    names = texts_in(page, "<dt>")
    values = texts_in(page, "<dd>")
    run = dict(zip(names, values, strict=True))
    versions = run.pop("versions", "")
    return PageFacts(
        facts=texts_in(header, "<span>"),
        model=model,
        run=[*run.items()],
        scope=scope,
        versions=versions,
        command=text_in(page, "<code>"),
    )


def texts_in(page: str, tag: str) -> list[str]:
    """The texts of the elements that begin with `tag`."""
    found = re.findall(rf"{tag}([^<]*)<", page)
    return [html.unescape(text) for text in found]


def text_in(page: str, tag: str) -> str:
    """The first of `texts_in`; "" if there is none."""
    return (texts_in(page, tag) or [""])[0]


def payload(page: str) -> dict[str, Any]:
    """The JSON in a page, as `packed_payload` packs it, without its arrays."""
    packed = re.search(r'id="payload">([^<]*)<', page)
    assert packed is not None, "pages of answers have a payload"
    digits = packed[1].translate(str.maketrans("/,.", "<>&"))
    text, _, arrays = gzip.decompress(base64.b85decode(digits)).partition(b"\0")
    assert not arrays, "figures of answers have no packed arrays"
    return json.loads(text)


def script_named(name: str) -> ModuleType:
    """The script of analyses/, which has the name of its folder in reports/."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"analyses/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    sys.modules[name] = script
    spec.loader.exec_module(script)
    return script


def of_profile(folder: Path, stored: StoredAnswer) -> StoredAnswer:
    """The answer of a script that needs only a profile, which positional_heads stores."""
    analysis = rl.open(REPORTS / "positional_heads" / folder.name)
    assert isinstance(analysis, rl.Analysis)
    facts = read_record(folder)
    assert facts["text"] == analysis.provenance["text"]
    assert facts["tokens"] == analysis.provenance["tokens"]
    answer = script_named(folder.parent.name).answer(analysis)
    return replace(
        stored,
        question=answer.question,
        findings=[*answer.findings],
        figures=answer.figures,
    )


def of_sweep(folder: Path, stored: StoredAnswer) -> StoredAnswer:
    """The answer about stopped planes, which needs only the sweep."""
    sweep = open_results(folder / "truncation.nc")
    analysis = SimpleNamespace(
        truncation=sweep, truncation_table=summarize_truncation(sweep)
    )
    answer = script_named(folder.parent.name).answer(analysis)
    return replace(stored, findings=[*answer.findings], figures=answer.figures)


def of_reach(folder: Path, stored: StoredAnswer) -> StoredAnswer:
    """The answer about copies and needles that were found."""
    script = script_named(folder.parent.name)
    chosen = script.heads_by_content(pd.read_csv(folder / "heads.csv"))
    reach = open_results(folder / "reach.nc")
    needles = open_results(folder / "needles.nc").assign_attrs(kind="reach")
    answer = script.answer_from(chosen, reach, needles)
    return replace(
        stored,
        question=answer.question,
        findings=[*answer.findings],
        figures=answer.figures,
    )


def of_silenced_heads(folder: Path, stored: StoredAnswer) -> StoredAnswer:
    """Figures of the losses without heads."""
    script = script_named(folder.parent.name)
    table = pd.read_csv(folder / "causal.csv").fillna({"label": ""})
    is_repeated = table["tokens"].isin(script.REPEATED)
    rows = table[~is_repeated].to_dict("records")
    repeated = table[is_repeated].to_dict("records")
    return replace(stored, figures=script.figures_of(rows, repeated))


NEW_ANSWERS = {
    "causal": of_silenced_heads,
    "positional_heads": of_profile,
    "frequency_norms": of_profile,
    "truncation": of_sweep,
    "reach": of_reach,
}
"""Functions that draw the answer of a script again from stored numbers."""


if __name__ == "__main__":
    main()
