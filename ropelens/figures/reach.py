"""How far heads reach: a picked key's score by distance, and where heads lose their keys."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.errors import BadArgument, Count, public
from ropelens.figures.comparison import Look, variant_looks
from ropelens.figures.inputs import check_head
from ropelens.figures.style import (
    DASHED,
    DRAWN_FROM_ONE,
    MUTED,
    faded,
    log_axis,
    name_panel,
    new_figure,
)
from ropelens.figures.text import short_count
from ropelens.figures.wavelengths import one_title
from ropelens.measure.terms import OWN

PER_DECADE = 16
"""Bins of distance in a decade."""

PER_BIN = 48
"""Whole distances drawn from a bin that holds more."""

DISTANCE = "distance (tokens, log scale)"
PANEL = 128
"""Height of a panel in pixels."""


@public
def plot_reach(
    reach: xr.Dataset,
    *,
    layer: Count | None = None,
    head: Count | None = None,
    variants: Sequence[str] | None = None,
) -> go.Figure:
    """How far heads find the keys they pick, from what `ropelens.reach` measured.

    All heads (no `layer`, `head`): the share of measured heads whose picked key still wins, by
    distance, a line a variant; the line ends at the share without a horizon up to the farthest
    distance. Band: the same of the ends of each head's 95 % interval.

    One head: the mean score of its picked key, moved, above the other keys', a panel a variant.
    y: `moved_score` less `others_level` (nats), so that the key wins above 0. A score is a sum
    of waves, too fine to draw at far distances: line and band are the mean and the range of
    up to 48 whole distances drawn from every sixteenth of a decade. Dashed: what no distance
    takes the score below (`lowest_score`). Diamond: `horizon`, with its 95 % interval.

    x is the distance (tokens), drawn at distance + 1 on a log axis, so that 0 has a place.
    """
    if (layer is None) != (head is None):
        raise BadArgument("plot_reach: layer and head go together.", attempt="both, or neither")
    measured = [str(name) for name in reach["variant"].values]
    names = measured if variants is None else list(variants)
    if not names or not set(names) <= set(measured):
        raise BadArgument(
            "There is nothing to draw of this variant.",
            seen=", ".join(names) or "none named",
            attempt=f"any of: {', '.join(measured)}",
        )
    others = variant_looks([name for name in names if name != OWN])
    looks = {name: others.get(name) for name in names}  # the model's rotation is drawn in ink
    if layer is None or head is None:
        figure = _horizons(reach, looks)
    else:
        figure = _one_head(reach, looks, layer=layer, head=head)
    figure.update_xaxes(**_distance_axis(reach))
    one_title(figure, DISTANCE)
    return figure.update_layout(meta=DRAWN_FROM_ONE)


def _one_head(
    reach: xr.Dataset, looks: dict[str, Look | None], *, layer: int, head: int
) -> go.Figure:
    check_head(reach, layer=layer, head=head)
    of_head = reach.sel(layer=layer, head=head)
    if bool(of_head["horizon"].isnull().all()):
        raise BadArgument(
            f"The reach of layer {layer}, head {head} was not measured.",
            attempt=f'reach(model, tokens, heads="{layer}.{head}")',
        )
    rows = {"rows": len(looks), "cols": 1, "shared_xaxes": True}
    figure = new_figure(
        f"Reach of layer {layer}, head {head}",
        height=PANEL * len(looks) + 110,
        **rows,
        vertical_spacing=0.22 / len(looks),  # room for the name of a panel
    )
    for row, (name, look) in enumerate(looks.items(), start=1):
        of_variant, color = of_head.sel(variant=name), MUTED if look is None else look.color
        _draw_panel(figure, of_variant, color, row=row, col=1)
        name_panel(figure, row, f"<b>{name}</b>: {horizon_words(of_variant)}")
    drawn = np.concatenate([trace.y for trace in figure.data])
    margin = 0.06 * (drawn.max() - drawn.min()) + 1e-3
    figure.update_yaxes(title_text="above others (nats)")
    figure.update_yaxes(range=[float(drawn.min() - margin), float(drawn.max() + margin)])
    return figure.update_layout(showlegend=False)


def _horizons(reach: xr.Dataset, looks: dict[str, Look | None]) -> go.Figure:
    farthest = float(reach["distance"].max())
    figure = new_figure("Heads whose picked key still wins, by distance", height=400)
    for name, look in looks.items():
        color, dash = (None, "solid") if look is None else (look.color, look.dash)
        of_variant = reach.sel(variant=name)
        fill = {"fillcolor": faded(color or MUTED, 0.3), "line": {"width": 0, "shape": "hv"}}
        group: dict[str, Any] = {"mode": "lines", "legendgroup": name}
        for end in ("horizon_low", "horizon_high"):
            values = _values(of_variant[end])
            x, y = surviving(values, farthest)
            if values.size:
                onto = "tonexty" if end == "horizon_high" else None
                band = {"showlegend": False, "hoverinfo": "skip", **fill, **group}
                figure.add_scatter(x=x + 1, y=100 * y, fill=onto, **band)
        x, y = surviving(_values(of_variant["horizon"]), farthest)
        figure.add_scatter(
            x=x + 1,
            y=100 * y,
            name=f"{name} ({y[-1]:.0%} left)",
            **group,
            line={"color": color, "width": 2.25, "dash": dash, "shape": "hv"},
            customdata=x,
            hovertemplate=f"{name}<br>%{{y:.0f}}% of heads still win beyond "
            "%{customdata:,.1f} tokens<extra></extra>",
        )
    figure.update_yaxes(title_text="share of heads (%)", range=[-3, 103])
    below = {"yref": "container", "y": 0, "yanchor": "bottom"}  # it may take several rows
    return figure.update_layout(legend=below)


def surviving(horizon: np.ndarray, farthest: float) -> tuple[np.ndarray, np.ndarray]:
    """Distances at which heads lose their key, and the share of heads that win beyond each.

    Begins at 0 and ends at `farthest`; a horizon of 0 is lost from the start.
    """
    lost = np.sort(horizon[horizon <= farthest])
    at = np.concatenate([[0.0], lost, [farthest]])
    left = len(horizon) - np.searchsorted(lost, at, side="right")
    return at, left / max(len(horizon), 1)


def _values(values: xr.DataArray) -> np.ndarray:
    """The numbers of the heads that have one."""
    flat = values.values.ravel()
    return flat[~np.isnan(flat)]


def horizon_words(of_variant: xr.Dataset) -> str:
    """Where a head loses its picked key under one variant, in words."""
    horizon, low, high = _horizon(of_variant)
    if float(of_variant["lowest_score"]) > float(of_variant["others_level"]):
        return "no horizon at any distance"
    if horizon == 0:
        return "below the other keys wherever it stands"
    farthest = float(of_variant["distance"].max())
    if np.isinf(horizon):
        return f"no horizon up to {short_count(farthest)} tokens"
    interval = ""
    if np.isfinite(low):
        upper = short_count(high) if np.isfinite(high) else f"beyond {short_count(farthest)}"
        interval = f" (95%: {short_count(low)} to {upper})"
    return f"horizon {short_count(horizon)} tokens{interval}"


def _horizon(of_variant: xr.Dataset) -> tuple[float, ...]:
    """The horizon and the ends of its interval."""
    names = ("horizon", "horizon_low", "horizon_high")
    return tuple(float(of_variant[name]) for name in names)


def score_range(
    of_variant: xr.Dataset,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Middle distance, lowest, mean and highest moved score of every bin of distances."""
    distance, begins, middle = distance_bins(of_variant)
    product = of_variant["product_real"].values + 1j * of_variant["product_imag"].values
    there = np.isfinite(product)
    product = product[there] * of_variant["variant_gain"].values[there]
    inv_freq = of_variant["variant_inv_freq"].values[there]
    score = (np.exp(1j * np.outer(distance, inv_freq)) @ product).real
    mean = np.add.reduceat(score, begins) / np.diff(begins, append=len(score))
    return middle, np.minimum.reduceat(score, begins), mean, np.maximum.reduceat(score, begins)


def distance_bins(reach: xr.Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whole distances bin after bin, where each bin begins among them, and its middle.

    A bin is about a sixteenth of a decade, of the whole distances from 0 to the farthest.
    """
    farthest = max(int(reach["distance"].max()), 1)
    count = int(np.ceil(np.log10(farthest) * PER_DECADE)) + 1
    edges = np.unique(np.geomspace(1, farthest + 1, count).round().astype(int))
    random = np.random.default_rng(0)  # even steps would beat with the waves
    bins = [np.array([0])]
    for begin, end in itertools.pairwise(edges):
        some = random.integers(begin, end, size=PER_BIN)
        bins.append(np.arange(begin, end) if end - begin <= PER_BIN else some)
    begins = np.cumsum([0, *map(len, bins[:-1])])
    middle = np.concatenate([[0], np.sqrt(edges[:-1] * (edges[1:] - 1.0))])
    return np.concatenate(bins), begins, middle


def _draw_panel(figure: go.Figure, of_variant: xr.Dataset, color: str, **place: int) -> None:
    """The moved score by distance, the levels it meets, and the horizon."""
    level = float(of_variant["others_level"])
    middle, *scores = score_range(of_variant)
    low, mean, high = (score - level for score in scores)
    silent = {"mode": "lines", "hoverinfo": "skip"}
    band = {"line": {"width": 0, "color": color}, "fillcolor": faded(color, 0.28), **silent}
    figure.add_scatter(x=middle + 1, y=low, **band, **place)
    figure.add_scatter(x=middle + 1, y=high, fill="tonexty", **band, **place)
    figure.add_scatter(
        x=middle + 1,
        y=mean,
        mode="lines",
        line={"width": 2, "color": color},
        customdata=np.stack([middle, low, high], axis=-1),
        hovertemplate="about %{customdata[0]:,.0f} tokens back: %{y:.2f} nats above the "
        "other keys (%{customdata[1]:.2f} to %{customdata[2]:.2f})<extra></extra>",
        **place,
    )
    lowest = float(of_variant["lowest_score"]) - level
    for y, line in ((0.0, {"color": MUTED, "width": 1.25}), (lowest, DASHED | {"width": 1.5})):
        figure.add_scatter(x=middle[[0, -1]] + 1, y=[y, y], line=line, **silent, **place)
    horizon, *ends = _horizon(of_variant)
    there = 0 < horizon < np.inf  # else no diamond
    farthest = float(of_variant["distance"].max())
    below, above = np.nan_to_num(ends, nan=horizon, posinf=farthest)
    bars: dict[str, list[float]] = {"array": [], "arrayminus": []}
    if there:
        bars = {"array": [max(above - horizon, 0)], "arrayminus": [max(horizon - below, 0)]}
    figure.add_scatter(
        x=[horizon + 1] if there else [],
        y=[0] if there else [],
        mode="markers",
        marker={"symbol": "diamond", "size": 11, "color": color},
        error_x={**bars, "color": color, "thickness": 2},
        hovertemplate=horizon_words(of_variant) + "<extra></extra>",
        **place,
    )


def _distance_axis(reach: xr.Dataset) -> dict:
    """Keywords for `update_xaxes`: distance + 1 on a log scale, ticks named by distance."""
    farthest = max(float(reach["distance"].max()), 1.0)
    ticks = [0, *(10**power for power in range(int(np.log10(farthest)) + 1))]
    names = {tick + 1: short_count(tick) for tick in ticks}
    return log_axis(names, range=[-0.03, float(np.log10(farthest + 1)) + 0.03])
