"""How far heads reach: a picked key's score by distance, and where heads lose their keys."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.errors import BadArgument
from ropelens.figures.inputs import check_head
from ropelens.figures.numbers import short_count
from ropelens.figures.series import Look, variant_looks
from ropelens.figures.style import (
    DASHED,
    DRAWN_FROM_ONE,
    MUTED,
    faded,
    log_axis,
    name_panel,
    new_figure,
)
from ropelens.figures.wavelengths import one_title
from ropelens.measure.terms import OWN

PER_DECADE = 16
"""Bins of distance in a decade."""

PER_BIN = 48
"""Whole distances drawn from a bin that holds more."""

DISTANCE = "distance (tokens, log scale)"
PANEL = 128
"""Height of a panel in pixels."""


def plot_reach(
    found: xr.Dataset, *, layer: int, head: int, variants: Sequence[str] | None = None
) -> go.Figure:
    """A head's picked key, moved: its mean score above the other keys', a panel a variant.

    x: distance (tokens; drawn at distance + 1 on a log axis, so that 0 has a place). y:
    `moved_score` less `others_level` (nats), so that the key wins above 0. A score is a sum
    of waves, too fine to draw at far distances: line and band are the mean and the range of
    up to 48 whole distances drawn from every sixteenth of a decade. Dashed: what no distance
    takes the score below (`lowest_score`). Diamond: `horizon`, with its 95 % interval.
    `found` is what `ropelens.reach` gave.
    """
    check_head(found, layer=layer, head=head)
    names = _chosen(found, variants)
    of_head = found.sel(layer=layer, head=head)
    if bool(of_head["horizon"].isnull().all()):
        raise BadArgument(
            f"The reach of layer {layer}, head {head} was not measured.",
            attempt=f'reach(model, tokens, heads="{layer}.{head}")',
        )
    rows = {"rows": len(names), "cols": 1, "shared_xaxes": True}
    figure = new_figure(
        f"Reach of layer {layer}, head {head}",
        height=PANEL * len(names) + 110,
        **rows,
        vertical_spacing=0.22 / len(names),  # room for the name of a panel
    )
    for row, (name, look) in enumerate(_looks(names).items(), start=1):
        of_variant, color = of_head.sel(variant=name), MUTED if look is None else look.color
        _draw_panel(figure, of_variant, color, row=row, col=1)
        name_panel(figure, row, f"<b>{name}</b>: {horizon_words(of_variant)}")
    figure.update_xaxes(**_distance_axis(found))
    one_title(figure, DISTANCE)
    drawn = np.concatenate([trace.y for trace in figure.data])
    margin = 0.06 * (drawn.max() - drawn.min()) + 1e-3
    figure.update_yaxes(title_text="above others (nats)")
    figure.update_yaxes(range=[float(drawn.min() - margin), float(drawn.max() + margin)])
    return figure.update_layout(showlegend=False, meta=DRAWN_FROM_ONE)


def plot_horizons(found: xr.Dataset, *, variants: Sequence[str] | None = None) -> go.Figure:
    """The share of measured heads whose picked key still wins, by distance, a line a variant.

    x: distance (tokens; drawn at distance + 1, log). y: share of heads with `horizon` beyond
    it (%). The line ends at the share without a horizon up to the farthest distance. Band:
    the same of the lower and upper ends of each head's 95 % interval, where there are any.
    """
    names = _chosen(found, variants)
    farthest = float(found["distance"].max())
    figure = new_figure("Heads whose picked key still wins, by distance", height=400)
    for name, own in _looks(names).items():
        color, dash = (None, "solid") if own is None else (own.color, own.dash)
        of_variant = found.sel(variant=name)
        fill = {"fillcolor": faded(color or MUTED, 0.3), "line": {"width": 0, "shape": "hv"}}
        for end in ("horizon_low", "horizon_high"):
            values = _values(of_variant[end])
            x, y = surviving(values, farthest)
            if values.size:
                onto = "tonexty" if end == "horizon_high" else None
                band = {"mode": "lines", "showlegend": False, "hoverinfo": "skip", **fill}
                figure.add_scatter(x=x + 1, y=100 * y, fill=onto, legendgroup=name, **band)
        x, y = surviving(_values(of_variant["horizon"]), farthest)
        figure.add_scatter(
            x=x + 1,
            y=100 * y,
            name=f"{name} ({y[-1]:.0%} left)",
            mode="lines",
            legendgroup=name,
            line={"color": color, "width": 2.25, "dash": dash, "shape": "hv"},
            customdata=x,
            hovertemplate=f"{name}<br>%{{y:.0f}}% of heads still win beyond "
            "%{customdata:,.1f} tokens<extra></extra>",
        )
    figure.update_xaxes(**_distance_axis(found), title_text=DISTANCE)
    figure.update_yaxes(title_text="share of heads (%)", range=[-3, 103])
    below = {"yref": "container", "y": 0, "yanchor": "bottom"}  # it may take several rows
    return figure.update_layout(legend=below, meta=DRAWN_FROM_ONE)


def surviving(horizon: np.ndarray, farthest: float) -> tuple[np.ndarray, np.ndarray]:
    """Distances at which heads lose their key, and the share of heads that win beyond each.

    Begins at 0 and ends at `farthest`; a horizon of 0 is lost from the start.
    """
    lost = np.sort(horizon[horizon <= farthest])
    at = np.concatenate([[0.0], lost, [farthest]])
    left = len(horizon) - np.searchsorted(lost, at, side="right")
    return at, left / max(len(horizon), 1)


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


def score_range(
    of_variant: xr.Dataset,
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Middle distance, lowest, mean and highest moved score of every bin of distances.

    A bin is about a sixteenth of a decade, of the whole distances from 0 to the farthest.
    """
    distance, begins, middle = distance_bins(of_variant)
    product = of_variant["product_real"].values + 1j * of_variant["product_imag"].values
    there = np.isfinite(product)
    product = product[there] * of_variant["variant_gain"].values[there]
    inv_freq = of_variant["variant_inv_freq"].values[there]
    score = (np.exp(1j * np.outer(distance, inv_freq)) @ product).real
    mean = np.add.reduceat(score, begins) / np.diff(begins, append=len(score))
    return middle, np.minimum.reduceat(score, begins), mean, np.maximum.reduceat(score, begins)


def distance_bins(found: xr.Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Whole distances bin after bin, where each bin begins among them, and its middle."""
    farthest = max(int(found["distance"].max()), 1)
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


def _looks(names: Sequence[str]) -> dict[str, Look | None]:
    """The look of each variant; None of the model's own rotation, which is drawn in ink."""
    others = variant_looks([name for name in names if name != OWN])
    return {name: others.get(name) for name in names}


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
    there = 0 < horizon < np.inf
    farthest = float(of_variant["distance"].max())
    below, above = np.nan_to_num(ends, nan=horizon, posinf=farthest)
    marker = {"symbol": "diamond", "size": 11, "color": color}
    bars: dict[str, list[float]] = {"array": [], "arrayminus": []}
    if there:
        bars = {"array": [max(above - horizon, 0)], "arrayminus": [max(horizon - below, 0)]}
    figure.add_scatter(
        x=[horizon + 1] if there else [],
        y=[0] if there else [],
        mode="markers",
        marker=marker,
        error_x={**bars, "color": color, "thickness": 2},
        hovertemplate=horizon_words(of_variant) + "<extra></extra>",
        **place,
    )


def _horizon(of_variant: xr.Dataset) -> tuple[float, ...]:
    """The horizon and the ends of its interval."""
    names = ("horizon", "horizon_low", "horizon_high")
    return tuple(float(of_variant[name]) for name in names)


def check_reach(found: xr.Dataset) -> None:
    """Raise `BadArgument` for a dataset that `ropelens.reach` did not make."""
    if "horizon" not in found or "variant" not in found.dims:
        raise BadArgument(
            "This dataset holds no reach of heads.",
            attempt="pass what reach(model, tokens) gives",
        )


def _chosen(found: xr.Dataset, variants: Sequence[str] | None) -> list[str]:
    """The variants to draw; refuses those that were not measured, or data that is no reach."""
    check_reach(found)
    measured = [str(name) for name in found["variant"].values]
    names = measured if variants is None else list(variants)
    missing = [name for name in names if name not in measured]
    if missing or not names:
        raise BadArgument(
            "There is nothing to draw of this variant.",
            seen=", ".join(missing) or "none named",
            attempt=f"one of: {', '.join(measured)}",
        )
    return names


def _values(values: xr.DataArray) -> np.ndarray:
    """The numbers of the heads that have one."""
    flat = values.values.ravel()
    return flat[~np.isnan(flat)]


def _distance_axis(found: xr.Dataset) -> dict:
    """Keywords for `update_xaxes`: distance + 1 on a log scale, ticks named by distance."""
    farthest = max(float(found["distance"].max()), 1.0)
    ticks = [0, *(10**power for power in range(int(np.log10(farthest)) + 1))]
    names = {tick + 1: short_count(tick) for tick in ticks}
    return log_axis(names, range=[-0.03, float(np.log10(farthest + 1)) + 0.03])
