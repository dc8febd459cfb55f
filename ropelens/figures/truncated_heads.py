"""What becomes of heads as planes stop: the heads that change most, and a single head."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.errors import BadArgument
from ropelens.figures import style
from ropelens.figures.head import square_root_scale
from ropelens.figures.inputs import check_head
from ropelens.figures.text import NOTHING

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
KEPT_AXIS = {
    "range": [1.04, -0.04],
    "tickvals": [1, 0.75, 0.5, 0.25, 0],
    "tickformat": ".0%",
}
KEPT_TITLE = "planes that still rotate (% of all)"
MOST = 16  # heads that are shown
PANELS = {
    "attention_change": "attention,<br>change (bits)",
    "induction": "induction<br>(0 to 1)",
}
"""The variables of a sweep that have a panel for one head, and their axes."""
NAMES = np.array([*style.LABELS, NOTHING])  # labels by their numbers in `head_steps`


def changed_heads_figure(truncation: xr.Dataset) -> go.Figure:
    """`plot_truncation` by head: a row a head with its label, an end of the axis a panel."""
    ends = [end for end in kinds_of(truncation) if end in ENDS]
    if not ends or "attention_change" not in truncation:
        raise BadArgument(
            "The sweep has no change of attention under planes stopped from an end.",
            attempt='truncate(model, tokens, ends=..., measures=("change", "labels", ...))',
        )
    steps = head_steps(truncation)
    changes = {end: steps[f"attention_change_{end}"] for end in ends}
    largest = np.fmax.reduce([np.fmax.reduce(one, axis=-1) for one in changes.values()])
    order = np.argsort(-np.nan_to_num(largest, nan=-1.0), axis=None, kind="stable")[:MOST]
    heads = np.unravel_index(order, largest.shape)
    names = [f"L{layer} H{head}" for layer, head in zip(*heads, strict=True)]
    figure = style.new_figure(
        "The heads that changed most",
        height=170 + 26 * len(names),
        **{"rows": 1, "cols": len(ends), "shared_yaxes": True, "horizontal_spacing": 0.02},
        subplot_titles=[ENDS[end][0].partition(" first")[0] for end in ends],
    )
    for column, end in enumerate(ends, start=1):
        change = changes[end][heads]
        labels = np.full(change.shape, "", NAMES.dtype)
        if f"label_{end}" in steps:
            labels = np.char.replace(NAMES[steps[f"label_{end}"][heads]], NOTHING, "")
        short = np.where(labels == "sink", labels, labels.astype("U3"))
        figure.add_heatmap(
            x=[f"{100 * share:.3g}%" for share in shares_of(truncation, end)[1:]],
            y=names,
            z=change[:, 1:],
            zmin=0,
            zmax=float(np.nanmax(largest, initial=0)) or 1.0,
            colorscale=square_root_scale(style.SEQUENTIAL),
            showscale=column == len(ends),
            colorbar={"thickness": 10, "title": {"text": "change<br>(bits)"}},
            text=np.where(labels == labels[:, :1], "", short)[:, 1:],
            texttemplate="%{text}",
            customdata=labels[:, 1:],
            hovertemplate="%{y}, %{x} of the planes rotate<br>attention changed by "
            "%{z:.3f} bits<br>%{customdata}<extra></extra>",
            xgap=2,
            ygap=2,
            row=1,
            col=column,
        )
    figure.update_annotations(font_size=12)
    figure.update_layout(margin_t=84)
    figure.update_xaxes(title_text=KEPT_TITLE, showgrid=False, type="category")
    figure.update_yaxes(showgrid=False, autorange="reversed", type="category")
    ticks = [f"{name} {of[0]}".strip() for name, of in zip(names, labels, strict=True)]
    title = "head, and its label as it is"
    figure.update_yaxes(title_text=title, tickvals=names, ticktext=ticks, col=1)
    return style.note_missing(figure, largest, "no change of attention was measured")


def plot_head_truncation(truncation: xr.Dataset, *, layer: int, head: int) -> go.Figure:
    """What a head does by the share of planes that still rotate in all heads.

    x: share of the planes that rotate, from all on the left to none. y: mean over rows of
    KL(attention as it is || under the edit), in bits; below, its induction score. A line an
    end of the axis, its markers by the head's label there; grey, the mean over as many
    random planes. Trace `meta` names the array of `head_steps` behind y.
    """
    check_head(truncation, layer=layer, head=head)
    arrays = head_steps(truncation)
    panels = [name for name in PANELS if name in truncation]
    title = f"Layer {layer}, head {head}, as planes stop"
    figure = style.stacked(title, len(panels), height=120 + 150 * len(panels))
    for row, name in enumerate(panels, start=1):
        for kind in kinds_of(truncation):
            look: dict[str, Any] = MEAN_OF_DRAWS
            if kind in ENDS:
                words, color, _ = ENDS[kind]
                steps = arrays.get(f"label_{kind}")
                labels = [] if steps is None else NAMES[steps[layer, head]].tolist()
                marks = [
                    style.SYMBOLS.get(label, "circle-open") for label in labels
                ] or "circle"
                colors = [style.COLORS.get(label, style.MUTED) for label in labels] or color
                look = {
                    "name": words,
                    "legendgroup": kind,
                    "mode": "lines+markers",
                    "line": {"color": color, "width": 2},
                    "marker": {"size": 9, "symbol": marks, "color": colors},
                    "text": labels,
                    "hovertemplate": "%{x:.3~%} of the planes rotate: %{y:.3f}, %{text}"
                    "<extra></extra>",
                    "cliponaxis": False,
                }
            x, y = shares_of(truncation, kind), arrays[f"{name}_{kind}"][layer, head]
            trace = look | {"meta": {"y": f"{name}_{kind}"}, "showlegend": row == 1}
            figure.add_scatter(x=x, y=y, **trace, row=row, col=1)
        figure.update_yaxes(title_text=PANELS[name], rangemode="tozero", nticks=5, row=row)
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
