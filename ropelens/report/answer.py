"""One question and its answer in words and figures, as one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.report import words
from ropelens.report.page import model_name, run_facts, short_facts, versions
from ropelens.report.page_figures import bare
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
        scope=words.scope(profile.attrs),
        findings=findings,
        run=run_facts(profile, heads),
        versions=versions(profile),
        command=str(profile.attrs.get("command", "")),
    )


def render_figures(template: str, figures: Mapping[str, go.Figure], **values: object) -> str:
    """A page of `figures` by their captions; `values` are what else its template names."""
    return render(
        template,
        scripts=["save.js", "answer.js"],
        payload={
            "figures": [bare(figure) for figure in figures.values()],
            "templates": {theme: page_template(theme) for theme in ("light", "dark")},
        },
        cards=[
            {"name": number, "title": figure.layout.title.text, "explain": caption, "terms": ()}
            for number, (caption, figure) in enumerate(figures.items())
        ],
        **values,
    )
