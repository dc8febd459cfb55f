"""Figure of the heads that training changed most, with their attention by offset."""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Float, Int

from ropelens.comparison.recalibration_table import AFTER, BEFORE
from ropelens.figures import style
from ropelens.figures.formats import number, plotly_text, short_count

SHOWN = 5  # heads
HEADS = ("layer", "head")
PHASE_LINES = {
    BEFORE: {"color": style.MUTED, "dash": "dash", "width": 2},
    AFTER: {"color": style.VARIANT_COLORS[0], "dash": "solid", "width": 2.5},
}


@dataclass(frozen=True)
class ChangedFollower:
    """A head of a variant, and its follow score before training and after it."""

    layer: int
    head: int
    before: float
    after: float

    @property
    def title(self) -> str:
        return (
            f"L{self.layer} H{self.head}: follow score "
            f"{number(self.before, '+.2f')} before, {number(self.after, '+.2f')} after"
        )


def most_recovered(comparison: xr.Dataset) -> str:
    """The variant with the largest recovered share, or the first one if no share is defined."""
    shares = comparison["recovered"].isel(step=-1).values[1:]
    variants = comparison["variant"].values[1:]
    return str(variants[np.nan_to_num(shares, nan=-np.inf).argmax()])


def changed_followers(comparison: xr.Dataset, variant: str) -> list[ChangedFollower]:
    """The heads of the first run of a variant whose follow score training changed most."""
    scores = {}
    for phase in (BEFORE, AFTER):
        model = comparison["follow_score"].isel(
            entry=_index(comparison, variant, phase)
        )
        scores[phase] = model.transpose(*HEADS).values
    change = np.abs(scores[AFTER] - scores[BEFORE])
    order = np.argsort(-np.nan_to_num(change, nan=-1), axis=None)
    followers = []
    for flat in order[:SHOWN].tolist():
        layer, head = np.unravel_index(flat, change.shape)
        if np.isfinite(change[layer, head]):
            follower = ChangedFollower(
                layer=int(layer),
                head=int(head),
                before=float(scores[BEFORE][layer, head]),
                after=float(scores[AFTER][layer, head]),
            )
            followers.append(follower)
    return followers


def _index(comparison: xr.Dataset, variant: str, phase: str) -> int:
    """The index of the first model of a variant in a phase."""
    is_variant = comparison["group"].values == variant
    in_phase = comparison["phase"].values == phase
    return int(np.flatnonzero(is_variant & in_phase)[0])


def plot_changed_followers(comparison: xr.Dataset) -> go.Figure:
    """Attention by offset of the heads of the variant that recovered most, in octaves."""
    variant = most_recovered(comparison)
    followers = changed_followers(comparison, variant)
    figure = style.new_figure(
        "Heads whose follow score changed most",
        height=80 + 150 * max(1, len(followers)),
        rows=max(1, len(followers)),
        cols=1,
        shared_xaxes=True,
        vertical_spacing=0.06,
        subplot_titles=[follower.title for follower in followers],
    )
    starts = comparison["offset_start"].values
    for row, follower in enumerate(followers, start=1):
        for phase, line in PHASE_LINES.items():
            model = comparison["offset_mass"].isel(
                entry=_index(comparison, variant, phase),
                layer=follower.layer,
                head=follower.head,
            )
            octaves, mass = mass_by_octave(starts, model.values)
            figure.add_scatter(
                x=octaves + 1,
                y=mass,
                mode="lines+markers",
                line=line,
                marker={"size": 6},
                name=f"{plotly_text(variant)} {phase} training",
                legendgroup=phase,
                showlegend=row == 1,
                text=[_octave_in_words(octave) for octave in octaves],
                hovertemplate="offset %{text}: %{y:.1%}",
                row=row,
                col=1,
            )
        figure.update_yaxes(
            title_text="attention", tickformat=".0%", rangemode="tozero", row=row
        )
    figure.update_annotations(font_size=13)
    labels = {octave + 1: short_count(octave) for octave in octaves_of(starts).tolist()}
    style.set_log_ticks(figure, labels)
    style.set_x_title(figure, "offset: distance back (tokens, log scale)")
    return style.note_missing(figure, "no keys were exchanged")


def octaves_of(starts: Int[np.ndarray, " bin"]) -> Int[np.ndarray, " octave"]:
    """The first offsets of the octaves 0, 1, 2 to 3, 4 to 7, ... up to the largest offset."""
    last = int(starts[-1])
    return np.array([0, *(2**power for power in range(last.bit_length()))])


def mass_by_octave(
    starts: Int[np.ndarray, " bin"], mass: Float[np.ndarray, " bin"]
) -> tuple[Int[np.ndarray, " octave"], Float[np.ndarray, " octave"]]:
    """The first offset and the share of the attention of each octave of offsets."""
    octaves = octaves_of(starts)
    place = np.searchsorted(octaves, starts, side="right") - 1
    return octaves, np.bincount(place, weights=mass, minlength=len(octaves))


def _octave_in_words(first: int) -> str:
    return f"{first}" if first < 2 else f"{first} to {2 * first - 1}"
