"""A head's kernel: how it spreads its attention over offsets, measured and predicted."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.errors import Count, public
from ropelens.figures.inputs import check_head
from ropelens.figures.style import DASHED, DRAWN_FROM_ONE, SHADE, log_axis, new_figure

TICKS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
MEASURED = {"line": {"width": 2, "shape": "hvh"}, "fill": "tozeroy", "fillcolor": SHADE}


@public
def plot_kernel(profile: xr.Dataset, *, layer: Count, head: Count) -> go.Figure:
    """The weight of one offset, by offset: fitted to the attention, and from means alone.

    Measured: the kernel that explains the head's attention best, the sink aside. Predicted:
    what the head would do if every query and key were its mean (`predicted_kernel`, turned
    into weights with the same sum as the measured ones). Offsets are drawn at offset + 1 on a
    logarithmic axis, so that 0 has a place; ticks and hovers name the true ones. Trace `meta`
    names the array behind each axis.
    """
    check_head(profile, layer=layer, head=head)
    arrays = kernel_arrays(profile)
    start, last = profile["offset_start"].values, profile["offset_stop"].values - 1
    named = [f"{a}" if a == b else f"{a} to {b}" for a, b in zip(start, last, strict=True)]
    figure = new_figure(f"Kernel of layer {layer}, head {head}", height=340)
    for name, words, look in (
        ("kernel_measured", "fitted to the attention", MEASURED),
        ("kernel_predicted", "predicted from mean q and k", {"line": DASHED}),
    ):
        figure.add_scatter(
            x=start + 1,
            y=arrays[name][layer, head],
            name=words,
            mode="lines",
            **look,
            meta={"y": name},
            customdata=named,
            hovertemplate="offset %{customdata}: %{y:.2%} " + words + "<extra></extra>",
        )
    figure.update_xaxes(**_offset_axis(int(profile["offset_stop"].values[-1])))
    title = "weight of one offset (% of attention)"
    figure.update_yaxes(title_text=title, tickformat=".0%", rangemode="tozero")
    return figure.update_layout(hovermode="x unified", meta=DRAWN_FROM_ONE)


def kernel_arrays(profile: xr.Dataset) -> dict[str, np.ndarray]:
    """`kernel_measured` and `kernel_predicted`, weights of one offset [layer, head, bin]."""
    dims = ("layer", "head", "offset_bin")
    measured = profile["kernel"].transpose(*dims).values
    score = profile["predicted_kernel"].transpose(*dims).values
    width = (profile["offset_stop"] - profile["offset_start"]).values
    known = np.isfinite(score) & np.isfinite(measured)
    highest = np.max(score, axis=-1, keepdims=True, where=known, initial=-1e30)
    weight = np.exp(np.where(known, score - highest, -np.inf))
    whole = np.nansum(measured * width, axis=-1, keepdims=True)
    total = (weight * width).sum(-1, keepdims=True)
    predicted = np.divide(weight * whole, total, out=np.zeros_like(weight), where=total > 0)
    predicted[~known] = np.nan
    return {"kernel_measured": measured, "kernel_predicted": predicted}


def _offset_axis(context: int) -> dict:
    """Keywords for `update_xaxes`: offset + 1 on a log scale, ticks named by offset."""
    ticks = [offset for offset in TICKS if offset < context]
    while context > 2 * ticks[-1] > 512:
        ticks.append(2 * ticks[-1])
    return log_axis(
        {offset + 1: f"{offset}" for offset in ticks},
        title_text="offset: tokens looked back (tokens, log scale)",
        range=[-0.03, float(np.log10(context + 1))],
    )
