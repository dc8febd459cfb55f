"""Result folders with a page: answers of scripts, comparisons, several checkpoints."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.analysis.analysis import Analysis, open_analysis
from ropelens.analysis.plan import Plan, this_command
from ropelens.comparison.compare import compare
from ropelens.comparison.table import summarize_comparison
from ropelens.errors import BadArgument
from ropelens.files.folder import file_name, write_whole
from ropelens.files.results import (
    PAGE,
    open_results,
    read_record,
    write_folder,
)
from ropelens.measure.measurement import versions
from ropelens.models.checkpoint import fingerprint
from ropelens.models.load import Opened
from ropelens.report.page import QUESTION, render_answer, render_comparison
from ropelens.report.words import comparison_sentences, scope

FACTS = ("revision", "backend", "text", "command", "warnings")
"""Attributes that results have from `analyze`, beside those of `profile`."""

OF_COMPARISON = (
    *(
        "command",
        "question",
        "baseline",
        "seed",
        "created",
        "documents",
        "context",
        "sequences",
    ),
    *("head_sequences", "growth_sequences"),
)
"""Attributes of a comparison that run.json has too; trained runs alone have the last ones."""


@dataclass(frozen=True)
class Answer:
    """What a script answers: one question on one model, or on several.

    `findings` are sentences with numbers, the most important first; `figures` go by their
    captions, each explained in a sentence or two, in order; `more` are further results by
    the names of their files ("reach.nc", "truncation.csv").
    """

    question: str = QUESTION
    findings: Sequence[str] = ()
    figures: Mapping[str, go.Figure] = field(default_factory=dict)
    more: Mapping[str, xr.Dataset | pd.DataFrame] = field(default_factory=dict)

    def save(self, folder: str | Path, comparison: xr.Dataset, *, lead: str = "") -> Path:
        """Write what `compare` returns, and its table, to `folder`; the path of the page.

        `folder` gets index.html, comparison.nc, comparison.csv, run.json and `more`, all of
        them or, after an error, none. The sentence `lead` comes first, `findings` after the
        sentences that the numbers give by themselves.
        """
        comparison = comparison.assign_attrs(
            question=self.question,
            command=this_command(),
            lead=lead,
            findings="\n".join(self.findings),
        )
        table, facts = summarize_comparison(comparison), comparison.attrs
        entries = comparison["entry"].values.tolist()
        record: dict[str, Any] = {
            "kind": "comparison",
            "findings": [
                *comparison_sentences(comparison, table),
                *filter(None, [scope(facts)]),
            ],
            "model": {"name": str(facts["model"])},
            "entries": entries,
            "versions": json.loads(facts["versions"]),
            **{name: facts[name] for name in OF_COMPARISON if name in facts},
        }
        if "fingerprint" in comparison.coords:
            prints = comparison["fingerprint"].values.tolist()
            record["fingerprints"] = dict(zip(entries, prints, strict=True))
        Path(folder).parent.mkdir(parents=True, exist_ok=True)
        return write_folder(
            folder,
            record=record,
            results={"comparison.nc": comparison, "comparison.csv": table, **self.more},
            page=lambda: render_comparison(comparison, table),
        )


def write_answer(folder: str | Path, analysis: Analysis, answer: Answer) -> Path:
    """Write what a script answers about one model; the path of its page.

    The results go into a folder in the script's `folder` that is named after the model:
    index.html, run.json, and the numbers of `analysis` and of the answer. All of them are
    written or, after an error, none.
    """
    attrs = analysis.profile.attrs
    folder = Path(folder) / (file_name(str(attrs["model"])).strip(".-") or "model")
    folder.parent.mkdir(parents=True, exist_ok=True)
    facts = {name: attrs[name] for name in FACTS}
    findings = [*answer.findings, *filter(None, [scope(attrs)])]
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


def rewrite_page(folder: str | Path, *, beside: str | Path | None = None) -> Path:
    """Make the page of a result folder again, from the numbers in it; its path.

    `beside` is the folder of another analysis, whose heads the page then has too. Raises
    `BadArgument` for numbers that are missing or damaged, and for the page of an answer,
    which only its script can draw; the page that was there then stays.
    """
    folder, record = Path(folder), read_record(folder)
    kind = record.get("kind")
    if kind == "answer":
        raise BadArgument(
            f"Only its script can draw the page in {folder}.",
            seen=str(record.get("question")),
            attempt=str(record.get("command")),
        )
    if kind == "comparison" and beside is None:
        comparison = open_results(folder / "comparison.nc", "comparison")
        return write_whole(folder / PAGE, render_comparison(comparison))
    other = None if beside is None else open_analysis(beside)
    return write_whole(folder / PAGE, open_analysis(folder).page(beside=other))


def is_measured(folder: Path, plan: Plan) -> bool:
    """Whether `folder` has what the plan would give: of these weights, text and versions."""
    assert isinstance(plan.source, Opened)
    record = read_record(folder)
    if (record.get("arguments"), record.get("versions")) != (plan.arguments, versions()):
        return False
    prints = (record.get(name, {}).get("fingerprint") for name in ("model", "text"))
    weights = fingerprint(plan.source.checkpoint.path)
    return tuple(prints) == (weights, plan.text.fingerprint)


def write_checkpoints(folder: Path, names: Sequence[str]) -> Path:
    """Set the analyses in `folder`, a folder each, side by side there; the path of the page.

    Beside what `Answer.save` writes there is heads.csv, in which the column `checkpoint`
    comes first.
    """
    heads = pd.concat(
        {name: open_analysis(folder / name).heads for name in names}, names=["checkpoint", None]
    )
    comparison = compare([folder / name for name in names], cache=folder)  # which stays empty
    return Answer(more={"heads.csv": heads.reset_index("checkpoint")}).save(folder, comparison)
