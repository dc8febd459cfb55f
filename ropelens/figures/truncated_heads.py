"""What becomes of heads as planes stop: the heads that change most, and a single head."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.errors import BadArgument
from ropelens.figures.head import square_root_scale
from ropelens.figures.inputs import check_head
from ropelens.figures.style import (
    COLORS,
    DASHED,
    LABELS,
    MUTED,
    SEQUENTIAL,
    SYMBOLS,
    VARIANT_COLORS,
    new_figure,
    set_x,
    stacked,
)
from ropelens.figures.text import NOTHING

ENDS = {
    "slow": ("slowest planes stopped first (p-RoPE)", VARIANT_COLORS[0], "square"),
    "fast": ("fastest planes stopped first", VARIANT_COLORS[3], "circle"),
}
"""The ends from which planes stop: words, colour and symbol."""
MEAN_OF_DRAWS = {
    "mode": "lines",
    "line": DASHED,
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
MOST = 16
"""Heads that are shown."""
PANELS = {
    "attention_change": "attention,<br>change (bits)",
    "induction": "induction<br>(0 to 1)",
}
"""The variables of a sweep that have a panel for one head, and their axes."""


def changed_heads_figure(truncation: xr.Dataset) -> go.Figure:
    """`plot_truncation` by head: a row a head with its label, an end of the axis a panel."""
    ends = [end for end in kinds_of(truncation) if end in ENDS]
    if not ends or "attention_change" not in truncation:
        raise BadArgument(
            "The sweep has no change of attention by head.",
            attempt='truncate(model, tokens, ends=..., measures=("change", "labels", ...))',
        )
    steps = head_steps(truncation)
    changes = {end: steps[f"attention_change_{end}"] for end in ends}
    largest = np.nanmax([np.nanmax(change, axis=-1) for change in changes.values()], axis=0)
    order = np.argsort(-np.nan_to_num(largest, nan=-1.0), axis=None, kind="stable")[:MOST]
    heads = np.unravel_index(order, largest.shape)
    names = [f"L{layer} H{head}" for layer, head in zip(*heads, strict=True)]
    unknown = np.full((*largest.shape, truncation.sizes["edit"]), len(LABELS))
    words = np.array([*LABELS, ""])
    figure = new_figure(
        "The heads that changed most",
        height=170 + 26 * len(names),
        **{"rows": 1, "cols": len(ends), "shared_yaxes": True, "horizontal_spacing": 0.02},
        subplot_titles=[ENDS[end][0].partition(" first")[0] for end in ends],
    )
    for column, end in enumerate(ends, start=1):
        shares = shares_of(truncation, end)[1:]
        old, *new = words[steps.get(f"label_{end}", unknown)[heads][:, : len(shares) + 1].T]
        labels = np.transpose(new)
        figure.add_heatmap(
            x=[f"{100 * share:.3g}%" for share in shares],
            y=names,
            z=changes[end][heads][:, 1:],
            zmin=0,
            zmax=float(np.nanmax(largest)) or 1.0,
            colorscale=square_root_scale(SEQUENTIAL),
            showscale=column == len(ends),
            colorbar={"thickness": 10, "title": {"text": "change<br>(bits)"}},
            text=np.where(labels == old[:, None], "", np.vectorize(_short)(labels)),
            texttemplate="%{text}",
            customdata=labels,
            hovertemplate="%{y}, %{x} of the planes rotate<br>attention changed by "
            "%{z:.3f} bits<br>%{customdata}<extra></extra>",
            hoverongaps=False,
            xgap=2,
            ygap=2,
            row=1,
            col=column,
        )
    figure.update_annotations(font_size=12)
    figure.update_layout(margin_t=84)
    figure.update_xaxes(title_text=KEPT_TITLE, showgrid=False, type="category")
    figure.update_yaxes(showgrid=False, autorange="reversed", type="category")
    ticks = [f"{name} {label}".strip() for name, label in zip(names, old, strict=True)]
    title = "head, and its label as it is"
    return figure.update_yaxes(title_text=title, tickvals=names, ticktext=ticks, col=1)


def _short(label: str) -> str:
    return label if label == "sink" else label[:3]


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
    figure = stacked(title, len(panels), height=120 + 150 * len(panels))
    for row, name in enumerate(panels, start=1):
        for kind in kinds_of(truncation):
            figure.add_scatter(
                x=shares_of(truncation, kind),
                y=arrays[f"{name}_{kind}"][layer, head],
                meta={"y": f"{name}_{kind}"},
                showlegend=row == 1,
                **_look(arrays, kind, layer, head),
                row=row,
                col=1,
            )
        figure.update_yaxes(title_text=PANELS[name], rangemode="tozero", nticks=5, row=row)
    set_x(figure, KEPT_AXIS, KEPT_TITLE)
    return figure


def kinds_of(truncation: xr.Dataset) -> list[str]:
    """The ways in which a sweep stops planes, step by step: of "slow", "fast" and "random"."""
    kinds = set(truncation["kind"].values.astype(str))
    return [kind for kind in (*ENDS, "random") if kind in kinds]


def shares_of(truncation: xr.Dataset, kind: str) -> np.ndarray:
    """The shares of planes that rotate at the steps of a kind, from all to the fewest."""
    return np.unique(truncation["kept"].values[_entries(truncation, kind)])[::-1]


def head_steps(truncation: xr.Dataset) -> dict[str, np.ndarray]:
    """Every head's numbers at the steps of each kind, [layer, head, step].

    `attention_change_slow` in bits, `induction_slow`, and so on, random planes as the mean
    over their draws; `label_slow` and `label_fast` as numbers of `LABELS`, one more where it
    was not measured. Without what was not measured at all.
    """
    arrays: dict[str, np.ndarray] = {}
    for kind in kinds_of(truncation):
        entries, shares = _entries(truncation, kind), shares_of(truncation, kind)
        at = [entries[truncation["kept"].values[entries] == share] for share in shares]
        for name in ({*PANELS, "label"} if kind in ENDS else {*PANELS}) & {*truncation}:
            values = truncation[name].transpose("layer", "head", "edit").values
            if name == "label":
                known = [values.astype(str) == label for label in LABELS]
                numbers = np.select(known, range(len(LABELS)), len(LABELS)).astype(np.uint8)
                arrays[f"label_{kind}"] = numbers[..., [one[0] for one in at]]
            else:
                means = [values[..., one].mean(-1) for one in at]
                arrays[f"{name}_{kind}"] = np.stack(means, axis=-1)
    return arrays


def _entries(truncation: xr.Dataset, kind: str) -> np.ndarray:
    """Entries of a kind, and the model as it is, which is each kind's first step."""
    return np.flatnonzero(np.isin(truncation["kind"].values.astype(str), ["none", kind]))


def _look(arrays: dict[str, np.ndarray], kind: str, layer: int, head: int) -> dict[str, Any]:
    """Keywords of the scatter of a kind: an end has a marker a label, random planes none."""
    if kind == "random":
        return MEAN_OF_DRAWS
    words, color, _ = ENDS[kind]
    steps = arrays.get(f"label_{kind}")
    labels = [] if steps is None else [(*LABELS, NOTHING)[n] for n in steps[layer, head]]
    symbols = [SYMBOLS.get(label, "circle-open") for label in labels]
    colors = [COLORS.get(label, MUTED) for label in labels]
    return {
        "name": words,
        "legendgroup": kind,
        "mode": "lines+markers",
        "line": {"color": color, "width": 2},
        "marker": {"size": 9, "symbol": symbols or "circle", "color": colors or color},
        "text": labels,
        "hovertemplate": "%{x:.3~%} of the planes rotate: %{y:.3f}, %{text}<extra></extra>",
        "cliponaxis": False,
    }
