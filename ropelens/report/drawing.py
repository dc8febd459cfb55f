"""Drawing the figures of pages from the tables in `catalog`."""

import contextlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.errors import BadArgument
from ropelens.report.catalog import (
    ALL_HEADS_FIGURES,
    CHOSEN_HEAD_FIGURES,
    COMPARISON_FIGURES,
    HEAD_SWEEP_FIGURE,
    LOSS_FIGURES,
    MODEL_FIGURES,
    REACH_FIGURE,
    SWEEP_FIGURES,
    PageFigure,
)


@dataclass(frozen=True)
class Card:
    """The words of a figure on a page."""

    name: str
    title: str
    explain: str
    note: str = ""
    tab: str = ""
    label_note: str = ""


@dataclass(frozen=True, eq=False)
class DrawnFigure:
    """A drawn figure of a page. `name` is the name of its row, or begins with it."""

    name: str
    row: PageFigure
    figure: go.Figure

    @property
    def card(self) -> Card:
        return Card(
            name=self.name,
            title=self.row.title or self.figure.layout.title.text,
            explain=self.row.explain,
            note=self.row.note,
            tab=self.row.tab,
            label_note=self.row.label_note,
        )


@dataclass(frozen=True)
class ProfileFigures:
    """The figures on the page of a profile, by their places."""

    all_heads: list[DrawnFigure]
    chosen_head: list[DrawnFigure]
    model: list[DrawnFigure]


def draw_profile(
    profile: xr.Dataset, heads: pd.DataFrame, selected: tuple[int, int]
) -> ProfileFigures:
    """Draw the figures of a profile for the `selected` head (layer, head)."""
    of_head = draw_chosen_head(CHOSEN_HEAD_FIGURES, profile, selected)
    figures = ProfileFigures([], of_head, [])
    for row in ALL_HEADS_FIGURES:
        with contextlib.suppress(BadArgument):
            if row.has_data(heads):
                figure = row.draw(profile, heads=heads, selected=selected)
                figures.all_heads.append(DrawnFigure(row.name, row, figure))
    for row in MODEL_FIGURES:
        figure = row.draw(profile)
        figures.model.append(DrawnFigure(row.name, row, figure))
    return figures


def draw_chosen_head(
    rows: Sequence[PageFigure], profile: xr.Dataset, selected: tuple[int, int]
) -> list[DrawnFigure]:
    """Draw the figures of `rows` for the `selected` head."""
    layer, head = selected
    figures = []
    for row in rows:
        with contextlib.suppress(BadArgument):
            figure = row.draw(profile, layer=layer, head=head)
            figures.append(DrawnFigure(row.name, row, figure))
    return figures


def draw_head_sweep(
    sweep: xr.Dataset | None, selected: tuple[int, int]
) -> list[DrawnFigure]:
    """Draw the `selected` head as planes stop, if this was measured."""
    row = HEAD_SWEEP_FIGURE
    if sweep is None or not row.has_data(sweep):
        return []
    layer, head = selected
    with contextlib.suppress(BadArgument):
        figure = row.draw(sweep, layer=layer, head=head)
        return [DrawnFigure(row.name, row, figure)]
    return []


def draw_reach(reach: xr.Dataset | None) -> list[DrawnFigure]:
    """Draw the shares of copies that heads find, if this was measured."""
    row = REACH_FIGURE
    if reach is None or not row.has_data(reach):
        return []
    return [DrawnFigure(row.name, row, row.draw(reach))]


def draw_sweep(
    sweep: xr.Dataset, table: pd.DataFrame, suffix: str
) -> list[DrawnFigure]:
    """Draw the figures of a sweep and its summary `table`, with a suffix to their names."""
    figures = []
    for row in SWEEP_FIGURES:
        with contextlib.suppress(BadArgument):
            figure = row.draw(sweep, table=table)
            figures.append(DrawnFigure(row.name + suffix, row, figure))
    return figures


def draw_comparison(comparison: xr.Dataset, table: pd.DataFrame) -> list[DrawnFigure]:
    """Draw the figures of a comparison and its summary `table`.

    Changes of the loss are drawn if a loss has a pair.
    """
    figures = []
    if table["loss_change"].notna().any():
        for row in LOSS_FIGURES:
            if row.has_data(comparison):
                figure = row.draw(comparison, table)
                figures.append(DrawnFigure(row.name, row, figure))
    for row in COMPARISON_FIGURES:
        if row.has_data(comparison):
            figure = row.draw(comparison)
            figures.append(DrawnFigure(row.name, row, figure))
    return figures


def bare(figure: go.Figure, **layout: Any) -> dict[str, Any]:
    """JSON of a figure for the script, which sets the title, the colours and the legend."""
    figure = go.Figure(figure)
    legend = figure.layout.legend
    changed = {"paper_bgcolor": "rgba(0,0,0,0)", "margin_t": 36}
    if legend.yref == "container" and legend.y:  # at the top
        changed.update(legend_y=1, legend_yanchor="top", margin_t=90)
    changed.update(layout)
    figure.update_layout(title_text="", template=None, dragmode=False, autosize=True)
    figure.update_layout(changed)
    return json.loads(figure.to_json(engine="json"))
