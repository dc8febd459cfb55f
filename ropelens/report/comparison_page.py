"""The page of a comparison: sentences, a table, figures, and two heads side by side."""

from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.budget.labels import Thresholds
from ropelens.figures.compared_heads import (
    COMPARED_LINES,
    ComparedHead,
    kv_heads_by_entry,
    plot_compared_head,
    position_by_entry,
)
from ropelens.figures.formats import plotly_text
from ropelens.report import tables
from ropelens.report.catalog import COMPARISON_FIGURES, card, draw
from ropelens.report.page import render_figures
from ropelens.report.render import packed
from ropelens.report.sentences.comparison import comparison_sentences
from ropelens.report.sentences.heads import label_rules

QUESTION = "How do these models differ in their use of RoPE's frequencies?"


def render_comparison(comparison: xr.Dataset, table: pd.DataFrame) -> str:
    """Text of the page of a comparison and its summary `table`."""
    figures: dict[str, go.Figure] = {}
    for row, figure in draw(COMPARISON_FIGURES, comparison, table=table).items():
        caption = card(row, figure)["explain"].format(**comparison.attrs)
        figures[caption] = figure
    first, second = chosen_heads(comparison)
    columns = tables.compared_head_columns(comparison)
    heads = heads_payload(comparison, columns)
    heads["chosen"] = [asdict(first), asdict(second)]
    return render_figures(
        "comparison.html",
        figures,
        scripts=["compared.js"],
        placed={
            "first": plot_compared_head(comparison, first),
            "second": plot_compared_head(comparison, second),
        },
        payload={"heads": heads},
        question=str(comparison.attrs.get("question", QUESTION)),
        findings=comparison_sentences(comparison, table),
        columns=tables.comparison_columns(table),
        rows=tables.comparison_rows(table),
        head_columns=columns,
        entry_noun="Run" if "context" in comparison.attrs else "Model",
        entries=comparison["entry"].values.tolist(),
        label_rules=label_rules(asdict(Thresholds())),
        **tables.about_comparison(comparison, table),
    )


def chosen_heads(comparison: xr.Dataset) -> tuple[ComparedHead, ComparedHead]:
    """The heads that the page shows first: the most positional head of each of two entries.

    If the second model has a head at the same place as the first, this head is shown.
    """
    fraction = comparison["positional_fraction"].transpose("entry", "layer", "head")
    places = []
    for of_entry in fraction.fillna(-1).values[:2]:
        places.append(np.unravel_index(of_entry.argmax(), of_entry.shape))
    first, second = places
    labels = comparison["label"].transpose("entry", "layer", "head").values
    if labels[1][first]:
        second = first
    return ComparedHead(0, *map(int, first)), ComparedHead(1, *map(int, second))


def heads_payload(
    comparison: xr.Dataset, columns: tuple[tables.Column, ...]
) -> dict[str, Any]:
    """Labels, numbers and planes of all heads, by entry, for the script."""
    by_head = ("entry", "layer", "head")
    arrays = {
        "wavelength": packed(_values(comparison, "wavelength"), dims=by_head[:2]),
        "wavelength_position": packed(position_by_entry(comparison), dims=by_head[:2]),
    }
    for line in COMPARED_LINES:
        dims = ("entry", "layer", "kv_head" if line.variable == "k_norm" else "head")
        arrays[line.variable] = packed(
            comparison[line.variable].transpose(*dims, "frequency").values, dims=dims
        )
    numbers = {}
    for column in columns:
        values = comparison[column.name].transpose(*by_head).values
        numbers[column.name] = np.vectorize(column.write, otypes=[object])(values)
    return {
        "titles": [plotly_text(str(name)) for name in comparison["entry"].values],
        "labels": comparison["label"].transpose(*by_head).values.tolist(),
        "kvHeads": kv_heads_by_entry(comparison).tolist(),
        "numbers": {name: texts.tolist() for name, texts in numbers.items()},
        "arrays": arrays,
    }


def _values(comparison: xr.Dataset, name: str) -> np.ndarray:
    return comparison[name].transpose("entry", "layer", "frequency").values
