"""Tables of the figures on each page, with the functions that draw them."""

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.errors import BadArgument
from ropelens.figures import (
    attention,
    claim,
    comparison,
    comparison_planes,
    follow,
    head_map,
    head_planes,
    head_truncation,
    head_wavelengths,
    kernel,
    norms,
    reach,
    sweep_traces,
)
from ropelens.figures.truncation import MeasureName, plot_truncation, summary_column
from ropelens.report.render import page_words


@dataclass(frozen=True, eq=False)
class PageFigure:
    """A figure on a page. The words around it are in templates/words.toml.

    `draw` draws the results of the page, and raises `BadArgument` if they have no data for it;
    `known` returns False in this case. On the page of a profile, `section` is its place: "all"
    heads, the chosen "head" or the "model".
    """

    name: str
    draw: Callable[..., go.Figure]
    known: Callable[..., bool] = lambda *_, **__: True
    section: str = ""
    layout: dict[str, Any] = field(default_factory=dict)
    words: str = ""  # name of its words, if it differs


FIXED_AXES = ("xaxis3", "yaxis", "yaxis2", "yaxis3")
FIXED_MARGINS = {f"{axis}_automargin": False for axis in FIXED_AXES}  # otherwise slow

# fmt: off
PROFILE_FIGURES = (
    PageFigure("wavelengths", head_wavelengths.plot_head_wavelengths,
        section="all", layout={"margin_t": 40},
        known=lambda _, *, heads, **__: len(head_wavelengths.by_position(heads)) > 0),
    PageFigure("map", head_map.plot_head_map, section="all"),
    PageFigure("follow", follow.plot_follow, section="all", layout={"height": 520},
        known=lambda _, *, heads, **__: (
            bool(heads.filter(["follow_score"]).notna().any(axis=None)))),
    PageFigure("claim", claim.plot_claim, section="all", layout={"height": 520}),
    PageFigure("selectivity", head_planes.plot_selectivity,
        section="head", layout={"margin_t": 36, "margin_l": 72, "height": 415} | FIXED_MARGINS),
    PageFigure("attention", attention.plot_attention,
        section="head", layout={"height": 470, "margin_t": 12}),
    PageFigure("pair", lambda profile, **_: head_planes.pair_figure(profile),
        section="head", layout={"height": 330, "margin_t": 12}),
    PageFigure("kernel", kernel.plot_kernel,
        section="head", layout={"height": 450, "margin_t": 36}),
    PageFigure("norms", norms.plot_norms, section="model"),
)

WITH_PINNED = ("selectivity", "attention", "pair", "kernel")  # also show the pinned head

HEAD_SWEEP_FIGURE = PageFigure("stopped", head_truncation.plot_head_truncation,
    section="head", layout={"margin_t": 56, "height": 400},
    known=lambda sweep, **_: (
        bool({*head_truncation.HEAD_PANELS} & {*sweep})
        and bool(sweep["kind"].isin([*sweep_traces.END_LOOKS]).any())))

REACH_FIGURE = PageFigure("reach", reach.plot_reach,
    section="head", layout={"margin_t": 12, "height": 360, "showlegend": True},
    known=lambda reach: bool(reach["found_share"].notnull().any()))


def _plot_other_measures(sweep: xr.Dataset, table: pd.DataFrame) -> go.Figure:
    names = [n for n in get_args(MeasureName)[1:] if table[summary_column(n)].notna().any()]
    return plot_truncation(sweep, measures=names, table=table)


SWEEP_FIGURES = (
    PageFigure("truncation", plot_truncation),
    PageFigure("bands", partial(plot_truncation, by="band")),
    PageFigure("classes", partial(plot_truncation, by="class")),
    PageFigure("others", _plot_other_measures),
)

COMPARISON_FIGURES = (
    PageFigure("loss_change", comparison.plot_loss_change,
        known=lambda _, table: bool(table["loss_change"].notna().any())),
    PageFigure("position_loss", lambda runs, **_: comparison.plot_position_loss(runs),
        known=lambda runs, **_: "position_loss" in runs),
    PageFigure("copying", lambda runs, **_: comparison.plot_copying(runs),
        known=lambda runs, **_: "copy_loss" in runs),
    PageFigure("planes", lambda runs, **_: comparison_planes.plot_comparison_planes(runs)),
    PageFigure("growth", lambda runs, **_: comparison.plot_growth(runs),
        known=lambda runs, **_: "growth_loss" in runs),
)
# fmt: on


def draw(
    rows: Sequence[PageFigure], results: xr.Dataset | None, **more: Any
) -> dict[PageFigure, go.Figure]:
    """Draw the figures of `rows` for which the `results` have data; {} if they are None."""
    figures = {}
    for row in rows if results is not None else ():
        with contextlib.suppress(
            BadArgument
        ):  # the results have no data for the figure
            if row.known(results, **more):
                figures[row] = row.draw(results, **more)
    return figures


def draw_profile(
    profile: xr.Dataset, heads: pd.DataFrame, selected: tuple[int, int]
) -> dict[PageFigure, go.Figure]:
    """Draw the `PROFILE_FIGURES` for the `selected` head (layer, head)."""
    of_head: dict[str, Any] = dict(zip(("layer", "head"), selected, strict=True))
    of_all: dict[str, Any] = {"heads": heads, "selected": selected}
    arguments = {"all": of_all, "head": of_head, "model": {}}
    figures: dict[PageFigure, go.Figure] = {}
    for row in PROFILE_FIGURES:
        figures |= draw([row], profile, **arguments[row.section])
    return figures


def card(row: PageFigure, figure: go.Figure) -> dict[str, Any]:
    """Title and explanation of a figure."""
    words = {
        "name": row.name,
        "section": row.section,
        "title": figure.layout.title.text,
    }
    return words | page_words()["figures"][row.words or row.name]


def bare(figure: go.Figure, **layout: Any) -> dict[str, Any]:
    """JSON of a figure for the script, which sets the title, the colours and the legend."""
    figure = go.Figure(figure)
    if (
        figure.layout.legend.yref == "container" and figure.layout.legend.y
    ):  # at the top
        layout = {"legend_y": 1, "legend_yanchor": "top", "margin_t": 90} | layout
    figure.update_layout(title_text="", template=None, dragmode=False, autosize=True)
    figure.update_layout({"paper_bgcolor": "rgba(0,0,0,0)", "margin_t": 36} | layout)
    return json.loads(figure.to_json(engine="json"))
