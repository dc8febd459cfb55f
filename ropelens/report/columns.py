"""Columns of the tables on pages, with units and meanings, and their rows as text."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import xarray as xr

from ropelens.comparison.best import OVER_TEXT_OF_ONE_SEED
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
    """A column of a table. `write` formats its numbers.

    `words` are whole words where there is room for more than the `title`.
    """

    name: str
    title: str
    unit: str
    meaning: str
    write: Callable[[Any], str] = two_decimals
    long_title: str = ""

    @property
    def words(self) -> str:
        return self.long_title or self.title


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
        long_title="confidence of the label",
    ),
    Column(
        "positional_fraction",
        "positional",
        "0–1",
        "share of position in the bits without sinks, which decides the label",
        long_title="share of position",
    ),
    Column(
        "content_fraction",
        "semantic",
        "0–1",
        "share of content in the bits without sinks, which decides the label",
        long_title="share of content",
    ),
    Column(
        "total_bits",
        "total",
        "bits",
        "information in the choice of keys",
        long_title="all bits",
    ),
    Column(
        "sink_bits",
        "sink",
        "bits",
        "bits that sinks explain",
        long_title="bits of sinks",
    ),
    Column(
        "position_bits",
        "position",
        "bits",
        "bits that only the offset explains",
        long_title="bits of position",
    ),
    Column(
        "content_bits",
        "content",
        "bits",
        "bits that the tokens explain",
        long_title="bits of content",
    ),
    Column(
        "interaction_bits",
        "both",
        "bits",
        "bits that only tokens and offset together explain",
        long_title="bits of content and position together",
    ),
    Column(
        "follow_score",
        "follows",
        "−1–1",
        "what the head follows when keys exchange contents: 1 positions, −1 contents",
        long_title="follows positions or contents",
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
        long_title="first offset",
    ),
    Column(
        "offset_high",
        "offset to",
        "tokens",
        "last offset of the middle half of the kernel",
        write=without_decimals,
        long_title="last offset",
    ),
    Column(
        "top_wavelength",
        "top plane",
        "tokens",
        "wavelength of the plane that pushes most",
        write=short_count,
        long_title="wavelength of the strongest plane",
    ),
    Column(
        "top_share",
        "top share",
        "0–1",
        "share of the top plane in the push toward keys",
        long_title="share of the strongest plane",
    ),
    Column(
        "planes_to_half",
        "to half",
        "planes",
        "planes that make half of the push",
        write=without_decimals,
        long_title="planes with half of the push",
    ),
    Column(
        "mean_wavelength",
        "mean",
        "tokens",
        "geometric mean of the wavelengths, weighted by push",
        write=short_count,
        long_title="mean wavelength",
    ),
    Column(
        "previous_token",
        "previous",
        "0–1",
        "attention on the previous token",
        long_title="attention on the previous token",
    ),
    Column(
        "self_mass",
        "self",
        "0–1",
        "attention on the token itself",
        long_title="attention on the token itself",
    ),
    Column(
        "sink_mass",
        "on sinks",
        "0–1",
        "attention on sinks",
        long_title="attention on sinks",
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
        long_title="attention on duplicates",
    ),
)

LOSS_COLUMNS = (
    Column(
        "loss",
        "loss per token",
        "nats/token",
        "loss on text that was not used for training, or on the analyzed text",
        write=three_decimals,
    ),
    Column(
        "bits_per_byte",
        "loss per byte",
        "bits/byte",
        "the same loss by byte of the text, which is comparable if tokenizers differ",
        write=three_decimals,
    ),
    Column(
        "loss_change",
        "difference from the baseline",
        "nats/token",
        "loss per token minus the baseline's loss per token, as a mean over pairs "
        "with the same text (and the same size and seed), with its 95% interval",
        write=str,
    ),
    Column(
        "certain",
        "certain",
        "yes or no",
        "yes: the 95% interval of the difference excludes 0. The interval of one pair of "
        "trained runs is only over its text, and other seeds may differ, so one pair is "
        "never certain. Intervals are not widened for the number of variants",
        write=str,
    ),
    Column(
        "loss_past_context",
        "loss past the context",
        "nats/token",
        "loss at positions beyond the trained context, up to four times the context",
    ),
    Column(
        "repeat_gain",
        "gain of repeats",
        "nats/token",
        "how much the loss of random tokens falls when they are repeated",
    ),
    Column(
        "retrieval",
        "needles found",
        "share, 0–1",
        "share of needles whose value the model retrieves when the key is repeated; "
        f"a prompt hides {NEEDLES} needles in text, which are pairs of a key and a "
        f"value (chance: {CHANCE:.3g})",
    ),
)

LABEL_COLUMNS = (
    Column(
        "positional",
        "positional heads",
        "heads",
        "heads that get at least two thirds of their bits (without sinks) only from "
        "the offset",
        write=mean_count,
    ),
    Column(
        "mixed",
        "mixed heads",
        "heads",
        "heads with other labels than these: neither part has two thirds of the bits",
        write=mean_count,
    ),
    Column(
        "semantic",
        "semantic heads",
        "heads",
        "heads that get at least two thirds of their bits (without sinks) from the "
        "tokens",
        write=mean_count,
    ),
    Column(
        "sink",
        "sink heads",
        "heads",
        "heads of which sinks explain more than 90% of the bits",
        write=mean_count,
    ),
    Column(
        "diffuse",
        "diffuse heads",
        "heads",
        "heads with fewer than 0.1 bits: their attention is nearly uniform",
        write=mean_count,
    ),
    Column(
        "untested",
        "untested heads",
        "heads",
        "heads with too few rows of text for a label",
        write=mean_count,
    ),
)

ATTENTION_COLUMNS = (
    Column(
        "previous_token_heads",
        "previous-token heads",
        "heads",
        "heads with at least half of their attention on the previous token",
        write=mean_count,
    ),
    Column(
        "previous_token_layer_0",
        "previous-token heads in layer 0",
        "heads",
        "the same count in the first layer, where only RoPE distinguishes positions",
        write=mean_count,
    ),
    Column(
        "induction",
        "best induction head",
        "share, 0–1",
        "attention of the best head on the token after the last copy of the same token",
    ),
    Column(
        "positional_wavelength",
        "mean wavelength of positional heads",
        "tokens",
        "median over the positional heads of their mean wavelength: the geometric "
        "mean over the planes that rotate, weighted by their push toward keys",
        write=str,
    ),
    Column(
        "semantic_wavelength",
        "mean wavelength of semantic heads",
        "tokens",
        "median over the semantic heads of their mean wavelength",
        write=str,
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


@dataclass(frozen=True)
class GroupRow:
    """A row of a table of groups: the name of the group, and its numbers as text."""

    name: str
    cells: Sequence[str]


@dataclass(frozen=True)
class GroupTable:
    """A table of a comparison with a row for each group. `note` is a sentence below it."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[GroupRow]
    note: str = ""


def comparison_tables(table: pd.DataFrame, note: str = "") -> list[GroupTable]:
    """The tables on the page of a comparison. `note` is about the wavelengths of heads."""
    texts = table.assign(
        loss_change=[_change_words(row) for row in table.to_dict("records")],
        certain=[_certain_word(row) for row in table.to_dict("records")],
    )
    for name in ("positional_wavelength", "semantic_wavelength"):
        texts[name] = [_wavelength_words(row, name) for row in table.to_dict("records")]
    shown = known_columns(table, [*LOSS_COLUMNS, *LABEL_COLUMNS, *ATTENTION_COLUMNS])
    tables = []
    for title, columns in (
        ("Loss, copying and retrieval", LOSS_COLUMNS),
        ("Heads by label", LABEL_COLUMNS),
        ("Attention of heads", ATTENTION_COLUMNS),
    ):
        tables.append(
            group_table(
                title,
                [column for column in columns if column in shown],
                texts,
                note=note if columns is ATTENTION_COLUMNS else "",
            )
        )
    return tables


def known_columns(table: pd.DataFrame, columns: Sequence[Column]) -> list[Column]:
    """The columns in which a summary has numbers. No head is untested in most comparisons."""
    known = {name for name in table if table[name].notna().any()}
    if "loss_change" in known:
        known.add("certain")
    if "untested" in known and not table["untested"].any():
        known.discard("untested")
    return [column for column in columns if column.name in known]


def group_table(
    title: str, columns: Sequence[Column], table: pd.DataFrame, note: str = ""
) -> GroupTable:
    """The `columns` of a `table` with a row for each group, as text."""
    rows = []
    for row in table.to_dict("records"):
        cells = [column.write(row[column.name]) for column in columns]
        rows.append(GroupRow(row["group"], cells))
    return GroupTable(title, columns, rows, note)


def _change_words(row: Mapping[Hashable, Any]) -> str:
    """The difference of a group from the baseline, with its interval on a second line."""
    if not row["over"]:
        return NO_NUMBER
    return "\n".join(change_and_interval(row["loss_change"], row["low"], row["high"]))


def _certain_word(row: Mapping[Hashable, Any]) -> str:
    if not row["over"]:
        return NO_NUMBER
    if row["over"] == OVER_TEXT_OF_ONE_SEED:
        return "no (one seed)"
    return "yes" if row["low"] > 0 or row["high"] < 0 else "no"


def _wavelength_words(row: Mapping[Hashable, Any], name: str) -> str:
    """A mean wavelength. Variants that stop planes limit it: a second line has the limits."""
    words = short_count(row[name])
    if 0 < row["stopped_planes"] < row["planes"]:
        shortest = short_count(row["shortest_wavelength"])
        longest = short_count(row["longest_wavelength"])
        words += f"\nwithin {shortest}–{longest}"
    return words
