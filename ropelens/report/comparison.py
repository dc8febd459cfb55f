"""A comparison in a folder: its page, its table, its numbers and how it was made."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.comparison.table import summarize_comparison
from ropelens.files.folder import output_folder, write_whole
from ropelens.files.results import save_results
from ropelens.measure.heads import Thresholds
from ropelens.report import comparison_words as words
from ropelens.report.answer import render_figures
from ropelens.report.comparison_table import shown_columns, table_rows
from ropelens.report.page import versions
from ropelens.report.page_figures import COMPARISON, draw
from ropelens.report.words import label_rules

QUESTION = "How do these models differ in their use of RoPE's frequencies?"


def write_comparison(
    folder: str | Path,
    comparison: xr.Dataset,
    *,
    question: str = QUESTION,
    findings: Sequence[str] = (),
    command: str | None = None,
) -> Path:
    """Write what `compare` gave, and its table; return the path of the page.

    There will be index.html (one file, no network), comparison.nc, comparison.csv and
    run.json in `folder`, all of them or, after an error, what was there before. `findings`
    are sentences of your own, told after those that the numbers give by themselves; `command`
    is what a shell would be told to do the same again; None: the one that runs.
    """
    command = command or shlex.join(["python", *sys.argv])
    comparison = comparison.assign_attrs(
        question=question, command=command, findings="\n".join(findings)
    )
    table = summarize_comparison(comparison)
    said = words.findings(comparison, table)
    record = _record(comparison, said)
    page = render_comparison(comparison)
    Path(folder).parent.mkdir(parents=True, exist_ok=True)
    with output_folder(folder) as results:
        save_results(comparison, results / "comparison.nc")
        write_whole(results / "comparison.csv", table.to_csv(index=False, lineterminator="\n"))
        write_whole(results / "index.html", page)
        write_whole(results / "run.json", json.dumps(record, indent=2) + "\n")
    return Path(folder) / "index.html"


OF_RUNS = ("context", "sequences", "head_sequences", "growth_sequences", "data_sha256")
"""What run.json tells of trained runs alone. `data_sha256` is that of their data.json, which
names the text, the validation text and the tokenizer."""


def _record(comparison: xr.Dataset, findings: Sequence[str]) -> dict[str, Any]:
    """What run.json says."""
    facts = comparison.attrs
    record = {
        "command": facts["command"],
        "question": facts["question"],
        "finding": findings[0],
        "findings": findings,
        "model": {"name": str(facts["model"])},
        "entries": comparison["entry"].values.tolist(),
        "baseline": facts["baseline"],
        "seed": facts["seed"],
        "created": facts["created"],
        "versions": json.loads(facts["versions"]),
    }
    if "fingerprint" in comparison.coords:
        prints = comparison["fingerprint"].values.tolist()
        record["fingerprints"] = dict(zip(record["entries"], prints, strict=True))
    return record | {name: facts[name] for name in OF_RUNS if name in facts}


def comparison_figures(comparison: xr.Dataset, table: pd.DataFrame) -> dict[str, go.Figure]:
    """The figures that this comparison has something to show in, by their captions."""
    figures = draw(COMPARISON, comparison, table)
    return {row.explain.format(**comparison.attrs): figure for row, figure in figures.items()}


def render_comparison(comparison: xr.Dataset) -> str:
    """The page of a comparison as it was saved, as text."""
    table = summarize_comparison(comparison)
    return render_figures(
        "comparison.html",
        comparison_figures(comparison, table),
        question=str(comparison.attrs.get("question", QUESTION)),
        model=str(comparison.attrs["model"]),
        facts=words.facts(comparison, table),
        findings=words.findings(comparison, table),
        table={
            "title": "Side by side",
            "explain": "Means over the entries of each row; comparison.csv has the rest.",
            "columns": shown_columns(table),
            "rows": table_rows(table),
        },
        run=words.run_facts(comparison),
        versions=versions(comparison),
        label_rules=label_rules(dataclasses.asdict(Thresholds())),
        command=str(comparison.attrs.get("command", "")),
    )
