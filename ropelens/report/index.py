"""A gallery of pages, <analysis>/<model>/index.html: a small picture and a sentence each."""

from __future__ import annotations

import base64
import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from ropelens.errors import public
from ropelens.figures.style import MUTED
from ropelens.files.folder import write_whole
from ropelens.files.results import read_record
from ropelens.report.render import asset, content_policy, environment
from ropelens.report.words import plural

PAYLOAD = re.compile(r'<script type="text/plain" id="payload">([A-Za-z0-9+/=]*)</script>')
SENTENCES = re.compile(r"(?<=\.) (?=[A-Z])")
WIDE, HIGH = 160, 100
"""The size of a picture, in its own units."""
MOST = 60
"""Points of a trace that are drawn, at most; of a heat map, rows and columns."""


@public
def write_index(folder: str | Path) -> Path:
    """Write `folder`/index.html, a gallery of every `folder`/<analysis>/<model>/index.html.

    The picture is the page's first figure, drawn small. Model and sentence (the first of
    "findings") are from the run.json beside the page; without one the page has its place alone.
    """
    folder = Path(folder)
    analyses: dict[str, list[dict[str, Any]]] = {}
    pages = sorted(folder.glob("*/*/index.html"))
    for page in pages:
        record = read_record(page.parent)
        entry = {
            "model": record.get("model", {}).get("name") or page.parent.name,
            "link": quote(page.relative_to(folder).as_posix()),
            "finding": SENTENCES.split((record.get("findings") or [""])[0])[0],
            "shapes": list(first_figure(page.read_text(encoding="utf-8"))),
        }
        analyses.setdefault(page.parent.parent.name, []).append(entry)
    text = (
        environment()
        .get_template("index.html")
        .render(
            analyses=analyses,
            facts=[plural(len(pages), "page")],
            size=(WIDE, HIGH),
            policy=content_policy(),
            style=asset("page.css"),
        )
    )
    return write_whole(folder / "index.html", text)


def first_figure(page: str) -> Iterator[dict[str, Any]]:
    """The first figure of a page as shapes of SVG; none where the page holds no figure."""
    packed = PAYLOAD.search(page)
    if packed is None:
        return
    try:
        figures = json.loads(gzip.decompress(base64.b64decode(packed[1])))["figures"]
    except (OSError, EOFError, ValueError):  # a damaged page, which opens without figures
        return
    for figure in list(figures.values() if isinstance(figures, dict) else figures)[:1]:
        yield from shapes(figure)


def shapes(figure: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Rectangles and lines of SVG for the traces in the first panel of a figure."""
    traces = [
        trace
        for trace in figure["data"]
        if (trace.get("xaxis", "x"), trace.get("yaxis", "y")) == ("x", "y")
    ]
    maps = [trace for trace in traces if trace["type"] == "heatmap"]
    for trace in maps:
        yield from _cells(trace)
    lines = [t for t in traces if t["type"] in ("scatter", "bar")] if not maps else []
    x, y = (
        _places(lines, axis, figure["layout"], size)
        for axis, size in (("x", WIDE), ("y", HIGH))
    )
    for trace, across, along in zip(lines, x, y, strict=True):
        known = np.isfinite(across[: len(along)]) & np.isfinite(along[: len(across)])
        step, color = -(-int(known.sum()) // MOST) or 1, _color(trace)
        points = [(a, HIGH - b) for a, b in zip(across, along, strict=False)]
        points = [point for point, there in zip(points, known, strict=False) if there][::step]
        if "lines" in trace.get("mode", "lines") and len(points) > 1:
            yield {"points": " ".join(f"{a:.1f},{b:.1f}" for a, b in points), "color": color}
            continue
        for a, b in points:
            size = {"width": 4, "height": 4, "color": color}
            yield {"x": f"{a - 2:.1f}", "y": f"{b - 2:.1f}"} | size


def _places(
    traces: list[dict[str, Any]], axis: str, layout: dict[str, Any], size: int
) -> list[np.ndarray]:
    """Where the points of each trace stand on an axis, from 0 to `size`; names are counted."""
    look = layout.get(f"{axis}axis", {})
    values = [_array(trace.get(axis, [])) for trace in traces]
    names = list(dict.fromkeys(v for one in values for v in one if isinstance(v, str)))
    numbers = [
        np.array([names.index(v) if isinstance(v, str) else v for v in one], float)
        for one in values
    ]
    if look.get("type") == "log":
        numbers = [np.log10(np.where(one > 0, one, np.nan)) for one in numbers]
    every = np.concatenate([*numbers, [np.nan]])
    if not np.isfinite(every).any():
        return numbers
    low, breadth = np.nanmin(every), np.nanmax(every) - np.nanmin(every) or 1
    shares = [0.04 + 0.92 * (one - low) / breadth for one in numbers]
    first, last = look.get("range") or (0, 1)
    return [size * (1 - share if first > last else share) for share in shares]


def _color(trace: dict[str, Any]) -> str:
    color = trace.get("line", {}).get("color") or trace.get("marker", {}).get("color")
    return color if isinstance(color, str) else MUTED


def _cells(trace: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The cells of a heat map, row 0 on top."""
    z = _array(trace["z"]).astype(float)
    z = z[:: -(-len(z) // MOST), :: -(-z.shape[1] // MOST)]
    low = trace.get("zmin", np.nanmin(z) if np.isfinite(z).any() else 0)
    high = trace.get("zmax", np.nanmax(z) if np.isfinite(z).any() else 1)
    shares = np.clip((z - low) / ((high - low) or 1), 0, 1)
    tall, wide = HIGH / len(z), WIDE / z.shape[1]
    for row, column in np.argwhere(np.isfinite(shares)):
        share, scale = float(shares[row, column]), trace["colorscale"]
        place = {"x": round(column * wide, 1), "y": round(row * tall, 1)}
        place["color"] = min(scale, key=lambda stop: abs(stop[0] - share))[1]
        yield place | {"width": round(wide + 0.2, 1), "height": round(tall + 0.2, 1)}


def _array(values: Any) -> np.ndarray:
    """An array of a figure's JSON: a list, or bytes in base64 with their type and shape."""
    if isinstance(values, dict):
        data = np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"])
        shape = [int(size) for size in values.get("shape", str(len(data))).split(",")]
        return data.reshape(shape).astype(float)
    return np.array(values, dtype=object)
