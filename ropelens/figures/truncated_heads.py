"""What becomes of a head as planes stop."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures import style

ENDS = {
    "slow": ("slowest planes stopped first (p-RoPE)", style.VARIANT_COLORS[0], "square"),
    "fast": ("fastest planes stopped first", style.VARIANT_COLORS[3], "circle"),
}
"""The ends from which planes stop: words, colour and symbol."""
MEAN_OF_DRAWS = {
    "mode": "lines",
    "line": style.DASHED,
    "name": "random planes",
    "legendgroup": "random",
    "hoverinfo": "skip",
}
"""Keywords of the scatter that draws the mean over random sets of planes."""
KEPT_AXIS = {"range": [1.04, -0.04], "tickvals": [1, 0.75, 0.5, 0.25, 0], "tickformat": ".0%"}
KEPT_TITLE = "planes that still rotate (% of all)"
PANELS = {
    "attention_change": "attention,<br>change (bits)",
    "induction": "induction<br>(0 to 1)",
}
"""The variables of a sweep that have a panel for one head, and their axes."""


def plot_head_truncation(truncation: xr.Dataset, *, layer: int, head: int) -> go.Figure:
    """What a head does by the share of planes that still rotate in all heads.

    x: share of the planes that rotate, from all on the left to none. y: mean over rows of
    KL(attention as it is || under the edit), in bits; below, its induction score. A line an
    end of the axis, whose markers the page's script gives the head's label there; grey, the
    mean over as many random planes. Trace `meta` names the array of `head_steps` behind y.
    """
    arrays = head_steps(truncation)
    panels = [name for name in PANELS if name in truncation]
    title = f"Layer {layer}, head {head}, as planes stop"
    figure = style.stacked(title, len(panels), height=120 + 150 * len(panels))
    hover = "%{x:.3~%} of the planes rotate: %{y:.3f}, %{text}<extra></extra>"
    for row, name in enumerate(panels, start=1):
        for kind in kinds_of(truncation):
            look: dict[str, Any] = MEAN_OF_DRAWS
            if kind in ENDS:
                words, color, _ = ENDS[kind]
                look = {"name": words, "legendgroup": kind, "mode": "lines+markers"}
                look |= {"line": {"color": color, "width": 2}, "marker": {"size": 9}}
                look |= {"hovertemplate": hover, "cliponaxis": False}
            x, y = shares_of(truncation, kind), arrays[f"{name}_{kind}"][layer, head]
            trace = look | {"meta": {"y": f"{name}_{kind}"}, "showlegend": row == 1}
            figure.add_scatter(x=x, y=y, **trace, row=row, col=1)
        figure.update_yaxes(title_text=PANELS[name], nticks=5, row=row)
    figure.update_yaxes(autorangeoptions_include=[0, 0.01])  # no trifle fills its panel
    whole = {"range": [-0.03, 1.03], "tickvals": [0, 0.5, 1]}
    figure.update_yaxes(selector={"title.text": PANELS["induction"]}, **whole)
    style.set_x(figure, KEPT_AXIS, KEPT_TITLE)
    drawn = np.concatenate([trace.y for trace in figure.data])
    return style.note_missing(figure, drawn, "the sweep did not measure this head")


def kinds_of(truncation: xr.Dataset) -> list[str]:
    """The ways in which a sweep stops planes, step by step: of "slow", "fast" and "random"."""
    kinds = set(truncation["kind"].values.astype(str))
    return [kind for kind in (*ENDS, "random") if kind in kinds]


def _steps(truncation: xr.Dataset, kind: str) -> dict[float, np.ndarray]:
    """The entries of each step of a kind by the share that rotates, from all to the fewest.

    The model as it is is each kind's first step.
    """
    here, kept = truncation["kind"].isin(["none", kind]).values, truncation["kept"].values
    shares = np.unique(kept[here])[::-1]
    return {share: np.flatnonzero(here & (kept == share)) for share in shares}


def shares_of(truncation: xr.Dataset, kind: str) -> np.ndarray:
    """The shares of planes that rotate at the steps of a kind, from all to the fewest."""
    return np.array([*_steps(truncation, kind)])


def head_steps(truncation: xr.Dataset) -> dict[str, np.ndarray]:
    """Every head's numbers at the steps of each kind, [layer, head, step].

    `attention_change_slow` in bits, `induction_slow`, and so on, random planes as the mean
    over their draws; `label_slow` and `label_fast` as numbers of `LABELS`, one more where it
    was not measured. Without what was not measured at all.
    """
    arrays: dict[str, np.ndarray] = {}
    for kind in kinds_of(truncation):
        steps = _steps(truncation, kind).values()
        for name in {*PANELS} & {*truncation}:
            values = truncation[name].transpose("layer", "head", "edit").values
            means = [values[..., entries].mean(-1) for entries in steps]
            arrays[f"{name}_{kind}"] = np.stack(means, axis=-1)
        if kind in ENDS and "label" in truncation:
            labels = truncation["label"].transpose("layer", "head", "edit").values.astype(str)
            labels = labels[..., [entries[0] for entries in steps]]
            known = [labels == label for label in style.LABELS]
            numbers = np.select(known, range(len(style.LABELS)), len(style.LABELS))
            arrays[f"label_{kind}"] = numbers.astype(np.uint8)
    return arrays
