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

HEIGHT = 380  # in pixels, and for each line
HEIGHT_OF_LINE = 12
ROW_HEIGHT = 17  # of a row of a label, in pixels
MARGINS = 90  # above and below the axis, in pixels
TICKS = 7  # at most, on an axis without a log scale
LONGEST_NAME = 13  # characters in one row
BAR_STEP = 0.03  # from one bar to the next, as a share of the axis
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

    The grey line at 0 is the baseline. Bars to the right of the lines are the intervals of the
    last points. The axis shows these intervals, and all but the most extreme of other points.
    """
    figure = style.new_figure(title, height=HEIGHT + HEIGHT_OF_LINE * len(lines))
    figure.add_hline(y=0, line={"color": style.MUTED, "width": 4})
    for line in lines:
        _add_band(figure, line, looks[line.group])
    for line in lines:
        _add_line(figure, line, looks[line.group])
    figure.update_yaxes(title_text=y_title, exponentformat="none")
    figure.update_layout(showlegend=False, margin_r=_room_for_names(lines, baseline))
    if lines:
        bottom, top = _span(lines)
        figure.update_yaxes(range=[bottom, top])
        axis = _token_axis(lines)
        for number, line in enumerate(lines, start=1):
            x = axis.beyond(number * BAR_STEP)
            _add_last_interval(figure, line, looks[line.group], x=x)
        axis.set(figure, room=(len(lines) + 1) * BAR_STEP)
        _name_ends(figure, lines, looks, baseline)
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
        fillcolor=f"rgba({red},{green},{blue},0.08)",
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


def _add_last_interval(
    figure: go.Figure, line: DifferenceLine, look: Look, *, x: float
) -> None:
    """Draw the interval of the last point as a bar at `x`."""
    color = look.line["color"]
    last = slice(-1, None)
    figure.add_scatter(
        x=[x],
        y=line.change[last],
        error_y=style.interval_bars(
            line.change[last],
            line.low[last],
            line.high[last],
            color=color,
            thickness=2,
            width=4,
        ),
        mode="markers",
        marker={"symbol": look.symbol, "size": 9, "color": color},
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
    names = {baseline: f"<b>{_in_rows(baseline)}</b>"}
    heights = {baseline: 0.0}
    colors = {baseline: style.MUTED}
    for line in lines:
        change = float(line.change[-1])
        names[line.group] = f"<b>{_in_rows(line.group)}</b><br>{signed(change)}"
        heights[line.group] = change
        colors[line.group] = looks[line.group].line["color"]
    bottom, top = figure.layout.yaxis.range
    pixel = (top - bottom) / (figure.layout.height - MARGINS)
    sizes = {}
    for group, text in names.items():
        rows = 1 + text.count("<br>")
        sizes[group] = ROW_HEIGHT * rows * pixel
    labels = EndLabels(heights, sizes, bottom=bottom, top=top)
    for group, height in labels.apart().items():
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


@dataclass(frozen=True)
class EndLabels:
    """The `heights` and `sizes` of labels on an axis from `bottom` to `top`, by their names."""

    heights: Mapping[str, float]
    sizes: Mapping[str, float]
    bottom: float
    top: float

    def apart(self) -> dict[str, float]:
        """Middles of the labels, in the order of their heights, so that none overlap.

        Labels that would overlap form a block around the mean of their heights, or at the end
        of the axis, if the block would go beyond it.
        """
        blocks: list[list[str]] = []
        for name in sorted(self.heights, key=lambda name: self.heights[name]):
            blocks.append([name])
            while len(blocks) > 1 and self._overlap(blocks[-2], blocks[-1]):
                upper = blocks.pop()
                blocks[-1].extend(upper)
        placed = {}
        for block in blocks:
            edge = self._middle(block) - self._size(block) / 2
            for name in block:
                placed[name] = edge + self.sizes[name] / 2
                edge += self.sizes[name]
        return placed

    def _middle(self, block: list[str]) -> float:
        half = self._size(block) / 2
        mean = sum(self.heights[name] for name in block) / len(block)
        lowest = self.bottom + half
        highest = self.top - half
        if lowest > highest:  # the block is larger than the axis
            return (self.bottom + self.top) / 2
        return min(max(mean, lowest), highest)

    def _size(self, block: list[str]) -> float:
        return sum(self.sizes[name] for name in block)

    def _overlap(self, lower: list[str], upper: list[str]) -> bool:
        distance = self._middle(upper) - self._middle(lower)
        return distance < (self._size(lower) + self._size(upper)) / 2


def _in_rows(name: str) -> str:
    """The name in two rows if it is long: "p-rope-reversed:0.75" breaks before "reversed"."""
    if len(name) <= LONGEST_NAME:
        return plotly_text(name)
    breaks = [at for at, letter in enumerate(name) if letter in "-: /_"]
    middle = len(name) / 2
    after = min(breaks, key=lambda at: abs(at + 1 - middle), default=int(middle))
    first = name[: after + 1]
    second = name[after + 1 :]
    return f"{plotly_text(first)}<br>{plotly_text(second)}"


def _room_for_names(lines: Sequence[DifferenceLine], baseline: str) -> int:
    """Width of the right margin in pixels. Longer names are cut off."""
    rows = [baseline, *(line.group for line in lines)]
    longest = max(map(len, rows))
    return 24 + 8 * min(LONGEST_NAME, longest)


@dataclass(frozen=True)
class TokenAxis:
    """An axis of training tokens from `first` to `last`, on a log scale if `is_log`."""

    first: float
    last: float
    is_log: bool

    def beyond(self, share: float) -> float:
        """The place to the right of the last tokens, by a share of the axis."""
        if self.is_log:
            return self.last * (self.last / self.first) ** share
        return self.last * (1 + share)

    def set(self, figure: go.Figure, *, room: float) -> None:
        """Give the x axis a range with `room` on the right, ticks and a title."""
        end = self.beyond(room)
        if not self.is_log:
            ticks = _even_ticks(self.last)
            figure.update_xaxes(
                title_text="training tokens",
                range=[0, end],
                tickvals=ticks,
                ticktext=[short_count(tick) for tick in ticks],
            )
            return
        labels = {}
        power = 10.0 ** np.ceil(np.log10(self.first))
        while power <= self.last:
            labels[power] = short_count(power)
            power *= 10
        ends = np.log10([self.first * 0.9, end])
        style.set_log_ticks(figure, labels, ends=ends.tolist())
        style.set_x_title(figure, "training tokens (log scale)")


def _even_ticks(last: float) -> list[float]:
    """At most `TICKS` multiples of 1, 2 or 5 times a power of ten, from 0 to `last`."""
    power = 10.0 ** np.floor(np.log10(last / TICKS))
    factors = [factor for factor in (1, 2, 5, 10) if factor * power * TICKS > last]
    step = factors[0] * power
    return np.arange(0, last * (1 + 1e-9), step).tolist()


def _token_axis(lines: Sequence[DifferenceLine]) -> TokenAxis:
    """An axis with a log scale if the checkpoints are at powers of two."""
    tokens = np.unique(np.concatenate([line.tokens for line in lines]))
    tokens = tokens[tokens > 0]
    last = float(tokens[-1])
    is_log = len(tokens) > 1 and float(np.median(tokens)) < EARLY * last
    return TokenAxis(float(tokens[0]), last, is_log)
