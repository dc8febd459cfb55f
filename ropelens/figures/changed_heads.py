"""The heads whose attention changes most as planes stop, and what they are then."""

from __future__ import annotations

import numpy as np
import plotly.graph_objects as go
import xarray as xr

from ropelens.errors import BadArgument
from ropelens.figures.attention import square_root_scale
from ropelens.figures.style import INK, SEQUENTIAL, new_figure
from ropelens.measure.truncation_table import check_truncation

TITLES = {"slow": "slowest planes stopped", "fast": "fastest planes stopped"}
BRIGHT = 0.55
"""From this far up the colour scale on, dark words read better than light ones."""

SHORT = {
    "positional": "pos",
    "mixed": "mix",
    "semantic": "sem",
    "sink": "sink",
    "diffuse": "dif",
}


def plot_changed_heads(truncation: xr.Dataset, *, most: int = 16) -> go.Figure:
    """The `most` heads whose attention changes most at any step of a sweep from the ends.

    A row a head, with the label that it has in the model as it is; a column a kept share of
    the planes, an end a panel. Colour: mean over rows of KL(attention as it is || under the
    edit), in bits; it grows with the square root, so that small changes show. A word
    in a cell is the head's label there where it is a new one: pos(itional), mix(ed),
    sem(antic), sink, dif(fuse).
    """
    check_truncation(truncation)
    kinds = truncation["kind"].values.astype(str)
    ends = [end for end in TITLES if (kinds == end).any()]
    if not ends or "attention_change" not in truncation:
        raise BadArgument(
            "The sweep does not say which heads changed.",
            seen="no planes stopped from an end" if not ends else "no attention_change",
            attempt='truncate(model, tokens, measures=("change", "labels", ...))',
        )
    change = _by_head(truncation, "attention_change").astype(float)
    labels = _by_head(truncation, "label") if "label" in truncation else None
    heads = _most_changed(change[:, np.isin(kinds, ends)], most)
    change, labels = change[heads], None if labels is None else labels[heads].astype(str)
    places = np.array(
        np.unravel_index(heads, [truncation.sizes[d] for d in ("layer", "head")])
    ).T
    names = [f"L{layer} H{head}" for layer, head in places]
    figure = new_figure(
        "The heads that changed most",
        height=170 + 26 * len(names),
        **{"rows": 1, "cols": len(ends), "shared_yaxes": True, "horizontal_spacing": 0.02},
        subplot_titles=[TITLES[end] for end in ends],
    )
    highest = float(np.nanmax(change))
    words, hovers = _new_labels(labels, change.shape)
    for column, end in enumerate(ends, start=1):
        edits = np.flatnonzero(kinds == end)
        kept = truncation["kept"].values
        edits = edits[np.argsort(-kept[edits], kind="stable")]
        shares = [f"{100 * share:.3g}%" for share in kept[edits]]
        place = {"row": 1, "col": column}
        figure.add_heatmap(
            x=shares,
            y=names,
            z=change[:, edits],
            zmin=0,
            zmax=highest or 1.0,
            colorscale=square_root_scale(SEQUENTIAL),
            showscale=column == len(ends),
            colorbar={"thickness": 10, "title": {"text": "change<br>(bits)"}},
            customdata=hovers[:, edits],
            hovertemplate="%{y}, %{x} of the planes rotate<br>attention changed by "
            "%{z:.3f} bits%{customdata}<extra></extra>",
            hoverongaps=False,
            xgap=2,
            ygap=2,
            **place,
        )
        # Words dark on bright cells: a heat map's own have one colour.
        head, step = np.nonzero(words[:, edits] != "")
        bright = change[:, edits][head, step] > BRIGHT**2 * highest
        figure.add_scatter(
            x=[shares[i] for i in step],
            y=[names[i] for i in head],
            text=words[:, edits][head, step].tolist(),
            mode="text",
            textfont={"size": 11, "color": [INK["light" if one else "dark"] for one in bright]},
            hoverinfo="skip",
            showlegend=False,
            **place,
        )
    figure.update_annotations(font_size=12)
    figure.update_layout(margin_t=84)
    title = "planes that still rotate (% of all)"
    figure.update_xaxes(title_text=title, showgrid=False, type="category")
    figure.update_yaxes(showgrid=False, autorange="reversed", type="category")
    ticks = (
        names
        if labels is None
        else [f"{n} {row[0]}" for n, row in zip(names, labels, strict=True)]
    )
    title = "head, and its label as it is"
    return figure.update_yaxes(title_text=title, tickvals=names, ticktext=ticks, col=1)


def _by_head(truncation: xr.Dataset, name: str) -> np.ndarray:
    """A variable of the sweep as [layer * head, edit]; entry 0 is the model as it is."""
    return (
        truncation[name]
        .transpose("layer", "head", "edit")
        .values.reshape(-1, truncation.sizes["edit"])
    )


def _most_changed(change: np.ndarray, most: int) -> np.ndarray:
    """The heads of the largest changes over edits [head, edit], the most changed first."""
    largest = np.nan_to_num(change, nan=-1.0).max(axis=1)
    order = np.argsort(-largest, kind="stable")[: max(most, 1)]
    return order[largest[order] >= 0]


def _new_labels(
    labels: np.ndarray | None, shape: tuple[int, ...]
) -> tuple[np.ndarray, np.ndarray]:
    """The new label of each head under each edit, short, and old and new for the hover."""
    words, hovers = np.full((2, *shape), "", dtype=object)
    if labels is None:
        return words, hovers
    for at in np.ndindex(*shape):
        old, new = str(labels[at[0], 0]), str(labels[at])
        if new:
            words[at] = "" if old == new else SHORT[new]
            hovers[at] = f"<br>{old}, still" if old == new else f"<br>{old}, now {new}"
    return words, hovers
