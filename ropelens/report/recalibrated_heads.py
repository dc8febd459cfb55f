"""Heads of recalibrated models next to the same heads of the control."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import xarray as xr

from ropelens.comparison.recalibration_table import AFTER
from ropelens.figures.formats import in_words, number
from ropelens.report.comparison_page import page_addresses


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
    """A map of the first seed of each variant, after training."""
    maps = []
    pages = page_addresses(comparison)
    for index in first_runs(comparison):
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


def first_runs(comparison: xr.Dataset) -> list[int]:
    """Index of the first run after training of each variant except the control."""
    first: dict[str, int] = {}
    groups = comparison["group"].values.tolist()
    phases = comparison["phase"].values.tolist()
    for index, (group, phase) in enumerate(zip(groups, phases, strict=True)):
        if phase == AFTER and group != comparison.attrs["baseline"]:
            first.setdefault(group, index)
    return [*first.values()]


def shown_seeds(comparison: xr.Dataset) -> str:
    """The seeds of the runs in `head_maps`: "seed 0"."""
    of_runs = comparison["entry_seed"].isel(entry=first_runs(comparison))
    seeds = sorted(set(of_runs.values.tolist()))
    if len(seeds) == 1:
        return f"seed {seeds[0]}"
    return f"seeds {in_words(seeds)}"


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


def most_changed(maps: Sequence[HeadMap]) -> list[int]:
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
