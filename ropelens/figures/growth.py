"""How losses and heads of a comparison's runs grow as they learn."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.comparison.pairs import entries_of
from ropelens.comparison.table import loss_past_context, repeat_gain
from ropelens.figures.series import group_line, looks
from ropelens.figures.style import DOTTED, log_axis, new_figure
from ropelens.figures.text import plotly_text
from ropelens.measure.induction import best_head
from ropelens.measure.terms import NEEDLES

HEADS = ("layer", "head")


def _count(label: str) -> Callable[[xr.Dataset], xr.DataArray]:
    def count(entries: xr.Dataset) -> xr.DataArray:
        known = entries["growth_loss"].notnull()
        return (entries["growth_label"] == label).sum(HEADS).where(known)

    return count


PANELS: dict[str, Callable[[xr.Dataset], xr.DataArray]] = {
    "loss<br>(nats/token)": lambda entries: entries["growth_loss"],
    "loss past context<br>(nats/token)": lambda e: loss_past_context(e, "growth_position_loss"),
    "gain of repeats<br>(nats/token)": lambda e: repeat_gain(e, "growth_").mean("trial"),
    "positional<br>heads": _count("positional"),
    "semantic<br>heads": _count("semantic"),
    "best head on<br>previous token": lambda e: e["growth_previous_token"].max(HEADS),
    "best head,<br>induction": lambda e: best_head(e["growth_trial_induction"]).mean("trial"),
    "retrieval<br>(share)": lambda e: e["growth_retrieval"].mean(("retrieval_length", "depth")),
}
"""What each panel shows of entries, over (entry, step)."""


def plot_growth(comparison: xr.Dataset) -> go.Figure:
    """Losses, positional and semantic heads, the best heads' scores, retrieval, by step.

    A line a group, the mean over its seeds; whiskers from the lowest seed to the highest. The
    last panel is of retrieval, dotted what chance finds.
    """
    measured = {title: measure(comparison) for title, measure in PANELS.items()}
    panels = {title: values for title, values in measured.items() if values.notnull().any()}
    rows = {"rows": len(panels), "cols": 1, "shared_xaxes": True, "vertical_spacing": 0.02}
    figure = new_figure("How it grew over training", height=130 * len(panels) + 170, **rows)
    steps = comparison["step"].values
    for row, (title, values) in enumerate(panels.items(), start=1):
        for group, look in looks(comparison).items():
            figure.add_scatter(
                x=steps,
                **group_line(group, look, entries_of(values, group).transpose("entry", "step")),
                showlegend=row == 1,
                marker={"symbol": look.symbol, "size": 6},
                hovertemplate=f"{plotly_text(group)}<br>"
                "step %{x:,}: %{y:.3g}<extra></extra>",
                meta={"x": "step", "y": title.replace("<br>", " ")},
                row=row,
                col=1,
            )
        figure.update_yaxes(title_text=title, nticks=4, exponentformat="none", row=row)
        if not title.startswith("loss"):
            figure.update_yaxes(rangemode="tozero", row=row)
    figure.add_hline(y=1 / NEEDLES, line=DOTTED, row=len(panels))
    ticks = 4 ** np.arange(0, int(np.log2(max(2, int(steps.max())))) // 2 + 1)
    figure.update_xaxes(**log_axis({int(tick): f"{tick:,}" for tick in ticks}))
    return figure.update_xaxes(title_text="training step (log scale)", row=len(panels))
