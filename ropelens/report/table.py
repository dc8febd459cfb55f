"""The table of heads as the page shows it: columns with their units, numbers as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.figures.inputs import numbers
from ropelens.figures.text import number, short_count
from ropelens.measure.terms import NEEDLES

CHANCE = 1 / NEEDLES
"""Share of needles that a guess among the prompt's values finds."""
RETRIEVED = (
    "of needles, pairs of a key and a value hidden in the text, the share whose value is found "
    f"when the key comes again, among {NEEDLES} (chance: {CHANCE:.3g})"
)


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
    Column("positional_fraction", "position", "0–1", "share of the bits without sinks"),
    Column("content_fraction", "content", "0–1", "share of the bits without sinks"),
    Column("share_low", "share from", "0–1", "95% interval of the largest share"),
    Column("share_high", "share to", "0–1", "95% interval of the largest share"),
    Column("total_bits", "total", "bits", "information in the choice of keys"),
    Column("sink_bits", "sink", "bits", "what sinks explain"),
    Column("position_bits", "position", "bits", "what only the offset explains"),
    Column("content_bits", "content", "bits", "what the tokens explain"),
    Column("interaction_bits", "both", "bits", "what needs tokens and offset at once"),
    Column("offset", "offset", "tokens", "the one that a positional head looks back to", 0),
    Column(
        "offset_low", "offset from", "tokens", "first offset of the kernel's middle half", 0
    ),
    Column("offset_high", "offset to", "tokens", "last offset of the kernel's middle half", 0),
    Column("top_wavelength", "top plane", "tokens", "wavelength that pushes most", 0),
    Column("top_share", "its share", "0–1", "of the push toward keys"),
    Column("planes_to_half", "to half", "planes", "planes that hold half of the push", 0),
    Column("mean_wavelength", "mean", "tokens", "geometric mean by that push", 0),
    Column("previous_token", "previous", "0–1", "attention on the token before"),
    Column("self_mass", "self", "0–1", "attention on the token itself"),
    Column("sink_mass", "on sinks", "0–1", "attention on sinks"),
    Column("entropy_bits", "entropy", "bits", "spread of the attention"),
    Column("induction", "induction", "0–1", "attention on what followed last time"),
    Column("duplicate_token", "duplicate", "0–1", "attention on the same token earlier"),
)


@dataclass(frozen=True)
class Row:
    """One head: where it is, its label, and a text for each column."""

    layer: int
    head: int
    label: str
    cells: tuple[str, ...]


def shown_columns(profile: xr.Dataset, heads: pd.DataFrame) -> tuple[Column, ...]:
    """The columns that this table of heads has, those of tokens searched for last."""
    known = (column for column in COLUMNS if column.name in heads)
    return (*known, *searched_columns(profile, heads))


def searched_columns(profile: xr.Dataset, heads: pd.DataFrame) -> tuple[Column, ...]:
    """A column for each set of tokens that heads were searched by (`attention_on`)."""
    names = [str(name) for name in heads if str(name).startswith("attention_on_")]
    meanings = {name: profile[name].attrs["long_name"] for name in names if name in profile}
    return tuple(
        Column(name, meaning.removeprefix("mean attention "), "0–1", meaning)
        for name, meaning in meanings.items()
    )


def table_rows(heads: pd.DataFrame, columns: Sequence[Column]) -> list[Row]:
    """A `Row` for every head, in the table's order."""
    values_of = [(column, numbers(heads, column.name)) for column in columns]
    return [
        Row(
            layer=int(layer),
            head=int(head),
            label=str(label),
            cells=tuple(number_text(values[i], column=column) for column, values in values_of),
        )
        for i, (layer, head, label) in enumerate(
            zip(heads["layer"], heads["head"], heads["label"], strict=True)
        )
    ]


def number_text(value: float, *, column: Column) -> str:
    """A number as the table shows it."""
    if column.name in ("mean_wavelength", "top_wavelength") and not np.isnan(value):
        return short_count(value)
    return number(value, f".{column.digits}f")
