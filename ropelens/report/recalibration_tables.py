"""Tables of recalibrations with a row per variant: columns with units, and cells as text."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.budget.labels import LABELS, Thresholds
from ropelens.comparison.recalibration_table import BY_RATE, repeated_variants
from ropelens.figures import style
from ropelens.figures.formats import NO_NUMBER, mean_count, number, short_count
from ropelens.report.sentences.heads import label_meanings
from ropelens.report.sentences.recalibration import gap_in_words, percent_and_interval


@dataclass(frozen=True)
class NumberColumn:
    """A column of a table with a row per variant. `write` makes the text of a row."""

    title: str
    unit: str
    meaning: str
    write: Callable[[Mapping[Any, Any]], str]


@dataclass(frozen=True)
class NumberRow:
    name: str
    cells: Sequence[str]


@dataclass(frozen=True)
class NumberTable:
    """A table: a name, a sentence, columns, and rows as text. `names` are of the rows."""

    title: str
    explain: str
    columns: Sequence[NumberColumn]
    rows: Sequence[NumberRow]
    names: str = "variant"


def _gap(row: Mapping[Any, Any], name: str) -> str:
    if row["variant"] == "control":
        return NO_NUMBER
    return gap_in_words(row, name).replace(" (", "\n(")


def _recovered(row: Mapping[Any, Any], name: str = "recovered") -> str:
    if row["variant"] == "control":
        return NO_NUMBER
    if np.isnan(row[name]):
        return "not defined"
    return percent_and_interval(row, name).replace(" (", "\n(")


def _tokens(row: Mapping[Any, Any]) -> str:
    if row["variant"] == "control":
        return NO_NUMBER
    half = _count_or_words(row["tokens_to_half"])
    most = _count_or_words(row["tokens_to_90"])
    if half == most:
        return half
    return f"{half}\n(90 %: {most})"


def _count_or_words(tokens: str | float) -> str:
    return tokens if isinstance(tokens, str) else short_count(float(tokens))


def _after_and_before(row: Mapping[Any, Any], name: str) -> str:
    after = number(row[f"{name}_after"])
    return f"{after}\n(before {number(row[f'{name}_before'])})"


def _loss(row: Mapping[Any, Any]) -> str:
    after = number(row["loss_after"], ".3f")
    return f"{after}\n(before {number(row['loss_before'], '.3f')})"


def _count(row: Mapping[Any, Any], name: str) -> str:
    after = mean_count(row[f"{name}_after"])
    return f"{after}\n(before {mean_count(row[f'{name}_before'])})"


def _changed_labels(row: Mapping[Any, Any]) -> str:
    if row["variant"] == "control":
        return NO_NUMBER
    return _count(row, "labels_changed")


def _change_of_attention(row: Mapping[Any, Any]) -> str:
    if row["variant"] == "control":
        return NO_NUMBER
    return _after_and_before(row, "attention_change")


GAP_COLUMNS = (
    NumberColumn(
        "loss after training",
        "nats/token",
        "mean loss on held-out text at the recalibrated context, after the last step; in "
        "brackets before training",
        _loss,
    ),
    NumberColumn(
        "gap before training",
        "nats/token",
        "loss of the variant minus loss of the control on held-out text, before any training, "
        "with its 95 % interval over documents: the damage",
        lambda row: _gap(row, "gap_before"),
    ),
    NumberColumn(
        "gap after training",
        "nats/token",
        "the same difference after the last step",
        lambda row: _gap(row, "gap_after"),
    ),
    NumberColumn(
        "recovered",
        "% of the gap",
        "1 minus the gap after training divided by the gap before training; not defined if "
        "the interval of the gap before training is not above 0.02",
        _recovered,
    ),
    NumberColumn(
        "tokens to half (and to 90\u00a0%)",
        "training tokens",
        "training tokens at which half of the gap, and 90 % of it, had been recovered, "
        "interpolated between evaluated steps",
        _tokens,
    ),
    NumberColumn(
        "loss past the context",
        "nats/token",
        "loss of the tokens past the recalibrated context, up to four times its length",
        lambda row: _after_and_before(row, "loss_past_recalibrated_context"),
    ),
    NumberColumn(
        "induction",
        "0 to 1",
        "attention of the best head on the token after the last copy of the same token",
        lambda row: _after_and_before(row, "induction"),
    ),
    NumberColumn(
        "retrieval",
        "share of needles",
        "share of needles in the text whose value the model finds, in prompts of up to the "
        "recalibrated context; chance finds 0.125",
        lambda row: _after_and_before(row, "retrieval"),
    ),
    NumberColumn(
        "labels that differ",
        "heads",
        "heads whose label differs from the label of the same head in the control, by more "
        "than its uncertainty",
        _changed_labels,
    ),
)


LABEL_MEANINGS = label_meanings(Thresholds())


def _label_column(label: str) -> NumberColumn:
    return NumberColumn(
        label,
        "heads",
        LABEL_MEANINGS[label],
        lambda row: _count(row, f"{label}_heads"),
    )


LABEL_COLUMNS = (
    *(_label_column(label) for label in style.LABEL_ORDER),
    NumberColumn(
        "all heads",
        "heads",
        "number of all heads: each of them has one label",
        lambda row: mean_count(sum(row[f"{label}_heads_after"] for label in LABELS)),
    ),
    NumberColumn(
        "change of attention",
        "bits per row",
        "how far the attention of the variant is from the control's attention, as the mean "
        "over heads and rows of the Kullback-Leibler divergence; 0: the attention is the same",
        _change_of_attention,
    ),
)


def _change_by_rate(row: Mapping[Any, Any]) -> str:
    if row["is_of_study"]:
        return NO_NUMBER
    return gap_in_words(row, "rate_loss_change").replace(" (", "\n(")


RATE_COLUMNS = (
    NumberColumn(
        "variant",
        "name",
        "the variant, or the control, which keeps its rotation",
        lambda row: str(row["variant"]),
    ),
    NumberColumn(
        "loss after training",
        "nats/token",
        "mean loss on held-out text after the last step",
        lambda row: number(row["rate_loss"], ".3f"),
    ),
    NumberColumn(
        "change by the rate",
        "nats/token",
        "this loss minus the loss of the same variant with the learning rate of the study",
        _change_by_rate,
    ),
    NumberColumn(
        "gap after training",
        "nats/token",
        "loss above the loss of the control with the same learning rate, with its 95 % "
        "interval over documents; it also shrinks if the control becomes worse",
        lambda row: _gap(row, "rate_gap"),
    ),
    NumberColumn(
        "recovered",
        "% of the gap",
        "share of the gap before training that training with this rate has removed",
        lambda row: _recovered(row, "rate_recovered"),
    ),
)


def recalibration_tables(
    comparison: xr.Dataset, table: pd.DataFrame
) -> list[NumberTable]:
    """The tables of a comparison of recalibrations and its summary `table`."""
    records = table.to_dict("records")
    tables = [
        NumberTable(
            "Side by side",
            "Each row is the mean over the seeds of a variant. Brackets show 95 % intervals "
            "over documents, or the number before training. comparison.csv has more columns.",
            GAP_COLUMNS,
            _rows(GAP_COLUMNS, records),
        ),
        NumberTable(
            "Heads by label",
            "Every head is counted once. Means over seeds; in brackets before training.",
            LABEL_COLUMNS,
            _rows(LABEL_COLUMNS, records),
        ),
    ]
    if "rate" in comparison.sizes and repeated_variants(comparison):
        tables.append(
            NumberTable(
                "Learning rates",
                "Some runs were repeated with a third and with three times of the learning "
                "rate, with the first seed. Compare variants within a rate. comparison.nc has "
                "these numbers.",
                RATE_COLUMNS,
                _rows(RATE_COLUMNS, _at_rates(comparison), name="rate_in_words"),
                names="learning rate",
            )
        )
    return tables


def _at_rates(comparison: xr.Dataset) -> list[dict[Any, Any]]:
    """A row for each learning rate of the repeated variants, rate by rate."""
    names = [str(name) for name in comparison if comparison[name].dims == BY_RATE]
    repeated = comparison[names].sel(variant=repeated_variants(comparison))
    table = repeated.to_dataframe(dim_order=["rate", "variant"]).reset_index()
    rows = table.dropna(subset="rate_loss").to_dict("records")
    for row in rows:
        row["is_of_study"] = row["rate"] == float(comparison.attrs["learning_rate"])
        row["rate_in_words"] = f"{row['rate']:.3g}"
        if row["is_of_study"]:
            row["rate_in_words"] += " (the study's)"
    return rows


def _rows(
    columns: Sequence[NumberColumn],
    records: Sequence[Mapping[Any, Any]],
    *,
    name: str = "variant",
) -> list[NumberRow]:
    rows = []
    for record in records:
        cells = [column.write(record) for column in columns]
        rows.append(NumberRow(str(record[name]), cells))
    return rows
