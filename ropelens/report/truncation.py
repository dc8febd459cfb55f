"""The page's section on a truncation sweep: its figures and table."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens import figures
from ropelens.figures.truncation import MEASURES
from ropelens.measure.truncation_table import summarize_truncation
from ropelens.report.table import (
    NOTHING,
    RETRIEVED,
    Column,
    NamedRow,
    change_and_interval,
    signed,
)
from ropelens.report.truncation_words import (
    CONTROL,
    OF_END,
    control_change,
    span,
    tell_table,
)

COLUMNS = (
    Column("kept", "rotate", "% of planes", "planes that still rotate, of those that did"),
    Column("wavelength", "wavelengths", "stopped, tokens", "of the planes that stopped"),
    Column("loss_change", "loss", "change, nats/token", "on the text, from the model as it is"),
    Column(
        "interval", "95% interval", "nats/token",
        "of that change: paired over the same sequences, Student's t",
    ),
    Column(
        "control", "random planes", "nats/token",
        "the loss change when as many planes stop, drawn at random: mean of the draws",
    ),
    Column(
        "repeat_loss_change", "repeats", "nats/token",
        "change of the loss on random tokens that come a second time, which induction predicts",
    ),
    Column(
        "retrieval_change", "retrieval", "change, share",
        RETRIEVED,
    ),
    Column(
        "induction_change", "induction", "change, 0–1",
        "of the attention on what followed the same token last time, of the head that is best "
        "at it in the model as it is",
    ),
    Column(
        "labels_changed", "new labels", "heads",
        "heads that are called something else (95% of their numbers with the sequences drawn "
        "again)",
    ),
    Column(
        "changed_most", "most changed", "head, bits",
        "the head whose attention moved furthest, and the divergence from what it was",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Section:
    """What the page says of a sweep; figures by the name of their place."""

    sentences: list[str]
    figures: dict[str, dict]
    columns: tuple[Column, ...]
    rows: list[NamedRow]


def truncation_section(truncation: xr.Dataset, table: pd.DataFrame | None = None) -> Section:
    """The section about a sweep that `ropelens.truncate` made; `table` is its summary."""
    table = summarize_truncation(truncation) if table is None else table
    return Section(
        sentences=tell_table(table, truncation),
        figures={name: _bare(figure) for name, figure in _figures(truncation, table).items()},
        columns=COLUMNS,
        rows=_rows(table),
    )


def _figures(truncation: xr.Dataset, table: pd.DataFrame) -> dict[str, go.Figure]:
    """The figures that the sweep has numbers for."""
    known = [name for name, m in MEASURES.items() if table[m.column].notna().any()]
    ends = bool(table["kind"].isin(OF_END).any())
    others = [name for name in known if name != "loss"]
    draw: dict[str, tuple[bool, Callable[[], go.Figure]]] = {
        "truncation": (
            ends and "loss" in known,
            lambda: figures.plot_truncation(truncation, table=table),
        ),
        "bands": (
            bool((table["kind"] == "band").any()) and "loss" in known,
            lambda: figures.plot_bands(truncation, table=table),
        ),
        "others": (
            ends and bool(others),
            lambda: figures.plot_truncation(truncation, measures=others, table=table),
        ),
        "changed": (
            ends and "attention_change" in truncation,
            lambda: figures.plot_changed_heads(truncation),
        ),
    }
    return {name: make() for name, (wanted, make) in draw.items() if wanted}


def _bare(figure: go.Figure) -> dict:
    """A figure without its title, which stands in the page's text, and its colours."""
    lifted = 40 if figure.layout.legend.yref == "container" else 30
    figure.update_layout(
        title_text="",
        template=None,
        height=figure.layout.height - lifted,
        margin_t=figure.layout.margin.t - lifted,
        dragmode=False,
        autosize=True,
    )
    if figure.layout.legend.yref == "container":
        figure.update_layout(legend_y=1)
    return json.loads(figure.to_json(engine="json"))


def _rows(table: pd.DataFrame) -> list[NamedRow]:
    rows = table[table["kind"].isin(CONTROL)]
    order = list(CONTROL)
    rows = rows.sort_values(
        ["kind", "kept"], key=lambda c: c.map(order.index) if c.name == "kind" else -c,
        kind="stable",
    )  # fmt: skip
    return [NamedRow(str(row["edit"]), _cells(table, row)) for _, row in rows.iterrows()]


def _cells(table: pd.DataFrame, row: pd.Series) -> tuple[str, ...]:
    low, high = row["loss_change_low"], row["loss_change_high"]
    change, ends = change_and_interval(row["loss_change"], low, high)
    most, bits = row["changed_most"], row["largest_attention_change"]
    return (
        f"{100 * row['kept']:.3g}",
        span(row),
        change,
        ends,
        signed(control_change(table, row)),
        signed(row["repeat_loss_change"]),
        signed(row["retrieval_change"]),
        signed(row["induction_change"]),
        _count(row),
        f"{most} {bits:.2f}" if isinstance(most, str) and most else NOTHING,
    )


def _count(row: pd.Series) -> str:
    """The heads with a new label, and the interval of their number where it has a width."""
    if not np.isfinite(row["labels_changed"]):
        return NOTHING
    low, high = row["labels_changed_low"], row["labels_changed_high"]
    spread = f" ({low:.0f} to {high:.0f})" if np.isfinite(low) and low < high else ""
    return f"{row['labels_changed']:.0f}{spread}"
