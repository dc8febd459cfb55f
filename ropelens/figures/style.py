"""Colours, symbols and plotly templates of all figures.

Any two label colours have a CIELAB distance of at least 22 for people with protanopia,
deuteranopia or tritanopia (simulated after Machado et al. 2009), and contrast with both pages.
"""

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import plotly.graph_objects as go
import plotly.io as pio
from plotly.colors import get_colorscale
from plotly.subplots import make_subplots

Theme = Literal["light", "dark"]

EXCLUDED_LABELS = ("sink", "diffuse", "untested")
"""Labels of heads that choose too few keys besides sinks for their shares to mean much."""
LABEL_LOOKS = (
    ("positional", "#2a8fe0", "circle", "●"),
    ("mixed", "#97488d", "diamond", "◆"),
    ("semantic", "#d9700f", "square", "■"),
    ("sink", "#1f7443", "triangle-up", "▲"),
    ("diffuse", "#b5b5b0", "x", "✕"),
    ("untested", "#6c3cf0", "pentagon", "?"),
)
"""Label, colour, marker symbol, and the symbol as a character for cells and sentences."""
LABEL_ORDER = tuple(label for label, *_ in LABEL_LOOKS)
COLORS, SYMBOLS, SIGNS = ({row[0]: row[n] for row in LABEL_LOOKS} for n in (1, 2, 3))
VARIANT_COLORS = ("#006d9c", "#b874ed", "#935649", "#fa5d14", "#ae0ee9", "#d5794f")
"""Colours apart from label colours and, for colour-blind people too, from `MUTED` and `INK`."""
SEQUENTIAL = "Viridis"
DOMINATES = (
    5  # times the 90 % quantile, from which the largest cell would hide the others
)
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Liberation Sans', sans-serif"

INK = {"light": "#1d2126", "dark": "#e8e6e1"}
SOFT = {"light": "#5c636b", "dark": "#a3a9b0"}
GRID = {"light": "#e6e4de", "dark": "#2c3137"}
PAPER = {"light": "#ffffff", "dark": "#15181b"}
MUTED = "#80868d"  # grey of secondary lines, on a light and on a dark page
DASHED = {
    "width": 2,
    "dash": "4px,3px",
    "color": MUTED,
}  # predictions and random planes
DOTTED = {"width": 1.5, "dash": "dot", "color": MUTED}  # marks a position on an axis
DRAWN_FROM_ONE = {
    "drawn_from": 1
}  # layout `meta`: x is at x + 1, as a log axis has no 0
POSITION_TITLE = "position in the text (tokens, log scale)"
NO_DATA = "no data"  # name of the note in a figure without numbers
SHADE = "rgba(128,132,140,0.22)"
TEXT_ONLY = "%{text}<extra></extra>"  # `hovertemplate` that shows the trace's `text`


def template(theme: Theme) -> go.layout.Template:
    ink, soft, grid, paper = INK[theme], SOFT[theme], GRID[theme], PAPER[theme]
    clear, words = "rgba(0,0,0,0)", {"color": ink, "size": 12}
    lines = {"gridcolor": grid, "linecolor": soft, "ticklen": 4}
    small = {"color": soft, "size": 11}
    axis = lines | {"tickcolor": soft, "tickfont": small, "ticks": "outside"}
    axis |= {
        "title": {"font": words, "standoff": 10},
        "zeroline": False,
        "automargin": True,
    }
    corner = {"x": 0, "xref": "paper", "xanchor": "left", "pad": {"t": 14}}
    corner |= {"y": 1, "yref": "container", "yanchor": "top"}
    above = {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"}
    hover = {"bgcolor": paper, "bordercolor": soft, "align": "left"}
    bar = {"outlinewidth": 0, "ticks": "", "tickfont": small}
    return go.layout.Template(
        layout={
            "font": {"family": FONT} | words,
            "title": {"font": {"size": 14, "color": ink}} | corner,
            "paper_bgcolor": paper,
            "plot_bgcolor": clear,
            "colorway": [ink],
            "xaxis": axis,
            "yaxis": axis,
            "annotationdefaults": {"font": small, "showarrow": False},
            "shapedefaults": {"line": {"color": ink}},
            "modebar": {"bgcolor": clear, "color": soft, "activecolor": ink},
            "hoverlabel": hover | {"font": {"family": FONT} | words},
            "legend": above | {"font": words},
            "margin": {"l": 48, "r": 12, "t": 76, "b": 44},
        },
        data={
            "heatmap": [
                {"textfont": {"size": 11}, "colorbar": bar, "hoverongaps": False}
            ],
            "scatter": [{"marker": {"line": {"color": paper}}}],
        },
    )


def new_figure(title: str, *, height: int, **panels: Any) -> go.Figure:
    """Empty figure, dark if plotly's default template is; `panels` are for `make_subplots`."""
    figure = make_subplots(**panels) if panels else go.Figure()
    look = template("dark" if "dark" in str(pio.templates.default) else "light")
    return figure.update_layout(template=look, title_text=title, height=height)


def stacked(
    title: str, rows: int, *, spacing: float = 0.06, **panels: Any
) -> go.Figure:
    """Return a figure of `rows` stacked panels with a common x axis."""
    panels |= {
        "rows": rows,
        "cols": 1,
        "shared_xaxes": True,
        "vertical_spacing": spacing,
    }
    return new_figure(title, **panels)


def set_x(figure: go.Figure, axis: Mapping[str, Any], title: str) -> None:
    """Give every x axis the keywords `axis`, and the last x axis the title."""
    figure.update_xaxes(**axis)
    *_, last = figure.select_xaxes()
    last.title.text = title


def set_counts(figure: go.Figure, counts: Any, title: str, *, base: int = 2) -> None:
    """Give every x axis a log scale with ticks at powers of `base` up to the largest count."""
    longest = max(1, int(np.max(counts)))
    powers = [base**k for k in range(longest.bit_length()) if base**k <= longest]
    set_x(figure, log_axis({power: f"{power:,}" for power in powers}), title)


def sequential(z: np.ndarray) -> list[list[Any]]:
    """Colours from 0 to the largest number; on a log scale if a few cells dominate."""
    z = z[np.isfinite(z)]
    dominated = z.size and z.max() > DOMINATES * np.quantile(z, 0.9)
    scale = get_colorscale(SEQUENTIAL)
    return [[(1e2**at - 1) / 99 if dominated else at, color] for at, color in scale]


def interval_bars(value: Any, low: Any, high: Any, **look: Any) -> dict[str, Any]:
    """plotly's error bars from `value` to both ends of its interval; length 0 for NaN."""
    above, below = (
        np.nan_to_num(np.subtract(*ends)) for ends in ((high, value), (value, low))
    )
    bars = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
    return bars | {"thickness": 1.5} | look


def log_axis(names: Mapping[Any, str], **more: object) -> dict[str, Any]:
    """Keywords of `update_xaxes` for a log scale with ticks: `names` maps values to labels."""
    ticks = {"tickvals": list(names), "ticktext": list(names.values())}
    return {"type": "log", "tickmode": "array", **ticks, **more}


def index_axis(
    count: int, what: str, *, most: int = 8, room: float = 0.0
) -> dict[str, Any]:
    """Keywords of `update_yaxes` for rows 0 to `count` - 1, with at most `most` ticks."""
    step = 2 ** max(0, int(np.ceil(np.log2(count / most))))
    ends = [count - 0.5 + room, -0.5 - room]
    ticks = {"range": ends, "dtick": step, "tick0": 0, "showgrid": False}
    return ticks | {"title_text": f"{what} (index)"}


def layer_map(title: str, layers: int, count: int, across: str) -> go.Figure:
    """Figure for cells of 13 to 40 pixels, with a row for each layer, and axes with indices."""
    height = int(np.clip(layers * 40, 200, max(300, layers * 13)) + 130)
    figure, axes = (
        new_figure(title, height=height),
        ((layers, "layer"), (count, across)),
    )
    # The room at both ends of an axis is for the stroke of the frame.
    down, right = (
        index_axis(n, x, most=16, room=max(0.05, 0.006 * n)) for n, x in axes
    )
    figure.update_yaxes(**down)
    return figure.update_xaxes(**right | {"range": right["range"][::-1]})


def mark(
    figure: go.Figure,
    x: float,
    text: str,
    *,
    row: Any = "all",
    col: Any = "all",
    **look: Any,
) -> go.Figure:
    """Draw a dotted line at x in the panels of `row` and `col`, and `text` above the first."""
    line = DOTTED | {"color": look.pop("color", MUTED)}
    figure.add_vline(x=x, line=line, name="context", row=row, col=col)
    drawn = float(np.log10(x)) if figure.layout.xaxis.type == "log" else x
    number = "" if row in (1, "all") else row
    place = {"x": drawn, "xref": f"x{number}", "y": 1, "yref": f"y{number} domain"}
    place |= {"yanchor": "top", "text": text, "name": "context"}
    return figure.add_annotation(place | look)


def note_missing(figure: go.Figure, why: str, values: Any = None) -> go.Figure:
    """Add the note "no data: `why`" if none of the `values` (default: all drawn) is finite."""
    if values is None:
        drawn = [
            trace.z if trace.type == "heatmap" else trace.y for trace in figure.data
        ]
        values = np.concatenate([[], *map(np.ravel, drawn)])
    if not np.isfinite(np.asarray(values, float)).any():
        place = {"x": 0.5, "y": 0.5, "xref": "paper", "yref": "paper", "name": NO_DATA}
        figure.add_annotation(place | {"text": f"no data: {why}", "font_size": 13})
    return figure
