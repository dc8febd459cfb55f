"""The figures of each page, a row a figure: what draws it, and the words around it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures import comparison, head, heads, planes, truncated_heads
from ropelens.figures.edits import MEASURES, MeasureName, plot_truncation


@dataclass(frozen=True, eq=False)
class PageFigure:
    """A figure on a page.

    `draw` takes the page's results; so does `known`, whether there is something to draw.
    `explain`: the sentences below it. `title`: "" is the figure's. `section`: the place on the
    page of a profile, "all" heads, the chosen "head" or the "model"; `tab`: its name there.
    `layout`: what the page changes in the figure's.
    """

    name: str
    draw: Callable[..., go.Figure]
    explain: str
    title: str = ""
    known: Callable[..., bool] = lambda *_: True
    section: str = ""
    tab: str = ""
    layout: dict[str, Any] = field(default_factory=dict)


FIXED = {f"{axis}_automargin": False for axis in ("xaxis3", "yaxis", "yaxis2", "yaxis3")}
"""Margins that stay: to find margins that fit takes a third of the time of a click."""

# fmt: off
PROFILE = (
    PageFigure("wavelengths",
        lambda profile, table, at: planes.plot_head_wavelengths(profile, table, selected=at),
        "Which wavelengths push heads toward the keys they pick, sinks apart. Above, the mean "
        "of each label; below, a row a head, the most positional on top. Click a row.",
        title="Heads by wavelength", section="all", tab="By wavelength",
        known=lambda _, table, at: len(planes.by_position(table)) > 0,
        layout={"margin_t": 40}),
    PageFigure("map",
        lambda profile, table, at: heads.plot_head_map(profile, table, selected=at),
        "Each cell is a head. Colour and sign are its label, strength is how many bits it "
        "chooses with (full from 2); a number is how many tokens a positional head looks "
        "back. Click a cell, or use the arrow keys.",
        title="Every head, by layer", section="all", tab="By layer"),
    PageFigure("triangle",
        lambda profile, table, at: heads.plot_budget_triangle(profile, table, selected=at),
        "A head near a corner chooses its keys by that alone: how far back they are "
        "(position), what they are (content), or both at once. Sinks are left out. Larger "
        "points choose more sharply.",
        title="Where its bits come from", section="all", tab="Bits",
        layout={"margin": {"l": 50, "r": 50, "b": 44, "t": 24}, "height": 520}),
    PageFigure("claim",
        lambda profile, table, at: heads.plot_claim(profile, table, selected=at),
        "If positional heads use fast planes and semantic heads slow ones, points fall from "
        "top left to bottom right. Part of it is geometry: any model shows it. What counts is "
        "whether the diamond below lies outside the surrogates' strokes.",
        title="The claim: position and wavelength", section="all", tab="Trend",
        layout={"height": 520}),
    PageFigure("selectivity",
        lambda profile, _, at: head.plot_selectivity(profile, layer=at[0], head=at[1]),
        "How hard each plane pushes the head toward the keys it picks, how long its queries "
        "and keys are there, and how much they stay the same whatever the token. Drag over "
        "planes to stop them.",
        title="Planes: which wavelengths it uses", section="head", tab="Planes",
        layout={"margin_t": 36, "margin_l": 72, "height": 415} | FIXED),
    PageFigure("attention",
        lambda profile, _, at: head.plot_attention(profile, layer=at[0], head=at[1]),
        "Each row is a token looking back; bright cells are what it looks at. Bars are "
        "each plane's push on the pair under the pointer, the fastest first. Click a cell to "
        "open the pair.",
        title="Attention on an excerpt", section="head", tab="Attention",
        layout={"height": 470, "margin_t": 12}),
    PageFigure("pair", lambda profile, *_: head.pair_figure(profile),
        "A dial is a plane. Its hand turns with the distance: to the right it adds to the "
        "key's score, to the left (dashed) it takes away. Below, each plane's push: how much "
        "more it adds to this key than to the row's other keys, weighted by their attention. "
        "Times the gradient, it is what the push does for the next token. Last, the score with "
        "the key at any distance.",
        title="One query, one key", section="head", tab="Pair",
        layout={"height": 330, "margin_t": 12}),
    PageFigure("kernel",
        lambda profile, _, at: head.plot_kernel(profile, layer=at[0], head=at[1]),
        "How much of its attention a token gets by how far back it is, whatever stands there, "
        "fitted to all rows. Dashed: what the head's mean query and key alone would do.",
        title="Kernel: how far it looks back", section="head", tab="Distance",
        layout={"height": 450, "margin_t": 36}),
    PageFigure("norms", lambda profile, *_: planes.plot_norms(profile),
        "Bright cells are planes with long queries or keys, which can push most. Fast planes "
        "are on the left, slow ones on the right; the dotted line is the text's length. Values "
        "do not rotate: a pattern that they show too is not due to RoPE.",
        title="Query, key and value norms, by layer and wavelength", section="model"),
)

BESIDE = ("selectivity", "attention", "pair", "kernel")
"""The figures of `PROFILE` that show a second head beside the chosen one."""

SWEEP_OF_HEAD = (
    PageFigure("stopped",
        lambda sweep, at: truncated_heads.plot_head_truncation(sweep, layer=at[0], head=at[1]),
        "Planes stop in all heads, from either end of the axis; a mark is the head's label "
        "there.",
        title="Stopped: the head as planes stop", section="head", tab="Stopped",
        known=lambda sweep, _: (
            _has(sweep, "slow", "fast") and bool({*truncated_heads.PANELS} & {*sweep})
        ),
        layout={"margin_t": 56, "height": 400}),
)


REACH = (
    PageFigure("reach", head.plot_reach,
        "How often the head finds the copy of a token that stands so far back, with text "
        "between. Dotted: farther than was run, by turning the keys of the farthest run.",
        title="Reach: how far back it finds a copy", section="head", tab="Reach",
        known=lambda reach: bool(reach["found_share"].notnull().any()),
        layout={"margin_t": 12, "height": 360, "showlegend": True}),
)


def _measured(table: pd.DataFrame) -> list[MeasureName]:
    """The measures of a sweep that its table has numbers of."""
    return [name for name, m in MEASURES.items() if table[m.column].notna().any()]


def _has(sweep: pd.DataFrame | xr.Dataset, *kinds: str) -> bool:
    return bool(sweep["kind"].isin(kinds).any())


SWEEP = (
    PageFigure("truncation", lambda sweep, table: plot_truncation(sweep, table=table),
        "Left, the slowest planes stop first (p-RoPE); right, the fastest. Where a line is "
        "below the grey one, the model needs the stopped planes less than random ones. Bars "
        "are 95% intervals of the difference on the same sequences.",
        known=lambda _, table: _has(table, "slow", "fast") and "loss" in _measured(table)),
    PageFigure("bands", lambda sweep, table: plot_truncation(sweep, by="band", table=table),
        "One band of neighbouring planes stops at a time. Grey: as many random planes.",
        known=lambda _, table: _has(table, "band") and "loss" in _measured(table)),
    PageFigure("others",
        lambda sweep, table: plot_truncation(
            sweep, measures=[one for one in _measured(table) if one != "loss"], table=table
        ),
        "The same steps, other measures, each as the change from the model as it is.",
        known=lambda _, table: (
            _has(table, "slow", "fast") and bool({*_measured(table)} - {"loss"})
        )),
)

SEEDS = "Whiskers reach from the lowest seed to the highest, where there are several."
COMPARISON = (
    PageFigure("loss_change", comparison.plot_loss_change,
        "The loss on the same text, less that of the baseline. A ring is one pair, a filled "
        "mark their mean, a bar its 95% interval (of one pair: over its text alone, which "
        "does not cover training again); left of the line is better.",
        known=lambda _, table: bool(table["loss_change"].notna().any())),
    PageFigure("position_loss", lambda runs, _: comparison.plot_position_loss(runs),
        "The loss by the position of the predicted token. Right of the dotted line the text is "
        f"longer than any in training. {SEEDS}",
        known=lambda runs, _: "position_loss" in runs),
    PageFigure("copying", lambda runs, _: comparison.plot_copying(runs),
        "Above: the loss on random tokens that come again after so many tokens; a model that "
        "copies has 0. Below: needles found in prompts of so many tokens; dotted, what chance "
        "finds. Right of the other dotted line lies more than any text in training. " + SEEDS,
        known=lambda runs, _: "copy_loss" in runs),
    PageFigure("planes", lambda runs, _: comparison.plot_comparison_planes(runs),
        "Mean norms show how much a plane can do, selectivity how much it pushes heads toward "
        "the keys they pick. A ring is a plane that does not rotate, drawn where the same "
        f"plane rotates in another model. {SEEDS}"),
    PageFigure("growth", lambda runs, _: comparison.plot_growth(runs),
        "Checkpoints at steps 1, 2, 4, ... of training. Lines are means over seeds, whiskers "
        "reach from the lowest seed to the highest. Heads and losses of text are measured on "
        "fewer sequences than in the table ({growth_sequences} for heads). Dotted: retrieval "
        "by chance.",
        known=lambda runs, _: "growth_loss" in runs),
)
# fmt: on


def draw(rows: Sequence[PageFigure], *results: Any) -> dict[PageFigure, go.Figure]:
    """The figures of `rows` that `results`, if there are any, have something to show in."""
    if results[0] is None:
        return {}
    return {row: row.draw(*results) for row in rows if row.known(*results)}


def card(row: PageFigure, figure: go.Figure) -> dict[str, Any]:
    """The words around a figure, as a template reads them."""
    words = {"name": row.name, "section": row.section, "tab": row.tab, "explain": row.explain}
    return words | {"title": row.title or figure.layout.title.text}


def bare(figure: go.Figure, **layout: Any) -> dict[str, Any]:
    """A figure for a page's script: title, colours and the legend's place are the page's."""
    figure = go.Figure(figure)
    figure.update_layout(title_text="", template=None, dragmode=False, autosize=True)
    figure.update_layout(paper_bgcolor="rgba(0,0,0,0)")
    legend = figure.layout.legend
    if legend.yref == "container" and legend.y:  # above an axis that stands on top
        layout = {"legend_y": 1, "legend_yanchor": "top", "margin_t": 90} | layout
    figure.update_layout({"margin_t": 36} | layout)
    return json.loads(figure.to_json(engine="json"))
