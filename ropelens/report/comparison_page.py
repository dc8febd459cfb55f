"""The page of a comparison: sentences, a table, figures, and two heads side by side."""

from collections.abc import Sequence
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
from ropelens.report.columns import (
    Column,
    compared_head_columns,
    comparison_columns,
    comparison_rows,
)
from ropelens.report.drawing import draw_comparison
from ropelens.report.figure_page import render_figures
from ropelens.report.render import packed
from ropelens.report.run_facts import comparison_facts
from ropelens.report.sentences.comparison import comparison_sentences
from ropelens.report.sentences.heads import label_rules

QUESTION = "How do these models differ in their use of RoPE's frequencies?"
BY_HEAD = ("entry", "layer", "head")


def render_comparison(comparison: xr.Dataset, table: pd.DataFrame) -> str:
    """Text of the page of a comparison and its summary `table`."""
    figures: dict[str, go.Figure] = {}
    for drawn in draw_comparison(comparison, table):
        caption = drawn.row.explain.format_map(comparison.attrs)
        figures[caption] = drawn.figure
    thresholds = asdict(Thresholds())
    first, second = chosen_heads(comparison)
    head_columns = compared_head_columns(comparison)
    heads = heads_payload(comparison, head_columns)
    heads["chosen"] = [asdict(first), asdict(second)]
    return render_figures(
        "comparison.html",
        figures,
        about=comparison_facts(comparison, table),
        placed={
            "first": plot_compared_head(comparison, first),
            "second": plot_compared_head(comparison, second),
        },
        scripts=["compared.js"],
        payload={"heads": heads},
        question=str(comparison.attrs.get("question", QUESTION)),
        findings=comparison_sentences(comparison, table),
        columns=comparison_columns(table),
        rows=comparison_rows(table),
        head_columns=head_columns,
        entry_noun="Run" if "context" in comparison.attrs else "Model",
        entries=comparison["entry"].values.tolist(),
        label_rules=label_rules(thresholds),
    )


def chosen_heads(comparison: xr.Dataset) -> tuple[ComparedHead, ComparedHead]:
    """The heads that the page shows first: the most positional head of each of two entries.

    If the second model has a head at the same place as the first, this head is shown.
    """
    fractions = comparison["positional_fraction"].transpose(*BY_HEAD).fillna(-1).values
    labels = comparison["label"].transpose(*BY_HEAD).values
    first = _most_positional(fractions[0])
    second = first
    if not labels[1][first]:
        second = _most_positional(fractions[1])
    return ComparedHead(0, *first), ComparedHead(1, *second)


def _most_positional(fractions: np.ndarray) -> tuple[int, int]:
    """The layer and the index of the head with the largest of the fractions [layer, head]."""
    layer, head = np.unravel_index(fractions.argmax(), fractions.shape)
    return int(layer), int(head)


def heads_payload(comparison: xr.Dataset, columns: Sequence[Column]) -> dict[str, Any]:
    """Labels, numbers and planes of all heads, by entry, for the script."""
    names = comparison["entry"].values.astype(str)
    return {
        "titles": [plotly_text(name) for name in names.tolist()],
        "labels": comparison["label"].transpose(*BY_HEAD).values.tolist(),
        "kvHeads": kv_heads_by_entry(comparison).tolist(),
        "numbers": {column.name: _texts(comparison, column) for column in columns},
        "arrays": _plane_arrays(comparison),
    }


def _texts(comparison: xr.Dataset, column: Column) -> list[list[list[str]]]:
    """The numbers of a column as text [entry, layer, head]."""
    write = np.vectorize(column.write, otypes=[object])
    return write(comparison[column.name].transpose(*BY_HEAD).values).tolist()


def _plane_arrays(comparison: xr.Dataset) -> dict[str, dict[str, object]]:
    """The arrays that the figures of heads name."""
    by_layer = ("entry", "layer")
    wavelength = comparison["wavelength"].transpose(*by_layer, "frequency")
    arrays = {
        "wavelength": packed(wavelength.values, dims=by_layer),
        "wavelength_position": packed(position_by_entry(comparison), dims=by_layer),
    }
    for line in COMPARED_LINES:
        values = comparison[line.variable]
        head = "kv_head" if "kv_head" in values.dims else "head"
        dims = (*by_layer, head)
        values = values.transpose(*dims, "frequency")
        arrays[line.variable] = packed(values.values, dims=dims)
    return arrays
