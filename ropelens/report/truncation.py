"""The page's section on a truncation sweep: its sentences, figures and table."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens import figures
from ropelens.figures.plane_marks import marks, plane_index, turning_wavelengths
from ropelens.figures.truncation import MEASURES
from ropelens.figures.wavelengths import short_count
from ropelens.report.table import NOTHING, Column, NamedRow, interval, signed
from ropelens.truncation_summary import summarize_truncation

FREE = 0.01
"""Nats/token: a cut whose interval ends below this is called free."""

QUARTER = 0.75
OF_END = {"slow": "slowest", "fast": "fastest"}
CONTROL = {"slow": "random", "fast": "random", "band": "band control"}


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
        "of needles, pairs of a key and a value hidden in the text, whose value is found when "
        "the key comes again, among 8 (chance: 0.125)",
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


def truncation_section(truncation: xr.Dataset) -> Section:
    """The section about a sweep that `ropelens.truncate` made."""
    table = summarize_truncation(truncation)
    said = [_quarters(table), _free(table), _places(truncation), _bands(table)]
    said.append(_retrieval(table))
    return Section(
        sentences=[sentence for sentence in said if sentence],
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
            lambda: figures.plot_truncation(truncation),
        ),
        "bands": (
            bool((table["kind"] == "band").any()) and "loss" in known,
            lambda: figures.plot_bands(truncation),
        ),
        "others": (
            ends and bool(others),
            lambda: figures.plot_truncation(truncation, measures=others),
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


def _quarters(table: pd.DataFrame) -> str:
    """What a quarter of the planes costs, from both ends."""
    parts = []
    for end, name in OF_END.items():
        rows = table[(table["kind"] == end) & table["loss_change"].notna()]
        if len(rows):
            row = rows.iloc[int((rows["kept"] - QUARTER).abs().argmin())]
            share = f"{100 * (1 - row['kept']):.3g}%"
            parts.append(
                f"the {name} {share} of the planes (wavelengths {_span(row)} tokens) "
                f"{_costs(row['loss_change'])}{_interval(row)}"
            )
    return f"Stopping {'; stopping '.join(parts)}." if parts else ""


def _costs(change: float) -> str:
    return f"changes the loss by {signed(change)} nats/token"


def _interval(row: pd.Series) -> str:
    low, high = row["loss_change_low"], row["loss_change_high"]
    if not np.isfinite(low):
        return ""
    return f" (95% interval {interval(low, high)})"


def _free(table: pd.DataFrame) -> str:
    """How many of the slowest planes may stop for nothing."""
    rows = table[(table["kind"] == "slow") & table["loss_change_high"].notna()]
    rows = rows.sort_values("kept", ascending=False)
    dear = np.flatnonzero((rows["loss_change_high"] >= FREE).to_numpy())
    free = rows.iloc[: dear[0] if len(dear) else len(rows)]
    if not len(rows):
        return ""
    if not len(free):
        return (
            f"No step of the sweep is free: each costs {FREE} nats/token or may (upper end of "
            "the interval)."
        )
    last = free.iloc[-1]
    return (
        f"The slowest planes may stop for nothing (the interval ends below {FREE} nats/token) "
        f"until {100 * last['kept']:.3g}% still rotate: wavelengths of "
        f"{short_count(last['wavelength_low'])} tokens and more."
    )


def _places(truncation: xr.Dataset) -> str:
    """Where the trained context and the predicted band lie among the planes."""
    _, wavelength = turning_wavelengths(truncation)
    words = {
        "context": "a wavelength of the trained context ({length:,.0f} tokens) falls at "
        "{at:.1f}",
        "band": "the predicted band of long queries ({length:,.0f} tokens, Oka et al. 2026) "
        "at {at:.1f}",
    }
    found = [(mark, plane_index(wavelength, mark.wavelength)) for mark in marks(truncation)]
    parts = [
        words[mark.name].format(length=mark.wavelength, at=at)
        for mark, at in found
        if at is not None
    ]
    if not parts:
        return ""
    return (
        f"Where planes are numbered from 0, the fastest, to {len(wavelength) - 1}, "
        f"{' and '.join(parts)}."
    )


def _bands(table: pd.DataFrame) -> str:
    """The dearest band, beside random planes."""
    bands = table[(table["kind"] == "band") & table["loss_change"].notna()]
    if not len(bands):
        return ""
    row = bands.iloc[int(bands["loss_change"].argmax())]
    control = _control(table, row)
    beside = f"; as many random planes: {signed(control)}" if np.isfinite(control) else ""
    return (
        f"Of {len(bands)} bands, the dearest is that of wavelengths {_span(row)} tokens: "
        f"{signed(row['loss_change'])} nats/token{beside}."
    )


def _retrieval(table: pd.DataFrame) -> str:
    """How well the model retrieves as it is, without which changes mean little."""
    share = table["retrieval"].iloc[0]
    if not np.isfinite(share):
        return ""
    return f"As it is, the model retrieves {share:.1%} of the needles (chance: 12.5%)."


def _control(table: pd.DataFrame, row: pd.Series) -> float:
    """The mean loss change of the random sets that stand beside an entry; NaN without."""
    control = table[table["kind"] == CONTROL[row["kind"]]]
    same = "band" if row["kind"] == "band" else "kept"
    return float(control.loc[control[same] == row[same], "loss_change"].mean())


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
    most, bits = row["changed_most"], row["largest_attention_change"]
    return (
        f"{100 * row['kept']:.3g}",
        _span(row),
        signed(row["loss_change"]),
        interval(low, high) if np.isfinite(low) else NOTHING,
        signed(_control(table, row)),
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


def _span(row: pd.Series) -> str:
    low, high = short_count(row["wavelength_low"]), short_count(row["wavelength_high"])
    return low if low == high else f"{low} to {high}"
