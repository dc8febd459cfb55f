"""The page's section on a truncation sweep: its figures and table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.figures.text import NOTHING, change_and_interval, signed
from ropelens.measure.truncation_table import summarize_truncation
from ropelens.report.page_figures import SWEEP, bare, card, draw
from ropelens.report.table import (
    RETRIEVED,
    Column,
    NamedRow,
)
from ropelens.report.truncation_words import (
    CONTROL,
    control_change,
    describe_truncation,
    span,
)

COLUMNS = (
    Column("kept", "rotate", "% of planes", "planes that still rotate, of those that did"),
    Column("wavelength", "wavelengths", "stopped, tokens", "of the planes that stopped"),
    Column("loss_change", "loss", "change, nats/token", "on the text, from the model as it is"),
    Column(
        "interval", "95% interval", "nats/token",
        "of that change: paired, over groups of sequences, Student's t",
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
        "at it in the model as it is (chosen in other trials)",
    ),
    Column(
        "labels_changed", "new labels", "heads",
        "heads that are called something else (95% of their numbers with groups of "
        "sequences drawn again)",
    ),
    Column(
        "changed_most", "most changed", "head, bits",
        "the head whose attention moved furthest, and the divergence from what it was",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Section:
    """What the page says of a sweep; figures by the name of their place, with their words.

    `stopped` is what stopping the slowest planes costs, by the share that is `kept`.
    """

    sentences: list[str]
    text: str
    figures: dict[str, dict]
    cards: list[dict]
    columns: tuple[Column, ...]
    rows: list[NamedRow]
    stopped: list[dict]


def truncation_section(truncation: xr.Dataset, table: pd.DataFrame | None = None) -> Section:
    """The section about a sweep that `ropelens.truncate` made; `table` is its summary."""
    table = summarize_truncation(truncation) if table is None else table
    figures = draw(SWEEP, truncation, table)
    return Section(
        sentences=describe_truncation(truncation, table=table),
        text=str(truncation.attrs.get("text", "")),
        figures={row.name: bare(figure) for row, figure in figures.items()},
        cards=[card(row, figure) for row, figure in figures.items()],
        columns=COLUMNS,
        rows=_rows(table),
        stopped=_stopped(table),
    )


def _stopped(table: pd.DataFrame) -> list[dict]:
    rows = table[(table["kind"] == "slow") & table["loss_change"].notna()]
    ends = rows[["loss_change", "loss_change_low", "loss_change_high"]].to_numpy(float)
    said = [change_and_interval(*one) for one in ends]
    return [
        {"kept": float(kept), "words": f"{change} nats/token ({interval})"}
        for kept, (change, interval) in zip(rows["kept"], said, strict=True)
    ]


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
