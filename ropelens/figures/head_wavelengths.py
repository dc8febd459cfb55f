"""Every head beside every other: through which wavelengths it picks its keys."""

from __future__ import annotations

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Int

from ropelens.figures.inputs import head_table, numbers, row_of
from ropelens.figures.label_selectivity import add_label_lines, selectivity_shares
from ropelens.figures.norms import in_columns
from ropelens.figures.style import COLORS, LABELS, OUTSIDE, SEQUENTIAL, SYMBOLS, new_figure
from ropelens.figures.wavelengths import (
    column_names,
    common_columns,
    mark_context,
    one_title,
    wavelength_axis,
)

MEANS = 150
"""Height of the panel of means, in pixels; what is beside panels takes as much."""

NAMED = 40
"""Rows with a name, at most."""


def plot_head_wavelengths(
    profile: xr.Dataset,
    heads: pd.DataFrame | None = None,
    *,
    selected: tuple[int, int] | None = None,
) -> go.Figure:
    """Through which wavelengths heads pick their keys: means by label, and every head.

    The push is the positive part of `selectivity_keys` (sinks are left out), in percent of a
    head's own. Above, the mean over the heads of each label; below, a row a head with its
    label's sign, the most positional on top. Heads that are diffuse or sinks are left out.
    `selected` (layer, head) gets a frame, where it has a row.
    """
    heads = head_table(profile, heads)
    order = by_position(heads)
    rows = heads.iloc[order]
    layer, head = (rows[name].to_numpy(int) for name in ("layer", "head"))
    names = np.array([f"L{one} H{other}" for one, other in zip(layer, head, strict=True)])
    edges, planes = common_columns(profile["wavelength"].values)
    shares = in_columns(100 * selectivity_shares(profile)[layer, head], planes[layer])
    below = int(np.clip(9 * len(order), 120, 560))
    figure = new_figure(
        "Push toward keys by wavelength",
        height=2 * MEANS + below,
        **{"rows": 2, "cols": 1, "shared_xaxes": True, "vertical_spacing": 0.03},
        row_heights=[MEANS, below],
    )
    add_label_lines(figure, profile, heads)
    figure.add_heatmap(
        x=edges,
        y=names,
        z=shares.astype(np.float32),
        text=column_names(profile["wavelength"].values, planes)[layer],
        colorscale=SEQUENTIAL,
        zmin=0,
        colorbar={
            **{"thickness": 10, "nticks": 4, "title": {"text": "share<br>(%)"}},
            **{"len": below / (MEANS + below), "y": 0, "yanchor": "bottom"},
        },
        hovertemplate="%{y}<br>%{z:.0f}% of its push at %{text} tokens<extra></extra>",
        hoverongaps=False,
        row=2,
        col=1,
    )
    breadth = np.log10(edges[-1] / edges[0])
    for label in LABELS[:3]:
        own = names[(rows["label"] == label).to_numpy()]
        figure.add_scatter(
            x=np.full(len(own), 10 ** (np.log10(edges[0]) - 0.015 * breadth)),
            y=own,
            mode="markers",
            marker={"color": COLORS[label], "symbol": SYMBOLS[label], "size": 7},
            hoverinfo="skip",
            showlegend=False,
            cliponaxis=False,
            row=2,
            col=1,
        )
    ends = np.log10([edges[0], edges[-1]]) - [0.03 * breadth, 0]
    figure.update_xaxes(wavelength_axis(profile["wavelength"].values) | {"range": ends})
    one_title(figure)
    figure.update_yaxes(title_text="mean<br>share (%)", rangemode="tozero", nticks=4, row=1)
    shown = names[:: -(-len(order) // NAMED)] if len(order) else names
    figure.update_yaxes(
        **{"title_text": "head (layer, head)", "type": "category", "showgrid": False},
        **{"range": [len(order) - 0.4, -0.6], "categoryarray": names},
        **{"tickvals": shown, "tickfont_size": 9},
        row=2,
    )
    mark_context(figure, profile)
    if selected is not None:
        here = np.flatnonzero(order == row_of(heads, selected))
        at = float(here[0]) if here.size else -2.0
        box = {"x0": edges[0], "x1": edges[-1], "y0": at - 0.5, "y1": at + 0.5}
        line = {"color": "#ffffff", "width": 2}
        figure.add_shape(name="selected", type="rect", **box, line=line, row=2, col=1)
    return figure


def by_position(heads: pd.DataFrame) -> Int[np.ndarray, " row"]:
    """Rows of the table, those with the largest positional fraction first.

    Heads that are diffuse or sinks, and those without a fraction, are left out.
    """
    fraction = numbers(heads, "positional_fraction")
    known = np.isfinite(fraction) & ~heads["label"].isin(OUTSIDE).to_numpy()
    order = np.argsort(-fraction, kind="stable")
    return order[known[order]]
