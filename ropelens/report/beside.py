"""Another model, or another checkpoint, whose heads stand beside those of a page."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.figures.attention import excerpt_tokens
from ropelens.report import words
from ropelens.report.page_figures import BESIDE, PROFILE, PageFigure, draw
from ropelens.report.payload import model_payload


def beside_payload(
    profile: xr.Dataset,
    heads: pd.DataFrame,
    *,
    of_page: xr.Dataset,
    figures: dict[PageFigure, go.Figure],
) -> dict[str, Any]:
    """What the script shows of `profile` beside the page of `of_page`, drawn as `figures`.

    The same figure of both has the same axis of wavelengths or offsets, for which `figures`
    is changed. `excerptOf[excerpt]` is the excerpt here that has the same text, or -1.
    """
    rows = [row for row in PROFILE if row.name in BESIDE]
    own = draw(rows, profile, heads, words.first_head(heads))
    for row in rows:
        if row.name != "attention":  # its axes are tokens
            one_range(figures[row], own[row])
    same = same_text(tokens_of(of_page), tokens_of(profile))
    if missing := same.count(-1):
        warnings.warn(
            f"{profile.attrs['model']} has not read {missing} of the {len(same)} pieces of "
            f"text of {of_page.attrs['model']}: give both the same --prompt to see it there.",
            stacklevel=2,
        )
    shown = sorted({number for number in same if number >= 0}) or [0]
    return {
        **model_payload(profile.isel(excerpt=shown), heads, own),
        "excerptOf": [shown.index(number) if number >= 0 else -1 for number in same],
    }


def one_range(*figures: go.Figure) -> None:
    """Give each x axis of figures of the same panels the range that holds those of all."""
    for axes in zip(*(figure.select_xaxes() for figure in figures), strict=True):
        ranges = [axis.range for axis in axes if axis.range]
        if ranges:
            low, high = np.array(ranges, float).T
            for axis in axes:
                axis.range = [low.min(), high.max()]


def tokens_of(profile: xr.Dataset) -> list[list[str]]:
    """The tokens of every excerpt."""
    return [excerpt_tokens(profile, number) for number in range(profile.sizes["excerpt"])]


def same_text(shown: Sequence[list[str]], found: Sequence[list[str]]) -> list[int]:
    """For each text that is shown the place of the same among those found, or -1.

    Texts may be cut into other tokens, and the first of them may be a BOS that one lacks.
    """
    texts = [_texts(tokens) for tokens in found]
    return [
        next((i for i, text in enumerate(texts) if text & _texts(tokens)), -1)
        for tokens in shown
    ]


def _texts(tokens: list[str]) -> set[str]:
    """An excerpt as text: whole, and without its first token."""
    return {"".join(some).strip() for some in (tokens, tokens[1:])} - {""}
