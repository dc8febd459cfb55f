"""Stacked panels of lines, with the mean and range of each group of a comparison."""

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
import xarray as xr

from ropelens.comparison.pairs import group_entries, group_names
from ropelens.figures import style
from ropelens.figures.formats import plotly_text
from ropelens.figures.group_looks import Look, group_looks

HEADS = ("layer", "head")
AVERAGED = {*HEADS, "kv_head", "trial", "retrieval_length", "depth"}


@dataclass(frozen=True)
class LinePanel:
    """A panel: the title of its axis, and values [entry, x] of the groups that have a line.

    The coordinate of x gives the places of the points. Other dims are averaged.
    """

    title: str
    values: dict[str, xr.DataArray]

    @classmethod
    def of_groups(cls, title: str, values: xr.DataArray) -> "LinePanel":
        """A panel with a line for each group of the `values` of a comparison."""
        by_group = {}
        for group in group_names(values):
            by_group[group] = group_entries(values, group)
        return cls(title, by_group)


def averaged(values: xr.DataArray) -> xr.DataArray:
    """Mean over layers, heads and trials."""
    return values.mean([dim for dim in values.dims if dim in AVERAGED])


def line_panels(
    title: str,
    comparison: xr.Dataset,
    panels: Sequence[LinePanel],
    *,
    hover: str,
    height: int = 560,
    spacing: float = 0.08,
) -> go.Figure:
    """Figure of the `panels`; the text for the pointer shows `hover` after the group."""
    figure = style.stacked(title, max(1, len(panels)), height=height, spacing=spacing)
    looks = group_looks(comparison)
    for row, panel in enumerate(panels, start=1):
        for group, look in looks.items():
            values = averaged(panel.values[group]).transpose("entry", ...)
            if values.sizes["entry"]:
                _add_line(figure, values, group, look, hover, row=row)
        figure.update_yaxes(title_text=panel.title, row=row)
    return style.note_missing(figure, "these quantities were not measured")


def _add_line(
    figure: go.Figure,
    values: xr.DataArray,
    group: str,
    look: Look,
    hover: str,
    *,
    row: int,
) -> None:
    """Draw the mean of a group's entries, with whiskers from the least to the largest."""
    mean = values.mean("entry")
    name = plotly_text(group)
    bars = style.interval_bars(
        mean,
        values.min("entry"),
        values.max("entry"),
        thickness=1,
        width=2,
        visible=values.sizes["entry"] > 1,
    )
    figure.add_scatter(
        x=mean[mean.dims[0]].values,
        y=mean.values,
        error_y=bars,
        mode="lines+markers",
        marker={"symbol": look.symbol, "size": 6},
        line=look.line,
        hovertemplate=f"{name}<br>{hover}<extra></extra>",
        name=name,
        legendgroup=group,
        showlegend=row == 1,
        row=row,
        col=1,
    )
