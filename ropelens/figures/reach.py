"""Figure of the copies that heads find at each distance."""

from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.arguments import public
from ropelens.figures import style
from ropelens.figures.formats import short_count
from ropelens.figures.group_looks import Look, variant_looks
from ropelens.figures.inputs import Head, Layer, place_of
from ropelens.interventions.variables import OWN_ROTATION


@public
def plot_reach(
    reach: xr.Dataset, *, layer: Layer = None, head: Head | None = None
) -> go.Figure:
    """Share of copies that a head finds by distance, or the mean over measured heads.

    Circles show `found_share`, which is measured on copies at the distance. Dotted lines show
    `extrapolated_share`. Trace `meta` names the array of `reach_arrays` that y shows.
    """
    if isinstance(head, str):
        layer, head = place_of(layer, head)
    indices = {}
    if layer is not None:
        indices["layer"] = layer
    if head is not None:
        indices["head"] = head
    where = ", ".join(f"{dim} {number}" for dim, number in indices.items())
    figure = style.new_figure(
        f"Copies found by {where or 'heads'}, by distance (dotted: extrapolated)",
        height=400,
    )
    averaged = [dim for dim in ("layer", "head") if dim not in indices]
    shares = reach[["found_share", "extrapolated_share"]]
    shares = shares.isel(indices).mean(averaged)
    variants = reach["variant"].values.tolist()
    looks = variant_looks([name for name in variants if name != OWN_ROTATION])
    for variant in variants:
        line = _line_of(variant, looks)
        _add_found(figure, shares, variant, line)
        _add_extrapolated(figure, shares, variant, line)
    figure.update_yaxes(
        title_text="copies found (% of rows)", tickformat=".0%", range=[-0.03, 1.03]
    )
    _set_distances(figure, reach)
    below = {"yref": "container", "y": 0, "yanchor": "bottom"}  # room for several rows
    figure.update_layout(legend=below, meta=style.DRAWN_FROM_ONE)
    why = "the reach of these heads was not measured"
    return style.note_missing(figure, why, shares["found_share"])


def _line_of(variant: str, looks: Mapping[str, Look]) -> dict[str, Any]:
    """Line keywords of a variant; the rotation of the model itself has the colour of text."""
    if variant in looks:
        return looks[variant].line
    return {"width": 2.5}


def _add_found(
    figure: go.Figure, shares: xr.Dataset, variant: str, line: dict[str, Any]
) -> None:
    words = "of copies found %{x:,.0f} tokens back"
    figure.add_scatter(
        x=shares["run_distance"].values,
        y=shares["found_share"].sel(variant=variant).values,
        mode="lines+markers",
        marker_size=9,
        name=variant,
        legendgroup=variant,
        meta={"y": f"found_share {variant}"},
        line=line,
        hovertemplate=f"{variant}<br>%{{y:.0%}} {words}<extra></extra>",
    )


def _add_extrapolated(
    figure: go.Figure, shares: xr.Dataset, variant: str, line: dict[str, Any]
) -> None:
    words = "of copies found (extrapolated) %{x:,.0f} tokens back"
    figure.add_scatter(
        x=shares["distance"].values,
        y=shares["extrapolated_share"].sel(variant=variant).values,
        mode="lines",
        showlegend=False,
        name=variant,
        legendgroup=variant,
        meta={"y": f"extrapolated_share {variant}"},
        line={"color": line.get("color"), "dash": "dot", "width": 1.5},
        hovertemplate=f"{variant}<br>%{{y:.0%}} {words}<extra></extra>",
    )


def _set_distances(figure: go.Figure, reach: xr.Dataset) -> None:
    distances = [*reach["run_distance"].values, *reach["distance"].values]
    low, high = np.log10([min(distances), max(distances)]).tolist()
    ticks = distances
    if reach.sizes["distance"]:
        ticks = [10**power for power in range(int(low), int(high) + 1)]
    labels = {tick: short_count(tick) for tick in ticks}
    style.set_log_ticks(figure, labels, ends=[low - 0.05, high + 0.05])
    style.set_x_title(figure, "distance (tokens, log scale)")


def reach_arrays(reach: xr.Dataset) -> dict[str, np.ndarray]:
    """Variables of `reach` by variant, [layer, head, distance]."""
    arrays = {}
    for name, variant in product(reach.data_vars, reach["variant"].values):
        arrays[f"{name} {variant}"] = reach[name].sel(variant=variant).values
    return arrays
