"""Columns of the tables on pages, with units and meanings, and their rows as text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import xarray as xr

from ropelens.figures.formats import (
    NO_NUMBER,
    change_and_interval,
    mean_count,
    number,
    short_count,
)
from ropelens.figures.inputs import numbers
from ropelens.profiles.measures import NEEDLES
from ropelens.report.sentences.truncation import CHANCE


def two_decimals(value: float) -> str:
    return number(value, ".2f")


def three_decimals(value: float) -> str:
    return number(value, ".3f")


def three_decimals_with_sign(value: float) -> str:
    return number(value, "+.3f")


def without_decimals(value: float) -> str:
    return number(value, ".0f")


@dataclass(frozen=True)
class Column:
    """A column of a table. `write` formats its numbers."""

    name: str
    title: str
    unit: str
    meaning: str
    write: Callable[[Any], str] = two_decimals


HEAD_COLUMNS = (
    Column(
        "attribution",
        "attribution",
        "answer",
        "sum of the attributions of the planes of the head",
        write=three_decimals_with_sign,
    ),
    Column(
        "confidence",
        "conf.",
        "0–1",
        "share of the resamples that give this label",
    ),
    Column(
        "positional_fraction",
        "positional",
        "0–1",
        "share of position in the bits without sinks, which decides the label",
    ),
    Column(
        "content_fraction",
        "semantic",
        "0–1",
        "share of content in the bits without sinks, which decides the label",
    ),
    Column(
        "total_bits",
        "total",
        "bits",
        "information in the choice of keys",
    ),
    Column(
        "sink_bits",
        "sink",
        "bits",
        "bits that sinks explain",
    ),
    Column(
        "position_bits",
        "position",
        "bits",
        "bits that only the offset explains",
    ),
    Column(
        "content_bits",
        "content",
        "bits",
        "bits that the tokens explain",
    ),
    Column(
        "interaction_bits",
        "both",
        "bits",
        "bits that only tokens and offset together explain",
    ),
    Column(
        "follow_score",
        "follows",
        "−1–1",
        "what the head follows when keys exchange contents: 1 positions, −1 contents",
    ),
    Column(
        "offset",
        "offset",
        "tokens",
        "how far back a positional head looks",
        write=without_decimals,
    ),
    Column(
        "offset_low",
        "offset from",
        "tokens",
        "first offset of the middle half of the kernel",
        write=without_decimals,
    ),
    Column(
        "offset_high",
        "offset to",
        "tokens",
        "last offset of the middle half of the kernel",
        write=without_decimals,
    ),
    Column(
        "top_wavelength",
        "top plane",
        "tokens",
        "wavelength of the plane that pushes most",
        write=short_count,
    ),
    Column(
        "top_share",
        "top share",
        "0–1",
        "share of the top plane in the push toward keys",
    ),
    Column(
        "planes_to_half",
        "to half",
        "planes",
        "planes that make half of the push",
        write=without_decimals,
    ),
    Column(
        "mean_wavelength",
        "mean",
        "tokens",
        "geometric mean of the wavelengths, weighted by push",
        write=short_count,
    ),
    Column(
        "previous_token",
        "previous",
        "0–1",
        "attention on the previous token",
    ),
    Column(
        "self_mass",
        "self",
        "0–1",
        "attention on the token itself",
    ),
    Column(
        "sink_mass",
        "on sinks",
        "0–1",
        "attention on sinks",
    ),
    Column(
        "entropy_bits",
        "entropy",
        "bits",
        "spread of the attention",
    ),
    Column(
        "induction",
        "induction",
        "0–1",
        "attention on the token after the last copy of the same token",
    ),
    Column(
        "duplicate_token",
        "duplicate",
        "0–1",
        "attention on an earlier copy of the same token",
    ),
)

COMPARISON_COLUMNS = (
    Column(
        "loss",
        "loss",
        "nats/token",
        "on text that was not used for training, or on the analyzed text",
        write=three_decimals,
    ),
    Column(
        "bits_per_byte",
        "loss",
        "bits/byte",
        "the same loss by byte of the text, which is comparable if tokenizers differ",
        write=three_decimals,
    ),
    Column(
        "loss_change",
        "change",
        "nats/token",
        "difference from the baseline's loss over pairs with the same text (and the "
        "same size and seed), with its 95% interval",
        write=str,
    ),
    Column(
        "worse",
        "worse",
        "pairs",
        "pairs in which the loss is above the baseline's loss",
        write=str,
    ),
    Column(
        "loss_past_context",
        "past\ncontext",
        "nats/token",
        "loss at positions beyond the trained context, up to four times the context",
    ),
    Column(
        "repeat_gain",
        "repeats\ngain",
        "nats/token",
        "how much the loss of random tokens falls when they are repeated",
    ),
    Column(
        "retrieval",
        "retrieval",
        "0–1",
        "share of needles whose value the model retrieves when the key is repeated; "
        f"a prompt hides {NEEDLES} needles in text, which are pairs of a key and a "
        f"value (chance: {CHANCE:.3g})",
        write=three_decimals,
    ),
    Column(
        "previous_token_heads",
        "previous\ntoken",
        "heads",
        "heads with at least half of their attention on the previous token",
        write=mean_count,
    ),
    Column(
        "previous_token_layer_0",
        "in\nlayer 0",
        "heads",
        "the same count in the first layer, where only RoPE distinguishes positions",
        write=mean_count,
    ),
    Column(
        "induction",
        "induction",
        "0–1",
        "attention of the best head on the token after the last copy of the same token",
    ),
    Column(
        "positional",
        "positional",
        "heads",
        "heads that get at least two thirds of their bits (without sinks) only from "
        "the offset",
        write=mean_count,
    ),
    Column(
        "positional_wavelength",
        "positional\nmean wavelength",
        "tokens",
        "median over the positional heads of their mean wavelength: the geometric "
        "mean over the planes that rotate, weighted by their push toward keys",
        write=short_count,
    ),
    Column(
        "semantic",
        "semantic",
        "heads",
        "heads that get at least two thirds of their bits (without sinks) from the "
        "tokens; all others are mixed, sinks or diffuse",
        write=mean_count,
    ),
    Column(
        "semantic_wavelength",
        "semantic\nmean wavelength",
        "tokens",
        "median over the semantic heads of their mean wavelength",
        write=short_count,
    ),
)


def head_columns(profile: xr.Dataset, heads: pd.DataFrame) -> tuple[Column, ...]:
    """Columns of this table of heads. Columns of searched tokens come last."""
    known = [column for column in HEAD_COLUMNS if column.name in heads]
    return (*known, *searched_columns(profile, heads))


def searched_columns(profile: xr.Dataset, heads: pd.DataFrame) -> tuple[Column, ...]:
    """One column for each set of tokens in the option `attention_on` of the run."""
    columns = []
    for name in map(str, heads.columns):
        if name.startswith("attention_on_") and name in profile:
            meaning = profile[name].attrs["long_name"]
            title = meaning.removeprefix("mean attention ")
            columns.append(Column(name, title, "0–1", meaning))
    return tuple(columns)


@dataclass(frozen=True)
class HeadRow:
    """A row of the table of heads: a head, its label, and its numbers as text."""

    layer: int
    head: int
    label: str
    cells: Sequence[str]


def head_rows(heads: pd.DataFrame, columns: Sequence[Column]) -> list[HeadRow]:
    """The rows of a table of heads. A head without a number has `NO_NUMBER`."""
    texts = [
        [column.write(value) for value in numbers(heads, column.name)]
        for column in columns
    ]
    rows = []
    for index, head in enumerate(heads.to_dict("records")):
        cells = [of_column[index] for of_column in texts]
        rows.append(HeadRow(head["layer"], head["head"], head["label"], cells))
    return rows


def compared_head_columns(comparison: xr.Dataset) -> tuple[Column, ...]:
    """Columns of the table of heads that a comparison has for each head."""
    by_head = {"entry", "layer", "head"}
    return tuple(
        column
        for column in HEAD_COLUMNS
        if column.name in comparison and {*comparison[column.name].dims} == by_head
    )


def comparison_columns(table: pd.DataFrame) -> tuple[Column, ...]:
    """Columns in which this table has a number."""
    known = {name for name in table if table[name].notna().any()}
    if "loss_change" not in known:
        known.discard("worse")
    return tuple(column for column in COMPARISON_COLUMNS if column.name in known)


@dataclass(frozen=True)
class ComparisonRow:
    """A row of the table of a comparison: a group, and its numbers as text."""

    name: str
    cells: Sequence[str]


def comparison_rows(table: pd.DataFrame) -> list[ComparisonRow]:
    columns = comparison_columns(table)
    rows = []
    for row in table.to_dict("records"):
        values = dict(row)
        values["loss_change"] = NO_NUMBER
        if row["over"]:
            change = change_and_interval(row["loss_change"], row["low"], row["high"])
            values["loss_change"] = "\n".join(change)
        values["worse"] = NO_NUMBER
        if row["pairs"]:
            values["worse"] = f"{row['worse']} of {row['pairs']}"
        cells = [column.write(values[column.name]) for column in columns]
        rows.append(ComparisonRow(row["group"], cells))
    return rows
