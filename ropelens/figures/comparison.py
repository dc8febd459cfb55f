"""Figures of a comparison: losses, copying, planes, and changes during training."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.comparison import table as tables
from ropelens.figures import style
from ropelens.figures.formats import plotly_text, ranges, short_count
from ropelens.figures.planes import mark_trained, set_wavelengths
from ropelens.interventions.truncation_table import best_head
from ropelens.profiles.measures import NEEDLES

KNOWN_VARIANTS = (
    "p-rope-0.75",
    "p-rope-0.25",
    "p-rope-0.5",
    "p-rope-reversed-0.75",
    "nope",
)
VARIANT_SYMBOLS = ("square", "diamond", "triangle-up", "cross", "star", "pentagon")
DASHES = ("solid", "dash", "dot")
PLANE_PANELS = {
    "query norm<br>(model units)": "q_norm",
    "key norm<br>(model units)": "k_norm",
    "selectivity on keys<br>(nats)": "selectivity_keys",
}
HEADS = ("layer", "head")
AVERAGED = {*HEADS, "kv_head", "trial", "retrieval_length", "depth"}
Panels = Mapping[str, Callable[[str], xr.DataArray]]
"""For each axis title, the values of a group over `entry` and the dimension of x."""


class Look(NamedTuple):
    """Marker symbol and plotly's line keywords of a group."""

    symbol: str
    line: dict[str, Any]


def group_looks(comparison: xr.Dataset) -> dict[str, Look]:
    """Look of each group. The baseline is first, and its line is grey and wide."""
    first, *rest = tables.group_names(comparison)
    baseline = Look("circle", {"color": style.MUTED, "dash": "solid", "width": 5})
    return {first: baseline} | variant_looks(rest)


def variant_looks(names: Sequence[str]) -> dict[str, Look]:
    """Look of each variant: fixed for `KNOWN_VARIANTS`, the next unused look for others."""
    kinds = [*zip(style.VARIANT_COLORS, VARIANT_SYMBOLS, strict=True)]
    palette = [
        Look(symbol, {"color": color, "dash": dash, "width": 2})
        for dash, (color, symbol) in itertools.product(DASHES, kinds)
    ]
    known, written = KNOWN_VARIANTS, [name.replace(":", "-") for name in names]
    unused = itertools.cycle(
        n for n in range(len(palette)) if n >= len(known) or known[n] not in written
    )
    indices = [known.index(name) if name in known else next(unused) for name in written]
    return {name: palette[index] for name, index in zip(names, indices, strict=True)}


def _averaged(values: xr.DataArray) -> xr.DataArray:
    return values.mean([dim for dim in values.dims if dim in AVERAGED])


def _line_panels(
    title: str, comparison: xr.Dataset, panels: Panels, hover: str, **size: Any
) -> go.Figure:
    """Stack the panels, with the mean and range of each group's entries."""
    size = {"height": 560, "spacing": 0.08} | size
    figure = style.stacked(title, max(1, len(panels)), **size)
    looks = group_looks(comparison)
    for row, (unit, values_of) in enumerate(panels.items(), start=1):
        for group, look in looks.items():
            values = _averaged(values_of(group)).transpose("entry", ...)
            if not values.sizes["entry"]:
                continue
            mean, low, high = (
                values.mean("entry"),
                values.min("entry"),
                values.max("entry"),
            )
            whiskers = {
                "thickness": 1,
                "width": 2,
                "visible": values.sizes["entry"] > 1,
            }
            bars, name = (
                style.interval_bars(mean, low, high, **whiskers),
                plotly_text(group),
            )
            data = {"x": mean[mean.dims[0]].values, "y": mean.values, "error_y": bars}
            marks = {
                "mode": "lines+markers",
                "marker": {"symbol": look.symbol, "size": 6},
            }
            marks |= {
                "line": look.line,
                "hovertemplate": f"{name}<br>{hover}<extra></extra>",
            }
            legend = {"name": name, "legendgroup": group, "showlegend": row == 1}
            figure.add_scatter(**data, **marks, **legend, row=row, col=1)
        figure.update_yaxes(title_text=unit, row=row)
    return style.note_missing(figure, "these quantities were not measured")


def plot_loss_change(comparison: xr.Dataset, table: pd.DataFrame) -> go.Figure:
    """Loss of each group minus the loss of the baseline (nats/token), with 95% intervals.

    `table` is `summarize_comparison(comparison)`. Each ring is a pair of runs with one seed.
    """
    rows = table[table["loss_change"].notna()].iloc[::-1]
    baseline, looks = plotly_text(comparison.attrs["baseline"]), group_looks(comparison)
    figure = style.new_figure(
        f"Loss compared with {baseline}", height=140 + 46 * len(rows)
    )
    for row in rows.to_dict("records"):
        symbol, color = looks[row["group"]].symbol, looks[row["group"]].line["color"]
        mean, low, high = row["loss_change"], row["low"], row["high"]
        pairs = tables.paired_changes(comparison["loss"], row["group"]).values
        ring = {"size": 13, "symbol": "circle-open", "color": color, "line_width": 1.5}
        names, hover = [plotly_text(row["group"])], "one pair: %{x:+.4f} nats/token"
        look = {
            "mode": "markers",
            "marker": ring,
            "hovertemplate": f"{hover}<extra></extra>",
        }
        figure.add_scatter(x=pairs, y=names * len(pairs), **look)
        hover = f"%{{x:+.4f}} nats/token (95% interval over {row['over']}: "
        look["hovertemplate"] = f"{hover}{low:+.4f} to {high:+.4f})<extra></extra>"
        look["marker"] = {"size": 8, "symbol": symbol, "color": color}
        bars = style.interval_bars([mean], [low], [high], color=color, width=7)
        figure.add_scatter(x=[mean], y=names, error_x=bars, **look)
    figure.add_vline(x=0, line={"color": style.MUTED, "width": 1.5})
    title = "difference in loss; right is worse (nats/token)"
    figure.update_xaxes(title_text=title, exponentformat="none")
    figure.update_yaxes(range=[-0.6, len(rows) - 0.4], showgrid=False, type="category")
    figure.update_layout(showlegend=False)
    return style.note_missing(
        figure, "no two losses are on the same text", rows["loss_change"]
    )


def plot_position_loss(comparison: xr.Dataset) -> go.Figure:
    """Loss by position (nats/token), and differences from the baseline. Whiskers: seeds."""
    start = np.maximum(comparison["position_start"].values.astype(float), 1)
    middle = np.sqrt(start * (comparison["position_stop"].values - 1).clip(1))
    losses = comparison["position_loss"].transpose("entry", ...)
    losses = losses.assign_coords({losses.dims[1]: middle})
    change = (
        f"difference from {plotly_text(comparison.attrs['baseline'])}<br>(nats/token)"
    )
    panels = {"loss (nats/token)": partial(tables.group_entries, losses)}
    panels[change] = partial(tables.paired_changes, losses)
    title, hover = (
        "Loss by position in the text",
        "position %{x:.0f}: %{y:.3f} nats/token",
    )
    figure = _line_panels(title, comparison, panels, hover)
    figure.update_yaxes(
        exponentformat="none", zeroline=True, zerolinecolor=style.MUTED, row=2
    )
    style.set_counts(figure, comparison["position_stop"], style.POSITION_TITLE)
    context = int(comparison.attrs["context"])
    return style.mark(figure, context, "trained context ", xanchor="right")


def plot_copying(comparison: xr.Dataset) -> go.Figure:
    """Loss of copied random tokens by distance, and needles found. A guess is dotted."""
    units = "loss of copied tokens<br>(nats/token)", "needles found<br>(share)"
    measured = comparison["copy_loss"], comparison["far_retrieval"]
    panels = {
        n: partial(tables.group_entries, v)
        for n, v in zip(units, measured, strict=True)
    }
    title, hover = "Copying and retrieval by distance", "%{x:,} tokens: %{y:.3g}"
    figure = _line_panels(title, comparison, panels, hover)
    figure.update_yaxes(rangemode="tozero")
    figure.add_hline(y=1 / NEEDLES, line=style.DOTTED, row=2)
    lengths = [*comparison["copy_distance"], *comparison["prompt_length"]]
    style.set_counts(figure, lengths, "distance or prompt length (tokens, log scale)")
    context = int(comparison.attrs["context"])
    return style.mark(figure, context, "trained context ", xanchor="right")


def plot_comparison_planes(comparison: xr.Dataset) -> go.Figure:
    """Norms and selectivity of the planes by wavelength, averaged over layers, heads and seeds.

    If layers of a model rotate differently, each rotation has its own line. A ring marks a
    plane that does not rotate, at the wavelength that it has in another group.
    """
    comparison = _split_rotations(comparison)
    places = {
        group: plane_places(comparison, group) for group in group_looks(comparison)
    }

    def values_of_group(name: str, group: str) -> xr.DataArray:
        entries = tables.group_entries(comparison[name], group)
        return _averaged(entries.assign_coords(frequency=places[group][0]))

    panels = {
        unit: partial(values_of_group, name) for unit, name in PLANE_PANELS.items()
    }
    title, hover = (
        "Norms and selectivity of planes",
        "%{y:.3f}, wavelength %{x:.3~s} tokens",
    )
    figure = _line_panels(title, comparison, panels, hover, spacing=0.05)
    set_wavelengths(figure, np.array([place for place, _ in places.values()]))
    ring = {"symbol": "circle-open", "size": 13, "color": style.MUTED}
    look: dict[str, Any] = {"mode": "markers", "marker": ring, "hoverinfo": "skip"}
    look |= {"name": "does not rotate", "legendgroup": "still"}
    for row, values_of in enumerate(panels.values(), start=1):
        still = [
            values_of(group).mean("entry")[~turns]
            for group, (_, turns) in places.items()
        ]
        x = np.concatenate([values["frequency"] for values in still])
        look["showlegend"] = row == 1 and len(x) > 0
        figure.add_scatter(x=x, y=np.concatenate(still), **look, row=row, col=1)
    figure.update_yaxes(
        nticks=5, rangemode="tozero", zeroline=True, zerolinecolor=style.MUTED
    )
    mark_trained(figure, comparison, [0])
    return figure.update_layout(margin_t=104, legend_y=1.1)


def _split_rotations(comparison: xr.Dataset) -> xr.Dataset:
    """The numbers of planes, with a group for the layers of each rotation of a model."""
    comparison = comparison[[*dict.fromkeys(PLANE_PANELS.values()), "wavelength"]]
    parts = []
    for number, group in enumerate(comparison["group"].values):
        entry = comparison.isel(entry=[number])
        wavelength = (
            entry["wavelength"].transpose("layer", "frequency", ...).values[..., 0]
        )
        wavelength = np.where(np.isfinite(wavelength), wavelength, np.nan)
        rotating = np.flatnonzero(np.isfinite(wavelength).any(1))
        rotations = np.log(wavelength[rotating]).round(3)
        alike = pd.Series(rotating).groupby(
            [*map(np.ndarray.tobytes, rotations)], sort=False
        )
        kinds = [of_kind.tolist() for _, of_kind in alike]
        for layers in kinds if len(kinds) > 1 else ():
            longest = short_count(np.nanmax(wavelength[layers]))
            name = f"{group}, layers {ranges(layers)} (to {longest} tokens)"
            part = entry.where(entry["layer"].isin(layers))
            parts.append(part.assign_coords(group=("entry", [name])))
        parts += [entry] if len(kinds) < 2 else []
    return xr.concat(parts, "entry").assign_attrs(comparison.attrs)


def plane_places(comparison: xr.Dataset, group: str) -> tuple[np.ndarray, np.ndarray]:
    """Wavelength at which each plane is drawn (tokens), and whether it rotates [frequency].

    A plane that does not rotate is drawn at its wavelength in the first entry that has the same
    planes and rotates this plane, else at NaN. Entries have the median over their layers.
    """
    wavelength = (
        comparison["wavelength"].median("layer").transpose("entry", "frequency").values
    )
    exists = ~np.isnan(wavelength)
    of_group = wavelength[comparison["group"].values == group][0]
    alike = wavelength[(exists == ~np.isnan(of_group)).all(axis=1)]
    turns, turning = np.isfinite(of_group), np.isfinite(alike)
    substitute = alike[turning.argmax(0), np.arange(alike.shape[1])]
    substitute = np.where(turning.any(0), substitute, np.nan)
    return np.where(turns, of_group, substitute), turns


def _count(entries: xr.Dataset, label: str) -> xr.DataArray:
    known = entries["growth_loss"].notnull()
    return (entries["growth_label"] == label).sum(HEADS).where(known)


GROWTH: dict[str, Callable[[xr.Dataset], xr.DataArray]] = {
    "loss<br>(nats/token)": lambda e: e["growth_loss"],
    "loss past context<br>(nats/token)": lambda e: tables.loss_past_context(
        e, "growth_"
    ),
    "gain of repeats<br>(nats/token)": lambda e: tables.repeat_gain(e, "growth_"),
    "positional<br>heads (count)": lambda e: _count(e, "positional"),
    "semantic<br>heads (count)": lambda e: _count(e, "semantic"),
    "previous-token<br>head (0 to 1)": lambda e: e["growth_previous_token"].max(HEADS),
    "induction<br>head (0 to 1)": lambda e: best_head(e["growth_trial_induction"]),
    "retrieval<br>(share)": lambda e: e["growth_retrieval"],
}


def plot_growth(comparison: xr.Dataset) -> go.Figure:
    """Losses, heads and retrieval by training step. The dotted line is a guess at needles."""
    measured = {unit: measure(comparison) for unit, measure in GROWTH.items()}
    known = {
        unit: values for unit, values in measured.items() if values.notnull().any()
    }
    panels = {
        unit: partial(tables.group_entries, values) for unit, values in known.items()
    }
    size = {"height": 130 * len(panels) + 170, "spacing": 0.02}
    title, hover = "Changes during training", "step %{x:,}: %{y:.3g}"
    figure = _line_panels(title, comparison, panels, hover, **size)
    for row, unit in enumerate(panels, start=1):
        figure.update_yaxes(rangemode="normal" if "loss" in unit else "tozero", row=row)
    figure.update_yaxes(nticks=4, exponentformat="none")
    figure.add_hline(y=1 / NEEDLES, line=style.DOTTED, row=max(1, len(panels)))
    style.set_counts(figure, comparison["step"], "training (steps, log scale)", base=4)
    return figure
