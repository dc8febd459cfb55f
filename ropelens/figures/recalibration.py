"""Figures of recalibrations: gaps to the control, and losses and retrieval before and after."""

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from plotly.colors import hex_to_rgb

from ropelens.comparison.pairs import group_entries, group_names
from ropelens.comparison.recalibration_table import AFTER, BEFORE
from ropelens.figures import style
from ropelens.figures.comparison import GUESS
from ropelens.figures.formats import number, plotly_text, short_count
from ropelens.figures.group_looks import Look, group_looks
from ropelens.figures.line_panels import LinePanel, line_panels

MOST_TICKS = 7
NEAR_ZERO = 0.01  # of the largest gap; the line of the control covers smaller gaps
GAP_TITLE = "loss above the control's loss<br>(nats/token; 0: no gap)"


def plot_gaps(comparison: xr.Dataset) -> go.Figure:
    """Gap of each variant to the control by training tokens, with 95 % intervals as bands.

    The grey line at 0 is the control. The axis is logarithmic in the step plus 1, so that it
    begins with the models before training.
    """
    figure = style.new_figure("Gap to the control during training", height=430)
    looks = group_looks(comparison)
    control, *variants = comparison["variant"].values.tolist()
    x = comparison["step"].values + 1
    figure.add_scatter(
        x=x,
        y=np.zeros(len(x)),
        mode="lines",
        line=looks[control].line,
        name=f"{plotly_text(control)} (keeps its rotation)",
        hoverinfo="skip",
    )
    for variant in variants:
        _add_band(figure, comparison.sel(variant=variant), looks[variant])
    largest = float(np.nanmax(np.abs(comparison["gap"].values), initial=0))
    for variant in variants:
        of_variant = comparison.sel(variant=variant)
        share = _share_in_words(of_variant)
        if np.abs(of_variant["gap"].values[-1]) <= NEAR_ZERO * largest:
            share = f"{share}, near 0"
        _add_gap(figure, of_variant, looks[variant], share)
    figure.update_yaxes(title_text=GAP_TITLE, exponentformat="none")
    _set_tokens(figure, comparison)
    return style.note_missing(figure, "no variant was trained", comparison["gap"])


def _add_band(figure: go.Figure, of_variant: xr.Dataset, look: Look) -> None:
    x = of_variant["step"].values + 1
    low = of_variant["gap_low"].values
    high = of_variant["gap_high"].values
    red, green, blue = hex_to_rgb(look.line["color"])
    figure.add_scatter(
        x=np.concatenate([x, x[::-1]]),
        y=np.concatenate([high, low[::-1]]),
        fill="toself",
        fillcolor=f"rgba({red},{green},{blue},0.2)",
        line_width=0,
        mode="lines",
        hoverinfo="skip",
        showlegend=False,
        name=plotly_text(of_variant["variant"].item()),
        meta={"role": "interval"},
    )


def _share_in_words(of_variant: xr.Dataset) -> str:
    recovered = float(of_variant["recovered"][-1])
    if np.isfinite(recovered):
        return f"{100 * recovered:.0f} % recovered"
    return "no clear damage"


def _add_gap(figure: go.Figure, of_variant: xr.Dataset, look: Look, share: str) -> None:
    name = plotly_text(of_variant["variant"].item())
    words = []
    for step in range(of_variant.sizes["step"]):
        at = of_variant.isel(step=step)
        ends = f"{number(float(at['gap_low']), '+.3f')} to "
        ends += number(float(at["gap_high"]), "+.3f")
        tokens = f"{int(at['tokens_seen']):,} tokens (step {int(at['step']):,})"
        gap = number(float(at["gap"]), "+.3f")
        words.append(f"{name}<br>{tokens}: {gap} nats/token<br>95 % interval {ends}")
    figure.add_scatter(
        x=of_variant["step"].values + 1,
        y=of_variant["gap"].values,
        text=words,
        mode="lines+markers",
        line={**look.line, "width": 2.5},
        marker={"symbol": look.symbol, "size": 8},
        hovertemplate=style.TEXT_ONLY,
        name=f"{name}: {share}",
        meta={"role": "gap"},
    )


def _set_tokens(figure: go.Figure, comparison: xr.Dataset) -> None:
    """Ticks at evaluated steps: 0, the last one, and those between that have room."""
    steps = comparison["step"].values
    every = int(np.ceil(len(steps) / MOST_TICKS))
    last = len(steps) - 1
    shown = [index for index in range(0, last, every) if last - index >= every]
    labels = {}
    for index in dict.fromkeys([0, *shown, last]):
        tokens = float(comparison["tokens_seen"][index])
        labels[int(steps[index]) + 1] = short_count(tokens) if tokens else "0"
    style.set_log_ticks(figure, labels)
    style.set_x_title(figure, "training tokens (0: before training; log scale)")


def plot_losses_before_and_after(comparison: xr.Dataset) -> go.Figure:
    """Loss by position (nats/token) up to four times the context. Whiskers: seeds."""
    first = np.maximum(comparison["position_start"].values.astype(float), 1)
    last = (comparison["position_stop"].values - 1).clip(1)
    losses = comparison["position_loss"].transpose("entry", ...)
    losses = losses.assign_coords({losses.dims[1]: np.sqrt(first * last)})
    figure = _before_and_after(
        "Loss by position, before and after",
        comparison,
        losses,
        "loss {}<br>(nats/token)",
        hover="position %{x:.0f}: %{y:.3f} nats/token",
    )
    figure.update_yaxes(exponentformat="none")
    figure.update_yaxes(matches="y", row=2)
    style.set_counts(figure, comparison["position_stop"], style.POSITION_TITLE)
    return _mark_contexts(figure, comparison)


def plot_needles_before_and_after(comparison: xr.Dataset) -> go.Figure:
    """Share of needles that are found, by the length of the prompt. A guess is dotted."""
    figure = _before_and_after(
        "Retrieval, before and after",
        comparison,
        comparison["far_retrieval"],
        "needles found {}<br>(share)",
        hover="%{x:,} tokens: %{y:.3g}",
    )
    figure.update_yaxes(range=[0, 1.03])
    figure.add_hline(y=GUESS, line=style.DOTTED)
    lengths = comparison["prompt_length"].values.tolist()
    style.set_log_ticks(figure, {length: f"{length:,}" for length in lengths})
    # The words of a mark would widen the axis to the left.
    figure.update_xaxes(autorangeoptions_clipmin=min(lengths) / 1.1)
    style.set_x_title(figure, "length of the prompt (tokens, log scale)")
    return _mark_contexts(figure, comparison)


def _before_and_after(
    title: str, comparison: xr.Dataset, values: xr.DataArray, axis: str, *, hover: str
) -> go.Figure:
    """A panel for the models before training, and one for the models after it."""
    panels = []
    for phase in (BEFORE, AFTER):
        by_group = {}
        for group in group_names(comparison):
            of_group = group_entries(values, group)
            in_phase = np.flatnonzero(of_group["phase"].values == phase)
            by_group[group] = of_group.isel(entry=in_phase)
        panels.append(LinePanel(axis.format(phase), by_group))
    return line_panels(title, comparison, panels, hover=hover)


def _mark_contexts(figure: go.Figure, comparison: xr.Dataset) -> go.Figure:
    """Mark the recalibrated context and, if it is another one in reach, the trained one."""
    context = int(comparison.attrs["context"])
    trained = int(comparison.attrs["trained_context"])
    longest = int(comparison["position_stop"].max())
    if trained == context:
        words = "recalibrated and trained context "
        return style.mark(figure, context, words, xanchor="right", yanchor="bottom")
    words = "recalibrated context "
    style.mark(figure, context, words, xanchor="right", yanchor="bottom")
    if 0 < trained <= longest:
        words = " trained context"
        style.mark(figure, trained, words, xanchor="left", yanchor="bottom")
    return figure
