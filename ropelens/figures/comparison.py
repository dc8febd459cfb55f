"""How the groups of a comparison differ: in loss, by position, in heads, as they learn."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.comparison.pairs import entries_of, group_names, paired_changes
from ropelens.comparison.table import loss_past_context, repeat_gain
from ropelens.figures.style import (
    COLORS,
    DOTTED,
    LABELS,
    MUTED,
    VARIANT_COLORS,
    interval_bars,
    log_axis,
    mark,
    new_figure,
    set_x,
    stacked,
)
from ropelens.figures.text import mean_count, plotly_text, short_count
from ropelens.figures.wavelengths import AXIS_TITLE, mark_wavelengths
from ropelens.measure.terms import NEEDLES
from ropelens.measure.truncation_table import best_head

KNOWN = ("p-rope-0.75", "p-rope-0.25", "p-rope-0.5", "p-rope-reversed-0.75", "nope")
"""Variants that look the same on every page: the first has the first colour, and so on."""

VARIANT_SYMBOLS = ("square", "diamond", "triangle-up", "cross", "star", "pentagon")
DASHES = ("solid", "dash", "dot")
HEADS = ("layer", "head")
Values = Callable[[str], xr.DataArray]
"""What a panel shows of a group, over `entry` and the dimension of x."""


@dataclass(frozen=True)
class Look:
    """How a group is drawn: its colour, marker and line."""

    color: str
    symbol: str
    dash: str
    width: float = 2

    @property
    def line(self) -> dict[str, object]:
        """As plotly's `line`."""
        return {"color": self.color, "dash": self.dash, "width": self.width}


def looks(comparison: xr.Dataset) -> Mapping[str, Look]:
    """The look of each group; the first, the baseline, is grey and wide, below the others."""
    first, *rest = group_names(comparison)
    return {first: Look(MUTED, "circle", "solid", width=5)} | variant_looks(rest)


def variant_looks(names: Sequence[str]) -> dict[str, Look]:
    """The look of each variant, "p-rope:0.75" or "p-rope-0.75"; others take what is left."""
    every = [
        Look(color, symbol, dash)
        for dash in DASHES
        for color, symbol in zip(VARIANT_COLORS, VARIANT_SYMBOLS, strict=True)
    ]
    written = {name: name.replace(":", "-") for name in names}
    taken = {KNOWN.index(known) for known in written.values() if known in KNOWN}
    left = itertools.cycle(sorted(set(range(len(every))) - taken))
    return {
        name: every[KNOWN.index(known) if known in KNOWN else next(left)]
        for name, known in written.items()
    }


def _add_lines(
    figure: go.Figure,
    comparison: xr.Dataset,
    values_of: Values,
    *,
    row: int,
    hover: str,
    meta: Mapping[str, str],
) -> None:
    """A line a group in the panel `row`: the mean of `values_of` a group over its entries.

    x is the coordinate of the other dimension. Whiskers reach from the lowest entry to the
    highest, if there are several.
    """
    for group, look in looks(comparison).items():
        values = values_of(group).transpose("entry", ...)
        if not values.sizes["entry"]:
            continue
        mean, low, high = values.mean("entry"), values.min("entry"), values.max("entry")
        several = {"thickness": 1, "width": 2, "visible": values.sizes["entry"] > 1}
        figure.add_scatter(
            x=mean[mean.dims[0]].values,
            y=mean.values,
            error_y=interval_bars(mean, low, high, **several),
            name=plotly_text(group),
            legendgroup=group,
            showlegend=row == 1,
            mode="lines+markers",
            line=look.line,
            marker={"symbol": look.symbol, "size": 6},
            hovertemplate=f"{plotly_text(group)}<br>{hover}<extra></extra>",
            meta=dict(meta),
            row=row,
            col=1,
        )


def plot_loss_change(comparison: xr.Dataset, table: pd.DataFrame) -> go.Figure:
    """Loss of each group less the baseline's (nats per token), with 95% intervals.

    `table` is `summarize_comparison(comparison)`. A ring is a pair, of one seed; right of zero
    is worse.
    """
    rows = table[table["loss_change"].notna()].iloc[::-1]
    baseline = plotly_text(comparison.attrs["baseline"])
    figure = new_figure(f"Loss against that of {baseline}", height=140 + 46 * len(rows))
    for row in rows.to_dict("records"):
        group, look = row["group"], looks(comparison)[row["group"]]
        mean, low, high = row["loss_change"], row["low"], row["high"]
        pairs = paired_changes(comparison["loss"], group).values
        ring = {"size": 13, "symbol": "circle-open", "color": look.color, "line_width": 1.5}
        figure.add_scatter(
            x=pairs,
            y=[plotly_text(group)] * len(pairs),
            mode="markers",
            marker=ring,
            hovertemplate="one pair: %{x:+.4f} nats/token<extra></extra>",
            meta={"x": "loss_change", "of": "pair"},
        )
        figure.add_scatter(
            x=[mean],
            y=[plotly_text(group)],
            error_x=interval_bars([mean], [low], [high], color=look.color, width=7),
            mode="markers",
            marker={"size": 8, "symbol": look.symbol, "color": look.color},
            hovertemplate=f"%{{x:+.4f}} nats/token [{low:+.4f}, {high:+.4f}], "
            f"95% over {row['over']}<extra></extra>",
            meta={"x": "loss_change", "of": "mean"},
        )
    figure.add_vline(x=0, line={"color": MUTED, "width": 1.5})
    title = "difference in loss (nats per token; right is worse)"
    figure.update_xaxes(title_text=title, exponentformat="none")
    figure.update_yaxes(range=[-0.6, len(rows) - 0.4], showgrid=False, type="category")
    return figure.update_layout(showlegend=False)


def plot_position_loss(comparison: xr.Dataset) -> go.Figure:
    """Loss by position (nats per token), up to four times the trained context.

    Above each group's mean, below its mean difference to the baseline, over the same text;
    whiskers from the lowest seed to the highest.
    """
    figure = stacked("Loss by position in the text", 2, height=560, spacing=0.08)
    start = np.maximum(comparison["position_start"].values.astype(float), 1)
    middle = np.sqrt(start * (comparison["position_stop"].values - 1).clip(1))
    losses = comparison["position_loss"].transpose("entry", ...)
    losses = losses.assign_coords({losses.dims[1]: middle})
    change = f"difference to {plotly_text(comparison.attrs['baseline'])}<br>(nats/token)"
    panels: dict[str, tuple[str, Values]] = {
        "position_loss": ("loss (nats/token)", partial(entries_of, losses)),
        "change": (change, partial(paired_changes, losses)),
    }
    hover = "position %{x:.0f}: %{y:.3f} nats/token"
    for row, (name, (title, values_of)) in enumerate(panels.items(), start=1):
        _add_lines(figure, comparison, values_of, row=row, hover=hover, meta={"y": name})
        figure.update_yaxes(title_text=title, row=row)
    figure.update_yaxes(exponentformat="none", zeroline=True, zerolinecolor=MUTED, row=2)
    longest = int(comparison["position_stop"].max())
    _set_tokens(figure, comparison, longest, "position of the predicted token (log scale)")
    return figure


def plot_copying(comparison: xr.Dataset) -> go.Figure:
    """Loss of copied tokens by distance, needles found by length, past the trained context.

    Above, random tokens that come again after so many tokens (nats per token); below, the
    share of needles found in prompts of so many tokens, dotted what chance finds. Lines are
    means over a group's entries; whiskers from the lowest to the highest.
    """
    figure = stacked("Copying and retrieval by distance", 2, height=560, spacing=0.08)
    panels = {
        "copy_loss": ("copy_distance", "loss of copied tokens<br>(nats/token)"),
        "far_retrieval": ("prompt_length", "needles found<br>(share)"),
    }
    for row, (name, (_, title)) in enumerate(panels.items(), start=1):
        values = comparison[name]
        values = values.mean("trial") if "trial" in values.dims else values
        of, hover = partial(entries_of, values), "%{x:,} tokens: %{y:.3g}"
        _add_lines(figure, comparison, of, row=row, hover=hover, meta={"y": name})
        figure.update_yaxes(title_text=title, rangemode="tozero", row=row)
    figure.add_hline(y=1 / NEEDLES, line=DOTTED, row=2)
    longest = max(int(comparison[dim].max()) for dim, _ in panels.values())
    title = "tokens to the copy; of the prompt (log scale)"
    _set_tokens(figure, comparison, longest, title)
    return figure


def _set_tokens(figure: go.Figure, comparison: xr.Dataset, longest: int, title: str) -> None:
    """A common axis of tokens up to the `longest`, where the trained context is marked."""
    context = int(comparison.attrs["context"])
    mark(figure, context, "trained context ", name="context", xanchor="right")
    powers = [2**k for k in range(int(np.log2(longest)) + 1)]
    set_x(figure, log_axis({power: f"{power:,}" for power in powers}), title)


PLANES = {
    "q_norm": "query norm<br>(model units)",
    "k_norm": "key norm<br>(model units)",
    "selectivity_keys": "selectivity on keys<br>(nats)",
}


def plot_comparison_planes(comparison: xr.Dataset) -> go.Figure:
    """Norms and selectivity of the planes, means over layers, heads and seeds.

    Whiskers reach from the lowest seed to the highest. Planes stand at their wavelength. One
    that does not rotate stands where the same plane of another group rotates, in a ring.
    """
    figure = stacked("What the planes carry", len(PLANES), height=560, spacing=0.05)
    places = {group: plane_places(comparison, group) for group in looks(comparison)}
    every = np.concatenate([place for place, _ in places.values()])
    ends = np.log10([np.nanmin(every) / 1.3, np.nanmax(every) * 1.3]).tolist()
    powers = log_axis({power: short_count(power) for power in 10.0 ** np.arange(9)}, range=ends)
    set_x(figure, powers, AXIS_TITLE)
    for row, (name, title) in enumerate(PLANES.items(), start=1):
        averaged = [dim for dim in comparison[name].dims if dim not in ("entry", "frequency")]
        means = comparison[name].mean(averaged)

        def of_group(group: str, means: xr.DataArray = means) -> xr.DataArray:
            return entries_of(means, group).assign_coords(frequency=places[group][0])

        hover = "%{y:.3f}, wavelength %{x:.3~s} tokens"
        _add_lines(figure, comparison, of_group, row=row, hover=hover, meta={"y": name})
        still = [
            of_group(group).mean("entry")[~turning] for group, (_, turning) in places.items()
        ]
        figure.add_scatter(
            x=np.concatenate([one["frequency"] for one in still]),
            y=np.concatenate(still),
            mode="markers",
            marker={"symbol": "circle-open", "size": 13, "color": MUTED},
            name="does not rotate",
            legendgroup="still",
            showlegend=row == 1 and any(map(len, still)),
            hoverinfo="skip",
            meta={"still": name},
            row=row,
            col=1,
        )
        tozero = {"rangemode": "tozero", "zeroline": True, "zerolinecolor": MUTED}
        figure.update_yaxes(title_text=title, nticks=5, **tozero, row=row)
    mark_wavelengths(figure, comparison, yanchor="bottom")
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


def plot_label_counts(table: pd.DataFrame) -> go.Figure:
    """How many heads of each group are positional, semantic, ...: means over its entries.

    `table` is what `summarize_comparison` made.
    """
    rows = table.iloc[::-1]
    figure = new_figure("What the heads are", height=150 + 40 * len(rows))
    for label in LABELS:
        figure.add_bar(
            x=rows[label],
            y=[plotly_text(group) for group in rows["group"]],
            orientation="h",
            name=label,
            marker={"color": COLORS[label]},
            text=[mean_count(count) if count else "" for count in rows[label]],
            textposition="inside",
            insidetextanchor="middle",
            hovertemplate=f"%{{y}}: %{{x:.2~f}} {label}<extra></extra>",
        )
    figure.update_layout(barmode="stack", bargap=0.3, legend_traceorder="normal")
    figure.update_xaxes(title_text="heads (mean over entries)")
    return figure.update_yaxes(showgrid=False, type="category")


def _count(entries: xr.Dataset, label: str) -> xr.DataArray:
    known = entries["growth_loss"].notnull()
    return (entries["growth_label"] == label).sum(HEADS).where(known)


GROWTH: dict[str, Callable[[xr.Dataset], xr.DataArray]] = {
    "loss<br>(nats/token)": lambda e: e["growth_loss"],
    "loss past context<br>(nats/token)": lambda e: loss_past_context(e, "growth_position_loss"),
    "gain of repeats<br>(nats/token)": lambda e: repeat_gain(e, "growth_").mean("trial"),
    "positional<br>heads": lambda e: _count(e, "positional"),
    "semantic<br>heads": lambda e: _count(e, "semantic"),
    "best head on<br>previous token": lambda e: e["growth_previous_token"].max(HEADS),
    "best head,<br>induction": lambda e: best_head(e["growth_trial_induction"]).mean("trial"),
    "retrieval<br>(share)": lambda e: e["growth_retrieval"].mean(("retrieval_length", "depth")),
}
"""What each panel of `plot_growth` shows of entries, over (entry, step)."""


def plot_growth(comparison: xr.Dataset) -> go.Figure:
    """Losses, positional and semantic heads, the best heads' scores, retrieval, by step.

    A line a group, the mean over its seeds; whiskers from the lowest seed to the highest. The
    last panel is of retrieval, dotted what chance finds.
    """
    measured = {title: measure(comparison) for title, measure in GROWTH.items()}
    panels = {title: values for title, values in measured.items() if values.notnull().any()}
    height = 130 * len(panels) + 170
    figure = stacked("How it grew over training", len(panels), height=height, spacing=0.02)
    for row, (title, values) in enumerate(panels.items(), start=1):
        of, meta = partial(entries_of, values), {"y": title.replace("<br>", " ")}
        hover = "step %{x:,}: %{y:.3g}"
        _add_lines(figure, comparison, of, row=row, hover=hover, meta=meta)
        range_mode = "normal" if title.startswith("loss") else "tozero"
        figure.update_yaxes(title_text=title, rangemode=range_mode, row=row)
    figure.update_yaxes(nticks=4, exponentformat="none")
    figure.add_hline(y=1 / NEEDLES, line=DOTTED, row=len(panels))
    longest = int(comparison["step"].max())
    ticks = 4 ** np.arange(0, int(np.log2(max(2, longest))) // 2 + 1)
    axis = log_axis({int(tick): f"{tick:,}" for tick in ticks})
    set_x(figure, axis, "training step (log scale)")
    return figure
