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
from ropelens.figures.text import plural
from ropelens.files.folder import write_whole
from ropelens.files.results import read_record
from ropelens.report.render import render

PAYLOAD = re.compile(r'<script type="text/plain" id="payload">([A-Za-z0-9+/=]*)</script>')
SENTENCES = re.compile(r"(?<=\.) (?=[A-Z])")
WIDE, HIGH = 160, 100  # the size of a picture, in its own units
MOST = 60  # points of a trace that are drawn, at most; of a heat map, rows and columns


@public
def write_index(folder: str | Path) -> Path:
    """Write `folder`/index.html, a gallery of every `folder`/<analysis>/<model>/index.html.

    The picture is the page's first figure, drawn small. Model and sentence (the first of
    "findings") are from the run.json beside the page; without one the page has its place alone.
    In each analysis the model with most heads comes first.
    """
    folder = Path(folder)
    analyses: dict[str, list[dict[str, Any]]] = {}
    pages = sorted(page for page in folder.glob("*/*/index.html") if page.is_file())
    for page in pages:
        record = read_record(page.parent)
        entry = {
            "model": record.get("model", {}).get("name") or page.parent.name,
            "link": quote(page.relative_to(folder).as_posix()),
            "finding": SENTENCES.split((record.get("findings") or [""])[0])[0],
            "shapes": list(first_figure(page.read_text(encoding="utf-8"))),
            "heads": sum(record.get("labels", {}).values()),
        }
        analyses.setdefault(page.parent.parent.name, []).append(entry)
        analyses[page.parent.parent.name].sort(key=lambda entry: -entry["heads"])
    facts = [plural(len(pages), "page")]
    text = render("index.html", analyses=analyses, facts=facts, size=(WIDE, HIGH))
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
    yield from shapes(next(iter(figures.values() if isinstance(figures, dict) else figures)))


def shapes(figure: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """SVG of the first panel of a figure: lines of its scatters, cells of its heat maps.

    A line shows the values of a trace in their order, on one scale for all traces.
    """
    lines = []
    for trace in figure["data"]:
        if (trace.get("xaxis", "x"), trace.get("yaxis", "y")) != ("x", "y"):
            continue
        if trace["type"] == "heatmap":
            yield from _cells(trace)
        elif trace["type"] in ("scatter", "bar"):
            arrays = [_array(trace[axis]) for axis in "yx" if trace.get(axis)]
            numbers = [one for one in arrays if not isinstance(next(iter(one), 0), str)]
            values = np.array(numbers[0] if numbers else [], float)
            values = values[np.isfinite(values)]
            if len(values):
                lines.append((trace, values[:: -(-len(values) // MOST)]))
    every = np.concatenate([[], *(values for _, values in lines)])
    low, high = every.min(initial=np.inf), every.max(initial=-np.inf)
    for trace, values in lines:
        across = WIDE * np.linspace(0.04, 0.96, max(len(values), 2))
        along = HIGH * (0.96 - 0.92 * (values - low) / ((high - low) or 1))
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in zip(across, along, strict=False))
        color = trace.get("line", {}).get("color") or trace.get("marker", {}).get("color")
        stroke = color if isinstance(color, str) else MUTED
        yield {"d": f"M{points}", "stroke": stroke, "fill": "none"}


def _cells(trace: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The cells of a heat map, row 0 on top."""
    z = _array(trace["z"]).astype(float)
    z = z[:: -(-len(z) // MOST), :: -(-z.shape[1] // MOST)]
    low, high = trace.get("zmin", 0), trace.get("zmax", np.nanmax(z, initial=0))
    shares = np.clip((z - low) / ((high - low) or 1), 0, 1)
    tall, wide, scale = HIGH / len(z), WIDE / z.shape[1], trace["colorscale"]
    for row, column in np.argwhere(np.isfinite(shares)):
        color = min(scale, key=lambda stop: abs(stop[0] - shares[row, column]))[1]
        place, across = f"M{column * wide:.1f},{row * tall:.1f}", f"{wide + 0.2:.1f}"
        cell = f"{place}h{across}v{tall + 0.2:.1f}h-{across}z"
        yield {"d": cell, "stroke": "none", "fill": color}


def _array(values: Any) -> np.ndarray:
    """An array of a figure's JSON: a list, or bytes in base64 with their type and shape."""
    if isinstance(values, dict):
        data = np.frombuffer(base64.b64decode(values["bdata"]), values["dtype"])
        shape = [int(size) for size in values.get("shape", str(len(data))).split(",")]
        return data.reshape(shape).astype(float)
    return np.array(values, dtype=object)
