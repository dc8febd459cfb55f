"""Query and key norms by layer and wavelength: which planes a model puts its weight on."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.subplots import make_subplots

from ropelens.figures.inputs import check_head, kv_heads
from ropelens.figures.style import SEQUENTIAL, index_step, template
from ropelens.figures.wavelengths import AXIS_TITLE, common_columns, wavelength_axis

PANELS = {"q_norm": "query", "k_norm": "key"}


def plot_norms(profile: xr.Dataset, *, head: int | None = None) -> go.Figure:
    """Mean norm of every plane by layer, queries above keys; brighter is longer.

    `head`: that query head of each layer, with the key-value head it reads; None: the mean
    over heads. Values are in the units of the model's queries and keys. Source: Barbero et
    al. 2024 (arXiv 2410.06205), its figures of norms by layer and frequency.
    """
    if head is not None:
        check_head(profile, layer=0, head=head)
    layers = profile.sizes["layer"]
    edges, planes = common_columns(profile["wavelength"].values)
    figure = make_subplots(
        rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.14 if layers <= 16 else 0.07
    )
    for row, (name, side) in enumerate(PANELS.items(), start=1):
        z = in_columns(norms_by_layer(profile, name, head=head), planes)
        figure.add_heatmap(
            x=edges,
            y=np.arange(layers),
            z=z,
            name=f"{side} norm",
            meta={"role": name},
            colorscale=SEQUENTIAL,
            zmin=0,
            zmax=float(np.nanmax(z)),
            colorbar=_bar(row),
            hovertemplate="layer %{y}<br>wavelength %{x:.3~s} tokens<br>"
            f"{side} norm %{{z:.3f}}<extra></extra>",
            hoverongaps=False,
            row=row,
            col=1,
        )
    whose = "mean over heads" if head is None else f"head {head} of each layer"
    figure.update_layout(
        template=template("light"),
        title_text=f"Query and key norms by wavelength, {whose}",
        height=170 + 2 * int(np.clip(layers * 30, 120, max(220, layers * 9))),
    )
    figure.update_yaxes(
        title_text="layer (index)",
        range=[layers - 0.5, -0.5],
        dtick=index_step(layers, most=8),
        tick0=0,
        showgrid=False,
    )
    figure.update_xaxes(**wavelength_axis(profile["wavelength"].values), showgrid=False)
    figure.update_xaxes(range=np.log10([edges[0], edges[-1]]).tolist())
    figure.update_xaxes(title_text="", row=1)
    figure.update_xaxes(title_text=AXIS_TITLE, row=2)
    _name_panels(figure)
    mark_context(figure, profile, color="#ffffff", below=True)
    return figure


def norms_by_layer(profile: xr.Dataset, name: str, *, head: int | None) -> np.ndarray:
    """`q_norm` or `k_norm` as [layer, frequency]: one head's, or the mean over heads."""
    dim = "head" if name == "q_norm" else "kv_head"
    values = profile[name].transpose("layer", dim, "frequency")
    if head is None:
        return values.mean(dim).values
    layers = np.arange(profile.sizes["layer"])
    return values.values[layers, head if dim == "head" else kv_heads(profile)[:, head]]


def in_columns(values: np.ndarray, planes: np.ndarray) -> np.ndarray:
    """Values [layer, frequency] moved to the columns of `common_columns`; NaN where none."""
    moved = np.take_along_axis(values, np.maximum(planes, 0), axis=1)
    return np.where(planes >= 0, moved, np.nan)


def mark_context(
    figure: go.Figure, profile: xr.Dataset, *, color: str, below: bool = False
) -> None:
    """A dotted line at the context's length: planes beyond it never turn once.

    Its name stands above the first panel, or `below` it.
    """
    context = profile.attrs.get("context")
    turning = profile["wavelength"].values
    turning = turning[np.isfinite(turning)]
    if context and turning.size and turning.min() < int(context) < turning.max():
        line = {"width": 1.75, "dash": "dot", "color": color}
        figure.add_vline(x=int(context), line=line, name="context")
        figure.add_annotation(
            x=np.log10(int(context)),
            y=0 if below else 1,
            xref="x",
            yref="y domain",
            yanchor="top" if below else "bottom",
            text="context",
            name="context",
        )


def _name_panels(figure: go.Figure) -> None:
    """The panel's quantity and unit above it: a bar's own title would widen the margin."""
    for axis, side in (("y", "query"), ("y2", "key")):
        figure.add_annotation(
            x=0,
            y=1,
            xref="paper",
            yref=f"{axis} domain",
            xanchor="left",
            yanchor="bottom",
            text=f"{side} norm (model units)",
            font_size=12,
        )


def _bar(row: int) -> dict:
    return {
        "len": 0.46,
        "y": 1.0 if row == 1 else 0.46,
        "yanchor": "top",
        "thickness": 10,
        "nticks": 4,
    }
