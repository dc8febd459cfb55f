"""How the groups of a comparison differ: in loss, by position, in heads, as they learn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.comparison.pairs import entries_of, group_names, paired_changes
from ropelens.comparison.table import loss_past_context, repeat_gain
from ropelens.figures.style import (
    COLORS,
    DOTTED,
    LABELS,
    MUTED,
    VARIANT_COLORS,
    log_axis,
    mark,
    new_figure,
)
from ropelens.figures.text import mean_count, plotly_text
from ropelens.measure.terms import NEEDLES
from ropelens.measure.truncation_table import best_head

KNOWN = ("p-rope-0.75", "p-rope-0.25", "p-rope-0.5", "p-rope-reversed-0.75", "nope")
"""Variants that look the same on every page: the first has the first colour, and so on."""

VARIANT_SYMBOLS = ("square", "diamond", "triangle-up", "cross", "star", "pentagon")
DASHES = ("solid", "dash", "dot")

HEADS = ("layer", "head")
TWO_PANELS: dict[str, Any] = {
    "height": 560,
    **{"rows": 2, "cols": 1, "shared_xaxes": True, "vertical_spacing": 0.08},
}
"""One above the other, over the same tokens."""


@dataclass(frozen=True)
class Look:
    """How a group is drawn: its colour, marker and line."""

    color: str
    symbol: str
    dash: str
    width: float = 2

    @property
    def line(self) -> dict[str, object]:
        """As plotly's `line`."""
        return {"color": self.color, "dash": self.dash, "width": self.width}


def looks(comparison: xr.Dataset) -> Mapping[str, Look]:
    """The look of each group; the first, the baseline, is grey and wide, below the others."""
    first, *rest = group_names(comparison)
    return {first: Look(MUTED, "circle", "solid", width=5)} | variant_looks(rest)


def variant_looks(names: Sequence[str]) -> dict[str, Look]:
    """The look of each variant, "p-rope:0.75" or "p-rope-0.75"; others take what is left."""
    every = [
        Look(color, symbol, dash)
        for dash in DASHES
        for color, symbol in zip(VARIANT_COLORS, VARIANT_SYMBOLS, strict=True)
    ]
    written = {name: name.replace(":", "-") for name in names}
    taken = {KNOWN.index(known) for known in written.values() if known in KNOWN}
    left = itertools.cycle(sorted(set(range(len(every))) - taken))
    return {
        name: every[KNOWN.index(known) if known in KNOWN else next(left)]
        for name, known in written.items()
    }


def group_line(group: str, look: Look, values: xr.DataArray) -> dict[str, Any]:
    """Keywords of the scatter that draws a group's `values`, over `entry` and one axis more.

    The mean over `entry`; whiskers from the lowest entry to the highest, if there are several.
    """
    mean = values.mean("entry")
    above, below = values.max("entry") - mean, mean - values.min("entry")
    whiskers = {"type": "data", "array": above.values, "arrayminus": below.values}
    return {
        "y": mean.values,
        "error_y": whiskers
        | {"thickness": 1, "width": 2, "visible": values.sizes["entry"] > 1},
        "name": plotly_text(group),
        "legendgroup": group,
        "mode": "lines+markers",
        "line": look.line,
    }


def _add_lines(
    figure: go.Figure,
    comparison: xr.Dataset,
    values_of: Callable[[str], xr.DataArray],
    *,
    x: np.ndarray,
    row: int,
    hover: str,
    meta: dict[str, str],
) -> None:
    """A line a group in the panel `row`: `values_of` a group are over (entry, x)."""
    for group, look in looks(comparison).items():
        values = values_of(group).transpose("entry", ...)
        if values.sizes["entry"]:
            figure.add_scatter(
                x=x,
                **group_line(group, look, values),
                showlegend=row == 1,
                marker={"symbol": look.symbol, "size": 6},
                hovertemplate=f"{plotly_text(group)}<br>{hover}<extra></extra>",
                meta=meta,
                row=row,
                col=1,
            )


def plot_loss_change(comparison: xr.Dataset, table: pd.DataFrame) -> go.Figure:
    """Loss of each group less the baseline's (nats per token), with 95% intervals.

    `table` is `summarize_comparison(comparison)`. A ring is a pair, of one seed; right of zero
    is worse.
    """
    rows = table[table["loss_change"].notna()].iloc[::-1]
    baseline = plotly_text(comparison.attrs["baseline"])
    figure = new_figure(f"Loss against that of {baseline}", height=140 + 46 * len(rows))
    for row in rows.to_dict("records"):
        group, mean, look = row["group"], row["loss_change"], looks(comparison)[row["group"]]
        pairs = paired_changes(comparison["loss"], group).values
        ring = {"size": 13, "symbol": "circle-open", "color": look.color, "line_width": 1.5}
        figure.add_scatter(
            x=pairs,
            y=[plotly_text(group)] * len(pairs),
            mode="markers",
            marker=ring,
            hovertemplate="one pair: %{x:+.4f} nats/token<extra></extra>",
            meta={"x": "loss_change", "of": "pair"},
        )
        bar = {"array": [row["high"] - mean], "arrayminus": [mean - row["low"]]}
        figure.add_scatter(
            x=[mean],
            y=[plotly_text(group)],
            error_x={"type": "data", **bar, "color": look.color, "thickness": 2.5, "width": 7},
            mode="markers",
            marker={"size": 8, "symbol": look.symbol, "color": look.color},
            hovertemplate="%{x:+.4f} nats/token "
            f"[{row['low']:+.4f}, {row['high']:+.4f}], 95% over {row['over']}<extra></extra>",
            meta={"x": "loss_change", "of": "mean"},
        )
    figure.add_vline(x=0, line={"color": MUTED, "width": 1.5})
    title = "difference in loss (nats per token; right is worse)"
    figure.update_xaxes(title_text=title, exponentformat="none")
    figure.update_yaxes(range=[-0.6, len(rows) - 0.4], showgrid=False, type="category")
    return figure.update_layout(showlegend=False)


def plot_position_loss(comparison: xr.Dataset) -> go.Figure:
    """Loss by position (nats per token), up to four times the trained context.

    Above each group's mean, below its mean difference to the baseline, over the same text;
    whiskers from the lowest seed to the highest.
    """
    figure = new_figure("Loss by position in the text", **TWO_PANELS)
    start = np.maximum(comparison["position_start"].values.astype(float), 1)
    middle = np.sqrt(start * (comparison["position_stop"].values - 1).clip(1))
    losses = comparison["position_loss"]
    panels: dict[str, Callable[[str], xr.DataArray]] = {
        "position_loss": partial(entries_of, losses),
        "change": partial(paired_changes, losses),
    }
    hover = "position %{x:.0f}: %{y:.3f} nats/token"
    for row, (name, values_of) in enumerate(panels.items(), start=1):
        meta = {"x": "position", "y": name}
        _add_lines(figure, comparison, values_of, x=middle, row=row, hover=hover, meta=meta)
    longest = int(comparison["position_stop"].max())
    _past_context(figure, comparison, longest, "position of the predicted token (log scale)")
    baseline = plotly_text(comparison.attrs["baseline"])
    figure.update_yaxes(title_text="loss (nats/token)", row=1)
    figure.update_yaxes(title_text=f"difference to {baseline}<br>(nats/token)", row=2)
    figure.update_yaxes(exponentformat="none", zeroline=True, zerolinecolor=MUTED, row=2)
    return figure


def plot_copying(comparison: xr.Dataset) -> go.Figure:
    """Loss of copied tokens by distance, needles found by length, past the trained context.

    Above, random tokens that come again after so many tokens (nats per token); below, the
    share of needles found in prompts of so many tokens, dotted what chance finds. Lines are
    means over a group's entries; whiskers from the lowest to the highest.
    """
    panels = {
        "loss of copied tokens<br>(nats/token)": comparison["copy_loss"].mean("trial"),
        "needles found<br>(share)": comparison["far_retrieval"],
    }
    figure = new_figure("Copying and retrieval by distance", **TWO_PANELS)
    longest = 1
    for row, (title, values) in enumerate(panels.items(), start=1):
        (dim,) = (dim for dim in values.dims if dim != "entry")
        longest = max(longest, int(values[dim].max()))
        _add_lines(
            figure,
            comparison,
            partial(entries_of, values),
            x=values[dim].values,
            row=row,
            hover="%{x:,} tokens: %{y:.3g}",
            meta={"x": str(dim), "y": "copy_loss" if row == 1 else "far_retrieval"},
        )
        figure.update_yaxes(title_text=title, rangemode="tozero", row=row)
    figure.add_hline(y=1 / NEEDLES, line=DOTTED, row=2)
    title = "tokens to the copy; of the prompt (log scale)"
    _past_context(figure, comparison, longest, title)
    return figure


def _past_context(figure: go.Figure, comparison: xr.Dataset, longest: int, title: str) -> None:
    """A common axis of tokens up to the `longest`, where the trained context is marked."""
    context = int(comparison.attrs["context"])
    mark(figure, context, "trained context ", name="context", xanchor="right")
    powers = [2**k for k in range(int(np.log2(longest)) + 1)]
    figure.update_xaxes(**log_axis({power: f"{power:,}" for power in powers}))
    figure.update_xaxes(title_text=title, row=2)


def plot_label_counts(table: pd.DataFrame) -> go.Figure:
    """How many heads of each group are positional, semantic, ...: means over its entries.

    `table` is what `summarize_comparison` made.
    """
    rows = table.iloc[::-1]
    figure = new_figure("What the heads are", height=150 + 40 * len(rows))
    for label in LABELS:
        figure.add_bar(
            x=rows[label],
            y=[plotly_text(group) for group in rows["group"]],
            orientation="h",
            name=label,
            marker={"color": COLORS[label]},
            text=[mean_count(count) if count else "" for count in rows[label]],
            textposition="inside",
            insidetextanchor="middle",
            hovertemplate=f"%{{y}}: %{{x:.2~f}} {label}<extra></extra>",
        )
    figure.update_layout(barmode="stack", bargap=0.3, legend_traceorder="normal")
    figure.update_xaxes(title_text="heads (mean over entries)")
    return figure.update_yaxes(showgrid=False, type="category")


def _count(label: str) -> Callable[[xr.Dataset], xr.DataArray]:
    def count(entries: xr.Dataset) -> xr.DataArray:
        known = entries["growth_loss"].notnull()
        return (entries["growth_label"] == label).sum(HEADS).where(known)

    return count


GROWTH: dict[str, Callable[[xr.Dataset], xr.DataArray]] = {
    "loss<br>(nats/token)": lambda entries: entries["growth_loss"],
    "loss past context<br>(nats/token)": lambda e: loss_past_context(e, "growth_position_loss"),
    "gain of repeats<br>(nats/token)": lambda e: repeat_gain(e, "growth_").mean("trial"),
    "positional<br>heads": _count("positional"),
    "semantic<br>heads": _count("semantic"),
    "best head on<br>previous token": lambda e: e["growth_previous_token"].max(HEADS),
    "best head,<br>induction": lambda e: best_head(e["growth_trial_induction"]).mean("trial"),
    "retrieval<br>(share)": lambda e: e["growth_retrieval"].mean(("retrieval_length", "depth")),
}
"""What each panel of `plot_growth` shows of entries, over (entry, step)."""


def plot_growth(comparison: xr.Dataset) -> go.Figure:
    """Losses, positional and semantic heads, the best heads' scores, retrieval, by step.

    A line a group, the mean over its seeds; whiskers from the lowest seed to the highest. The
    last panel is of retrieval, dotted what chance finds.
    """
    measured = {title: measure(comparison) for title, measure in GROWTH.items()}
    panels = {title: values for title, values in measured.items() if values.notnull().any()}
    rows = {"rows": len(panels), "cols": 1, "shared_xaxes": True, "vertical_spacing": 0.02}
    figure = new_figure("How it grew over training", height=130 * len(panels) + 170, **rows)
    steps = comparison["step"].values
    for row, (title, values) in enumerate(panels.items(), start=1):
        _add_lines(
            figure,
            comparison,
            partial(entries_of, values),
            x=steps,
            row=row,
            hover="step %{x:,}: %{y:.3g}",
            meta={"x": "step", "y": title.replace("<br>", " ")},
        )
        figure.update_yaxes(title_text=title, nticks=4, exponentformat="none", row=row)
        if not title.startswith("loss"):
            figure.update_yaxes(rangemode="tozero", row=row)
    figure.add_hline(y=1 / NEEDLES, line=DOTTED, row=len(panels))
    ticks = 4 ** np.arange(0, int(np.log2(max(2, int(steps.max())))) // 2 + 1)
    figure.update_xaxes(**log_axis({int(tick): f"{tick:,}" for tick in ticks}))
    return figure.update_xaxes(title_text="training step (log scale)", row=len(panels))
