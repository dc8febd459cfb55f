"""Figures of the measured steps of a training."""

from typing import Any

import plotly.graph_objects as go
import xarray as xr

from ropelens.figures import style

MAP_AXES = {"previous_token": "head", "induction": "head", "plane_lengths": "plane"}
MAP_TITLES = ("previous token", "induction", "|q||k| of planes")


def plot_numbers(steps: xr.Dataset) -> go.Figure:
    """The `numbers` (step, number) of a dataset from `open_steps`, with a panel for each."""
    names = steps["number"].values.tolist()
    figure = style.stacked(
        "Changes during training",
        len(names),
        height=90 * len(names) + 140,
        spacing=0.012,
    )
    for row, name in enumerate(names, start=1):
        figure.add_scatter(
            x=steps["step"].values,
            y=steps["numbers"].sel(number=name).values,
            mode="lines+markers",
            hovertemplate="step %{x:,}: %{y:.4g}<extra></extra>",
            showlegend=False,
            row=row,
            col=1,
        )
        figure.update_yaxes(title_text=name.replace("_", "<br>"), nticks=4, row=row)
    style.set_x_title(figure, "training (steps)")
    return figure


def plot_maps(steps: xr.Dataset) -> go.Figure:
    """Heads and planes of each layer, at the step that a slider chooses."""
    count = steps.sizes["step"]
    layers = steps.sizes["layer"]
    figure = style.new_figure(
        "Heads and planes at each step",
        height=250 + 14 * max(12, layers),
        rows=1,
        cols=len(MAP_AXES),
        subplot_titles=MAP_TITLES,
    )
    for number in range(count):
        for col, name in enumerate(MAP_AXES, start=1):
            figure.add_heatmap(
                z=steps[name].values[number],
                zmin=0,
                zmax=float(steps[name].max()),
                visible=number == count - 1,
                colorscale=style.SEQUENTIAL,
                showscale=False,
                hovertemplate="layer %{y}, %{x}: %{z:.3g}<extra></extra>",
                row=1,
                col=col,
            )
    for col, axis in enumerate(MAP_AXES.values(), start=1):
        figure.update_xaxes(title_text=axis, col=col)
    slider = {
        "steps": _slider_steps(steps["step"].values.tolist()),
        "active": count - 1,
        "currentvalue": {"prefix": "step "},
        "pad": {"t": 50},
    }
    figure.update_layout(sliders=[slider])
    figure.update_yaxes(autorange="reversed", dtick=max(1, layers // 8))
    return figure.update_yaxes(title_text="layer", col=1)


def _slider_steps(training_steps: list[int]) -> list[dict[str, Any]]:
    """A position of the slider for each step, which shows the maps of this step."""
    positions = []
    for number, step in enumerate(training_steps):
        visible = []
        for other in range(len(training_steps)):
            visible += [other == number] * len(MAP_AXES)
        positions.append(
            {"label": f"{step:,}", "method": "restyle", "args": ["visible", visible]}
        )
    return positions
