"""Figure of differences from a baseline during training, with a line for each variant."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go
from jaxtyping import Float
from plotly.colors import hex_to_rgb

from ropelens.figures import style
from ropelens.figures.formats import plotly_text, short_count, signed
from ropelens.figures.group_looks import Look

Points = Float[np.ndarray, " point"]

HEIGHT = 420
LABEL_HEIGHT = 0.085  # of a label of two rows, as a share of the height of the axis
TRANSIENT = 0.1  # share of the points that may be outside of the axis at each end
EARLY = 0.25  # checkpoints at powers of two have their median step before this share


@dataclass(frozen=True)
class DifferenceLine:
    """Differences of a group from the baseline by training tokens, with 95 % intervals.

    The ends of an interval are NaN if it is not known.
    """

    group: str
    tokens: Points
    change: Points
    low: Points
    high: Points


def plot_difference_lines(
    title: str,
    lines: Sequence[DifferenceLine],
    looks: Mapping[str, Look],
    *,
    baseline: str,
    y_title: str,
) -> go.Figure:
    """Figure of `lines`, with their 95 % intervals as bands, and their names at their ends.

    The grey line at 0 is the baseline. The axis shows the last points with their intervals, and
    all but the most extreme of the other points.
    """
    figure = style.new_figure(title, height=HEIGHT)
    figure.add_hline(y=0, line={"color": style.MUTED, "width": 4})
    for line in lines:
        _add_band(figure, line, looks[line.group])
    for line in lines:
        _add_line(figure, line, looks[line.group])
        _add_last_interval(figure, line, looks[line.group])
    figure.update_yaxes(title_text=y_title, exponentformat="none")
    figure.update_layout(showlegend=False, margin_r=_room_for_names(lines, baseline))
    if lines:
        bottom, top = _span(lines)
        figure.update_yaxes(range=[bottom, top])
        _name_ends(figure, lines, looks, baseline)
        _set_tokens(figure, lines)
    return style.note_missing(figure, "no two losses are on the same text")


def _add_band(figure: go.Figure, line: DifferenceLine, look: Look) -> None:
    """Shade the interval of each point where it is known."""
    known = np.isfinite(line.low)
    if known.sum() < 2:
        return
    tokens = line.tokens[known]
    red, green, blue = hex_to_rgb(look.line["color"])
    figure.add_scatter(
        x=np.concatenate([tokens, tokens[::-1]]),
        y=np.concatenate([line.high[known], line.low[known][::-1]]),
        fill="toself",
        fillcolor=f"rgba({red},{green},{blue},0.13)",
        line_width=0,
        mode="lines",
        hoverinfo="skip",
        name=plotly_text(line.group),
        meta={"role": "interval"},
    )


def _add_line(figure: go.Figure, line: DifferenceLine, look: Look) -> None:
    name = plotly_text(line.group)
    hovers = []
    for change, low, high in zip(line.change, line.low, line.high, strict=True):
        words = signed(change)
        if np.isfinite(low):
            words += f" (95% interval {signed(low)} to {signed(high)})"
        hovers.append(words)
    figure.add_scatter(
        x=line.tokens,
        y=line.change,
        text=hovers,
        mode="lines+markers",
        line={**look.line, "width": 2.5},
        marker={"symbol": look.symbol, "size": 7},
        hovertemplate=f"{name}<br>%{{x:,}} tokens: %{{text}}<extra></extra>",
        name=name,
    )


def _add_last_interval(figure: go.Figure, line: DifferenceLine, look: Look) -> None:
    """Draw the interval of the last point as a bar."""
    color = look.line["color"]
    last = slice(-1, None)
    figure.add_scatter(
        x=line.tokens[last],
        y=line.change[last],
        error_y=style.interval_bars(
            line.change[last], line.low[last], line.high[last], color=color, width=5
        ),
        mode="markers",
        marker={"symbol": look.symbol, "size": 11, "color": color},
        hoverinfo="skip",
        name=plotly_text(line.group),
        meta={"role": "last"},
    )


def _span(lines: Sequence[DifferenceLine]) -> tuple[float, float]:
    """The ends of the axis of differences."""
    changes = np.concatenate([line.change for line in lines])
    ends = [line.low[-1] for line in lines] + [line.high[-1] for line in lines]
    ends += [line.change[-1] for line in lines]
    shown = [0.0, *ends, *np.nanquantile(changes, [TRANSIENT, 1 - TRANSIENT])]
    bottom = float(np.nanmin(shown))
    top = float(np.nanmax(shown))
    room = 0.06 * (top - bottom) or 0.01
    return bottom - room, top + room


def _name_ends(
    figure: go.Figure,
    lines: Sequence[DifferenceLine],
    looks: Mapping[str, Look],
    baseline: str,
) -> None:
    """Write the name and the last difference of each line to the right of its end."""
    names = {baseline: f"<b>{plotly_text(baseline)}</b>"}
    heights = {baseline: 0.0}
    colors = {baseline: style.MUTED}
    for line in lines:
        change = float(line.change[-1])
        names[line.group] = f"<b>{plotly_text(line.group)}</b><br>{signed(change)}"
        heights[line.group] = change
        colors[line.group] = looks[line.group].line["color"]
    bottom, top = figure.layout.yaxis.range
    least = LABEL_HEIGHT * (top - bottom)
    for group, height in apart(heights, least=least).items():
        figure.add_annotation(
            x=1,
            xref="paper",
            xanchor="left",
            xshift=12,
            y=height,
            yref="y",
            text=names[group],
            align="left",
            font={"color": colors[group], "size": 12},
            name="line end",
        )


def apart(heights: Mapping[str, float], *, least: float) -> dict[str, float]:
    """Heights in the same order, moved as little as needed to be `least` apart.

    Neighbours that are too close form a block around the mean of their heights.
    """
    blocks: list[list[str]] = []
    for name in sorted(heights, key=lambda name: heights[name]):
        blocks.append([name])
        while len(blocks) > 1 and _overlap(blocks[-2], blocks[-1], heights, least):
            upper = blocks.pop()
            blocks[-1].extend(upper)
    placed = {}
    for block in blocks:
        for number, name in enumerate(block):
            placed[name] = _lowest(block, heights, least) + number * least
    return placed


def _lowest(block: list[str], heights: Mapping[str, float], least: float) -> float:
    """The height of the lowest name of a block."""
    middle = sum(heights[name] for name in block) / len(block)
    return middle - least * (len(block) - 1) / 2


def _overlap(
    lower: list[str], upper: list[str], heights: Mapping[str, float], least: float
) -> bool:
    highest = _lowest(lower, heights, least) + least * (len(lower) - 1)
    return _lowest(upper, heights, least) - highest < least


def _room_for_names(lines: Sequence[DifferenceLine], baseline: str) -> int:
    """Width of the right margin in pixels. Longer names are cut off."""
    names = [baseline, *(line.group for line in lines)]
    return 24 + 7 * min(22, max(map(len, names)))


def _set_tokens(figure: go.Figure, lines: Sequence[DifferenceLine]) -> None:
    """Make x training tokens, on a log scale if the checkpoints are at powers of two."""
    tokens = np.unique(np.concatenate([line.tokens for line in lines]))
    tokens = tokens[tokens > 0]
    last = float(tokens[-1])
    if np.median(tokens) >= EARLY * last:
        figure.update_xaxes(
            title_text="training tokens", range=[0, last * 1.02], exponentformat="SI"
        )
        return
    labels = {}
    power = 10.0 ** np.ceil(np.log10(tokens[0]))
    while power <= last:
        labels[power] = short_count(power)
        power *= 10
    ends = np.log10([tokens[0] * 0.9, last * 1.1])
    style.set_log_ticks(figure, labels, ends=ends.tolist())
    style.set_x_title(figure, "training tokens (log scale)")
