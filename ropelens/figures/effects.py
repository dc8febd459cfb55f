"""Figures of attributions and patches: an effect on an answer, with both signs."""

from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.errors import BadArgument, Positive, public
from ropelens.figures import style
from ropelens.figures.formats import plotly_text, short_count, visible_token
from ropelens.figures.inputs import Selected, frame_of
from ropelens.interventions.truncation_table import position_losses, top_planes

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
    names = {"attribution", "change"} & {*results}
    if not names:
        seen, hint = (
            str(results.attrs.get("kind")),
            "a result of patch_each or attribute_planes",
        )
        raise BadArgument("These results have no effects of heads.", seen=seen, hint=hint)
    (name,) = names
    values = results[name]
    if name == "attribution":
        values = values.sum("frequency", min_count=1)
    across = next((dim for dim in ("head", "position") if dim in values.dims), "")
    z = values.transpose("layer", ...).values.reshape(results.sizes["layer"], -1)
    what = "attribution" if name == "attribution" else "change of the answer"
    title = f"{what.capitalize()} by layer" + f" and {across}" * bool(across)
    height = int(np.clip(len(z) * 40, 200, max(300, len(z) * 13)) + 130)
    figure = style.new_figure(title, height=height)
    most = float(np.nanmax(np.abs(z), initial=0)) or 1.0
    bar = {"thickness": 10, "nticks": 5, "title": {"text": what, "side": "right"}}
    look: dict[str, Any] = {"colorscale": BOTH_SIGNS, "zmin": -most, "zmax": most}
    hover = f"layer %{{y}}{f', {across} %{{x}}' * bool(across)}<br>{what} %{{z:+.3f}}"
    look |= {"colorbar": bar, "hovertemplate": f"{hover}<extra></extra>", "xgap": 1, "ygap": 1}
    figure.add_heatmap(z=z, **look)
    figure.update_yaxes(**style.index_axis(len(z), "layer", most=16, room=0.05))
    axis = style.index_axis(z.shape[1], across or "layer", most=16, room=0.05)
    figure.update_xaxes(**axis | {"range": axis["range"][::-1]}, visible=bool(across))
    if across == "position":
        tokens = [visible_token(str(token), longest=12) for token in results["token"].values]
        ticks: dict[str, Any] = {"ticktext": [*map(plotly_text, tokens)], "tickangle": -90}
        ticks["tickvals"] = np.arange(len(tokens))
        figure.update_xaxes(title_text="position (token)", **ticks)
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
    figure = style.new_figure("Planes with the largest attribution", height=110 + 26 * count)
    names = planes["head"] + " · " + planes["wavelength"].map(short_count) + " tokens"
    places = [[int(part) for part in head.split(".")] for head in planes["head"]]
    rows: dict[str, Any] = {"y": np.arange(len(names)), "customdata": places}
    hover = "head %{customdata[0]}.%{customdata[1]}<br>%{x:+.3f} <extra></extra>"
    colors = np.where(planes["attribution"] > 0, TOWARD, AWAY)
    look: dict[str, Any] = {"orientation": "h", "marker_color": colors, "name": "attribution"}
    figure.add_bar(x=planes["attribution"], **rows, **look, hovertemplate=hover)
    if "dropped" in planes:
        ring = {"symbol": "circle-open", "size": 11, "color": style.MUTED, "line_width": 2}
        look = {"mode": "markers", "marker": ring, "name": "effect of the plane if dropped"}
        figure.add_scatter(x=-planes["dropped"], **rows, **look, hovertemplate=hover)
    axis = {"tickvals": rows["y"], "ticktext": names, "range": [len(names) - 0.4, -0.6]}
    figure.update_yaxes(**axis, showgrid=False, title_text="head · wavelength")
    figure.update_xaxes(title_text="attribution (units of the answer)", zeroline=True)
    figure.update_xaxes(zerolinecolor=style.MUTED)
    return style.note_missing(figure, "no plane has an attribution", planes["attribution"])


@public
def plot_position_losses(results: xr.Dataset) -> go.Figure:
    """Loss by position (nats/token) for each edit of `evaluate`, and its change by the edit.

    Bars are standard errors over groups of sequences.
    """
    table, units = position_losses(results), {"loss": "loss", "change": "change of the loss"}
    figure = style.stacked("Loss by position in the text", 2, height=520)
    for number, (edit, rows) in enumerate(table.groupby("edit", sort=False)):
        color = (style.MUTED, *style.VARIANT_COLORS)[number % (1 + len(style.VARIANT_COLORS))]
        look: dict[str, Any] = {"mode": "lines+markers", "line_color": color}
        look |= {"name": plotly_text(str(edit)), "legendgroup": number}
        for row, column in enumerate(units, start=1):
            data: dict[str, Any] = {"x": rows["position_start"].clip(lower=1)}
            data |= {"y": rows[column], "error_y": {"array": rows["loss_se"], "thickness": 1}}
            data["error_y"] = data["error_y"] if row == 1 else None
            figure.add_scatter(**data, **look, showlegend=row == 1, row=row, col=1)
    for row, unit in enumerate(units.values(), start=1):
        figure.update_yaxes(title_text=f"{unit}<br>(nats/token)", row=row)
    powers = [2**k for k in range(int(table["position_stop"].max()).bit_length())]
    axis = style.log_axis({power: f"{power:,}" for power in powers})
    style.set_x(figure, axis, "position in the text (tokens, log scale)")
    return style.note_missing(figure, "no loss was measured", table["loss"])
