"""How a notebook shows an analysis: what was found, a map of the heads, labels by layer."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import pandas as pd

from ropelens.figures.style import COLORS, LABELS, MUTED, SIGNS

CELL = 16
"""Pixels of a head on the map; of wide layers fewer."""

WIDEST = 640
FAINT, FULL = 0.2, 2.0
"""The opacity of a head without bits, and the bits from which on it is opaque."""


def shown(model: str, findings: Sequence[str], heads: pd.DataFrame) -> str:
    """HTML without scripts, in which every text is escaped."""
    said = "".join(f"<p>{escape(finding)}</p>" for finding in findings)
    present = [label for label in LABELS if (heads["label"] == label).any()]
    counts = pd.crosstab(heads["layer"], heads["label"]).reindex(columns=present, fill_value=0)
    legend = " ".join(
        f'<span style="white-space:nowrap"><span style="color:{COLORS[label]}">{SIGNS[label]}'
        f"</span> {escape(label)}</span>"
        for label in present
    )
    return (
        f"<div><p><b>{escape(model)}</b></p>{said}<p>{legend}</p>"
        f"{head_map(heads)}{counts.to_html()}</div>"
    )


def head_map(heads: pd.DataFrame) -> str:
    """An SVG of layers by heads: the colour is the label, its strength the bits chosen."""
    layers, count = int(heads["layer"].max()) + 1, int(heads["head"].max()) + 1
    cell, left = max(3, min(CELL, WIDEST // count)), 3 * CELL
    cells = []
    columns = zip(*(heads[name] for name in COLUMNS), strict=True)
    for layer, head, label, bits, offset in columns:
        strength = FAINT + (1 - FAINT) * min(max(float(bits), 0) / FULL, 1)
        at = "" if pd.isna(offset) else f", offset {offset:.0f}"
        name = f"{int(layer)}.{int(head)}: {label}, {bits:.2f} bits{at}"
        cells.append(
            f'<rect x="{left + int(head) * cell}" y="{int(layer) * cell}" '
            f'width="{cell - 1}" height="{cell - 1}" fill="{COLORS.get(label, MUTED)}" '
            f'fill-opacity="{strength:.2f}">'
            f"<title>{escape(name)}</title></rect>"
        )
        if cell == CELL:
            cells.append(
                f'<text x="{left + (int(head) + 0.5) * cell - 0.5}" '
                f'y="{(int(layer) + 1) * cell - 5}" text-anchor="middle" font-size="9" '
                f'fill="{"#fff" if strength > 0.5 else MUTED}" pointer-events="none">'
                f"{SIGNS.get(label, '')}</text>"
            )
    step = max(1, 12 // cell)  # so that numbers of layers do not touch
    names = "".join(
        f'<text x="{left - 4}" y="{layer * cell + cell - 3}" text-anchor="end" '
        f'font-size="10" fill="{MUTED}">{layer}</text>'
        for layer in range(0, layers, step)
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{left + count * cell}" '
        f'height="{layers * cell}"><title>Heads by layer</title>{names}{"".join(cells)}</svg>'
    )


COLUMNS = ("layer", "head", "label", "total_bits", "offset")
