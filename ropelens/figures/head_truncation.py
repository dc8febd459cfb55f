"""What became of one head as planes stop, from either end, beside random planes."""

from __future__ import annotations

from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.errors import BadArgument
from ropelens.figures.inputs import check_head
from ropelens.figures.numbers import NOTHING
from ropelens.figures.style import COLORS, LABELS, MUTED, SYMBOLS, new_figure
from ropelens.figures.truncation import ENDS, MEAN_OF_DRAWS
from ropelens.measure.truncation_table import check_truncation

PANELS = {
    "attention_change": "attention,<br>change (bits)",
    "induction": "induction<br>(0 to 1)",
}
"""What a panel shows of a sweep, and its axis."""

UNKNOWN = len(LABELS)
"""The number of a label that was not measured; others are numbered by `LABELS`."""


def plot_head_truncation(truncation: xr.Dataset, *, layer: int, head: int) -> go.Figure:
    """What a head does by the share of planes that still rotate in all heads.

    x: kept share of the planes, from all on the left to none. y: mean over rows of
    KL(attention as it is || under the edit), in bits; below, its induction score. A line an
    end of the axis, its markers by the head's label there; grey, the mean over as many
    random planes. Trace `meta` names the array of `head_steps` behind y.
    """
    check_truncation(truncation)
    check_head(truncation, layer=layer, head=head)
    arrays = head_steps(truncation)
    panels = [name for name in PANELS if any(key.startswith(name) for key in arrays)]
    if not panels:
        raise BadArgument(
            "The sweep does not say what became of single heads.",
            attempt='truncate(model, tokens, measures=("change", "tasks", "labels"))',
        )
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
    figure.update_xaxes(range=[1.04, -0.04], tickvals=[1, 0.75, 0.5, 0.25, 0], tickformat=".0%")
    figure.update_xaxes(title_text="planes that still rotate (% of all)", row=len(panels))
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
    over their draws; `label_slow` and `label_fast` as numbers of `LABELS`. Only what was
    measured is there.
    """
    found: dict[str, np.ndarray] = {}
    for kind in kinds_of(truncation):
        entries, shares = _entries(truncation, kind), shares_of(truncation, kind)
        at = [entries[truncation["kept"].values[entries] == share] for share in shares]
        for name in PANELS:
            if name in truncation:
                values = truncation[name].transpose("layer", "head", "edit").values
                means = [values[..., one].mean(-1) for one in at]
                found[f"{name}_{kind}"] = np.stack(means, axis=-1)
        if "label" in truncation and kind != "random":
            labels = truncation["label"].transpose("layer", "head", "edit").values.astype(str)
            numbers = np.full(labels.shape, UNKNOWN, np.uint8)
            for number, label in enumerate(LABELS):
                numbers[labels == label] = number
            found[f"label_{kind}"] = numbers[..., [one[0] for one in at]]
    return found


def _entries(truncation: xr.Dataset, kind: str) -> np.ndarray:
    """Entries of a kind, and the model as it is, which is each kind's first step."""
    return np.flatnonzero(np.isin(truncation["kind"].values.astype(str), ["none", kind]))


def _look(arrays: dict[str, np.ndarray], kind: str, layer: int, head: int) -> dict[str, Any]:
    """Keywords of the scatter of a kind: an end has a marker a label, random planes none."""
    if kind == "random":
        return MEAN_OF_DRAWS
    words, color, _ = ENDS[kind]
    steps = arrays.get(f"label_{kind}")
    known = (
        [] if steps is None else [(*LABELS, NOTHING)[number] for number in steps[layer, head]]
    )
    return {
        "name": words,
        "legendgroup": kind,
        "mode": "lines+markers",
        "line": {"color": color, "width": 2},
        "marker": {
            "size": 9,
            "symbol": [SYMBOLS.get(label, "circle-open") for label in known] or "circle",
            "color": [COLORS.get(label, MUTED) for label in known] or color,
        },
        "text": known,
        "hovertemplate": "%{x:.3~%} of the planes rotate: %{y:.3f}, %{text}<extra></extra>",
        "cliponaxis": False,
    }
