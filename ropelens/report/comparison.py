"""A comparison as one page."""

from __future__ import annotations

import dataclasses

import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.comparison.table import summarize_comparison
from ropelens.figures.comparison import plot_label_counts, plot_loss_change, plot_position_loss
from ropelens.figures.comparison_planes import plot_comparison_planes, plot_growth_planes
from ropelens.figures.growth import plot_growth
from ropelens.measure.heads import Thresholds
from ropelens.report import comparison_words as words
from ropelens.report.answer import render_figures
from ropelens.report.comparison_table import shown_columns, table_rows
from ropelens.report.page import versions
from ropelens.report.words import label_rules

QUESTION = "How do these models differ in their use of RoPE's frequencies?"


def comparison_figures(comparison: xr.Dataset, table: pd.DataFrame) -> dict[str, go.Figure]:
    """The figures that this comparison has something to show in, by their captions."""
    figures: dict[str, go.Figure] = {}
    if table["loss_change"].notna().any():
        figures[
            "The loss on the same text, less that of the baseline. A ring is one pair, a "
            "filled mark their mean, a bar its 95% interval; left of the line is better."
        ] = plot_loss_change(comparison, table)
    if "position_loss" in comparison:
        figures[
            "How well tokens are predicted by where they stand. Right of the dotted line the "
            "text is longer than any that was learnt from. Whiskers reach from the lowest seed "
            "to the highest, where there are several."
        ] = plot_position_loss(comparison)
    figures[
        "Mean norms say how much a plane can do, selectivity how much it pushes heads toward "
        "the keys they pick. Hollow marks are planes that do not rotate; they stand where the "
        "same plane rotates in another model. Whiskers reach from the lowest seed to the "
        "highest, where there are several."
    ] = plot_comparison_planes(comparison)
    figures[
        "Heads by the source of their choice of keys: position, both (mixed), content, the "
        "first token (sink), or hardly any choice (diffuse)."
    ] = plot_label_counts(table)
    if "growth_loss" in comparison:
        figures[
            "Checkpoints at steps 1, 2, 4, ... of training. Lines are means over seeds, "
            "whiskers reach from the lowest seed to the highest. Heads and losses of text are "
            f"of fewer sequences than in the table ({comparison.attrs['growth_sequences']} for "
            "heads). Dotted: what chance retrieves."
        ] = plot_growth(comparison)
        figures[
            "The same planes at every checkpoint: move the slider to see norms and "
            "selectivity form."
        ] = plot_growth_planes(comparison)
    return figures


def render_comparison(comparison: xr.Dataset, table: pd.DataFrame | None = None) -> str:
    """The page of a comparison as it was saved, as text; `table` is its summary."""
    table = summarize_comparison(comparison) if table is None else table
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
