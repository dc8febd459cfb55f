"""Figures of attributions and patches: an effect on an answer, with both signs."""

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.arguments import Positive, public
from ropelens.errors import BadArgument
from ropelens.figures import style
from ropelens.figures.formats import plotly_text, short_count, visible_token
from ropelens.figures.inputs import Selected, frame_of
from ropelens.interventions.top_planes import top_planes

HOVER = "head %{customdata[0]}.%{customdata[1]}<br>%{x:+.3f} <extra></extra>"
TOWARD = "#d9700f"
AWAY = "#2a8fe0"
BOTH_SIGNS = [[0, AWAY], [0.5, "rgba(128,132,140,0.08)"], [1, TOWARD]]


@public
def plot_effects(results: xr.Dataset, *, selected: Selected = None) -> go.Figure:
    """Heat map of a result of `patch_each`, or of `attribute_planes` summed over planes.

    The colour is the change of the answer, or the attribution of the head, in units of the
    answer: orange above 0 and blue below 0. Rows are layers, and columns are heads, positions
    (with the tokens of the prompt), or the whole layer. `selected` is a head as "2.3" or
    (layer, head), and gets a frame; results without heads have none.

    Raises `BadArgument` for results with dims other than `layer`, `head` and `position`.
    """
    if "attribution" in results:
        effect = "attribution"
        values = results["attribution"].sum("frequency", min_count=1)
    elif "change" in results:
        effect = "change of the answer"
        values = results["change"]
    else:
        raise BadArgument(
            "These results have no effects of heads.",
            seen=str(results.attrs.get("kind")),
            hint="a result of patch_each or attribute_planes",
        )
    others = [str(dim) for dim in values.dims if dim != "layer"]
    if len(others) > 1 or not {"head", "position"}.issuperset(others):
        raise BadArgument(
            "A map of effects has layers, and heads or positions.",
            seen=f"dims {', '.join(map(str, values.dims))}",
            hint="one value of each other dim, such as results.isel(prompt=0)",
        )
    columns = "".join(others)  # "" if each layer has one column
    z = values.transpose("layer", ...).values.reshape(results.sizes["layer"], -1)
    figure = _effect_map(z, effect, columns)
    if columns == "position":
        tokens = [str(token) for token in results["token"].values]
        figure.update_xaxes(
            title_text="position (token)",
            ticktext=[
                plotly_text(visible_token(token, longest=12)) for token in tokens
            ],
            tickvals=np.arange(len(tokens)),
            tickangle=-90,
        )
    if selected is not None and columns == "head":
        figure.add_shape(frame_of(selected))
    return style.note_missing(figure, "no head has an effect")


def _effect_map(z: np.ndarray, effect: str, columns: str) -> go.Figure:
    """Map of `z` [layer, column]; `columns` names the columns, or is "" for whole layers."""
    layers, count = z.shape
    title = f"{effect.capitalize()} by layer"
    hover = "layer %{y}"
    if columns:
        title += f" and {columns}"
        hover += f", {columns} %{{x}}"
    figure = style.layer_map(title, layers, count, columns)
    figure.update_xaxes(visible=bool(columns))
    largest = float(np.nanmax(np.abs(z), initial=0)) or 1.0
    figure.add_heatmap(
        z=z,
        colorscale=BOTH_SIGNS,
        zmin=-largest,
        zmax=largest,
        colorbar={
            "thickness": 10,
            "nticks": 5,
            "title": {"text": effect, "side": "right"},
        },
        hovertemplate=f"{hover}<br>{effect} %{{z:+.3f}}<extra></extra>",
        xgap=1,
        ygap=1,
    )
    return figure


@public
def plot_top_planes(attribution: xr.Dataset, *, count: Positive = 12) -> go.Figure:
    """Planes with the largest attribution of `attribute_planes`, with both signs.

    Bars are attributions in units of the answer, the largest at the top. A ring is the decrease
    of the answer if only this plane is dropped, which the attribution predicts. `customdata` is
    the layer and the index of the head.
    """
    planes = top_planes(attribution, count)
    values = planes["attribution"]
    rows = np.arange(len(planes))
    indices = [[int(part) for part in head.split(".")] for head in planes["head"]]
    figure = style.new_figure(
        "Planes with the largest attribution", height=110 + 26 * count
    )
    figure.add_bar(
        x=values,
        y=rows,
        customdata=indices,
        hovertemplate=HOVER,
        orientation="h",
        name="attribution",
        marker_color=np.where(values > 0, TOWARD, AWAY),
    )
    if "dropped" in planes:
        ring = {
            "symbol": "circle-open",
            "size": 11,
            "color": style.MUTED,
            "line_width": 2,
        }
        figure.add_scatter(
            x=-planes["dropped"],
            y=rows,
            customdata=indices,
            hovertemplate=HOVER,
            mode="markers",
            marker=ring,
            name="effect of the plane if dropped",
        )
    wavelengths = planes["wavelength"].map(short_count)
    figure.update_yaxes(
        tickvals=rows,
        ticktext=planes["head"] + " · " + wavelengths + " tokens",
        range=[len(planes) - 0.4, -0.6],
        showgrid=False,
        title_text="head · wavelength",
    )
    figure.update_xaxes(
        title_text="attribution (units of the answer)",
        zeroline=True,
        zerolinecolor=style.MUTED,
    )
    return style.note_missing(figure, "no plane has an attribution", values)
