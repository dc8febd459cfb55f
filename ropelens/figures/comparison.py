"""How the groups of a comparison differ: in loss, by position, in heads, as they learn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.comparison.table import (
    entries_of,
    group_names,
    loss_past_context,
    paired_changes,
    repeat_gain,
)
from ropelens.figures import style
from ropelens.figures.text import plotly_text, short_count
from ropelens.figures.wavelengths import AXIS_TITLE, NO_PLANES, mark_trained
from ropelens.interventions.truncation_table import best_head
from ropelens.interventions.variables import NEEDLES

KNOWN = ("p-rope-0.75", "p-rope-0.25", "p-rope-0.5", "p-rope-reversed-0.75", "nope")
"""Variants that look the same on every page: the first has the first colour, and so on."""

VARIANT_SYMBOLS = ("square", "diamond", "triangle-up", "cross", "star", "pentagon")
DASHES = ("solid", "dash", "dot")
HEADS = ("layer", "head")
AVERAGED = {*HEADS, "kv_head", "trial", "retrieval_length", "depth"}
"""The dimensions of an entry that a line is the mean over."""
Values = Callable[[str], xr.DataArray]
"""What a panel shows of a group, over `entry` and the dimension of x."""


class Look(NamedTuple):
    """How a group is drawn: its marker, and plotly's keywords of its line."""

    symbol: str
    line: dict[str, Any]


def looks(comparison: xr.Dataset) -> Mapping[str, Look]:
    """The look of each group; the first, the baseline, is grey and wide, below the others."""
    first, *rest = group_names(comparison)
    baseline = Look("circle", {"color": style.MUTED, "dash": "solid", "width": 5})
    return {first: baseline} | variant_looks(rest)


def variant_looks(names: Sequence[str]) -> dict[str, Look]:
    """The look of each variant, "p-rope:0.75" or "p-rope-0.75"; others take what is left."""
    every = [
        Look(symbol, {"color": color, "dash": dash, "width": 2})
        for dash in DASHES
        for color, symbol in zip(style.VARIANT_COLORS, VARIANT_SYMBOLS, strict=True)
    ]
    written = [name.replace(":", "-") for name in names]
    left = itertools.cycle(
        at for at in range(len(every)) if at >= len(KNOWN) or KNOWN[at] not in written
    )
    places = [KNOWN.index(one) if one in KNOWN else next(left) for one in written]
    return {name: every[at] for name, at in zip(names, places, strict=True)}


def _averaged(values: xr.DataArray) -> xr.DataArray:
    return values.mean([dim for dim in values.dims if dim in AVERAGED])


def _lines(
    title: str, comparison: xr.Dataset, panels: Mapping[str, Values], *, hover: str, **size: Any
) -> go.Figure:
    """A panel per row, by the title of its axis: a line per group, the mean over its entries.

    x is the coordinate of the dimension that is left. Whiskers reach from the lowest entry to
    the highest, if there are several.
    """
    figure = style.stacked(title, max(1, len(panels)), **size)
    for row, (unit, values_of) in enumerate(panels.items(), start=1):
        for group, look in looks(comparison).items():
            values = _averaged(values_of(group)).transpose("entry", ...)
            if not values.sizes["entry"]:
                continue
            mean, low, high = values.mean("entry"), values.min("entry"), values.max("entry")
            several = {"thickness": 1, "width": 2, "visible": values.sizes["entry"] > 1}
            name = plotly_text(group)
            data: dict[str, Any] = {"x": mean[mean.dims[0]].values, "y": mean.values}
            data["error_y"] = style.interval_bars(mean, low, high, **several)
            marks = {"mode": "lines+markers", "marker": {"symbol": look.symbol, "size": 6}}
            legend = {"name": name, "legendgroup": group, "showlegend": row == 1}
            text = f"{name}<br>{hover}<extra></extra>"
            figure.add_scatter(
                **data, **marks, **legend, line=look.line, hovertemplate=text, row=row, col=1
            )
        figure.update_yaxes(title_text=unit, row=row)
    drawn = np.concatenate([[], *(trace.y for trace in figure.data)])
    return style.note_missing(figure, drawn, "no entry has these numbers")


def plot_loss_change(comparison: xr.Dataset, table: pd.DataFrame) -> go.Figure:
    """Loss of each group less the baseline's (nats per token), with 95% intervals.

    `table` is `summarize_comparison(comparison)`. A ring is a pair, of one seed; right of zero
    is worse.
    """
    rows = table[table["loss_change"].notna()].iloc[::-1]
    baseline = plotly_text(comparison.attrs["baseline"])
    figure = style.new_figure(f"Loss against that of {baseline}", height=140 + 46 * len(rows))
    for row in rows.to_dict("records"):
        symbol, line = looks(comparison)[row["group"]]
        color, mean, low, high = line["color"], row["loss_change"], row["low"], row["high"]
        pairs = paired_changes(comparison["loss"], row["group"]).values
        ring = {"size": 13, "symbol": "circle-open", "color": color, "line_width": 1.5}
        hover = "one pair: %{x:+.4f} nats/token<extra></extra>"
        name, points = plotly_text(row["group"]), {"mode": "markers", "marker": ring}
        figure.add_scatter(x=pairs, y=[name] * len(pairs), **points, hovertemplate=hover)
        points["marker"] = {"size": 8, "symbol": symbol, "color": color}
        bars = style.interval_bars([mean], [low], [high], color=color, width=7)
        hover = f"%{{x:+.4f}} nats/token [{low:+.4f}, {high:+.4f}], 95% over {row['over']}"
        hover += "<extra></extra>"
        figure.add_scatter(x=[mean], y=[name], error_x=bars, **points, hovertemplate=hover)
    figure.add_vline(x=0, line={"color": style.MUTED, "width": 1.5})
    title = "difference in loss (nats per token; right is worse)"
    figure.update_xaxes(title_text=title, exponentformat="none")
    figure.update_yaxes(range=[-0.6, len(rows) - 0.4], showgrid=False, type="category")
    figure.update_layout(showlegend=False)
    return style.note_missing(figure, rows["loss_change"], "no two losses are of the same text")


def plot_position_loss(comparison: xr.Dataset) -> go.Figure:
    """Loss by position (nats per token), up to four times the trained context.

    Above each group's mean, below its mean difference to the baseline, over the same text;
    whiskers from the lowest seed to the highest.
    """
    start = np.maximum(comparison["position_start"].values.astype(float), 1)
    middle = np.sqrt(start * (comparison["position_stop"].values - 1).clip(1))
    losses = comparison["position_loss"].transpose("entry", ...)
    losses = losses.assign_coords({losses.dims[1]: middle})
    change = f"difference to {plotly_text(comparison.attrs['baseline'])}<br>(nats/token)"
    panels: dict[str, Values] = {
        "loss (nats/token)": partial(entries_of, losses),
        change: partial(paired_changes, losses),
    }
    title, hover = "Loss by position in the text", "position %{x:.0f}: %{y:.3f} nats/token"
    figure = _lines(title, comparison, panels, hover=hover, height=560, spacing=0.08)
    figure.update_yaxes(exponentformat="none", zeroline=True, zerolinecolor=style.MUTED, row=2)
    longest = int(comparison["position_stop"].max())
    _set_tokens(figure, comparison, longest, "position of the predicted token (log scale)")
    return figure


def plot_copying(comparison: xr.Dataset) -> go.Figure:
    """Loss of copied tokens by distance, needles found by length, past the trained context.

    Above, random tokens that come again after so many tokens (nats per token); below, the
    share of needles found in prompts of so many tokens, dotted what chance finds. Lines are
    means over a group's entries; whiskers from the lowest to the highest.
    """
    panels: dict[str, Values] = {
        "loss of copied tokens<br>(nats/token)": partial(entries_of, comparison["copy_loss"]),
        "needles found<br>(share)": partial(entries_of, comparison["far_retrieval"]),
    }
    title, hover = "Copying and retrieval by distance", "%{x:,} tokens: %{y:.3g}"
    figure = _lines(title, comparison, panels, hover=hover, height=560, spacing=0.08)
    figure.update_yaxes(rangemode="tozero")
    figure.add_hline(y=1 / NEEDLES, line=style.DOTTED, row=2)
    longest = max(int(comparison[dim].max()) for dim in ("copy_distance", "prompt_length"))
    _set_tokens(figure, comparison, longest, "tokens to the copy; of the prompt (log scale)")
    return figure


def _set_tokens(figure: go.Figure, comparison: xr.Dataset, longest: int, title: str) -> None:
    """A common axis of tokens up to the `longest`, where the trained context is marked."""
    powers = [2**k for k in range(int(np.log2(longest)) + 1)]
    style.set_x(figure, style.log_axis({power: f"{power:,}" for power in powers}), title)
    context = int(comparison.attrs["context"])
    style.mark(figure, context, "trained context ", name="context", xanchor="right")


PLANES = {
    "query norm<br>(model units)": "q_norm",
    "key norm<br>(model units)": "k_norm",
    "selectivity on keys<br>(nats)": "selectivity_keys",
}


def plot_comparison_planes(comparison: xr.Dataset) -> go.Figure:
    """Norms and selectivity of the planes, means over layers, heads and seeds.

    Whiskers reach from the lowest seed to the highest. Planes stand at their wavelength. One
    that does not rotate stands where the same plane of another group rotates, in a ring.
    """
    places = {group: plane_places(comparison, group) for group in looks(comparison)}

    def of_group(name: str, group: str) -> xr.DataArray:
        entries = entries_of(comparison[name], group)
        return _averaged(entries.assign_coords(frequency=places[group][0]))

    panels = {unit: partial(of_group, name) for unit, name in PLANES.items()}
    title, hover = "What the planes carry", "%{y:.3f}, wavelength %{x:.3~s} tokens"
    figure = _lines(title, comparison, panels, hover=hover, height=560, spacing=0.05)
    every = np.concatenate([place for place, _ in places.values()])
    every = every if np.isfinite(every).any() else NO_PLANES
    ends = np.log10([np.nanmin(every) / 1.3, np.nanmax(every) * 1.3]).tolist()
    powers = {power: short_count(power) for power in 10.0 ** np.arange(9)}
    style.set_x(figure, style.log_axis(powers, range=ends), AXIS_TITLE)
    for row, values_of in enumerate(panels.values(), start=1):
        still = [values_of(group).mean("entry")[~turns] for group, (_, turns) in places.items()]
        x = np.concatenate([one["frequency"] for one in still])
        ring = {"symbol": "circle-open", "size": 13, "color": style.MUTED}
        points = {"mode": "markers", "marker": ring, "hoverinfo": "skip"}
        legend: dict[str, Any] = {"name": "does not rotate", "legendgroup": "still"}
        legend["showlegend"] = row == 1 and len(x) > 0
        figure.add_scatter(x=x, y=np.concatenate(still), **points, **legend, row=row, col=1)
    figure.update_yaxes(nticks=5, rangemode="tozero", zeroline=True, zerolinecolor=style.MUTED)
    mark_trained(figure, comparison)
    return figure.update_layout(margin_t=104, legend_y=1.1)


def plane_places(comparison: xr.Dataset, group: str) -> tuple[np.ndarray, np.ndarray]:
    """Where the planes of `group` stand (tokens), and whether they rotate, [frequency] each.

    The wavelength of a plane is its median over layers. One that does not rotate takes the
    place of the same plane in the first entry of as many planes in which it does, else NaN.
    """
    wavelength = comparison["wavelength"].median("layer").transpose("entry", "frequency").values
    exists = ~np.isnan(wavelength)
    of_group = wavelength[np.flatnonzero(comparison["group"].values == group)[0]]
    alike = wavelength[(exists == ~np.isnan(of_group)).all(axis=1)]
    turning = np.isfinite(alike)
    lent = np.where(turning.any(0), alike[turning.argmax(0), np.arange(alike.shape[1])], np.nan)
    return np.where(np.isfinite(of_group), of_group, lent), np.isfinite(of_group)


def _count(entries: xr.Dataset, label: str) -> xr.DataArray:
    known = entries["growth_loss"].notnull()
    return (entries["growth_label"] == label).sum(HEADS).where(known)


GROWTH: dict[str, Callable[[xr.Dataset], xr.DataArray]] = {
    "loss<br>(nats/token)": lambda e: e["growth_loss"],
    "loss past context<br>(nats/token)": lambda e: loss_past_context(e, "growth_position_loss"),
    "gain of repeats<br>(nats/token)": lambda e: repeat_gain(e, "growth_"),
    "positional<br>heads": lambda e: _count(e, "positional"),
    "semantic<br>heads": lambda e: _count(e, "semantic"),
    "best head on<br>previous token": lambda e: e["growth_previous_token"].max(HEADS),
    "best head,<br>induction": lambda e: best_head(e["growth_trial_induction"]),
    "retrieval<br>(share)": lambda e: e["growth_retrieval"],
}
"""What each panel of `plot_growth` shows of entries, by step."""


def plot_growth(comparison: xr.Dataset) -> go.Figure:
    """Losses, positional and semantic heads, the best heads' scores, retrieval, by step.

    A line per group, the mean over its seeds; whiskers from the lowest seed to the highest. The
    last panel is of retrieval, dotted what chance finds.
    """
    measured = {unit: measure(comparison) for unit, measure in GROWTH.items()}
    panels: dict[str, Values] = {
        unit: partial(entries_of, values)
        for unit, values in measured.items()
        if values.notnull().any()
    }
    size = {"height": 130 * len(panels) + 170, "spacing": 0.02}
    title, hover = "How it grew over training", "step %{x:,}: %{y:.3g}"
    figure = _lines(title, comparison, panels, hover=hover, **size)
    for row, unit in enumerate(panels, start=1):
        figure.update_yaxes(rangemode="normal" if "loss" in unit else "tozero", row=row)
    figure.update_yaxes(nticks=4, exponentformat="none")
    figure.add_hline(y=1 / NEEDLES, line=style.DOTTED, row=max(1, len(panels)))
    longest = int(comparison["step"].max())
    ticks = 4 ** np.arange(0, int(np.log2(max(2, longest))) // 2 + 1)
    axis = style.log_axis({int(tick): f"{tick:,}" for tick in ticks})
    style.set_x(figure, axis, "training step (log scale)")
    return figure
