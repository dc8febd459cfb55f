"""How the groups of a comparison differ: in loss, by position, in what their heads are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.comparison.pairs import entries_of, paired_changes
from ropelens.errors import BadArgument
from ropelens.figures.numbers import mean_count
from ropelens.figures.series import group_line, looks
from ropelens.figures.style import COLORS, DOTTED, LABELS, MUTED, log_axis, mark, new_figure
from ropelens.figures.text import plotly_text
from ropelens.measure.terms import NEEDLES

TWO_PANELS: dict[str, Any] = {
    "height": 560,
    **{"rows": 2, "cols": 1, "shared_xaxes": True, "vertical_spacing": 0.08},
}
"""One above the other, over the same tokens."""


def plot_loss_change(comparison: xr.Dataset, table: pd.DataFrame) -> go.Figure:
    """Loss of each group less the baseline's (nats per token), with 95% intervals.

    `table` is what `summarize_comparison` made of `comparison`. A ring is a pair, of one
    seed; right of zero is worse. Raises `BadArgument` where no group has a pair.
    """
    rows = table[table["loss_change"].notna()].iloc[::-1]
    if rows.empty:
        raise BadArgument(
            "There is no loss to compare.",
            means="no entry has one of the baseline to be paired with",
        )
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
    for group, look in looks(comparison).items():
        panels = {
            "position_loss": entries_of(comparison, group)["position_loss"],
            "change": paired_changes(comparison["position_loss"], group),
        }
        for row, (name, values) in enumerate(panels.items(), start=1):
            if not values.sizes["entry"]:
                continue
            figure.add_scatter(
                x=middle,
                **group_line(group, look, values),
                showlegend=row == 1,
                marker={"symbol": look.symbol, "size": 6},
                hovertemplate=f"{plotly_text(group)}<br>"
                "position %{x:.0f}: %{y:.3f} nats/token<extra></extra>",
                meta={"x": "position", "y": name},
                row=row,
                col=1,
            )
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
        "copy_loss": (
            comparison["copy_loss"].mean("trial"),
            "loss of copied tokens<br>(nats/token)",
        ),
        "far_retrieval": (comparison["far_retrieval"], "needles found<br>(share)"),
    }
    figure = new_figure("Copying and retrieval by distance", **TWO_PANELS)
    longest = 1
    for row, (name, (values, title)) in enumerate(panels.items(), start=1):
        (dim,) = (dim for dim in values.dims if dim != "entry")
        longest = max(longest, int(values[dim].max()))
        for group, look in looks(comparison).items():
            figure.add_scatter(
                x=values[dim].values,
                **group_line(group, look, entries_of(values, group).transpose("entry", dim)),
                showlegend=row == 1,
                marker={"symbol": look.symbol, "size": 6},
                hovertemplate=f"{plotly_text(group)}<br>"
                "%{x:,} tokens: %{y:.3g}<extra></extra>",
                meta={"x": str(dim), "y": name},
                row=row,
                col=1,
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
    figure.update_yaxes(showgrid=False, type="category")
    return figure
