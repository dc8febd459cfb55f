"""Figure of one head while planes stop."""

from itertools import product

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures import style
from ropelens.figures.inputs import Head, Layer, place_of
from ropelens.figures.sweep_traces import (
    END_LOOKS,
    KEPT_TITLE,
    add_mean_of_draws,
    set_kept_shares,
)
from ropelens.interventions.truncation_table import sweeps_by_kind, swept_layers

HEAD_PANELS = {
    "attention_change": "change of<br>attention (bits)",
    "induction": "induction<br>(0 to 1)",
}
MISSING_LABEL = len(style.LABEL_ORDER)  # index of a label that was not measured


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
    measures = [name for name in HEAD_PANELS if name in truncation]
    figure = style.stacked(
        f"Layer {layer}, head {head} while planes stop",
        len(measures),
        height=120 + 150 * len(measures),
    )
    for row, measure in enumerate(measures, start=1):
        for kind in kinds_of(truncation):
            shares = rotating_shares(truncation, kind)
            values = arrays[f"{measure}_{kind}"][layer, head]
            _add_steps(figure, shares, values, kind, measure, row=row)
        figure.update_yaxes(title_text=HEAD_PANELS[measure], nticks=5, row=row)
    figure.update_yaxes(autorangeoptions_include=[0, 0.01])  # tiny changes stay flat
    figure.update_yaxes(
        range=[-0.03, 1.03],
        tickvals=[0, 0.5, 1],
        selector={"title.text": HEAD_PANELS["induction"]},
    )
    set_kept_shares(figure)
    style.set_x_title(figure, KEPT_TITLE)
    return style.note_missing(figure, "the sweep did not measure this head")


def _add_steps(
    figure: go.Figure,
    shares: np.ndarray,
    values: np.ndarray,
    kind: str,
    measure: str,
    *,
    row: int,
) -> None:
    meta = {"y": f"{measure}_{kind}"}
    if kind not in END_LOOKS:
        add_mean_of_draws(
            figure, shares, values, showlegend=row == 1, meta=meta, row=row, col=1
        )
        return
    look = END_LOOKS[kind]
    figure.add_scatter(
        x=shares,
        y=values,
        name=look.name,
        legendgroup=kind,
        mode="lines+markers",
        line={"color": look.color, "width": 2},
        marker={"size": 9},
        hovertemplate="%{x:.3~%} of the planes rotate: %{y:.3f}, %{text}<extra></extra>",
        cliponaxis=False,
        meta=meta,
        showlegend=row == 1,
        row=row,
        col=1,
    )


def kinds_of(truncation: xr.Dataset) -> list[str]:
    """Ways in which a sweep stops planes: some of "slow", "fast" and "random"."""
    kinds = set(truncation["kind"].values.astype(str))
    return [kind for kind in (*END_LOOKS, "random") if kind in kinds]


def rotating_shares(truncation: xr.Dataset, kind: str) -> np.ndarray:
    """Shares of planes that rotate at the steps of a kind, in descending order."""
    return np.array([*_entries_by_share(truncation, kind)])


def _entries_by_share(truncation: xr.Dataset, kind: str) -> dict[float, np.ndarray]:
    """Entries of the unmodified model and the steps of a kind, by rotating share."""
    first_sweep = next(iter(sweeps_by_kind(truncation).values()))
    of_kind = first_sweep["kind"].isin(["none", kind]).values
    kept = first_sweep["kept"].values
    entries = {}
    for share in np.unique(kept[of_kind])[::-1]:
        entries[share] = np.flatnonzero(of_kind & (kept == share))
    return entries


def head_steps(truncation: xr.Dataset) -> dict[str, np.ndarray]:
    """Numbers of every head at the steps of each kind, [layer, head, step].

    The arrays are `attention_change_slow` (bits), `induction_slow` and so on, with means over
    draws, if they were measured. `label_slow` and `label_fast` are indices in `LABEL_ORDER`;
    the first index after its end marks a missing label. If a sweep stops planes in one kind of
    layers after the other, a layer has the numbers of the sweep of its kind.
    """
    first, *others = sweeps_by_kind(truncation).values()
    steps = _steps_of_sweep(first)
    other_layers = [*swept_layers(truncation).values()][1:]
    for sweep, layers in zip(others, other_layers, strict=True):
        for name, values in _steps_of_sweep(sweep).items():
            if values.shape == steps[name].shape:
                steps[name][layers] = values[layers]
            elif name.startswith("label"):
                steps[name][layers] = MISSING_LABEL
            else:
                steps[name][layers] = np.nan
    return steps


def _steps_of_sweep(sweep: xr.Dataset) -> dict[str, np.ndarray]:
    steps = {}
    measured = [name for name in (*HEAD_PANELS, "label") if name in sweep]
    for kind, name in product(kinds_of(sweep), measured):
        values = sweep[name].transpose("layer", "head", "edit").values
        entries_by_share = _entries_by_share(sweep, kind)
        if name != "label":
            means = [
                values[..., entries].mean(-1) for entries in entries_by_share.values()
            ]
            steps[f"{name}_{kind}"] = np.stack(means, axis=-1)
        elif kind in END_LOOKS:
            firsts = [entries[0] for entries in entries_by_share.values()]
            steps[f"label_{kind}"] = _label_indices(values[..., firsts])
    return steps


def _label_indices(labels: np.ndarray) -> np.ndarray:
    """Indices of labels in `LABEL_ORDER`; `MISSING_LABEL` for other texts."""
    names = labels.astype(str)
    conditions = [names == label for label in style.LABEL_ORDER]
    indices = np.select(conditions, range(len(style.LABEL_ORDER)), MISSING_LABEL)
    return indices.astype(np.uint8)
