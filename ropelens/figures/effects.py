"""Figures of attributions and patches: an effect on an answer, with both signs."""

from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.arguments import Positive, public
from ropelens.errors import BadArgument
from ropelens.figures import style
from ropelens.figures.formats import plotly_text, short_count, visible_token
from ropelens.figures.inputs import Selected, frame_of
from ropelens.interventions.truncation_table import position_losses, top_planes

HOVER = "head %{customdata[0]}.%{customdata[1]}<br>%{x:+.3f} <extra></extra>"
TOWARD, AWAY = "#d9700f", "#2a8fe0"
BOTH_SIGNS = [[0, AWAY], [0.5, "rgba(128,132,140,0.08)"], [1, TOWARD]]


@public
def plot_effects(results: xr.Dataset, *, selected: Selected = None) -> go.Figure:
    """Heat map of a result of `patch_each`, or of `attribute_planes` summed over planes.

    The colour is the change of the answer, or the attribution of the head, in units of the
    answer: orange above 0 and blue below 0. Rows are layers, and columns are heads, positions
    (with the tokens of the prompt), or the whole layer. `selected` is a head as "2.3" or
    (layer, head), and gets a frame.
    """
    what, hint = "attribution", "a result of patch_each or attribute_planes"
    if what in results:
        values = results[what].sum("frequency", min_count=1)
    elif "change" in results:
        values, what = results["change"], "change of the answer"
    else:
        seen = str(results.attrs.get("kind"))
        raise BadArgument(
            "These results have no effects of heads.", seen=seen, hint=hint
        )
    across = next((dim for dim in ("head", "position") if dim in values.dims), "")
    z = values.transpose("layer", ...).values.reshape(results.sizes["layer"], -1)
    title = f"{what.capitalize()} by layer" + f" and {across}" * bool(across)
    figure = style.layer_map(title, *z.shape, across).update_xaxes(visible=bool(across))
    most = float(np.nanmax(np.abs(z), initial=0)) or 1.0
    bar = {"thickness": 10, "nticks": 5, "title": {"text": what, "side": "right"}}
    look: dict[str, Any] = {"colorscale": BOTH_SIGNS, "zmin": -most, "zmax": most}
    hover = f"layer %{{y}}{f', {across} %{{x}}' * bool(across)}<br>{what} %{{z:+.3f}}"
    look |= {
        "colorbar": bar,
        "hovertemplate": f"{hover}<extra></extra>",
        "xgap": 1,
        "ygap": 1,
    }
    figure.add_heatmap(z=z, **look)
    if across == "position":
        tokens = [
            visible_token(str(token), longest=12) for token in results["token"].values
        ]
        ticks = {
            "ticktext": [*map(plotly_text, tokens)],
            "tickvals": np.arange(len(tokens)),
        }
        figure.update_xaxes(title_text="position (token)", **ticks, tickangle=-90)
    if selected is not None:
        figure.add_shape(frame_of(selected))
    return style.note_missing(figure, "no head has an effect")


@public
def plot_top_planes(attribution: xr.Dataset, *, count: Positive = 12) -> go.Figure:
    """Planes with the largest attribution of `attribute_planes`, with both signs.

    Bars are attributions in units of the answer, the largest at the top. A ring is the decrease
    of the answer if only this plane is dropped, which the attribution predicts. `customdata` is
    the layer and the index of the head.
    """
    planes = top_planes(attribution, count)
    figure = style.new_figure(
        "Planes with the largest attribution", height=110 + 26 * count
    )
    names = planes["head"] + " · " + planes["wavelength"].map(short_count) + " tokens"
    places = [[int(part) for part in head.split(".")] for head in planes["head"]]
    rows: dict[str, Any] = {
        "y": np.arange(len(names)),
        "customdata": places,
        "hovertemplate": HOVER,
    }
    look: dict[str, Any] = {"orientation": "h", "name": "attribution"}
    look["marker_color"] = np.where(planes["attribution"] > 0, TOWARD, AWAY)
    figure.add_bar(x=planes["attribution"], **rows, **look)
    if "dropped" in planes:
        ring = {
            "symbol": "circle-open",
            "size": 11,
            "color": style.MUTED,
            "line_width": 2,
        }
        look = {
            "mode": "markers",
            "marker": ring,
            "name": "effect of the plane if dropped",
        }
        figure.add_scatter(x=-planes["dropped"], **rows, **look)
    axis = {"tickvals": rows["y"], "ticktext": names, "range": [len(names) - 0.4, -0.6]}
    figure.update_yaxes(**axis, showgrid=False, title_text="head · wavelength")
    title = "attribution (units of the answer)"
    figure.update_xaxes(title_text=title, zeroline=True, zerolinecolor=style.MUTED)
    return style.note_missing(
        figure, "no plane has an attribution", planes["attribution"]
    )


@public
def plot_position_losses(results: xr.Dataset) -> go.Figure:
    """Loss by position (nats/token) for each edit of `evaluate`, and its change by the edit.

    Bars are standard errors over groups of sequences.
    """
    table, colors = position_losses(results), (style.MUTED, *style.VARIANT_COLORS)
    figure = style.stacked("Loss by position in the text", 2, height=520)
    for number, (edit, rows) in enumerate(table.groupby("edit", sort=False)):
        look: dict[str, Any] = {"mode": "lines+markers", "name": plotly_text(str(edit))}
        look |= {"line_color": colors[number % len(colors)], "legendgroup": number}
        look["x"] = rows["position_start"].clip(lower=1)
        bars = {"array": rows["loss_se"], "thickness": 1}
        figure.add_scatter(y=rows["loss"], error_y=bars, **look, row=1, col=1)
        figure.add_scatter(y=rows["change"], showlegend=False, **look, row=2, col=1)
    figure.update_yaxes(title_text="loss<br>(nats/token)", row=1)
    figure.update_yaxes(title_text="change of the loss<br>(nats/token)", row=2)
    style.set_counts(figure, table["position_stop"], style.POSITION_TITLE)
    return style.note_missing(figure, "no loss was measured", table["loss"])
