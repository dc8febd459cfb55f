"""Displays of results in notebooks: sentences, a map of heads and a table of claims."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from ropelens.arguments import public
from ropelens.errors import BadArgument, explained
from ropelens.figures import inputs
from ropelens.figures.head_map import FULL_COLOR, MAX_HEADS_WITH_SIGNS
from ropelens.figures.style import COLORS, SIGNS
from ropelens.profiles.measures import complete_profile
from ropelens.report.claims import GLYPHS, ledger_rows
from ropelens.report.render import environment
from ropelens.report.sentences import describe
from ropelens.report.sentences.claims import claims_sentences
from ropelens.report.sentences.heads import heads_sentences, label_counts
from ropelens.report.tables import model_name, short_facts

WIDTH, HEIGHT = (
    600,
    480,
)  # pixels of a map whose cells are neither very large nor very small
LEVELS = 5  # strengths of a colour
MOST_HOVERS = (
    1_600  # heads with a text for the pointer: one line, or all lines for a quarter
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
            return display(sentences, claims=ledger_rows(results), glyphs=GLYPHS)
        results = complete_profile(results)
        profile = results if results.attrs.get("kind") == "profile" else None
        heads = None if profile is None else inputs.head_table(profile, None)
        return display(describe(results), heads, profile)


def display(
    sentences: Sequence[str],
    heads: pd.DataFrame | None = None,
    profile: xr.Dataset | None = None,
    page: Path | None = None,
    **values: Any,
) -> Display:
    """Display sentences, a map of heads, the path of a page, and `values` of the template."""
    values |= {"sentences": sentences, "colors": COLORS, "page": page}
    if profile is not None:
        values |= {"title": model_name(profile), "facts": short_facts(profile)}
    if heads is not None:
        values["map"] = head_map(heads)
    return Display(
        environment().get_template("notebook.html").render(values), sentences
    )


def head_map(heads: pd.DataFrame) -> dict[str, Any]:
    """Values of the template: sizes in pixels, cells by colour, signs, and hover texts."""
    places = heads[["layer", "head"]].astype(int)
    layers, count = (places.max() + 1).tolist()
    across, down = (
        int(np.clip(WIDTH // count, 4, 44)),
        int(np.clip(HEIGHT // layers, 4, 24)),
    )
    few = count <= MAX_HEADS_WITH_SIGNS and down >= 12
    level = np.ceil(LEVELS * inputs.numbers(heads, "total_bits") / FULL_COLOR).clip(
        1, LEVELS
    )
    groups = places.groupby([heads["label"], level / LEVELS])
    offset = inputs.numbers(heads, "offset")
    signs = np.where(
        np.isnan(offset), heads["label"].map(SIGNS), np.char.mod("%.0f", offset)
    )
    lines = [
        re.sub("</?b>", "", text).split("<br>") for text in inputs.hover_lines(heads)
    ]
    shown = None if len(lines) <= MOST_HOVERS // 4 else 1
    hovers = zip(
        *places.values.T, ("\n".join(text[:shown]) for text in lines), strict=True
    )
    return {
        **{"across": across, "down": down, "layers": layers, "heads": count},
        "gap": 2 if few else int(across > 6),
        "cells": [(*look, rows.values) for look, rows in groups],
        "signs": [*zip(*places.values.T, signs, strict=True)] if few else (),
        "hovers": [*hovers] if len(lines) <= MOST_HOVERS else (),
        "legend": [(k, SIGNS[k], n) for k, n in label_counts(heads).items() if n],
    }
