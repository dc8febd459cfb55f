"""Result folders with a page: answers of scripts, comparisons, and any page made again."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.analysis.analysis import FACTS, Analysis, open_analysis
from ropelens.comparison.table import summarize_comparison
from ropelens.errors import BadArgument
from ropelens.files.folder import file_name
from ropelens.files.results import open_results, read_own_record, write_folder, write_page
from ropelens.report.answer import render_answer
from ropelens.report.comparison import QUESTION, render_comparison
from ropelens.report.comparison_words import findings as comparison_findings
from ropelens.report.words import scope


@dataclass(frozen=True)
class Answer:
    """What a script answers: one question on one model.

    `findings` are sentences with numbers, the most important first; `figures` go by their
    captions, each explained in a sentence or two, in order; `more` are further results by
    the names of their files ("reach.nc", "truncation.csv").
    """

    question: str
    findings: Sequence[str]
    figures: Mapping[str, go.Figure]
    more: Mapping[str, xr.Dataset | pd.DataFrame] = field(default_factory=dict)


def write_answer(folder: str | Path, analysis: Analysis, answer: Answer) -> Path:
    """Write what a script found on one model; the path of its page.

    `folder` is the script's; the results go into a folder in it named after the model:
    index.html (one file, no network), run.json, and the numbers of `analysis` and of the
    answer. All of them are written or, after an error, what was there before stays.
    """
    model = file_name(str(analysis.profile.attrs["model"]))
    folder = Path(folder) / (model.strip(".-") or "model")
    folder.parent.mkdir(parents=True, exist_ok=True)
    facts = {name: analysis.profile.attrs[name] for name in FACTS}
    findings = [*answer.findings, *filter(None, [scope(analysis.profile.attrs)])]
    more = {
        name: result.assign_attrs(facts) if isinstance(result, xr.Dataset) else result
        for name, result in answer.more.items()
    }
    return write_folder(
        folder,
        record=analysis.provenance
        | {"kind": "answer", "question": answer.question, "findings": findings},
        results=analysis.results | more,
        page=lambda: render_answer(
            answer.question, answer.findings, answer.figures, analysis.profile, analysis.heads
        ),
    )


OF_RUNS = ("context", "sequences", "head_sequences", "growth_sequences", "data_sha256")
"""What run.json tells of comparisons of trained runs alone."""


def write_comparison(
    folder: str | Path,
    comparison: xr.Dataset,
    *,
    question: str = QUESTION,
    lead: str = "",
    findings: Sequence[str] = (),
    more: Mapping[str, xr.Dataset | pd.DataFrame] = MappingProxyType({}),
    command: str | None = None,
) -> Path:
    """Write what `compare` gave, and its table; return the path of the page.

    There will be index.html (one file, no network), comparison.nc, comparison.csv and
    run.json in `folder`, all of them or, after an error, what was there before. `lead` is the
    sentence that answers your `question`, told first; `findings` are sentences of your own,
    told after those that the numbers give by themselves; `more` are
    further results by the names of their files, such as "heads.csv"; `command`
    is what a shell would be told to do the same again; None: the one that runs.
    """
    comparison = comparison.assign_attrs(
        question=question,
        command=command or shlex.join(["python", *sys.argv]),
        lead=lead,
        findings="\n".join(findings),
    )
    table = summarize_comparison(comparison)
    Path(folder).parent.mkdir(parents=True, exist_ok=True)
    return write_folder(
        folder,
        record=_record(comparison, table),
        results={"comparison.nc": comparison, "comparison.csv": table, **more},
        page=lambda: render_comparison(comparison, table),
    )


def _record(comparison: xr.Dataset, table: pd.DataFrame) -> dict[str, Any]:
    """What run.json says of a comparison."""
    facts = comparison.attrs
    entries = comparison["entry"].values.tolist()
    record = {
        "kind": "comparison",
        **{name: facts[name] for name in ("command", "question")},
        "findings": [
            *comparison_findings(comparison, table),
            *filter(None, [scope(comparison.attrs)]),
        ],
        "model": {"name": str(facts["model"])},
        "entries": entries,
        **{name: facts[name] for name in ("baseline", "seed", "created")},
        "versions": json.loads(facts["versions"]),
    }
    if "fingerprint" in comparison.coords:
        prints = comparison["fingerprint"].values.tolist()
        record["fingerprints"] = dict(zip(entries, prints, strict=True))
    return record | {name: facts[name] for name in ("documents", *OF_RUNS) if name in facts}


def rewrite_page(folder: str | Path, *, beside: str | Path | None = None) -> Path:
    """Make the page of a result folder anew, from the numbers beside it; its path.

    `beside` is the folder of another analysis, whose heads the page then has too. Raises
    `BadArgument` where numbers are missing or damaged, where the page is a comparison's and
    another is to stand beside it, or where it is an answer's, which its script alone can draw;
    the page that was there then stays.
    """
    folder = Path(folder)
    record = read_own_record(folder)
    kind = record.get("kind")
    if kind == "answer":
        raise BadArgument(
            f"The page in {folder} is an analysis's own, which its script alone can draw.",
            seen=str(record.get("question")),
            attempt=str(record.get("command", "the script of the analysis")),
        )
    if kind == "comparison":
        if beside is not None:
            raise BadArgument(
                f"{folder} holds a comparison, which has no heads to set others beside.",
                attempt="the folder of one of its models, or ropelens compare",
            )
        comparison = open_results(folder / "comparison.nc", "comparison")
        return write_page(folder, render_comparison(comparison))
    other = None if beside is None else open_analysis(beside)
    return write_page(folder, open_analysis(folder).page(beside=other))
