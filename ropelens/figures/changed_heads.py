"""The heads whose attention changes most as planes stop, and what they are then."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
import xarray as xr
from jaxtyping import Float
from plotly.subplots import make_subplots

from ropelens.errors import BadArgument
from ropelens.figures.attention import square_root_scale
from ropelens.figures.style import INK, SEQUENTIAL, template
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


@dataclass(frozen=True)
class Cells:
    """One end of a sweep: heads (`names`) by kept `shares`; rows are heads.

    `change` in bits, `words` the new labels, "" for old ones, `hovers` both in words.
    """

    shares: list[str]
    names: list[str]
    change: Float[np.ndarray, "head edit"]
    words: list[list[str]]
    hovers: list[list[str]]


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
    change = truncation["attention_change"].transpose("edit", "layer", "head").values
    heads = _most_changed(change[np.isin(kinds, ends)], most)
    names = [f"L{layer} H{head}" for layer, head in heads]
    labels = _labels(truncation)
    highest = float(np.nanmax([change[:, layer, head] for layer, head in heads]))
    figure = make_subplots(
        rows=1,
        cols=len(ends),
        shared_yaxes=True,
        horizontal_spacing=0.02,
        subplot_titles=[TITLES[end] for end in ends],
    )
    for column, end in enumerate(ends, start=1):
        at = np.flatnonzero(kinds == end)
        at = at[np.argsort(-truncation["kept"].values[at], kind="stable")].tolist()
        cells = Cells(
            shares=[f"{100 * share:.3g}%" for share in truncation["kept"].values[at]],
            names=names,
            change=np.array([change[at, layer, head] for layer, head in heads]),
            words=[[_new(labels, edit, head) for edit in at] for head in heads],
            hovers=[[_both(labels, edit, head) for edit in at] for head in heads],
        )
        _draw(figure, cells, highest=highest, column=column, scale=column == len(ends))
    figure.update_annotations(font_size=12)
    figure.update_layout(
        template=template("light"),
        title_text="The heads that changed most",
        height=170 + 26 * len(heads),
        margin_t=84,
    )
    figure.update_xaxes(
        title_text="planes that still rotate (% of all)", showgrid=False, type="category"
    )
    figure.update_yaxes(showgrid=False, autorange="reversed", type="category")
    ticks = [_tick(name, labels, head) for name, head in zip(names, heads, strict=True)]
    figure.update_yaxes(
        title_text="head, and its label as it is", tickvals=names, ticktext=ticks, col=1
    )
    return figure


def _most_changed(change: np.ndarray, most: int) -> list[tuple[int, int]]:
    """(layer, head) of the largest changes over edits [edit, layer, head], in that order."""
    largest = np.nan_to_num(change, nan=-1.0).max(axis=0)
    order = np.argsort(-largest.ravel(), kind="stable")[: max(most, 1)]
    kept = [at for at in order if largest.ravel()[at] >= 0]
    pairs = np.array(np.unravel_index(kept, largest.shape)).T
    return [(int(layer), int(head)) for layer, head in pairs]


def _draw(figure: go.Figure, cells: Cells, *, highest: float, column: int, scale: bool) -> None:
    """One panel: the cells by colour, up to `highest` bits, and the words on them."""
    figure.add_heatmap(
        x=cells.shares,
        y=cells.names,
        z=cells.change,
        zmin=0,
        zmax=highest or 1.0,
        colorscale=square_root_scale(SEQUENTIAL),
        showscale=scale,
        colorbar={"thickness": 10, "title": {"text": "change<br>(bits)"}},
        customdata=cells.hovers,
        hovertemplate="%{y}, %{x} of the planes rotate<br>attention changed by "
        "%{z:.3f} bits%{customdata}<extra></extra>",
        hoverongaps=False,
        xgap=2,
        ygap=2,
        row=1,
        col=column,
    )
    # Words dark on bright cells: a heat map's own have one colour.
    at = [at for at, word in np.ndenumerate(np.array(cells.words, dtype=object)) if word]
    bright = cells.change > BRIGHT**2 * highest
    figure.add_scatter(
        x=[cells.shares[edit] for _, edit in at],
        y=[cells.names[head] for head, _ in at],
        text=[cells.words[head][edit] for head, edit in at],
        mode="text",
        textfont={"size": 11, "color": [INK["light" if bright[c] else "dark"] for c in at]},
        hoverinfo="skip",
        showlegend=False,
        row=1,
        col=column,
    )


def _labels(truncation: xr.Dataset) -> np.ndarray | None:
    """Labels [edit, layer, head]; None where they were not measured."""
    if "label" not in truncation:
        return None
    return truncation["label"].transpose("edit", "layer", "head").values.astype(str)


def _new(labels: np.ndarray | None, edit: int, head: tuple[int, int]) -> str:
    """The short label under an edit, where it is another than without; else ""."""
    if (
        labels is None
        or not labels[(edit, *head)]
        or labels[(edit, *head)] == labels[(0, *head)]
    ):
        return ""
    return SHORT[labels[(edit, *head)]]


def _both(labels: np.ndarray | None, edit: int, head: tuple[int, int]) -> str:
    """The label without the edit and under it, for the hover."""
    if labels is None or not labels[(edit, *head)]:
        return ""
    old, new = labels[(0, *head)], labels[(edit, *head)]
    return f"<br>{old}, still" if old == new else f"<br>{old}, now {new}"


def _tick(name: str, labels: np.ndarray | None, head: tuple[int, int]) -> str:
    return name if labels is None else f"{name} {labels[(0, *head)]}"
