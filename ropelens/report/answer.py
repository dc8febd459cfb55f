"""One question and its answer in words and figures, as one page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.report.page import model_name, run_facts, short_facts, versions
from ropelens.report.payload import page_template
from ropelens.report.render import render


def render_answer(
    question: str,
    findings: Sequence[str],
    figures: Mapping[str, go.Figure],
    profile: xr.Dataset,
    heads: pd.DataFrame,
) -> str:
    """The page of what a script found on one model, as text.

    `findings` are sentences with numbers, the most important first; `figures` go by their
    captions, each explained in a sentence or two, in order.
    """
    return render_figures(
        "answer.html",
        figures,
        question=question,
        model=model_name(profile),
        facts=short_facts(profile),
        findings=findings,
        run=run_facts(profile, heads),
        versions=versions(profile),
        command=str(profile.attrs.get("command", "")),
    )


def render_figures(template: str, figures: Mapping[str, go.Figure], **values: object) -> str:
    """A page of `figures` by their captions; `values` are what else its template names."""
    return render(
        template,
        script="answer.js",
        payload={
            "figures": [_bare(figure) for figure in figures.values()],
            "templates": {theme: page_template(theme) for theme in ("light", "dark")},
        },
        shown=[
            {"title": figure.layout.title.text, "caption": caption}
            for caption, figure in figures.items()
        ],
        **values,
    )


def _bare(figure: go.Figure) -> dict:
    """A figure without its title and colours: those are the page's."""
    figure = go.Figure(figure)
    figure.update_layout(
        title_text="", template=None, margin_t=36, dragmode=False, autosize=True
    )
    legend = figure.layout.legend
    if legend.yref == "container" and legend.y:  # above an axis that stands on top
        figure.update_layout(legend_y=1, legend_yanchor="top", margin_t=90)
    return json.loads(figure.to_json(engine="json"))
