"""Colours, symbols and plotly templates of all figures.

Any two label colours have a CIELAB distance of at least 22 for people with protanopia,
deuteranopia or tritanopia (simulated after Machado et al. 2009), and contrast with both pages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go
import plotly.io as pio
from plotly.colors import get_colorscale
from plotly.subplots import make_subplots

Theme = Literal["light", "dark"]

EXCLUDED_LABELS = ("sink", "diffuse", "untested")
"""Labels of heads that choose too few keys besides sinks for their shares to mean much."""


@dataclass(frozen=True)
class LabelLook:
    """How figures and pages show a label: colour, marker symbol, and sign in a cell."""

    label: str
    color: str
    symbol: str
    sign: str


LABEL_LOOKS = (
    LabelLook("positional", color="#2a8fe0", symbol="circle", sign="●"),
    LabelLook("mixed", color="#97488d", symbol="diamond", sign="◆"),
    LabelLook("semantic", color="#d9700f", symbol="square", sign="■"),
    LabelLook("sink", color="#1f7443", symbol="triangle-up", sign="▲"),
    LabelLook("diffuse", color="#b5b5b0", symbol="x", sign="✕"),
    LabelLook("untested", color="#6c3cf0", symbol="pentagon", sign="?"),
)
LABEL_ORDER = tuple(look.label for look in LABEL_LOOKS)
COLORS = {look.label: look.color for look in LABEL_LOOKS}
SYMBOLS = {look.label: look.symbol for look in LABEL_LOOKS}
SIGNS = {look.label: look.sign for look in LABEL_LOOKS}
VARIANT_COLORS = ("#3250f0", "#be8c00", "#00aa6e", "#c81428", "#be00a0", "#b478f0")
"""Blue, amber, green, red, magenta and lavender.

Any two of these colours and `MUTED` have a CIEDE2000 distance of at least 12 for people with
protanopia, deuteranopia or tritanopia, and 18 for others. They have a contrast of 3 with both
pages.
"""
SEQUENTIAL = "Viridis"
DOMINATES = 5  # times the 90 % quantile: a larger cell would hide all other cells
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"

INK = {"light": "#1d2126", "dark": "#e8e6e1"}
SOFT = {"light": "#5c636b", "dark": "#a3a9b0"}
GRID = {"light": "#e6e4de", "dark": "#2c3137"}
PAPER = {"light": "#ffffff", "dark": "#15181b"}
CLEAR = "rgba(0,0,0,0)"
MUTED = "#80868d"  # grey of secondary lines, on a light and on a dark page
SHADE = "rgba(128,132,140,0.22)"
DASHED = {  # predictions and random planes
    "width": 2,
    "dash": "4px,3px",
    "color": MUTED,
}
DOTTED = {  # marks a position on an axis
    "width": 1.5,
    "dash": "dot",
    "color": MUTED,
}
DRAWN_FROM_ONE = {  # layout `meta`: x is drawn at x + 1, because a log axis has no 0
    "drawn_from": 1,
}
POSITION_TITLE = "position in the text (tokens, log scale)"
NO_DATA = "no data"  # name of the note in a figure without numbers
TEXT_ONLY = "%{text}<extra></extra>"  # `hovertemplate` that shows the trace's `text`


def template(theme: Theme) -> go.layout.Template:
    """The plotly template of a page: fonts, colours, axes and margins."""
    ink = INK[theme]
    soft = SOFT[theme]
    words = {"color": ink, "size": 12}
    small = {"color": soft, "size": 11}
    axis = {
        "gridcolor": GRID[theme],
        "linecolor": soft,
        "ticklen": 4,
        "tickcolor": soft,
        "tickfont": small,
        "ticks": "outside",
        "title": {"font": words, "standoff": 10},
        "zeroline": False,
        "automargin": True,
    }
    title = {
        "font": {"size": 14, "color": ink},
        "x": 0,
        "xref": "paper",
        "xanchor": "left",
        "pad": {"t": 14},
        "y": 1,
        "yref": "container",
        "yanchor": "top",
    }
    hover_label = {
        "bgcolor": PAPER[theme],
        "bordercolor": soft,
        "align": "left",
        "font": {"family": FONT, "color": ink, "size": 12},
    }
    legend = {
        "orientation": "h",
        "x": 0,
        "y": 1.02,
        "yanchor": "bottom",
        "font": words,
    }
    heatmap = {
        "textfont": {"size": 11},
        "colorbar": {"outlinewidth": 0, "ticks": "", "tickfont": small},
        "hoverongaps": False,
    }
    return go.layout.Template(
        layout={
            "font": {"family": FONT, "color": ink, "size": 12},
            "title": title,
            "paper_bgcolor": PAPER[theme],
            "plot_bgcolor": CLEAR,
            "colorway": [ink],
            "xaxis": axis,
            "yaxis": axis,
            "annotationdefaults": {"font": small, "showarrow": False},
            "shapedefaults": {"line": {"color": ink}},
            "modebar": {"bgcolor": CLEAR, "color": soft, "activecolor": ink},
            "hoverlabel": hover_label,
            "legend": legend,
            "margin": {"l": 48, "r": 12, "t": 76, "b": 44},
        },
        data={
            "heatmap": [heatmap],
            "scatter": [{"marker": {"line": {"color": PAPER[theme]}}}],
        },
    )


def new_figure(title: str, *, height: int, **panels: Any) -> go.Figure:
    """Empty figure, dark if plotly's default template is; `panels` are for `make_subplots`."""
    figure = make_subplots(**panels) if panels else go.Figure()
    theme: Theme = "dark" if "dark" in str(pio.templates.default) else "light"
    return figure.update_layout(
        template=template(theme), title_text=title, height=height
    )


def stacked(
    title: str,
    rows: int,
    *,
    height: int,
    spacing: float = 0.06,
    row_heights: Sequence[float] | None = None,
) -> go.Figure:
    """Figure of `rows` stacked panels with a common x axis."""
    return new_figure(
        title,
        height=height,
        rows=rows,
        cols=1,
        shared_xaxes=True,
        vertical_spacing=spacing,
        row_heights=row_heights,
    )


def set_x_title(figure: go.Figure, title: str) -> None:
    """Give the last x axis a title."""
    *_, last = figure.select_xaxes()
    last.title.text = title


def set_log_ticks(
    figure: go.Figure,
    labels: Mapping[Any, str],
    *,
    ends: Sequence[float] | None = None,
    row: int | None = None,
) -> None:
    """Give the x axes (of a row of panels) a log scale with a tick at each key of `labels`.

    `ends` are the decimal logarithms of both ends of the axis.
    """
    figure.update_xaxes(
        type="log",
        tickmode="array",
        tickvals=list(labels),
        ticktext=list(labels.values()),
        range=ends,
        row=row,
    )


def set_counts(figure: go.Figure, counts: Any, title: str, *, base: int = 2) -> None:
    """Give every x axis a log scale with ticks at powers of `base` up to the largest count."""
    longest = max(1, int(np.max(counts)))
    labels = {}
    power = 1
    while power <= longest:
        labels[power] = f"{power:,}"
        power *= base
    set_log_ticks(figure, labels)
    set_x_title(figure, title)


def sequential(z: np.ndarray) -> list[list[Any]]:
    """Colours from 0 to the largest number; on a log scale if a few cells dominate."""
    z = z[np.isfinite(z)]
    scale = get_colorscale(SEQUENTIAL)
    if z.size and z.max() > DOMINATES * np.quantile(z, 0.9):
        return [[(1e2**at - 1) / 99, color] for at, color in scale]
    return [[at, color] for at, color in scale]


def interval_bars(
    value: Any,
    low: Any,
    high: Any,
    *,
    color: str | None = None,
    thickness: float = 1.5,
    width: float | None = None,
    visible: bool | None = None,
) -> dict[str, Any]:
    """plotly's error bars from `value` to both ends of its interval; length 0 for NaN."""
    return {
        "type": "data",
        "symmetric": False,
        "array": np.nan_to_num(np.subtract(high, value)),
        "arrayminus": np.nan_to_num(np.subtract(value, low)),
        "color": color,
        "thickness": thickness,
        "width": width,
        "visible": visible,
    }


def tick_step(count: int, *, most: int) -> int:
    """The power of 2 between ticks, so that `count` indices have at most `most` ticks."""
    return 2 ** max(0, int(np.ceil(np.log2(count / most))))


def set_rows(figure: go.Figure, count: int, unit: str, *, row: int) -> None:
    """Make y the indices of `count` rows of cells, from the top, in a row of panels."""
    figure.update_yaxes(
        range=[count - 0.5, -0.5],
        dtick=tick_step(count, most=8),
        tick0=0,
        showgrid=False,
        title_text=f"{unit} (index)",
        row=row,
    )


def layer_map(title: str, layers: int, count: int, across: str) -> go.Figure:
    """Figure for cells of 13 to 40 pixels, with a row for each layer, and axes with indices."""
    height = int(np.clip(layers * 40, 200, max(300, layers * 13)) + 130)
    figure = new_figure(title, height=height)
    # The room at both ends of an axis is for the stroke of the frame.
    room = max(0.05, 0.006 * layers)
    figure.update_yaxes(
        range=[layers - 0.5 + room, -0.5 - room],
        dtick=tick_step(layers, most=16),
        tick0=0,
        showgrid=False,
        title_text="layer (index)",
    )
    room = max(0.05, 0.006 * count)
    return figure.update_xaxes(
        range=[-0.5 - room, count - 0.5 + room],
        dtick=tick_step(count, most=16),
        tick0=0,
        showgrid=False,
        title_text=f"{across} (index)",
    )


def mark(
    figure: go.Figure,
    x: float,
    text: str,
    *,
    row: int | Literal["all"] = "all",
    col: int | Literal["all"] = "all",
    color: str = MUTED,
    xref: str | None = None,
    yref: str | None = None,
    y: float = 1,
    xanchor: str | None = None,
    yanchor: str = "top",
    align: str | None = None,
) -> go.Figure:
    """Draw a dotted line at x in the panels of `row` and `col`, and `text` above the first."""
    line = {"width": 1.5, "dash": "dot", "color": color}
    figure.add_vline(x=x, line=line, name="context", row=row, col=col)
    drawn = x
    if figure.layout.xaxis.type == "log":
        drawn = float(np.log10(x))
    number = "" if row in (1, "all") else row
    return figure.add_annotation(
        x=drawn,
        xref=xref or f"x{number}",
        xanchor=xanchor,
        y=y,
        yref=yref or f"y{number} domain",
        yanchor=yanchor,
        align=align,
        text=text,
        name="context",
    )


def note_missing(figure: go.Figure, why: str, values: Any = None) -> go.Figure:
    """Add the note "no data: `why`" if none of the `values` (default: all drawn) is finite."""
    if values is None:
        drawn = [_drawn_values(trace) for trace in figure.data]
        values = np.concatenate([[], *drawn])
    if not np.isfinite(np.asarray(values, float)).any():
        figure.add_annotation(
            x=0.5,
            y=0.5,
            xref="paper",
            yref="paper",
            name=NO_DATA,
            text=f"no data: {why}",
            font_size=13,
        )
    return figure


def _drawn_values(trace: Any) -> np.ndarray:
    return np.ravel(trace.z if trace.type == "heatmap" else trace.y)
