"""Figure of the planes of compared models."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Bool, Float

from ropelens.comparison.pairs import group_entries, group_names
from ropelens.figures import style
from ropelens.figures.formats import ranges, short_count
from ropelens.figures.line_panels import LinePanel, averaged, line_panels
from ropelens.figures.planes import Wavelengths, mark_trained, set_wavelengths

PLANE_PANELS = {
    "query norm<br>(model units)": "q_norm",
    "key norm<br>(model units)": "k_norm",
    "selectivity on keys<br>(nats)": "selectivity_keys",
}


def plot_comparison_planes(comparison: xr.Dataset) -> go.Figure:
    """Norms and selectivity of the planes by wavelength, averaged over layers, heads and seeds.

    If layers of a model rotate differently, each rotation has its own line. A ring marks a
    plane that does not rotate, at the wavelength that it has in another group.
    """
    comparison = _split_rotations(comparison)
    places = {
        group: plane_places(comparison, group) for group in group_names(comparison)
    }
    panels = []
    for title, name in PLANE_PANELS.items():
        values = {}
        for group, of_group in places.items():
            entries = averaged(group_entries(comparison[name], group))
            values[group] = entries.assign_coords(frequency=of_group.wavelength)
        panels.append(LinePanel(title, values))
    figure = line_panels(
        "Norms and selectivity of planes",
        comparison,
        panels,
        hover="%{y:.3f}, wavelength %{x:.3~s} tokens",
        spacing=0.05,
    )
    set_wavelengths(figure, np.array([place.wavelength for place in places.values()]))
    for row, panel in enumerate(panels, start=1):
        _add_rings(figure, panel, places, row=row)
    figure.update_yaxes(
        nticks=5, rangemode="tozero", zeroline=True, zerolinecolor=style.MUTED
    )
    mark_trained(figure, comparison, [0])
    return figure.update_layout(margin_t=104, legend_y=1.1)


@dataclass(frozen=True)
class PlanePlaces:
    """Wavelength at which each plane is drawn (tokens), and whether it rotates."""

    wavelength: Float[np.ndarray, " frequency"]
    rotates: Bool[np.ndarray, " frequency"]


def plane_places(comparison: xr.Dataset, group: str) -> PlanePlaces:
    """Places of the planes of a group.

    A plane that does not rotate is drawn at its wavelength in the first entry that has the same
    planes and rotates this plane, else at NaN. Entries have the median over their layers.
    """
    median = comparison["wavelength"].median("layer")
    wavelength = median.transpose("entry", "frequency").values
    of_group = wavelength[comparison["group"].values == group][0]
    same_planes = (np.isnan(wavelength) == np.isnan(of_group)).all(axis=1)
    alike = wavelength[same_planes]
    rotates_in = np.isfinite(alike)
    substitute = alike[rotates_in.argmax(0), np.arange(alike.shape[1])]
    substitute = np.where(rotates_in.any(0), substitute, np.nan)
    rotates = np.isfinite(of_group)
    return PlanePlaces(np.where(rotates, of_group, substitute), rotates)


def _add_rings(
    figure: go.Figure, panel: LinePanel, places: dict[str, PlanePlaces], *, row: int
) -> None:
    """Draw a ring at each plane that does not rotate."""
    x = []
    y = []
    for group, of_group in places.items():
        mean = panel.values[group].mean("entry")[~of_group.rotates]
        x.append(mean["frequency"])
        y.append(mean)
    still = np.concatenate(x)
    figure.add_scatter(
        x=still,
        y=np.concatenate(y),
        mode="markers",
        marker={"symbol": "circle-open", "size": 13, "color": style.MUTED},
        hoverinfo="skip",
        name="does not rotate",
        legendgroup="still",
        showlegend=row == 1 and len(still) > 0,
        row=row,
        col=1,
    )


def _split_rotations(comparison: xr.Dataset) -> xr.Dataset:
    """The numbers of planes, with a group for the layers of each rotation of a model."""
    numbers = comparison[[*PLANE_PANELS.values(), "wavelength"]]
    parts = []
    for index, group in enumerate(numbers["group"].values):
        entry = numbers.isel(entry=[index])
        wavelength = entry["wavelength"].isel(entry=0).transpose("layer", "frequency")
        rotations = _layers_by_rotation(wavelength.values)
        if len(rotations) < 2:
            parts.append(entry)
            continue
        for layers in rotations:
            longest = short_count(_longest(wavelength.values[layers]))
            name = f"{group}, layers {ranges(layers)} (to {longest} tokens)"
            of_layers = entry.where(entry["layer"].isin(layers))
            parts.append(of_layers.assign_coords(group=("entry", [name])))
    return xr.concat(parts, "entry").assign_attrs(comparison.attrs)


def _longest(wavelength: Wavelengths) -> float:
    return float(wavelength[np.isfinite(wavelength)].max())


def _layers_by_rotation(wavelength: Wavelengths) -> list[list[int]]:
    """The layers of each rotation; layers that do not rotate are left out."""
    layers_of: dict[bytes, list[int]] = {}
    for layer, of_layer in enumerate(wavelength):
        rotates = np.isfinite(of_layer)
        if rotates.any():
            rotation = np.log(np.where(rotates, of_layer, np.nan)).round(3)
            layers_of.setdefault(rotation.tobytes(), []).append(layer)
    return list(layers_of.values())
