"""The small pictures in a gallery."""

import base64
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from markupsafe import Markup

from ropelens.claims.verdict import VERDICTS

PICTURE = "picture.webp"
"""File next to a page: its main figure, which tools/gallery.py takes in a browser."""

SIDE = 20  # pixels of a square and its gap
GAP = 3
IN_ROW = 12


def picture_of(folder: Path) -> Markup:
    """The picture of the page in `folder` for its card; empty without one.

    It is the picture of the main figure, or a square for each claim in a ledger of one model.
    """
    file = folder / PICTURE
    if file.is_file():
        data = base64.b64encode(file.read_bytes()).decode()
        return Markup('<img src="data:image/webp;base64,{}" alt="">').format(data)
    ledger = folder / "claims.csv"
    if ledger.is_file():
        return verdict_squares(_verdicts(ledger))
    return Markup("")


def _verdicts(ledger: Path) -> list[str]:
    """The verdicts of a ledger of one model, in the order of `VERDICTS`; [] for several."""
    table = pd.read_csv(ledger, usecols=["model", "verdict"])
    if table["model"].nunique() > 1:
        return []
    known = table["verdict"][table["verdict"].isin(VERDICTS)]
    return sorted(known, key=VERDICTS.index)


def verdict_squares(verdicts: Sequence[str]) -> Markup:
    """A square for each verdict: filled if the claim holds, crossed if it is contradicted.

    Claims that are not testable have a line, and unresolved claims an outline.
    """
    if not verdicts:
        return Markup("")
    squares = []
    for number, verdict in enumerate(verdicts):
        x = SIDE * (number % IN_ROW)
        y = SIDE * (number // IN_ROW)
        squares.append(_square(verdict, x, y))
    rows = -(-len(verdicts) // IN_ROW)
    box = f"0 0 {SIDE * IN_ROW} {SIDE * rows}"
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
