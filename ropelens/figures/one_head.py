"""One head: the planes that push it toward its keys, and how it spreads over offsets."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.errors import Count, public
from ropelens.figures.inputs import check_head, kv_heads
from ropelens.figures.style import (
    DASHED,
    DRAWN_FROM_ONE,
    SHADE,
    log_axis,
    new_figure,
    set_x,
    stacked,
)
from ropelens.figures.wavelengths import mark_context, set_wavelengths, wavelength_positions

PANELS = {
    "selectivity<br>(nats)": {"selectivity_keys": "on keys", "selectivity_sink": "on sinks"},
    "norm<br>(model units)": {"q_norm": "query", "k_norm": "key"},
    "coherence<br>(0 to 1)": {"q_coherence": "query", "k_coherence": "key"},
}
FILLED = {"marker": {"size": 4}, "fill": "tozeroy", "fillcolor": SHADE}
LINES: dict[str, dict[str, Any]] = {
    "on keys": FILLED | {"line": {"width": 1.5, "shape": "hvh"}},
    "on sinks": {"line": DASHED | {"shape": "hvh"}, "marker": {"size": 3}},
    "query": {"line": {"width": 2}, "marker": {"size": 5}},
    "key": {"line": DASHED, "marker": {"size": 5}},
}


@public
def plot_selectivity(profile: xr.Dataset, *, layer: Count, head: Count) -> go.Figure:
    """Selectivity, norms and coherence of a head over wavelengths, one above the other.

    Selectivity (nats): how much each plane pushes the head toward the keys it picks, sinks
    apart. Norms (the model's units) bound what a plane could do. Coherence, in [0, 1]: 1
    where the plane carries the same vector whatever the token. Trace `meta` names the variable
    behind each axis; `customdata` is the wavelength in tokens.
    """
    check_head(profile, layer=layer, head=head)
    wavelength = profile["wavelength"].values
    title = f"Planes of layer {layer}, head {head}"
    figure = stacked(title, 3, height=460, row_heights=[0.4, 0.34, 0.26])
    for row, (unit, names) in enumerate(PANELS.items(), start=1):
        for name, side in names.items():
            figure.add_scatter(
                x=wavelength_positions(wavelength)[layer],
                y=of_head(profile, name, layer=layer, head=head),
                name=side,
                legendgroup=side,
                showlegend=row < 3,
                mode="lines+markers",
                **LINES[side],
                meta={"x": "wavelength_position", "y": name, "customdata": "wavelength"},
                customdata=wavelength[layer],
                hovertemplate=f"{side} %{{y:.3f}}<br>wavelength %{{customdata:.3~s}} tokens"
                "<extra></extra>",
                row=row,
                col=1,
            )
        figure.update_yaxes(title_text=unit, nticks=5, row=row)
    figure.update_yaxes(zeroline=True, row=1)
    figure.update_yaxes(rangemode="tozero", row=2)
    figure.update_yaxes(range=[-0.03, 1.03], tickvals=[0, 0.5, 1], row=3)
    set_wavelengths(figure, wavelength)
    mark_context(figure, profile)
    return figure


def of_head(profile: xr.Dataset, name: str, *, layer: int, head: int) -> np.ndarray:
    """A variable of one head over frequencies; for keys, of the key-value head it reads."""
    values = profile[name].isel(layer=layer)
    if "kv_head" in values.dims:
        return values.isel(kv_head=kv_heads(profile)[layer, head]).values
    return values.isel(head=head).values


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
    context = int(profile["offset_stop"].values[-1])
    ticks = [offset for offset in TICKS if offset < context]
    while context > 2 * ticks[-1] > 512:
        ticks.append(2 * ticks[-1])
    ends = [-0.03, float(np.log10(context + 1))]
    axis = log_axis({offset + 1: f"{offset}" for offset in ticks}, range=ends)
    set_x(figure, axis, "offset: tokens looked back (tokens, log scale)")
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
