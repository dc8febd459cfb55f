"""Figures of a comparison: losses, copying, and changes during training."""

from collections.abc import Hashable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.comparison.pairs import group_names, paired_changes
from ropelens.comparison.summary import loss_past_context, repeat_gain
from ropelens.figures import style
from ropelens.figures.difference_lines import DifferenceLine, plot_difference_lines
from ropelens.figures.formats import plotly_text
from ropelens.figures.group_looks import Look, group_looks
from ropelens.figures.line_panels import HEADS, LinePanel, line_panels
from ropelens.intervals import paired_interval
from ropelens.interventions.changes import best_head
from ropelens.profiles.measures import NEEDLES

GUESS = 1 / NEEDLES  # share of needles that a guess finds


def plot_loss_change(comparison: xr.Dataset, table: pd.DataFrame) -> go.Figure:
    """Loss of each group minus the loss of the baseline (nats/token), with 95% intervals.

    `table` is `summarize_comparison(comparison)`. Each ring is a pair of runs with one seed.
    """
    groups = table[table["loss_change"].notna()].iloc[::-1]
    baseline = plotly_text(comparison.attrs["baseline"])
    figure = style.new_figure(
        f"Loss compared with {baseline}", height=140 + 46 * len(groups)
    )
    looks = group_looks(comparison)
    for group in groups.to_dict("records"):
        pairs = paired_changes(comparison["loss"], group["group"]).values
        _add_pairs(figure, group, pairs, looks[group["group"]])
        _add_loss_change(figure, group, looks[group["group"]])
    figure.add_vline(x=0, line={"color": style.MUTED, "width": 1.5})
    figure.update_xaxes(
        title_text="difference in loss; right is worse (nats/token)",
        exponentformat="none",
    )
    figure.update_yaxes(
        range=[-0.6, len(groups) - 0.4], showgrid=False, type="category"
    )
    figure.update_layout(showlegend=False)
    return style.note_missing(
        figure, "no two losses are on the same text", groups["loss_change"]
    )


def _add_pairs(
    figure: go.Figure, group: Mapping[Hashable, Any], pairs: np.ndarray, look: Look
) -> None:
    """Draw a ring for each pair of runs."""
    ring = {
        "size": 13,
        "symbol": "circle-open",
        "color": look.line["color"],
        "line_width": 1.5,
    }
    figure.add_scatter(
        x=pairs,
        y=[plotly_text(group["group"])] * len(pairs),
        mode="markers",
        marker=ring,
        hovertemplate="one pair: %{x:+.4f} nats/token<extra></extra>",
    )


def _add_loss_change(
    figure: go.Figure, group: Mapping[Hashable, Any], look: Look
) -> None:
    """Draw the mean change of a group, and its interval."""
    change = group["loss_change"]
    low = group["low"]
    high = group["high"]
    color = look.line["color"]
    interval = f"95% interval over {group['over']}: {low:+.4f} to {high:+.4f}"
    figure.add_scatter(
        x=[change],
        y=[plotly_text(group["group"])],
        error_x=style.interval_bars([change], [low], [high], color=color, width=7),
        mode="markers",
        marker={"size": 8, "symbol": look.symbol, "color": color},
        hovertemplate=f"%{{x:+.4f}} nats/token ({interval})<extra></extra>",
    )


def plot_loss_lines(comparison: xr.Dataset, table: pd.DataFrame) -> go.Figure:
    """Loss of each group minus the loss of the baseline by training tokens (nats/token).

    `table` is `summarize_comparison(comparison)`, which has the last point of each line. The
    intervals are over seeds, and a group with one seed has none.
    """
    lines = []
    for group in table[table["loss_change"].notna()].to_dict("records"):
        line = _loss_line(comparison, group)
        if line.tokens.size:
            lines.append(line)
    baseline = str(comparison.attrs["baseline"])
    return plot_difference_lines(
        f"Validation loss compared with {plotly_text(baseline)}",
        lines,
        group_looks(comparison),
        baseline=baseline,
        y_title="difference in loss (nats/token)",
    )


def _loss_line(comparison: xr.Dataset, group: Mapping[Hashable, Any]) -> DifferenceLine:
    """The line of a group: the paired changes at checkpoints, and its row of the table."""
    name = group["group"]
    changes = paired_changes(comparison["growth_loss"], name).dropna("step")
    tokens_seen = comparison["tokens_seen"].sel(entry=changes["entry"])
    tokens = tokens_seen.sel(step=changes["step"]).mean("entry").values
    means = []
    lows = []
    highs = []
    for step in changes["step"]:
        mean, low, high = paired_interval(changes.sel(step=step).values)
        means.append(mean)
        lows.append(low)
        highs.append(high)
    if means:
        means[-1] = group["loss_change"]
        if group["over"] == "seeds":
            lows[-1] = group["low"]
            highs[-1] = group["high"]
    return DifferenceLine(
        name,
        tokens=tokens,
        change=np.array(means),
        low=np.array(lows),
        high=np.array(highs),
    )


def plot_position_loss(comparison: xr.Dataset) -> go.Figure:
    """Loss by position (nats/token), and differences from the baseline. Whiskers: seeds."""
    first = np.maximum(comparison["position_start"].values.astype(float), 1)
    last = (comparison["position_stop"].values - 1).clip(1)
    losses = comparison["position_loss"].transpose("entry", ...)
    losses = losses.assign_coords({losses.dims[1]: np.sqrt(first * last)})
    baseline = plotly_text(comparison.attrs["baseline"])
    changes = {}
    for group in group_names(comparison):
        changes[group] = paired_changes(losses, group)
    panels = [
        LinePanel.of_groups("loss (nats/token)", losses),
        LinePanel(f"difference from {baseline}<br>(nats/token)", changes),
    ]
    figure = line_panels(
        "Loss by position in the text",
        comparison,
        panels,
        hover="position %{x:.0f}: %{y:.3f} nats/token",
    )
    figure.update_yaxes(
        exponentformat="none", zeroline=True, zerolinecolor=style.MUTED, row=2
    )
    style.set_counts(figure, comparison["position_stop"], style.POSITION_TITLE)
    return _mark_context(figure, comparison)


def plot_copying(comparison: xr.Dataset) -> go.Figure:
    """Loss of copied random tokens by distance, and needles found. A guess is dotted."""
    copy_loss = comparison["copy_loss"]
    needles = comparison["far_retrieval"]
    panels = [
        LinePanel.of_groups("loss of copied tokens<br>(nats/token)", copy_loss),
        LinePanel.of_groups("needles found<br>(share)", needles),
    ]
    figure = line_panels(
        "Copying and retrieval by distance",
        comparison,
        panels,
        hover="%{x:,} tokens: %{y:.3g}",
    )
    figure.update_yaxes(rangemode="tozero")
    figure.add_hline(y=GUESS, line=style.DOTTED, row=2)
    lengths = [*comparison["copy_distance"], *comparison["prompt_length"]]
    style.set_counts(figure, lengths, "distance or prompt length (tokens, log scale)")
    return _mark_context(figure, comparison)


def _mark_context(figure: go.Figure, comparison: xr.Dataset) -> go.Figure:
    context = int(comparison.attrs["context"])
    return style.mark(figure, context, "trained context ", xanchor="right")


def plot_growth(comparison: xr.Dataset) -> go.Figure:
    """Losses, heads and retrieval by training step. The dotted line is a guess at needles."""
    panels = []
    for title, values in _growth(comparison).items():
        if values.notnull().any():
            panels.append(LinePanel.of_groups(title, values))
    figure = line_panels(
        "Changes during training",
        comparison,
        panels,
        hover="step %{x:,}: %{y:.3g}",
        height=130 * len(panels) + 170,
        spacing=0.02,
    )
    for row, panel in enumerate(panels, start=1):
        is_loss = "loss" in panel.title
        figure.update_yaxes(rangemode="normal" if is_loss else "tozero", row=row)
    figure.update_yaxes(nticks=4, exponentformat="none")
    figure.add_hline(y=GUESS, line=style.DOTTED, row=max(1, len(panels)))
    style.set_counts(figure, comparison["step"], "training (steps, log scale)", base=4)
    return figure


def _growth(comparison: xr.Dataset) -> dict[str, xr.DataArray]:
    """What changes with the steps, by the title of its axis."""
    past_context = loss_past_context(comparison, "growth_")
    previous_token = comparison["growth_previous_token"].max(HEADS)
    return {
        "loss<br>(nats/token)": comparison["growth_loss"],
        "loss past context<br>(nats/token)": past_context,
        "gain of repeats<br>(nats/token)": repeat_gain(comparison, "growth_"),
        "positional<br>heads (count)": _heads_with(comparison, "positional"),
        "semantic<br>heads (count)": _heads_with(comparison, "semantic"),
        "previous-token<br>head (0 to 1)": previous_token,
        "induction<br>head (0 to 1)": _best_induction(comparison),
        "retrieval<br>(share)": comparison["growth_retrieval"],
    }


def _best_induction(comparison: xr.Dataset) -> xr.DataArray:
    if "growth_best_induction" in comparison:
        return comparison["growth_best_induction"]
    # Results of earlier versions have the scores of all trials, which a panel averages
    return best_head(comparison["growth_trial_induction"])


def _heads_with(comparison: xr.Dataset, label: str) -> xr.DataArray:
    """Number of heads with a label at each step; NaN for steps that were not measured."""
    measured = comparison["growth_loss"].notnull()
    return (comparison["growth_label"] == label).sum(HEADS).where(measured)
