"""What becomes of heads as planes stop: the heads that change most, and a single head."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.errors import BadArgument
from ropelens.figures.attention import square_root_scale
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

TITLES = {"slow": "slowest planes stopped", "fast": "fastest planes stopped"}
MOST = 16
"""Heads that are shown."""
PANELS = {
    "attention_change": "attention,<br>change (bits)",
    "induction": "induction<br>(0 to 1)",
}
"""The variables of a sweep that have a panel for one head, and their axes."""

UNKNOWN = len(LABELS)
"""The number of a label that was not measured; others are numbered by `LABELS`."""


def changed_heads_figure(truncation: xr.Dataset) -> go.Figure:
    """`plot_truncation` by head: a row a head with its label, an end of the axis a panel."""
    ends = [end for end in kinds_of(truncation) if end in ENDS]
    if not ends or "attention_change" not in truncation:
        raise BadArgument(
            "The sweep has no change of attention by head.",
            attempt='truncate(model, tokens, ends=..., measures=("change", "labels", ...))',
        )
    change = _by_head(truncation, "attention_change").astype(float)
    stops = np.isin(truncation["kind"].values.astype(str), ends)
    largest = np.nan_to_num(change[:, stops], nan=-1.0).max(axis=1)
    heads = np.argsort(-largest, kind="stable")[:MOST]
    heads = heads[largest[heads] >= 0]
    change = change[heads]
    labels = np.full(change.shape, "")
    if "label" in truncation:
        labels = _by_head(truncation, "label")[heads].astype(str)
    of_layer = truncation.sizes["head"]
    names = [f"L{head // of_layer} H{head % of_layer}" for head in heads]
    figure = new_figure(
        "The heads that changed most",
        height=170 + 26 * len(names),
        **{"rows": 1, "cols": len(ends), "shared_yaxes": True, "horizontal_spacing": 0.02},
        subplot_titles=[TITLES[end] for end in ends],
    )
    for column, end in enumerate(ends, start=1):
        edits = np.flatnonzero(truncation["kind"].values == end)
        kept = truncation["kept"].values
        edits = edits[np.argsort(-kept[edits], kind="stable")]
        shares = [f"{100 * share:.3g}%" for share in kept[edits]]
        of_end = labels[:, edits]
        figure.add_heatmap(
            x=shares,
            y=names,
            z=change[:, edits],
            zmin=0,
            zmax=float(np.nanmax(change)) or 1.0,
            colorscale=square_root_scale(SEQUENTIAL),
            showscale=column == len(ends),
            colorbar={"thickness": 10, "title": {"text": "change<br>(bits)"}},
            text=np.where(of_end == labels[:, :1], "", np.vectorize(_short)(of_end)),
            texttemplate="%{text}",
            customdata=np.vectorize(_then)(labels[:, :1], of_end),
            hovertemplate="%{y}, %{x} of the planes rotate<br>attention changed by "
            "%{z:.3f} bits%{customdata}<extra></extra>",
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
    ticks = [f"{name} {row[0]}".strip() for name, row in zip(names, labels, strict=True)]
    title = "head, and its label as it is"
    return figure.update_yaxes(title_text=title, tickvals=names, ticktext=ticks, col=1)


def _by_head(truncation: xr.Dataset, name: str) -> np.ndarray:
    """A variable of the sweep as [layer * head, edit]; entry 0 is the model as it is."""
    values = truncation[name].transpose("layer", "head", "edit").values
    return values.reshape(-1, truncation.sizes["edit"])


def _short(label: str) -> str:
    return label if label == "sink" else label[:3]


def _then(old: str, new: str) -> str:
    """A head's label before and under an edit, for the hover."""
    if not new:
        return ""
    return f"<br>{old}, still" if old == new else f"<br>{old}, now {new}"


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
    figure = new_figure(
        f"Layer {layer}, head {head}, as planes stop",
        height=120 + 150 * len(panels),
        **{"rows": len(panels), "cols": 1, "shared_xaxes": True, "vertical_spacing": 0.06},
    )
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
    figure.update_xaxes(**KEPT_AXIS)
    return figure.update_xaxes(title_text=KEPT_TITLE, row=len(panels))


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
    over their draws; `label_slow` and `label_fast` as numbers of `LABELS`. Without what was
    not measured.
    """
    arrays: dict[str, np.ndarray] = {}
    for kind in kinds_of(truncation):
        entries, shares = _entries(truncation, kind), shares_of(truncation, kind)
        at = [entries[truncation["kept"].values[entries] == share] for share in shares]
        for name in PANELS:
            if name in truncation:
                values = truncation[name].transpose("layer", "head", "edit").values
                means = [values[..., one].mean(-1) for one in at]
                arrays[f"{name}_{kind}"] = np.stack(means, axis=-1)
        if "label" in truncation and kind != "random":
            labels = truncation["label"].transpose("layer", "head", "edit").values.astype(str)
            numbers = np.full(labels.shape, UNKNOWN, np.uint8)
            for number, label in enumerate(LABELS):
                numbers[labels == label] = number
            arrays[f"label_{kind}"] = numbers[..., [one[0] for one in at]]
    return arrays


def _entries(truncation: xr.Dataset, kind: str) -> np.ndarray:
    """Entries of a kind, and the model as it is, which is each kind's first step."""
    return np.flatnonzero(np.isin(truncation["kind"].values.astype(str), ["none", kind]))


def _look(arrays: dict[str, np.ndarray], kind: str, layer: int, head: int) -> dict[str, Any]:
    """Keywords of the scatter of a kind: an end has a marker a label, random planes none."""
    if kind == "random":
        return MEAN_OF_DRAWS
    words, color, _ = ENDS[kind]
    labels = []
    if f"label_{kind}" in arrays:
        steps = arrays[f"label_{kind}"][layer, head]
        labels = [(*LABELS, NOTHING)[number] for number in steps]
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
