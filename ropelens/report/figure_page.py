"""Pages with figures one below the other: answers, and the numbers of a training."""

from collections.abc import Mapping, Sequence

import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures.steps import plot_maps, plot_numbers
from ropelens.report.drawing import Card, bare
from ropelens.report.payload import page_templates
from ropelens.report.render import COMMON_SCRIPTS, render
from ropelens.report.run_facts import PageFacts, profile_facts

NUMBERS_CAPTION = (
    "Each number is measured on the same text at every step. previous token, induction "
    "and duplicate token are the largest of all heads, max score is the largest score in "
    "nats, and slow share is the share of |q||k| in the slower half of the planes. band "
    "plane is the plane with the largest |q||k|, as the median over layers. The others are "
    "means over heads."
)
MAPS_CAPTION = (
    "The slider chooses the step. Left and middle: attention of each head on the previous "
    "token, and on the token after an earlier copy of the current one. Right: length of "
    "queries times length of keys by plane, as a mean over the heads; plane 0 rotates "
    "fastest. Colours have the same scale at every step."
)


def render_figures(
    template: str,
    figures: Mapping[str, go.Figure],
    *,
    about: PageFacts,
    placed: Mapping[str, go.Figure] | None = None,
    scripts: Sequence[str] = (),
    payload: Mapping[str, object] | None = None,
    **values: object,
) -> str:
    """Text of a page with figures by their captions; `values` are used by the template.

    The template names the places of the figures `placed`. `scripts` read the `payload`.
    """
    numbered: dict[str, go.Figure] = {}
    cards = []
    for number, (caption, figure) in enumerate(figures.items()):
        numbered[str(number)] = figure
        cards.append(Card(str(number), figure.layout.title.text, caption))
    drawn = {**numbered, **(placed or {})}
    sent = {
        "figures": {name: bare(figure) for name, figure in drawn.items()},
        "templates": page_templates(),
        **(payload or {}),
    }
    return render(
        template,
        about=about,
        scripts=[*COMMON_SCRIPTS, "answer.js", *scripts],
        payload=sent,
        cards=cards,
        **values,
    )


def render_steps(steps: xr.Dataset) -> str:
    """Text of the page of a training, from the folder of `ropelens.watch`."""
    ends = steps.isel(step=[0, -1])
    first, last = ends["step"].values.tolist()
    findings = []
    for name, numbers in zip(
        ends["number"].values, ends["numbers"].values.T, strict=True
    ):
        words = str(name).replace("_", " ")
        findings.append(
            f"{words}: {numbers[0]:.3g} at step {first:,}, {numbers[1]:.3g} at step {last:,}"
        )
    return render_figures(
        "answer.html",
        {NUMBERS_CAPTION: plot_numbers(steps), MAPS_CAPTION: plot_maps(steps)},
        about=profile_facts(steps, pd.DataFrame()),
        question="How do heads and planes change during training?",
        findings=findings,
    )
