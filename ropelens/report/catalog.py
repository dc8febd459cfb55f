"""Tables of the figures on each page: functions that draw them, and the words around them."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures.attention import plot_attention
from ropelens.figures.claim import plot_claim
from ropelens.figures.comparison import (
    plot_copying,
    plot_growth,
    plot_loss_change,
    plot_loss_lines,
    plot_position_loss,
)
from ropelens.figures.comparison_planes import plot_comparison_planes
from ropelens.figures.effects import plot_effects, plot_top_planes
from ropelens.figures.follow import plot_follow
from ropelens.figures.head_map import plot_head_map
from ropelens.figures.head_planes import pair_figure, plot_selectivity
from ropelens.figures.head_truncation import HEAD_PANELS, plot_head_truncation
from ropelens.figures.head_wavelengths import by_position, plot_head_wavelengths
from ropelens.figures.kernel import plot_kernel
from ropelens.figures.norms import plot_norms
from ropelens.figures.reach import plot_reach
from ropelens.figures.sweep_traces import END_LOOKS
from ropelens.figures.truncation import MeasureName, plot_truncation, summary_column

FIXED_AXES = ("xaxis3", "yaxis", "yaxis2", "yaxis3")
FIXED_MARGINS = {f"{axis}_automargin": False for axis in FIXED_AXES}  # otherwise slow
WITH_PINNED = (
    "selectivity",
    "attention",
    "pair",
    "kernel",
)  # also show the pinned head


def always(*_: object) -> bool:
    return True


@dataclass(frozen=True, eq=False)
class PageFigure:
    """A figure on a page, and the words around it.

    `draw` draws the results of the page. If the results have no data for it, `has_data` is
    False, or `draw` raises `BadArgument`. `explain` is the text next to the figure. `title`
    replaces the title of the drawn figure, `tab` is the name of its tab, and `label_note`
    explains marks of labels. `layout` changes the layout on the page, and `note` is text below
    the figure.
    """

    name: str
    draw: Callable[..., go.Figure]
    explain: str
    note: str = ""
    title: str = ""
    tab: str = ""
    label_note: str = ""
    layout: Mapping[str, Any] = field(default_factory=dict)
    has_data: Callable[..., bool] = always


# ---- functions of rows of the tables


def has_positions(heads: pd.DataFrame) -> bool:
    return len(by_position(heads)) > 0


def has_follow_scores(heads: pd.DataFrame) -> bool:
    return bool(heads.filter(["follow_score"]).notna().any(axis=None))


def plot_empty_pair(profile: xr.Dataset, *, layer: int, head: int) -> go.Figure:
    """The figure of a pair of any head, which the script fills."""
    return pair_figure(profile)


def has_head_steps(sweep: xr.Dataset) -> bool:
    """Whether a sweep from an end has measures of each head."""
    measured = any(name in sweep for name in HEAD_PANELS)
    return measured and bool(sweep["kind"].isin([*END_LOOKS]).any())


def has_found_shares(reach: xr.Dataset) -> bool:
    return bool(reach["found_share"].notnull().any())


def plot_bands(sweep: xr.Dataset, *, table: pd.DataFrame) -> go.Figure:
    return plot_truncation(sweep, by="band", table=table)


def plot_classes(sweep: xr.Dataset, *, table: pd.DataFrame) -> go.Figure:
    return plot_truncation(sweep, by="class", table=table)


def plot_other_measures(sweep: xr.Dataset, *, table: pd.DataFrame) -> go.Figure:
    """The measures of a sweep except the loss."""
    _, *others = get_args(MeasureName)
    measures = [
        name for name in others if table[summary_column(name, table)].notna().any()
    ]
    return plot_truncation(sweep, measures=measures, table=table)


def has_position_losses(comparison: xr.Dataset) -> bool:
    return "position_loss" in comparison


def has_copies(comparison: xr.Dataset) -> bool:
    return "copy_loss" in comparison


def has_growth(comparison: xr.Dataset) -> bool:
    return "growth_loss" in comparison


# ---- tables

ALL_HEADS_FIGURES = (
    PageFigure(
        name="wavelengths",
        draw=plot_head_wavelengths,
        has_data=has_positions,
        title="Heads by wavelength",
        tab="By wavelength",
        explain=(
            "The wavelengths that push heads toward the keys they pick, without "
            "sinks. Top: the mean for each label, and for each kind of layers if "
            "there are several. Bottom: one row per head, with the most positional "
            "heads first. Click a row to choose a head."
        ),
        layout={"margin_t": 40},
    ),
    PageFigure(
        name="map",
        draw=plot_head_map,
        title="Every head, by layer",
        tab="By layer",
        explain=(
            "Each cell is a head. The colour and the sign show its label. The colour "
            "is stronger if the head chooses keys with more bits (full strength from "
            "2 bits). A number is the offset of a positional head in tokens. Click a "
            "cell or use the arrow keys to choose a head."
        ),
        layout={"showlegend": False},
    ),
    PageFigure(
        name="follow",
        draw=plot_follow,
        has_data=has_follow_scores,
        title="Position or content: what heads follow",
        tab="Follows",
        explain=(
            "The keys of a text exchange their contents and keep their positions. "
            "Heads at the top left attend to the same positions as before. Heads at "
            "the bottom right attend to the same contents at their new positions. "
            "Heads with little of both need a content at its position. Click a point "
            "to choose a head."
        ),
        layout={"height": 520, "showlegend": False},
    ),
    PageFigure(
        name="claim",
        draw=plot_claim,
        title="The claim: position and wavelength",
        tab="Trend",
        explain=(
            "If positional heads use fast planes and semantic heads use slow planes, "
            "points fall from top left to bottom right. Part of this trend is due to "
            "geometry, and any model shows that part. The claim holds only if the "
            "diamond below lies outside the strokes of the surrogates."
        ),
        layout={"height": 520, "showlegend": False},
    ),
)

PROMPT_HEAD_FIGURES = (
    PageFigure(
        name="selectivity",
        draw=plot_selectivity,
        title="Planes: which wavelengths it uses",
        tab="Planes",
        explain=(
            "For each plane: how strongly it pushes the head toward the keys it "
            "picks, how long its queries and keys are, and how similar they are for "
            "all tokens. Drag over planes to stop them."
        ),
        layout={"margin_t": 36, "margin_l": 72, "height": 415, **FIXED_MARGINS},
    ),
    PageFigure(
        name="attention",
        draw=plot_attention,
        title="Attention on an excerpt",
        tab="Attention",
        explain=(
            "Each row is a token that looks back, and bright cells get most of its "
            "attention. Bars show how strongly each plane pushes on the pair under "
            "the pointer, with the fastest plane first. Click a cell to open the "
            "pair."
        ),
        layout={"margin_t": 12, "height": 470},
    ),
    PageFigure(
        name="pair",
        draw=plot_empty_pair,
        title="One query, one key",
        tab="Pair",
        explain=(
            "Each dial is a plane, and the hand turns with the distance. A hand to "
            "the right increases the score of the key, and a dashed hand to the left "
            "decreases it. The bars show the push of each plane: how much more it "
            "adds to this key than to the other keys of the row (a mean weighted by "
            "attention). The push times the gradient is its effect on the next "
            "token. The last panel shows the score of the key at any distance."
        ),
        layout={"margin_t": 12, "height": 330},
    ),
)

CHOSEN_HEAD_FIGURES = (
    *PROMPT_HEAD_FIGURES,
    PageFigure(
        name="kernel",
        draw=plot_kernel,
        title="Kernel: how far it looks back",
        tab="Distance",
        explain=(
            "The line shows the share of attention that a token gets at each "
            "distance, regardless of which token it is. It is fitted to all rows. "
            "The dashed line shows the attention that the head would have if every "
            "query and key were equal to its mean."
        ),
        layout={"margin_t": 36, "height": 450},
    ),
)

MODEL_FIGURES = (
    PageFigure(
        name="norms",
        draw=plot_norms,
        title="Query, key and value norms, by layer and wavelength",
        explain=(
            "Bright cells are planes with long queries or keys, which can push most. "
            "Fast planes are on the left and slow planes are on the right. The "
            "dotted line is the length of the text, or the window of the layers if "
            "it is shorter. If a few cells are much brighter than all others, the "
            "colours have a log scale. Values do not rotate, so a pattern that "
            "values also show is not due to RoPE."
        ),
    ),
)

SWEEP_FIGURES = (
    PageFigure(
        name="truncation",
        draw=plot_truncation,
        explain=(
            "Left: the slowest planes stop first (p-RoPE). Right: the fastest planes "
            "stop first. If a line is below the grey line, the model needs the "
            "stopped planes less than random planes. Bars are 95% intervals of the "
            "difference on the same sequences."
        ),
    ),
    PageFigure(
        name="bands",
        draw=plot_bands,
        explain=(
            "One band of neighbouring planes stops at a time. Grey: the same number "
            "of random planes."
        ),
    ),
    PageFigure(
        name="classes",
        draw=plot_classes,
        explain=(
            "The same change for tokens of each class. The legend names the planes "
            "that stop. The lower panels show how far attention moves in the rows of "
            "these tokens, and how many heads get a new label from these rows, beyond "
            "its uncertainty. These panels are empty if this was not measured."
        ),
    ),
    PageFigure(
        name="others",
        draw=plot_other_measures,
        explain=(
            "The same steps with other measures. Each line shows the change from the "
            "unmodified model."
        ),
    ),
)

LOSS_FIGURES = (
    PageFigure(
        name="loss_lines",
        draw=plot_loss_lines,
        has_data=has_growth,
        explain=(
            "Below the grey line is better. Bars: 95% intervals over seeds at the end. A "
            "difference is certain if its bar does not reach the grey line (no bar: one "
            "seed)."
        ),
        note=(
            "Shaded: 95% intervals during training. The last points are on {sequences} "
            "sequences, the others on {growth_sequences}. Large differences early in "
            "training may be outside of the axis."
        ),
    ),
    PageFigure(
        name="loss_change",
        draw=plot_loss_change,
        explain=(
            "The loss minus the loss of the baseline on the same text. A ring is one "
            "pair, a filled mark is the mean of the pairs, and a bar is its 95% "
            "interval. The interval of a single pair is over its text and does not "
            "include the variation between training runs. Left of the line is "
            "better."
        ),
    ),
)

COMPARISON_FIGURES = (
    PageFigure(
        name="position_loss",
        draw=plot_position_loss,
        has_data=has_position_losses,
        explain=(
            "The loss by the position of the predicted token. Right of the dotted "
            "line, the text is longer than any text in training. Whiskers show the "
            "range over seeds, if there are several."
        ),
    ),
    PageFigure(
        name="copying",
        draw=plot_copying,
        has_data=has_copies,
        explain=(
            "Above: the loss on repeated random tokens, by the distance between the "
            "two copies. A model that copies has a loss of 0. Below: the needles "
            "found, by the length of the prompt. The horizontal dotted line is the "
            "share that chance finds. Right of the vertical dotted line, distances "
            "are longer than any text in training. Whiskers show the range over "
            "seeds, if there are several."
        ),
    ),
    PageFigure(
        name="planes",
        draw=plot_comparison_planes,
        explain=(
            "Mean norms show how much a plane can do. Selectivity shows how much it "
            "pushes heads toward the keys they pick. A ring is a plane that does not "
            "rotate. It is drawn where the same plane rotates in another model. "
            "Whiskers show the range over seeds, if there are several."
        ),
    ),
    PageFigure(
        name="growth",
        draw=plot_growth,
        has_data=has_growth,
        explain=(
            "Checkpoints at steps 1, 2, 4, ... of training. Lines are means over "
            "seeds, and whiskers show the range over seeds. Heads and text losses "
            "are measured on fewer sequences than in the table ({growth_sequences} "
            "for heads). Dotted: retrieval by chance."
        ),
    ),
)

HEAD_SWEEP_FIGURE = PageFigure(
    name="stopped",
    draw=plot_head_truncation,
    has_data=has_head_steps,
    title="Stopped: the head as planes stop",
    tab="Stopped",
    explain="Planes stop in all heads, starting with the slowest or with the fastest.",
    label_note="The mark shows the label of the head at this step.",
    layout={"margin_t": 56, "height": 400},
)

REACH_FIGURE = PageFigure(
    name="reach",
    draw=plot_reach,
    has_data=has_found_shares,
    title="Reach: how far back it finds a copy",
    tab="Reach",
    explain=(
        "How often the head finds the copy of a token at each distance, with "
        "other text between. Dotted: longer distances, computed by rotating the "
        "keys of the longest run."
    ),
    layout={"margin_t": 12, "height": 360},
)

EFFECTS_FIGURE = PageFigure(
    name="map",
    draw=plot_effects,
    title="Heads: attribution",
    tab="Heads",
    explain=(
        "The sum of the attributions of all planes of each head, to first order. "
        "Orange heads raise the answer and blue heads lower it. Click a cell or "
        "use the arrow keys to choose a head."
    ),
    layout={"showlegend": False},
)

TOP_PLANES_FIGURE = PageFigure(
    name="top",
    draw=plot_top_planes,
    title="Planes with the largest attribution",
    tab="Planes",
    explain=(
        "The contribution of a plane to the scores of its head, times the "
        "gradient of the answer. Orange planes raise the answer and blue planes "
        "lower it. A ring shows the decrease of the answer if only this plane is "
        "dropped: where the ring is far from the end of the bar, the attribution "
        "is wrong. Click a bar to choose its head."
    ),
)

PATCH_FIGURES = {
    "head": PageFigure(
        name="patched_head",
        draw=plot_effects,
        title="One head from the other prompt",
        tab="Patched heads",
        explain=(
            "Each head by itself gets the queries and keys that it has in the other "
            "prompt. The colour is the change of the answer. Click a cell to choose "
            "a head."
        ),
    ),
    "position": PageFigure(
        name="patched_position",
        draw=plot_effects,
        title="One position from the other prompt",
        tab="Patched positions",
        explain=(
            "The heads of one layer get their queries and keys from the other "
            "prompt, only at one position. The colour is the change of the answer."
        ),
    ),
}
