"""Figure of the loss by position in the text, for each edit."""

import plotly.graph_objects as go
import xarray as xr

from ropelens.arguments import public
from ropelens.figures import style
from ropelens.figures.formats import plotly_text
from ropelens.interventions.position_losses import position_losses


@public
def plot_position_losses(results: xr.Dataset) -> go.Figure:
    """Loss by position (nats/token) for each edit of `evaluate`, and its change by the edit.

    Bars are standard errors over groups of sequences.
    """
    table = position_losses(results)
    colors = (style.MUTED, *style.VARIANT_COLORS)
    figure = style.stacked("Loss by position in the text", 2, height=520)
    for number, (edit, rows) in enumerate(table.groupby("edit", sort=False)):
        position = rows["position_start"].clip(lower=1)
        color = colors[number % len(colors)]
        name = plotly_text(str(edit))
        figure.add_scatter(
            x=position,
            y=rows["loss"],
            error_y={"array": rows["loss_se"], "thickness": 1},
            mode="lines+markers",
            name=name,
            line_color=color,
            legendgroup=number,
            row=1,
            col=1,
        )
        figure.add_scatter(
            x=position,
            y=rows["change"],
            showlegend=False,
            mode="lines+markers",
            name=name,
            line_color=color,
            legendgroup=number,
            row=2,
            col=1,
        )
    figure.update_yaxes(title_text="loss<br>(nats/token)", row=1)
    figure.update_yaxes(title_text="change of the loss<br>(nats/token)", row=2)
    style.set_counts(figure, table["position_stop"], style.POSITION_TITLE)
    return style.note_missing(figure, "no loss was measured", table["loss"])
