"""How far heads reach: how often a picked key still wins, by distance."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.errors import BadArgument, Count, public
from ropelens.figures.comparison import variant_looks
from ropelens.figures.inputs import check_head
from ropelens.figures.style import DRAWN_FROM_ONE, log_axis, new_figure, set_x
from ropelens.figures.text import short_count
from ropelens.measure.terms import OWN

TOLD = ("picked_distance", "horizon", "horizon_low", "horizon_high", "unmoved_win_share")
"""The variables of a reach that a page writes beside the figure of a head."""


@public
def plot_reach(
    reach: xr.Dataset, *, layer: Count | None = None, head: Count | None = None
) -> go.Figure:
    """How often the key that heads pick still wins, by its distance, a line a variant.

    y: `win_share`, the share of rows whose picked key, moved that far back, scores above every
    other key; of one head, or the mean over all measured heads. Diamond: `horizon`, where the
    mean score falls to the mean of the other keys (of all heads, the median). x: distance
    (tokens), drawn at distance + 1 on a log axis, so that 0 has a place. Trace `meta` names
    the array of `reach_arrays` behind each line and diamond.
    """
    if (layer is None) != (head is None):
        raise BadArgument("plot_reach: layer and head go together.", attempt="both, or neither")
    if layer is None or head is None:
        title = "How often the picked key still wins, by distance"
        wins = reach["win_share"].mean(("layer", "head"))
        horizon = reach["horizon"].median(("layer", "head"))
    else:
        check_head(reach, layer=layer, head=head)
        title = f"Reach of layer {layer}, head {head}"
        wins, horizon = (
            reach[name].isel(layer=layer, head=head) for name in ("win_share", "horizon")
        )
    if bool(wins.isnull().all()):
        raise BadArgument(
            f"The reach of layer {layer}, head {head} was not measured.",
            attempt=f'reach(model, tokens, heads="{layer}.{head}")',
        )
    figure = new_figure(title, height=400)
    distance = reach["distance"].values
    names = reach["variant"].values.tolist()
    looks = variant_looks([name for name in names if name != OWN])
    for name in names:  # the model's own rotation is drawn in ink
        line = looks[name].line if name in looks else {"width": 2.5}
        figure.add_scatter(
            x=distance + 1,
            y=wins.sel(variant=name).values,
            name=name,
            legendgroup=name,
            mode="lines",
            line=line,
            meta={"y": f"win_share {name}"},
            customdata=distance,
            hovertemplate=f"{name}<br>%{{y:.0%}} of rows won %{{customdata:,.0f}} tokens back"
            "<extra></extra>",
        )
        figure.add_scatter(
            x=1 + _drawable(horizon.sel(variant=name).values.reshape(1)),
            y=[0],
            legendgroup=name,
            mode="markers",
            marker={"symbol": "diamond", "size": 11, "color": line.get("color")},
            meta={"x": f"horizon {name}"},
            showlegend=False,
            hovertemplate=f"{name}<br>horizon<extra></extra>",
            cliponaxis=False,
        )
    figure.update_yaxes(title_text="rows won (% of rows)", tickformat=".0%")
    figure.update_yaxes(range=[-0.03, 1.03])
    farthest = max(float(distance.max()), 1.0)
    ticks = [0, *(10**power for power in range(int(np.log10(farthest)) + 1))]
    ends = [-0.03, float(np.log10(farthest + 1)) + 0.03]
    axis = log_axis({tick + 1: short_count(tick) for tick in ticks}, range=ends)
    set_x(figure, axis, "distance (tokens, log scale)")
    below = {"yref": "container", "y": 0, "yanchor": "bottom"}  # it may take several rows
    return figure.update_layout(legend=below, meta=DRAWN_FROM_ONE)


def reach_arrays(reach: xr.Dataset) -> dict[str, np.ndarray]:
    """What `plot_reach` draws of every head, and a page tells, [layer, head, ...]."""
    arrays = {name: reach[name].transpose("layer", "head", ...).values for name in TOLD}
    for name in reach["variant"].values:
        of_variant = reach.sel(variant=name).transpose("layer", "head", ...)
        arrays[f"win_share {name}"] = of_variant["win_share"].values
        arrays[f"horizon {name}"] = 1 + _drawable(of_variant["horizon"].values[..., None])
    return arrays


def _drawable(horizon: np.ndarray) -> np.ndarray:
    """Horizons that lie in the figure; NaN for others."""
    return np.where(np.isfinite(horizon) & (horizon > 0), horizon, np.nan)
