"""The page of recalibrations: the answer, a picture, tables, and heads by their controls."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.budget.labels import LABELS, Thresholds
from ropelens.comparison.recalibration_table import AFTER
from ropelens.figures import style
from ropelens.figures.compared_heads import ComparedHead, plot_compared_head
from ropelens.figures.comparison_planes import plot_comparison_planes
from ropelens.figures.formats import NO_NUMBER, mean_count, number, short_count
from ropelens.figures.recalibration import (
    plot_gaps,
    plot_losses_before_and_after,
    plot_needles_before_and_after,
)
from ropelens.report.columns import compared_head_columns
from ropelens.report.comparison_page import (
    heads_payload,
    map_payload,
    page_addresses,
)
from ropelens.report.figure_page import render_figures
from ropelens.report.run_facts import PageFacts, version_words
from ropelens.report.sentences.heads import label_rules
from ropelens.report.sentences.profile import scope_sentence
from ropelens.report.sentences.recalibration import (
    nats,
    percent_and_interval,
    recalibration_sentences,
)

QUESTION = "What does the model need, if it may adapt?"
CAPTIONS = {
    "Loss by position, before and after": (
        "The loss by the position of the predicted token, in texts of up to four times the "
        "recalibrated context. Right of a dotted line, texts are longer than in that "
        "training. Whiskers show the range over seeds, if there are several."
    ),
    "Retrieval, before and after": (
        "A prompt hides 8 needles in text, which are pairs of a key and a value. The share "
        "whose value the model finds, by the length of the prompt. The horizontal dotted "
        "line is the share that chance finds."
    ),
    "Norms and selectivity of planes": (
        "After training. Mean norms show how much a plane can do. Selectivity shows how "
        "much it pushes heads toward the keys they pick. A ring is a plane that does not "
        "rotate. It is drawn where it rotates in another variant: heads of a variant with "
        "stopped planes cannot use these wavelengths."
    ),
}


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
    """A table: its name, a sentence about it, and its columns and rows as text."""

    title: str
    explain: str
    columns: Sequence[NumberColumn]
    rows: Sequence[NumberRow]


# ---- tables


def _gap(row: Mapping[Any, Any], name: str) -> str:
    if row["variant"] == "control":
        return NO_NUMBER
    value, low, high = (nats(row[f"{name}{end}"], "+") for end in ("", "_low", "_high"))
    return f"{value}\n({low} to {high})"


def _recovered(row: Mapping[Any, Any]) -> str:
    if row["variant"] == "control":
        return NO_NUMBER
    if np.isnan(row["recovered"]):
        return "not defined"
    return percent_and_interval(row).replace(" (", "\n(")


def _tokens(row: Mapping[Any, Any], name: str) -> str:
    if row["variant"] == "control":
        return NO_NUMBER
    value = row[name]
    return value if isinstance(value, str) else short_count(float(value))


def _after_and_before(row: Mapping[Any, Any], name: str) -> str:
    after = number(row[f"{name}_after"])
    return f"{after}\n(before {number(row[f'{name}_before'])})"


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
        "gap before training",
        "nats/token",
        "loss of the variant minus loss of the control on held-out text, before any training, "
        "with its 95% interval over documents: the damage",
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
        "tokens to half",
        "training tokens",
        "training tokens at which half of the gap had been recovered, interpolated between "
        "evaluated steps",
        lambda row: _tokens(row, "tokens_to_half"),
    ),
    NumberColumn(
        "tokens to 90 %",
        "training tokens",
        "training tokens at which 90 % of the gap had been recovered",
        lambda row: _tokens(row, "tokens_to_90"),
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
        "context; chance finds 0.125",
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


def _label_column(label: str) -> NumberColumn:
    return NumberColumn(
        label,
        "heads",
        f"heads with the label {label}; see the glossary",
        lambda row: _count(row, f"{label}_heads"),
    )


LABEL_COLUMNS = (
    *(_label_column(label) for label in style.LABEL_ORDER),
    NumberColumn(
        "all heads",
        "heads",
        "the sum of the other columns",
        lambda row: mean_count(sum(row[f"{label}_heads_after"] for label in LABELS)),
    ),
    NumberColumn(
        "change of attention",
        "bits per row",
        "mean over heads and rows of KL(attention of the control || attention of the variant)",
        _change_of_attention,
    ),
)


def _tables(table: pd.DataFrame) -> list[NumberTable]:
    records = table.to_dict("records")
    return [
        NumberTable(
            "Side by side",
            "Each row is the mean over the seeds of a variant. Brackets show 95 % intervals "
            "over documents, or the number before training.",
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


def _rows(
    columns: Sequence[NumberColumn], records: Sequence[Mapping[Any, Any]]
) -> list[NumberRow]:
    rows = []
    for record in records:
        cells = [column.write(record) for column in columns]
        rows.append(NumberRow(str(record["variant"]), cells))
    return rows


# ---- heads next to the heads of the control


@dataclass(frozen=True)
class MapCell:
    """A head of a variant next to the same head of the control."""

    control: str
    label: str
    bits: str
    shade: float
    changed: bool
    words: str
    link: str

    @property
    def exists(self) -> bool:
        return bool(self.label)


@dataclass(frozen=True)
class HeadMap:
    """The heads of a run after training, by layer, next to the heads of its control."""

    name: str
    rows: Sequence[Sequence[MapCell]]
    page: str
    control_page: str


@dataclass(frozen=True)
class ChangedHead:
    """A head whose label differs from the control's label in some variant."""

    name: str
    control: str
    cells: Sequence[MapCell]


FULL_SHADE = 1.0  # bits from which a cell of the map has the strongest shade


def head_maps(comparison: xr.Dataset) -> list[HeadMap]:
    """A map for each variant: its first seed after training."""
    maps = []
    pages = page_addresses(comparison)
    for index in _first_runs(comparison):
        control = int(comparison["partner"][index])
        maps.append(
            HeadMap(
                name=str(comparison["entry"].values[index]),
                rows=_cells(comparison, index, control),
                page=pages[index],
                control_page=pages[control],
            )
        )
    return maps


def _first_runs(comparison: xr.Dataset) -> list[int]:
    """Index of the first run after training of each variant except the control."""
    first: dict[str, int] = {}
    groups = comparison["group"].values.tolist()
    phases = comparison["phase"].values.tolist()
    for index, (group, phase) in enumerate(zip(groups, phases, strict=True)):
        if phase == AFTER and group != comparison.attrs["baseline"]:
            first.setdefault(group, index)
    return [*first.values()]


def _cells(comparison: xr.Dataset, index: int, control: int) -> list[list[MapCell]]:
    order = ("layer", "head")
    of_run = comparison.isel(entry=index).transpose(*order, ...)
    of_control = comparison["label"].isel(entry=control).transpose(*order).values
    labels = of_run["label"].values
    bits = of_run["attention_change"].values
    changed = of_run["label_changed"].values == 1
    rows = []
    for layer in range(labels.shape[0]):
        cells = []
        for head in range(labels.shape[1]):
            cells.append(
                _cell(
                    f"L{layer}H{head}",
                    entries=(control, index),
                    labels=(of_control[layer, head], labels[layer, head]),
                    bits=float(bits[layer, head]),
                    changed=bool(changed[layer, head]),
                )
            )
        rows.append(cells)
    return rows


def _cell(
    head: str,
    *,
    entries: tuple[int, int],
    labels: tuple[str, str],
    bits: float,
    changed: bool,
) -> MapCell:
    control, label = labels
    certainty = ""
    if control != label:
        certainty = " (certain)" if changed else " (within its uncertainty)"
    words = (
        f"{head}: control {control}, variant {label}{certainty}; attention changes by "
        f"{number(bits, '.3f')} bits"
    )
    return MapCell(
        control=control,
        label=label,
        bits=number(bits, ".2f"),
        shade=float(np.clip(np.nan_to_num(bits) / FULL_SHADE, 0, 1)),
        changed=changed,
        words=words,
        link=f"#heads={entries[0]}.{head},{entries[1]}.{head}",
    )


def _most_changed(maps: Sequence[HeadMap]) -> list[int]:
    """Indices of the two maps in which most labels changed, in the order of the maps."""
    counts = []
    for head_map in maps:
        counts.append(sum(cell.changed for row in head_map.rows for cell in row))
    order = np.argsort(counts, kind="stable")[::-1]
    return sorted(order[:2].tolist())


def changed_heads(maps: Sequence[HeadMap]) -> list[ChangedHead]:
    """Heads whose label differs from the control's in some variant, beyond its uncertainty."""
    changed: list[ChangedHead] = []
    if not maps:
        return changed
    layers = len(maps[0].rows)
    for layer in range(layers):
        for head in range(len(maps[0].rows[layer])):
            cells = [head_map.rows[layer][head] for head_map in maps]
            if any(cell.changed for cell in cells):
                name = f"L{layer} H{head}"
                changed.append(ChangedHead(name, cells[0].control, cells))
    return changed


# ---- the page


def render_recalibration(comparison: xr.Dataset, table: pd.DataFrame) -> str:
    """Text of the page of recalibrations and their summary `table`."""
    after = comparison.isel(
        entry=np.flatnonzero(comparison["phase"].values == AFTER),
    )
    figures: dict[str, go.Figure] = {}
    for figure in (
        plot_losses_before_and_after(comparison),
        plot_needles_before_and_after(comparison),
        plot_comparison_planes(after),
    ):
        figures[CAPTIONS[figure.layout.title.text]] = figure
    maps = head_maps(comparison)
    first, second = _first_heads(comparison, maps)
    columns = compared_head_columns(comparison)
    heads = heads_payload(comparison, columns)
    heads["chosen"] = [asdict(first), asdict(second)]
    return render_figures(
        "recalibration.html",
        figures,
        about=_facts(comparison),
        placed={
            "gaps": plot_gaps(comparison),
            "first": plot_compared_head(comparison, first),
            "second": plot_compared_head(comparison, second),
        },
        scripts=["compared.js", "variants.js"],
        payload={"heads": heads, "map": map_payload(comparison)},
        question=str(comparison.attrs.get("question", QUESTION)),
        findings=recalibration_sentences(comparison, table),
        tables=_tables(table),
        maps=maps,
        changed=changed_heads(maps),
        first_variants=_most_changed(maps),
        looks=style.LABEL_LOOKS,
        head_columns=columns,
        entry_noun="Model",
        entries=comparison["entry"].values.tolist(),
        label_rules=label_rules(asdict(Thresholds())),
    )


def _first_heads(
    comparison: xr.Dataset, maps: Sequence[HeadMap]
) -> tuple[ComparedHead, ComparedHead]:
    """The head with the largest change of attention in the first variant, and its control."""
    index = _first_runs(comparison)[0]
    control = int(comparison["partner"][index])
    change = comparison["attention_change"].isel(entry=index)
    bits = change.transpose("layer", "head").fillna(0).values
    layer, head = np.unravel_index(bits.argmax(), bits.shape)
    place = (int(layer), int(head))
    return ComparedHead(control, *place), ComparedHead(index, *place)


def _facts(comparison: xr.Dataset) -> PageFacts:
    attrs = comparison.attrs
    variants = comparison["variant"].values.tolist()
    trained = int(attrs["trained_context"])
    contexts = f"context {attrs['context']:,}"
    if trained:
        contexts = f"{contexts} (trained for {trained:,})"
    facts = [
        str(attrs["base"]),
        f"{len(variants) - 1} variants and the control, {comparison.sizes['seed']} seeds",
        contexts,
        f"{attrs['tokens']:,} training tokens each",
        f"{attrs['documents']:,} held-out documents",
    ]
    run = [
        ("base", str(attrs["base"])),
        ("fingerprint of the base", str(attrs["base_fingerprint"])),
        ("variants", ", ".join(variants)),
        (
            "trained parameters",
            f"{attrs['trained_parameters']}, of {attrs['parameters']:,}",
        ),
        ("learning rate", f"{attrs['learning_rate']:g}"),
        ("steps", f"{attrs['steps']:,}"),
        (
            "held-out text",
            f"{attrs['sequences']:,} sequences of {attrs['context']:,} tokens for gaps; at "
            f"most {attrs['measured_sequences']:,} for tasks and "
            f"{attrs['head_sequences']:,} for heads",
        ),
        ("seed", str(attrs["seed"])),
        ("created", str(attrs["created"])),
    ]
    return PageFacts(
        facts=facts,
        model=str(attrs["base"]),
        run=run,
        scope=scope_sentence({**attrs, "trained_context": 0}),
        versions=version_words(json.loads(attrs["versions"])),
        command=str(attrs.get("command", "")),
    )
