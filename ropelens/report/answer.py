"""Pages that answer one question in words and figures: a script's, and a comparison's."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.comparison.table import summarize_comparison
from ropelens.report import words
from ropelens.report.catalog import COMPARISON, bare, draw
from ropelens.report.facts import (
    comparison_facts,
    comparison_run_facts,
    model_name,
    run_facts,
    short_facts,
    versions,
)
from ropelens.report.payload import page_templates
from ropelens.report.render import render
from ropelens.report.tables import comparison_columns, comparison_rows
from ropelens.statistics.labels import Thresholds

QUESTION = "How do these models differ in their use of RoPE's frequencies?"


def render_answer(
    question: str,
    findings: Sequence[str],
    figures: Mapping[str, go.Figure],
    profile: xr.Dataset,
    heads: pd.DataFrame,
) -> str:
    """The page of a script's answer on one model, as text.

    `findings` are sentences with numbers, the most important first; `figures` go by their
    captions, each explained in a sentence or two, in order.
    """
    return render_figures(
        "answer.html",
        figures,
        question=question,
        model=model_name(profile),
        facts=short_facts(profile),
        scope=words.scope(profile.attrs),
        findings=findings,
        run=run_facts(profile, heads),
        versions=versions(profile.attrs),
        command=str(profile.attrs.get("command", "")),
    )


def render_comparison(comparison: xr.Dataset, table: pd.DataFrame | None = None) -> str:
    """The page of a comparison as it was saved, as text; `table` is its summary."""
    table = summarize_comparison(comparison) if table is None else table
    return render_figures(
        "comparison.html",
        comparison_figures(comparison, table),
        question=str(comparison.attrs.get("question", QUESTION)),
        model=str(comparison.attrs["model"]),
        facts=comparison_facts(comparison, table),
        scope=words.scope(comparison.attrs),
        findings=words.comparison_sentences(comparison, table),
        columns=comparison_columns(table),
        rows=comparison_rows(table),
        run=comparison_run_facts(comparison),
        versions=versions(comparison.attrs),
        label_rules=words.label_rules(dataclasses.asdict(Thresholds())),
        command=str(comparison.attrs.get("command", "")),
    )


def comparison_figures(comparison: xr.Dataset, table: pd.DataFrame) -> dict[str, go.Figure]:
    """The figures that this comparison has something to show in, by their captions."""
    figures = draw(COMPARISON, comparison, table)
    return {row.explain.format(**comparison.attrs): figure for row, figure in figures.items()}


def render_figures(template: str, figures: Mapping[str, go.Figure], **values: object) -> str:
    """A page of `figures` by their captions; `values` are the other names of its template."""
    drawn = enumerate(figures.items())
    return render(
        template,
        scripts=["save.js", "answer.js"],
        payload={
            "figures": [bare(figure) for figure in figures.values()],
            "templates": page_templates(),
        },
        cards=[
            {"name": number, "title": figure.layout.title.text, "explain": caption}
            for number, (caption, figure) in drawn
        ],
        **values,
    )
