"""Figure of the effect of stopping planes from either end."""

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures import style
from ropelens.figures.planes import reach_of
from ropelens.figures.sweep_traces import (
    END_LOOKS,
    KEPT_TITLE,
    SweptPlanes,
    add_draws,
    add_mean_of_draws,
    changes_of,
    figure_with_marks,
    set_kept_shares,
    swept_planes,
)

AXIS_TITLES = {  # by column of the summary
    "loss_change": "change of loss<br>(nats/token)",
    "far_loss_change": "change of loss at late<br>positions (nats/token)",
    "copy_loss_change": "change of loss of<br>far copies (nats/token)",
    "repeat_loss_change": "change of loss of<br>repeats (nats/token)",
    "retrieval_change": "change of correct<br>retrievals (share)",
    "induction_change": "change of best induction<br>head (0 to 1)",
    "labels_changed_share": "heads with a new<br>label (share)",
    "labels_differ_share": "heads with another<br>label (share)",
}


def ends_figure(
    truncation: xr.Dataset, table: pd.DataFrame, ends: list[str], measures: list[str]
) -> go.Figure:
    """A row of panels for each measure (column of the table), and a column for each end."""
    swept = swept_planes(truncation)
    figure = figure_with_marks(
        f"Effect of stopping planes from either end{swept.title_end}",
        height=180 + 240 * len(measures),
        rows=len(measures),
        cols=len(ends),
        shared_yaxes=True,
        horizontal_spacing=0.04,
        vertical_spacing=0.08,
    )
    for row, measure in enumerate(measures, start=1):
        for column, end in enumerate(ends, start=1):
            _add_random_planes(figure, table, end, measure, row=row, col=column)
            _add_end(figure, table, end, measure, row=row, col=column)
        figure.update_yaxes(title_text=AXIS_TITLES[measure], row=row, col=1)
    figure.update_yaxes(zeroline=True, nticks=6)
    set_kept_shares(figure)
    figure.update_xaxes(showticklabels=False)
    figure.update_xaxes(showticklabels=True, title_text=KEPT_TITLE, row=len(measures))
    for column, end in enumerate(ends, start=1):
        _mark_trained(figure, truncation, swept, end, column=column)
    return figure


def _add_random_planes(
    figure: go.Figure,
    table: pd.DataFrame,
    end: str,
    measure: str,
    *,
    row: int,
    col: int,
) -> None:
    """Draw random sets of planes, and their mean from all planes to none."""
    draws = table[table["kind"] == "random"]
    if draws.empty:
        return
    unmodified = table[table["kind"] == "none"]
    none_rotates = table[(table["kind"] == end) & (table["kept"] == 0)]
    steps = pd.concat([draws, unmodified, none_rotates])
    means = steps.groupby("kept")[measure].mean()
    add_mean_of_draws(
        figure, means.index, means, showlegend=row == col == 1, row=row, col=col
    )
    add_draws(figure, draws["kept"], changes_of(draws, measure), row=row, col=col)


def _add_end(
    figure: go.Figure,
    table: pd.DataFrame,
    end: str,
    measure: str,
    *,
    row: int,
    col: int,
) -> None:
    """Draw the change of a measure while planes stop from an end."""
    look = END_LOOKS[end]
    unmodified = table[table["kind"] == "none"]
    steps = pd.concat([unmodified, table[table["kind"] == end]])
    steps = steps.sort_values("kept", ascending=False)
    changes = changes_of(steps, measure)
    figure.add_scatter(
        x=steps["kept"],
        y=changes.values,
        error_y=changes.bars,
        text=changes.hovers,
        hovertemplate=style.TEXT_ONLY,
        mode="lines+markers",
        line={"color": look.color, "width": 2},
        marker={"color": look.color, "symbol": look.symbol, "size": 7},
        cliponaxis=False,
        name=look.name,
        legendgroup=end,
        showlegend=row == 1,
        row=row,
        col=col,
    )


def _mark_trained(
    figure: go.Figure,
    truncation: xr.Dataset,
    swept: SweptPlanes,
    end: str,
    *,
    column: int,
) -> None:
    """Mark the trained context in a column, with words above the first panel."""
    reach = reach_of(truncation, swept.layers, "trained context")
    rotates = np.isfinite(swept.wavelength)
    most = rotates.sum(axis=1).argmax()  # the layer with most rotating planes
    turning = swept.wavelength[most][rotates[most]]
    if len(turning) < 2 or not turning[0] <= reach.length <= turning[-1]:
        return
    planes = np.arange(len(turning))
    plane = np.interp(np.log(reach.length), np.log(turning), planes)
    share = float(plane + 0.5) / len(turning)
    trace = next(figure.select_traces(row=1, col=column))
    name = reach.name.replace(" ", "<br>")
    side = "left" if end == "slow" else "right"
    style.mark(
        figure,
        share if end == "slow" else 1 - share,
        f"wavelength = {name} ({reach.length:,} tokens)",
        col=column,
        xref=trace.xaxis,
        yref=f"{trace.yaxis} domain",
        xanchor=side,
        yanchor="bottom",
        align=side,
    )
