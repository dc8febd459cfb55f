"""The table of heads as the page shows it: columns with their units, numbers as text."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ropelens.figures.wavelengths import short_count
from ropelens.measure.terms import NEEDLES

NOTHING = "–"
CHANCE = 1 / NEEDLES
"""Share of needles that a guess among the prompt's values finds."""
RETRIEVED = (
    "of needles, pairs of a key and a value hidden in the text, the share whose value is found "
    f"when the key comes again, among {NEEDLES} (chance: {CHANCE:.3g})"
)
ROUNDED_AWAY = 5e-4
"""Below this, three decimals are all 0."""
SMALLEST = 1e-6
"""Changes below this are the rounding of float32 losses."""


def signed(value: float) -> str:
    """Three decimals with a sign, or one digit that is not 0; `NOTHING` without a number."""
    if not math.isfinite(value):
        return NOTHING
    if abs(value) >= ROUNDED_AWAY or value == 0:
        return _three(value)
    if abs(value) < SMALLEST:
        return "±0"
    return np.format_float_positional(
        value, precision=1, fractional=False, sign=True, trim="-"
    ).replace("-", "−")


def change_and_interval(value: float, low: float, high: float) -> tuple[str, str]:
    """A change and the ends of its interval, `NOTHING` without one, all to one precision.

    Three decimals; where these would all be 0, `signed`.
    """
    known = [v for v in (value, low, high) if math.isfinite(v)]
    write = _three if max(map(abs, known), default=0) >= ROUNDED_AWAY else signed
    ends = f"{write(low)} to {write(high)}" if math.isfinite(low) else NOTHING
    return write(value), ends


def _three(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−") if math.isfinite(value) else NOTHING


@dataclass(frozen=True)
class NamedRow:
    """A line of a table: its name, and a text for each column."""

    name: str
    cells: tuple[str, ...]


@dataclass(frozen=True)
class Column:
    """A column of heads.csv: its short title, its unit, what it means, its digits."""

    name: str
    title: str
    unit: str
    meaning: str
    digits: int = 2


COLUMNS = (
    Column("confidence", "conf.", "0–1", "share of resamples of sequences with this label"),
    Column("positional_fraction", "positional", "0–1", "position / (position + content) bits"),
    Column("total_bits", "total", "bits", "information in the choice of keys"),
    Column("sink_bits", "sink", "bits", "explained by one weight on the first token"),
    Column("position_bits", "position", "bits", "explained by the offset"),
    Column("content_bits", "content", "bits", "the rest: what the tokens are"),
    Column("offset", "offset", "tokens", "where a positional head looks back to", 0),
    Column("offset_weight", "weight", "0–1", "attention on that offset"),
    Column("mean_wavelength", "wavelength", "tokens", "geometric mean by selectivity", 0),
    Column("previous_token", "previous", "0–1", "attention on the token before"),
    Column("self_mass", "self", "0–1", "attention on the token itself"),
    Column("sink_mass", "first", "0–1", "attention on the first token"),
    Column("entropy_bits", "entropy", "bits", "spread of the attention"),
    Column("induction", "induction", "0–1", "attention on what followed last time"),
    Column("duplicate_token", "duplicate", "0–1", "attention on the same token earlier"),
)


@dataclass(frozen=True)
class Row:
    """One head: where it is, its label, and a text for each of `COLUMNS`."""

    layer: int
    head: int
    label: str
    cells: tuple[str, ...]


def shown_columns(heads: pd.DataFrame) -> tuple[Column, ...]:
    """The columns that this table of heads has."""
    return tuple(column for column in COLUMNS if column.name in heads)


def table_rows(heads: pd.DataFrame) -> list[Row]:
    """A `Row` for every head, in the table's order."""
    columns = [(column, numbers(heads, column.name)) for column in shown_columns(heads)]
    return [
        Row(
            layer=int(layer),
            head=int(head),
            label=str(label),
            cells=tuple(number_text(values[i], column=column) for column, values in columns),
        )
        for i, (layer, head, label) in enumerate(
            zip(heads["layer"], heads["head"], heads["label"], strict=True)
        )
    ]


def numbers(heads: pd.DataFrame, name: str) -> np.ndarray:
    """A column as float64, NaN where it says nothing."""
    return pd.to_numeric(heads[name]).astype("Float64").to_numpy(dtype=float, na_value=np.nan)


def number_text(value: float, *, column: Column) -> str:
    """A number as the table shows it."""
    if np.isnan(value):
        return NOTHING
    if np.isinf(value):
        return "∞"
    if column.name == "mean_wavelength":
        return short_count(value)
    return f"{value:.{column.digits}f}".replace("-", "−")
