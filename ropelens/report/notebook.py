"""Displays of results in notebooks: sentences, a map of heads and a table of claims."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.arguments import public
from ropelens.errors import BadArgument, explained
from ropelens.figures import inputs
from ropelens.figures.head_map import FULL_COLOR, MAX_HEADS_WITH_SIGNS
from ropelens.figures.style import COLORS, SIGNS
from ropelens.profiles.measures import complete_profile
from ropelens.report.claims_page import GLYPHS, LedgerRow, ledger_rows
from ropelens.report.render import environment
from ropelens.report.run_facts import model_name, short_facts
from ropelens.report.sentences import describe
from ropelens.report.sentences.claims import claims_sentences
from ropelens.report.sentences.heads import heads_sentences, label_counts

# Pixels of a map whose cells are neither very large nor very small
WIDTH = 600
HEIGHT = 480
SMALLEST_CELL = 4  # pixels
WIDEST_CELL = 44
TALLEST_CELL = 24
CELL_WITH_SIGN = 12  # pixels: height from which a cell has room for a sign
LEVELS = 5  # strengths of a colour
MOST_HOVERS = (
    1_600  # heads with one line of text for the pointer; a quarter has all lines
)


@dataclass(frozen=True)
class Display:
    """HTML for a notebook, and the sentences in it for a terminal."""

    html: str = field(repr=False)
    sentences: Sequence[str]

    def _repr_html_(self) -> str:
        return self.html


@public
def show(results: xr.Dataset | pd.DataFrame) -> Display:
    """Display results in a notebook, as the last expression of a cell.

    A profile or a table of heads gives sentences and a map of the heads. The table of
    `test_claims` gives a row for each claim, with its number next to the null. Other results
    give sentences. The HTML has less than 300 kB, loads nothing from a network, runs no
    script, and has the text colour of the notebook. Raises `BadArgument` for other tables.
    """
    hint = "a profile, or a table of classify_heads or test_claims"
    with explained("These results cannot be shown.", hint, error=BadArgument):
        if isinstance(results, pd.DataFrame):
            if "verdict" not in results:
                return display(heads_sentences(results), results)
            sentences = claims_sentences(results.assign(model=""))
            return display(sentences, claims=ledger_rows(results))
        if results.attrs.get("kind") != "profile":
            return display(describe(results))
        profile = complete_profile(results)
        heads = inputs.head_table(profile, None)
        return display(describe(profile), heads, profile)


def display(
    sentences: Sequence[str],
    heads: pd.DataFrame | None = None,
    profile: xr.Dataset | None = None,
    *,
    claims: Sequence[LedgerRow] = (),
    page: Path | None = None,
) -> Display:
    """Display sentences, a map of heads, a table of claims, and the path of a page."""
    html = environment().get_template("notebook.html")
    text = html.render(
        sentences=sentences,
        title="" if profile is None else model_name(profile),
        facts=() if profile is None else short_facts(profile),
        map=None if heads is None else head_map(heads),
        claims=claims,
        page=page,
        colors=COLORS,
        glyphs=GLYPHS,
    )
    return Display(text, sentences)


@dataclass(frozen=True)
class Cells:
    """Cells of a map with one label and one strength of its colour: [cell, (layer, head)]."""

    label: str
    strength: float
    places: np.ndarray


@dataclass(frozen=True)
class HeadText:
    """A sign in the cell of a head, or the text that the pointer shows."""

    layer: int
    head: int
    text: str


@dataclass(frozen=True)
class LegendEntry:
    """A label in the legend, with its sign and its number of heads."""

    label: str
    sign: str
    count: int


@dataclass(frozen=True)
class HeadMap:
    """A map of heads. `across` and `down` are the pixels from cell to cell, with a `gap`."""

    across: int
    down: int
    gap: int
    layers: int
    heads: int
    cells: Sequence[Cells]
    signs: Sequence[HeadText]
    hovers: Sequence[HeadText]
    legend: Sequence[LegendEntry]


def head_map(heads: pd.DataFrame) -> HeadMap:
    """The map of a table of heads, which colours each head by its label and its bits."""
    layers = int(heads["layer"].max()) + 1
    count = int(heads["head"].max()) + 1
    across = int(np.clip(WIDTH // count, SMALLEST_CELL, WIDEST_CELL))
    down = int(np.clip(HEIGHT // layers, SMALLEST_CELL, TALLEST_CELL))
    has_signs = count <= MAX_HEADS_WITH_SIGNS and down >= CELL_WITH_SIGN
    gap = 2 if has_signs else int(across > 6)
    counts = label_counts(heads)
    return HeadMap(
        across=across,
        down=down,
        gap=gap,
        layers=layers,
        heads=count,
        cells=_cells(heads),
        signs=_texts(heads, _signs(heads)) if has_signs else (),
        hovers=_texts(heads, _hovers(heads)) if len(heads) <= MOST_HOVERS else (),
        legend=[
            LegendEntry(label, SIGNS[label], n) for label, n in counts.items() if n
        ],
    )


def _cells(heads: pd.DataFrame) -> list[Cells]:
    """The heads by label and strength. More bits have a stronger colour."""
    places = heads[["layer", "head"]].astype(int)
    level = np.ceil(LEVELS * inputs.numbers(heads, "total_bits") / FULL_COLOR)
    strength = level.clip(1, LEVELS) / LEVELS
    cells = []
    for key, alike in places.groupby([heads["label"], strength]):
        label, of_cells = cast(tuple[str, float], key)
        cells.append(Cells(label, of_cells, alike.values))
    return cells


def _texts(heads: pd.DataFrame, texts: Sequence[str]) -> list[HeadText]:
    places = zip(heads["layer"], heads["head"], texts, strict=True)
    return [HeadText(int(layer), int(head), text) for layer, head, text in places]


def _signs(heads: pd.DataFrame) -> list[str]:
    """The offset of each head, or the sign of its label if it has no offset."""
    signs = []
    offsets = inputs.numbers(heads, "offset")
    for label, offset in zip(heads["label"], offsets, strict=True):
        signs.append(SIGNS[label] if np.isnan(offset) else f"{offset:.0f}")
    return signs


def _hovers(heads: pd.DataFrame) -> list[str]:
    """Text for each head, without tags; only the first line if there are many heads."""
    texts = []
    for hover in inputs.hover_lines(heads):
        lines = re.sub("</?b>", "", hover).split("<br>")
        if len(heads) > MOST_HOVERS // 4:
            lines = lines[:1]
        texts.append("\n".join(lines))
    return texts
