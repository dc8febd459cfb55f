"""How the groups of a comparison differ: in loss, by position, in what their heads are."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from ropelens.comparison.pairs import changes, entries_of, group_names
from ropelens.errors import BadArgument
from ropelens.figures.series import looks, mean_and_range
from ropelens.figures.style import COLORS, LABELS, MUTED, new_figure, template
from ropelens.figures.text import plotly_text


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
    look = looks(comparison)
    for row in rows.to_dict("records"):
        group, mean = row["group"], row["loss_change"]
        pairs = changes(comparison["loss"], group).values
        color = look[group].color
        figure.add_scatter(
            x=pairs,
            y=[plotly_text(group)] * len(pairs),
            mode="markers",
            marker={"size": 13, "symbol": "circle-open", "color": color, "line_width": 1.5},
            hovertemplate="one pair: %{x:+.4f} nats/token<extra></extra>",
            meta={"x": "loss_change", "of": "pair"},
        )
        figure.add_scatter(
            x=[mean],
            y=[plotly_text(group)],
            error_x={
                "type": "data",
                "array": [row["high"] - mean],
                "arrayminus": [mean - row["low"]],
                "color": color,
                "thickness": 2.5,
                "width": 7,
            },
            mode="markers",
            marker={"size": 8, "symbol": look[group].symbol, "color": color},
            hovertemplate="%{x:+.4f} nats/token "
            f"[{row['low']:+.4f}, {row['high']:+.4f}], 95% over {row['over']}<extra></extra>",
            meta={"x": "loss_change", "of": "mean"},
        )
    figure.add_vline(x=0, line={"color": MUTED, "width": 1.5})
    figure.update_layout(showlegend=False)
    figure.update_xaxes(
        title_text="difference in loss (nats per token; right is worse)", exponentformat="none"
    )
    figure.update_yaxes(range=[-0.6, len(rows) - 0.4], showgrid=False, type="category")
    return figure


def plot_position_loss(comparison: xr.Dataset) -> go.Figure:
    """Loss by position (nats per token), up to four times the trained context.

    Above each group's mean, below its mean difference to the baseline, over the same text;
    whiskers from the lowest seed to the highest.
    """
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08, row_heights=[0.5, 0.5]
    )
    start = np.maximum(comparison["position_start"].values.astype(float), 1)
    middle = np.sqrt(start * (comparison["position_stop"].values - 1).clip(1))
    look = looks(comparison)
    for group in group_names(comparison):
        panels = {
            1: entries_of(comparison, group)["position_loss"],
            2: changes(comparison["position_loss"], group),
        }
        for row, values in panels.items():
            if not values.sizes["entry"]:
                continue
            figure.add_scatter(
                x=middle,
                **mean_and_range(values),
                name=plotly_text(group),
                legendgroup=group,
                showlegend=row == 1,
                mode="lines+markers",
                line=look[group].line,
                marker={"symbol": look[group].symbol, "size": 6},
                hovertemplate=f"{plotly_text(group)}<br>"
                "position %{x:.0f}: %{y:.3f} nats/token<extra></extra>",
                meta={"x": "position", "y": "position_loss" if row == 1 else "change"},
                row=row,
                col=1,
            )
    context = int(comparison.attrs["context"])
    longest = int(comparison["position_stop"].max())
    powers = [2**k for k in range(int(np.log2(longest)) + 1)]
    figure.update_layout(
        template=template("light"), title_text="Loss by position in the text", height=560
    )
    figure.add_vline(x=context, line={"width": 1.75, "dash": "dot", "color": MUTED})
    figure.add_annotation(
        x=np.log10(context),
        y=1,
        yref="y domain",
        yanchor="top",
        xanchor="right",
        text="trained context ",
    )
    figure.update_xaxes(
        type="log", tickvals=powers, ticktext=[f"{power:,}" for power in powers]
    )
    figure.update_xaxes(title_text="position of the predicted token (log scale)", row=2)
    figure.update_yaxes(title_text="loss (nats/token)", row=1)
    figure.update_yaxes(
        title_text=f"difference to {plotly_text(comparison.attrs['baseline'])}<br>(nats/token)",
        exponentformat="none",
        zeroline=True,
        zerolinecolor=MUTED,
        row=2,
    )
    return figure


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


def mean_count(value: float) -> str:
    """A number of heads, the mean over some models: one decimal, none where it is whole."""
    return f"{value:.1f}".removesuffix(".0")
