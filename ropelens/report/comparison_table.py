"""The table of a comparison as its page shows it."""

from __future__ import annotations

import math

import pandas as pd

from ropelens.figures.text import NOTHING, change_and_interval, mean_count, short_count
from ropelens.report.table import RETRIEVED, Column, NamedRow

COLUMNS = (
    Column("loss", "loss", "nats/token", "on text held out of training, or analyzed", 3),
    Column(
        "loss_change", "change", "nats/token",
        "of the loss from the baseline's, pairs of the same text (and size and seed), with its "
        "95% interval",
    ),
    Column("worse", "worse", "pairs", "pairs in which the loss is above the baseline's", 0),
    Column(
        "loss_past_context", "past\ncontext", "nats/token",
        "loss at positions beyond the trained context, up to four times it",
    ),
    Column(
        "repeat_gain", "repeats\ngain", "nats/token",
        "how much less random tokens cost when they come a second time",
    ),
    Column("retrieval", "retrieval", "0–1", RETRIEVED, 3),
    Column(
        "previous_token_heads", "previous\ntoken", "heads",
        "heads that give at least half of their attention to the token before", 1,
    ),
    Column(
        "previous_token_layer_0", "in\nlayer 0", "heads",
        "those of them in the first layer, which must tell position from RoPE alone", 1,
    ),
    Column(
        "induction", "induction", "0–1",
        "the best head's attention on what followed the same token last time",
    ),
    Column(
        "positional", "positional", "heads",
        "heads with two thirds or more of their bits, sinks apart, from the offset alone", 1,
    ),
    Column(
        "positional_wavelength", "positional\nthrough", "tokens",
        "the median wavelength that positional heads select their keys through, of planes that "
        "turn",
    ),
    Column(
        "semantic", "semantic", "heads",
        "heads with as many from the tokens without rotation; all others are mixed, sinks or "
        "diffuse", 1,
    ),
    Column(
        "semantic_wavelength", "semantic\nthrough", "tokens",
        "the median wavelength that semantic heads select their keys through, of planes that "
        "turn",
    ),
)  # fmt: skip


def shown_columns(table: pd.DataFrame) -> tuple[Column, ...]:
    """The columns of which this table knows something."""
    known = {name for name in table if table[name].notna().any()}
    if "loss_change" not in known:
        known.discard("worse")
    return tuple(column for column in COLUMNS if column.name in known)


def table_rows(table: pd.DataFrame) -> list[NamedRow]:
    """A `NamedRow` for each group, in the table's order."""
    columns = shown_columns(table)
    return [
        NamedRow(str(row["group"]), tuple(_cell(row, column) for column in columns))
        for row in table.to_dict("records")
    ]


def _cell(row: dict, column: Column) -> str:
    value = float(row[column.name])
    if column.name == "worse":
        return f"{row['worse']} of {row['pairs']}" if row["pairs"] else NOTHING
    if column.name == "loss_change":
        if not row["over"]:
            return NOTHING
        return "\n".join(change_and_interval(value, row["low"], row["high"]))
    if not math.isfinite(value):
        return NOTHING if math.isnan(value) else "∞"
    if column.name.endswith("wavelength"):
        return short_count(value)
    if column.unit == "heads":
        return mean_count(value)
    return f"{value:.{column.digits}f}".replace("-", "−")
