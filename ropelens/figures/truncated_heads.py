"""Figure of one head while planes stop."""

from itertools import product
from typing import Any

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures import style
from ropelens.figures.inputs import Head, Layer, place_of
from ropelens.interventions.truncation_table import sweeps_by_kind, swept_layers

END_LOOKS = {  # words, colour and symbol
    "slow": (
        "slowest planes stopped first (p-RoPE)",
        style.VARIANT_COLORS[0],
        "square",
    ),
    "fast": ("fastest planes stopped first", style.VARIANT_COLORS[3], "circle"),
}
MEAN_OF_DRAWS = {"mode": "lines", "line": style.DASHED, "hoverinfo": "skip"}
MEAN_OF_DRAWS |= {"name": "random planes", "legendgroup": "random"}
KEPT_AXIS = {
    "range": [1.04, -0.04],
    "tickvals": [1, 0.75, 0.5, 0.25, 0],
    "tickformat": ".0%",
}
KEPT_TITLE = "planes that still rotate (% of all)"
HEAD_PANELS = {
    "attention_change": "change of<br>attention (bits)",
    "induction": "induction<br>(0 to 1)",
}


def plot_head_truncation(
    truncation: xr.Dataset, *, layer: Layer = None, head: Head
) -> go.Figure:
    """Change of attention and induction of a head, by the share of planes that still rotate.

    Planes stop in all heads of all layers, or of the layers of the same kind. The grey line is
    the mean over equally many random planes. Trace `meta` names the array of `head_steps` that
    y shows.
    """
    layer, head = place_of(layer, head)
    arrays = head_steps(truncation)
    panels = [name for name in HEAD_PANELS if name in truncation]
    title = f"Layer {layer}, head {head} while planes stop"
    figure = style.stacked(title, len(panels), height=120 + 150 * len(panels))
    hover = "%{x:.3~%} of the planes rotate: %{y:.3f}, %{text}<extra></extra>"
    for (row, name), kind in product(enumerate(panels, start=1), kinds_of(truncation)):
        look: dict[str, Any] = MEAN_OF_DRAWS
        if kind in END_LOOKS:
            words, color, _ = END_LOOKS[kind]
            look = {"name": words, "legendgroup": kind, "mode": "lines+markers"}
            look |= {"line": {"color": color, "width": 2}, "marker": {"size": 9}}
            look |= {"hovertemplate": hover, "cliponaxis": False}
        x, y = rotating_shares(truncation, kind), arrays[f"{name}_{kind}"][layer, head]
        trace = look | {"meta": {"y": f"{name}_{kind}"}, "showlegend": row == 1}
        figure.add_scatter(x=x, y=y, **trace, row=row, col=1)
        figure.update_yaxes(title_text=HEAD_PANELS[name], nticks=5, row=row)
    figure.update_yaxes(autorangeoptions_include=[0, 0.01])  # tiny changes stay flat
    axis = {"range": [-0.03, 1.03], "tickvals": [0, 0.5, 1]}
    figure.update_yaxes(selector={"title.text": HEAD_PANELS["induction"]}, **axis)
    style.set_x(figure, KEPT_AXIS, KEPT_TITLE)
    return style.note_missing(figure, "the sweep did not measure this head")


def kinds_of(truncation: xr.Dataset) -> list[str]:
    """Ways in which a sweep stops planes: some of "slow", "fast" and "random"."""
    kinds = set(truncation["kind"].values.astype(str))
    return [kind for kind in (*END_LOOKS, "random") if kind in kinds]


def _steps(truncation: xr.Dataset, kind: str) -> dict[float, np.ndarray]:
    """Entries of the unmodified model and the steps of a kind, by rotating share."""
    truncation = next(iter(sweeps_by_kind(truncation).values()))
    steps, share = (
        truncation["kind"].isin(["none", kind]).values,
        truncation["kept"].values,
    )
    shares = np.unique(share[steps])[::-1]
    return {value: np.flatnonzero(steps & (share == value)) for value in shares}


def rotating_shares(truncation: xr.Dataset, kind: str) -> np.ndarray:
    """Shares of planes that rotate at the steps of a kind, in descending order."""
    return np.array([*_steps(truncation, kind)])


def head_steps(truncation: xr.Dataset) -> dict[str, np.ndarray]:
    """Numbers of every head at the steps of each kind, [layer, head, step].

    The arrays are `attention_change_slow` (bits), `induction_slow` and so on, with means over
    draws, if they were measured. `label_slow` and `label_fast` are indices in `LABEL_ORDER`;
    the first index after its end marks a missing label. If a sweep stops planes in one kind of
    layers after the other, a layer has the numbers of the sweep of its kind.
    """
    sweeps, missing = sweeps_by_kind(truncation), len(style.LABEL_ORDER)
    if len(sweeps) > 1:
        joined, *others = map(head_steps, sweeps.values())
        for arrays, layers in zip(
            others, [*swept_layers(truncation).values()][1:], strict=True
        ):
            for name, values in arrays.items():
                known = values.shape == joined[name].shape
                absent = missing if name.startswith("label") else np.nan
                joined[name][layers] = values[layers] if known else absent
        return joined
    numbers: dict[str, np.ndarray] = {}
    names = [name for name in (*HEAD_PANELS, "label") if name in truncation]
    for kind, name in product(kinds_of(truncation), names):
        values = truncation[name].transpose("layer", "head", "edit").values
        steps = _steps(truncation, kind).values()
        if name != "label":
            means = [values[..., entries].mean(-1) for entries in steps]
            numbers[f"{name}_{kind}"] = np.stack(means, axis=-1)
        elif kind in END_LOOKS:
            labels = values.astype(str)[..., [entries[0] for entries in steps]]
            named = [labels == label for label in style.LABEL_ORDER]
            indices = np.select(named, range(missing), missing)
            numbers[f"label_{kind}"] = indices.astype(np.uint8)
    return numbers
