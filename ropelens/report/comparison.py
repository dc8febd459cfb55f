"""A comparison as one page."""

from __future__ import annotations

import dataclasses

import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.comparison.table import summarize_comparison
from ropelens.report import comparison_words as words
from ropelens.report.answer import render_figures
from ropelens.report.comparison_table import shown_columns, table_rows
from ropelens.report.page import versions
from ropelens.report.page_figures import COMPARISON, draw
from ropelens.report.words import label_rules, scope
from ropelens.statistics.labels import Thresholds

QUESTION = "How do these models differ in their use of RoPE's frequencies?"


def comparison_figures(comparison: xr.Dataset, table: pd.DataFrame) -> dict[str, go.Figure]:
    """The figures that this comparison has something to show in, by their captions."""
    figures = draw(COMPARISON, comparison, table)
    return {row.explain.format(**comparison.attrs): figure for row, figure in figures.items()}


def render_comparison(comparison: xr.Dataset, table: pd.DataFrame | None = None) -> str:
    """The page of a comparison as it was saved, as text; `table` is its summary."""
    table = summarize_comparison(comparison) if table is None else table
    return render_figures(
        "comparison.html",
        comparison_figures(comparison, table),
        question=str(comparison.attrs.get("question", QUESTION)),
        model=str(comparison.attrs["model"]),
        facts=words.facts(comparison, table),
        scope=scope(comparison.attrs),
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
