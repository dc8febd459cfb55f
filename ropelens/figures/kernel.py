"""Figure of the kernel of one head: the weight of each offset."""

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from scipy.special import softmax

from ropelens.arguments import public
from ropelens.errors import BadArgument
from ropelens.figures import style
from ropelens.figures.inputs import Head, Layer, place_of
from ropelens.profiles.measures import complete_profile

DIMS = ("layer", "head", "offset_bin")
MEASURED_NAME = "fitted to the attention"
PREDICTED_NAME = "predicted from mean query and key"


@public
def plot_kernel(profile: xr.Dataset, *, layer: Layer = None, head: Head) -> go.Figure:
    """Weight of each offset: fitted to the attention, and predicted from mean vectors.

    The fitted kernel explains the attention of the head best; sinks are left out. The predicted
    kernel is `predicted_kernel` as weights with the same sum: the attention if every query and
    key were equal to its mean. The log axis draws offsets at offset + 1, so that it can show 0.
    Trace `meta` names the array that y shows. The head is "2.3", or layer=2, head=3. Raises
    `BadArgument` for a profile without budget and for a capture, to which no kernel is fitted.
    """
    profile = complete_profile(profile)
    layer, head = place_of(layer, head)
    if "kernel" not in profile:
        hint = "a profile with its budget, or plot_attention"
        raise BadArgument("These results have no fitted kernel.", hint=hint)
    figure = style.new_figure(f"Kernel of layer {layer}, head {head}", height=340)
    kernels = kernel_arrays(profile)
    x = profile["offset_start"].values + 1
    bins = _bin_names(profile)
    hover = "offset %{customdata}: %{y:.2%} "
    figure.add_scatter(
        x=x,
        y=kernels["kernel_measured"][layer, head],
        customdata=bins,
        name=MEASURED_NAME,
        mode="lines",
        meta={"y": "kernel_measured"},
        hovertemplate=f"{hover}{MEASURED_NAME}<extra></extra>",
        line={"width": 2, "shape": "hvh"},
        fill="tozeroy",
        fillcolor=style.SHADE,
    )
    figure.add_scatter(
        x=x,
        y=kernels["kernel_predicted"][layer, head],
        customdata=bins,
        name=PREDICTED_NAME,
        mode="lines",
        meta={"y": "kernel_predicted"},
        hovertemplate=f"{hover}{PREDICTED_NAME}<extra></extra>",
        line=style.DASHED,
    )
    _set_offsets(figure, int(profile["offset_stop"].values[-1]))
    title = "weight of one offset (% of attention)"
    figure.update_yaxes(title_text=title, tickformat=".2~%", rangemode="tozero")
    figure.update_layout(hovermode="x unified", meta=style.DRAWN_FROM_ONE)
    return style.note_missing(figure, "no kernel was fitted to this head")


def _bin_names(profile: xr.Dataset) -> list[str]:
    """Offsets of each bin: "3" or "8 to 15"."""
    names = []
    stops = profile["offset_stop"].values
    for first, stop in zip(profile["offset_start"].values, stops, strict=True):
        names.append(f"{first}" if first == stop - 1 else f"{first} to {stop - 1}")
    return names


def _set_offsets(figure: go.Figure, context: int) -> None:
    """Draw each offset at offset + 1 on a log axis, with ticks at 0 and powers of 2."""
    labels = {1: "0"}
    offset = 1
    while offset < context:
        labels[offset + 1] = f"{offset}"
        offset *= 2
    ends = [-0.03, float(np.log10(context + 1))]
    style.set_log_ticks(figure, labels, ends=ends)
    style.set_x_title(figure, "offset: distance back (tokens, log scale)")


def kernel_arrays(profile: xr.Dataset) -> dict[str, np.ndarray]:
    """Weight of one offset [layer, head, bin]: `kernel_measured` and `kernel_predicted`."""
    measured = profile["kernel"].transpose(*DIMS).values
    score = profile["predicted_kernel"].transpose(*DIMS).values
    width = (profile["offset_stop"] - profile["offset_start"]).values
    both = np.isfinite(score) & np.isfinite(measured)
    total = np.nansum(measured * width, axis=-1, keepdims=True)
    with np.errstate(invalid="ignore"):  # heads without a kernel
        share = softmax(np.where(both, score + np.log(width), -np.inf), axis=-1)
    predicted = np.where(both, total * share / width, np.nan)
    return {"kernel_measured": measured, "kernel_predicted": predicted}
