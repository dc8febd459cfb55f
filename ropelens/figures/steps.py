"""Figures of the measured steps of a training."""

import plotly.graph_objects as go
import xarray as xr

from ropelens.figures import style

MAPS = {"previous_token": "head", "induction": "head", "plane_lengths": "plane"}
TITLES = ("previous token", "induction", "|q||k| of planes")


def plot_numbers(steps: xr.Dataset) -> go.Figure:
    """The `numbers` (step, number) of a dataset from `open_steps`, with a panel for each."""
    names = steps["number"].values.tolist()
    size = {"height": 90 * len(names) + 140, "spacing": 0.012}
    figure = style.stacked("Changes during training", len(names), **size)
    look = {
        "mode": "lines+markers",
        "hovertemplate": "step %{x:,}: %{y:.4g}<extra></extra>",
    }
    for row, name in enumerate(names, start=1):
        data = {
            "x": steps["step"].values,
            "y": steps["numbers"].sel(number=name).values,
        }
        figure.add_scatter(**data, **look, showlegend=False, row=row, col=1)
        figure.update_yaxes(title_text=name.replace("_", "<br>"), nticks=4, row=row)
    style.set_x(figure, {}, "training (steps)")
    return figure


def plot_maps(steps: xr.Dataset) -> go.Figure:
    """Heads and planes of each layer, at the step that a slider chooses."""
    count, height = steps.sizes["step"], 250 + 14 * max(12, steps.sizes["layer"])
    layout = {"rows": 1, "cols": len(MAPS), "subplot_titles": TITLES}
    figure = style.new_figure("Heads and planes at each step", height=height, **layout)
    look = {"colorscale": style.SEQUENTIAL, "showscale": False}
    look["hovertemplate"] = "layer %{y}, %{x}: %{z:.3g}<extra></extra>"
    for number in range(count):
        for col, (name, axis) in enumerate(MAPS.items(), start=1):
            z, last = steps[name].values, number == count - 1
            scale = {"zmin": 0, "zmax": float(steps[name].max()), "visible": last}
            figure.add_heatmap(z=z[number], **scale, **look, row=1, col=col)
            figure.update_xaxes(title_text=axis, col=col)
    traces = range(count * len(MAPS))
    choices = [
        {
            "label": f"{step:,}",
            "method": "restyle",
            "args": ["visible", [trace // len(MAPS) == number for trace in traces]],
        }
        for number, step in enumerate(steps["step"].values.tolist())
    ]
    slider = {
        "steps": choices,
        "active": count - 1,
        "currentvalue": {"prefix": "step "},
    }
    figure.update_layout(sliders=[slider | {"pad": {"t": 50}}])
    whole = {"autorange": "reversed", "dtick": max(1, steps.sizes["layer"] // 8)}
    figure.update_yaxes(**whole).update_yaxes(title_text="layer", col=1)
    return figure
