"""The small pictures in a gallery."""

import base64
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from markupsafe import Markup

from ropelens.claims.verdict import VERDICTS

PICTURE = "picture.webp"
"""The file with the main figure of a page, which tools/gallery.py takes in a browser."""

SIDE = 20  # pixels of a square and its gap
GAP = 3
IN_ROW = 12


def picture_of(folder: Path) -> Markup:
    """The picture of the page in `folder` for its card; empty without one.

    It is the picture of the main figure, or squares for the claims in a ledger, with a line of
    squares for each model if there are several.
    """
    file = folder / PICTURE
    if file.is_file():
        data = base64.b64encode(file.read_bytes()).decode()
        return Markup('<img src="data:image/webp;base64,{}" alt="">').format(data)
    ledger = folder / "claims.csv"
    if ledger.is_file():
        return verdict_squares(_rows_of_verdicts(ledger))
    return Markup("")


def _rows_of_verdicts(ledger: Path) -> list[list[str]]:
    """A row of sorted verdicts for each model; several rows if there is one model."""
    table = pd.read_csv(ledger, usecols=["model", "verdict"])
    known = table[table["verdict"].isin(VERDICTS)]
    rows = []
    for _, of_model in known.groupby("model", sort=False):
        rows.append(sorted(of_model["verdict"], key=VERDICTS.index))
    if len(rows) != 1:
        return rows
    verdicts = rows[0]
    starts = range(0, len(verdicts), IN_ROW)
    return [verdicts[start : start + IN_ROW] for start in starts]


def verdict_squares(rows: Sequence[Sequence[str]]) -> Markup:
    """A square for each verdict: filled if the claim holds, crossed if it is contradicted.

    Claims that are not testable have a line, and unresolved claims an outline.
    """
    verdicts: list[str] = []
    squares = []
    for number, row in enumerate(rows):
        verdicts += row
        for place, verdict in enumerate(row):
            squares.append(_square(verdict, SIDE * place, SIDE * number))
    if not squares:
        return Markup("")
    width = max(IN_ROW, *[len(row) for row in rows])
    box = f"0 0 {SIDE * width} {SIDE * len(rows)}"
    counts = [f"{verdicts.count(name)} {name}" for name in VERDICTS if name in verdicts]
    return Markup(
        '<svg class="verdicts" viewBox="{}" role="img" aria-label="{}">{}</svg>'
    ).format(box, ", ".join(counts), Markup("").join(squares))


def _square(verdict: str, x: int, y: int) -> Markup:
    name = verdict.replace(" ", "-")
    size = SIDE - 2 * GAP
    left = x + GAP
    top = y + GAP
    right = left + size
    bottom = top + size
    shape = f"M{left} {top}H{right}V{bottom}H{left}Z"
    if verdict == "contradicted":
        shape = f"M{left} {top}L{right} {bottom}M{right} {top}L{left} {bottom}"
    if verdict == "not testable":
        middle = top + size // 2
        shape = f"M{left} {middle}H{right}"
    return Markup('<path class="{}" d="{}"/>').format(name, shape)
