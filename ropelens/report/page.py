"""The offline page of a profile."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr

from ropelens.arguments import public
from ropelens.claims.ledger import ledger
from ropelens.errors import BadArgument
from ropelens.figures.claim import claim_title
from ropelens.figures.inputs import head_table, idle_layers
from ropelens.figures.style import COLORS, SIGNS
from ropelens.interventions.truncation_table import summarize_truncation, sweeps_by_kind
from ropelens.profiles.measures import complete_profile
from ropelens.report.catalog import WITH_PINNED
from ropelens.report.claims_page import GLYPHS, LedgerRow, ledger_rows
from ropelens.report.columns import head_columns, head_rows, searched_columns
from ropelens.report.drawing import (
    DrawnFigure,
    ProfileFigures,
    bare,
    draw_head_sweep,
    draw_profile,
    draw_reach,
    draw_sweep,
)
from ropelens.report.payload import build_payload
from ropelens.report.render import COMMON_SCRIPTS, render
from ropelens.report.run_facts import profile_facts
from ropelens.report.sentences.claims import claims_sentences
from ropelens.report.sentences.heads import (
    caution_sentences,
    claim_sentence,
    detail_sentences,
    label_counts,
    label_rules,
    labels_sentence,
)
from ropelens.report.sentences.profile import idle_sentence
from ropelens.report.sentences.truncation import sweep_sentences
from ropelens.runtime.folder import write_whole

PAGE_SCRIPTS = (
    "page/state.js",
    "page/inside.js",
    "page/figures.js",
    "page/live.js",
    "page/pair.js",
    "page/pair_figure.js",
    "page/excerpt.js",
    "page/tabs.js",
    "page/lists.js",
    "page/words.js",
    "page/choice.js",
)
"""In the order in which they run."""
MAP_COLORS = {
    "total_bits": "bits",
    "top_wavelength": "strongest plane (tokens)",
    "follow_score": "follows position or content",
    "induction": "induction",
    "sink_mass": "attention on sinks",
}
"""Columns of the table that can colour the map of heads, and their names in the menu."""


@dataclass(frozen=True)
class PageContents:
    """Sentences about the heads of a profile, and the figures of its page.

    `selected` is the layer and the index of the head that is shown first. The page of a prompt
    has the `top_planes` of the prompt instead of claims and labels.
    """

    headline: str
    notes: Sequence[str]
    selected: tuple[int, int]
    figures: ProfileFigures
    cautions: Sequence[str] = ()
    claims: Sequence[LedgerRow] = ()
    claims_sentence: str = ""
    is_prompt: bool = False
    top_planes: Sequence[Mapping[Any, Any]] = ()


@dataclass(frozen=True)
class SweepSection:
    """The section of a sweep: the text that it read, its figures and its sentences.

    `has_labels` is True if the label of each head was measured at each step.
    """

    text: str
    figures: Sequence[DrawnFigure]
    sentences: Sequence[str]
    has_labels: bool


@public
def write_report(
    profile: xr.Dataset,
    path: str | Path,
    *,
    heads: pd.DataFrame | None = None,
    truncation: xr.Dataset | None = None,
    reach: xr.Dataset | None = None,
) -> Path:
    """Write the page of `profile` to the file `path` and return the path.

    `heads` is the result of `classify_heads`; None uses its defaults. `truncation` and `reach`
    are results for the same model, which add tabs and a section. If writing fails, an earlier
    page stays unchanged. Raises `BadArgument` for results of another model or kind.
    """
    profile = complete_profile(profile)
    heads = head_table(profile, heads)
    return write_whole(Path(path), render_page(profile, heads, truncation, reach))


def render_page(
    profile: xr.Dataset,
    heads: pd.DataFrame,
    truncation: xr.Dataset | None = None,
    reach: xr.Dataset | None = None,
    table: pd.DataFrame | None = None,
) -> str:
    """Text of the page of a profile; `table` is the summary of `truncation`."""
    if truncation is not None:
        _check_results(truncation, "truncation", profile)
    if reach is not None:
        _check_results(reach, "reach", profile)
    contents = _contents(profile, heads)
    contents.figures.chosen_head.extend(draw_head_sweep(truncation, contents.selected))
    contents.figures.chosen_head.extend(draw_reach(reach))
    section = None
    if truncation is not None:
        section = _sweep_section(truncation, table)
    payload = build_payload(
        profile,
        heads,
        contents.figures,
        selected=contents.selected,
        truncation=truncation,
        reach=reach,
    )
    return render_contents(profile, heads, contents, payload, section)


def render_contents(
    profile: xr.Dataset,
    heads: pd.DataFrame,
    contents: PageContents,
    payload: dict[str, Any],
    section: SweepSection | None = None,
) -> str:
    """Text of the page with these contents, and with the section of a sweep."""
    claim = heads.attrs.get("claim")
    columns = head_columns(profile, heads)
    about = profile_facts(profile, heads)
    if contents.is_prompt:
        about = replace(about, scope="")
    sweep_figures = section.figures if section is not None else ()
    for drawn in sweep_figures:
        payload["figures"][drawn.name] = bare(drawn.figure)
    payload["prompt"] = contents.is_prompt
    return render(
        "page.html",
        scripts=[*COMMON_SCRIPTS, *PAGE_SCRIPTS],
        payload=payload,
        about=about,
        contents=contents,
        figures=contents.figures,
        section=section,
        marks_labels=section is not None and section.has_labels,
        with_pinned=WITH_PINNED,
        colors=COLORS,
        glyphs=SIGNS,
        claim_glyphs=GLYPHS,
        idle_layers=idle_layers(profile),
        idle=idle_sentence(profile),
        counts=label_counts(heads),
        claim_numbers=claim_title(claim),
        verdict=claim["verdict"] if claim else "",
        label_rules=label_rules(heads.attrs.get("thresholds")),
        map_colors=_map_colors(profile, heads, contents),
        columns=columns,
        rows=head_rows(heads, columns),
        sizes=profile.sizes,
    )


def _contents(profile: xr.Dataset, heads: pd.DataFrame) -> PageContents:
    """The figures, sentences and claims of a profile."""
    selected = first_head(heads)
    claims = ledger(profile).assign(model="")
    return PageContents(
        headline=labels_sentence(heads),
        notes=[claim_sentence(heads), *detail_sentences(heads)],
        selected=selected,
        figures=draw_profile(profile, heads, selected),
        cautions=caution_sentences(profile, heads),
        claims=ledger_rows(claims),
        claims_sentence=claims_sentences(claims)[0],
    )


def first_head(heads: pd.DataFrame) -> tuple[int, int]:
    """The head that a page shows first: the head with most position bits."""
    bits = heads["position_bits"].fillna(-1).to_numpy()
    head = heads.iloc[int(bits.argmax())]
    return int(head["layer"]), int(head["head"])


def _sweep_section(truncation: xr.Dataset, table: pd.DataFrame | None) -> SweepSection:
    """The section of a sweep; `table` is its summary. Each kind of layers has its figures."""
    if table is None:
        table = summarize_truncation(truncation)
    figures = []
    for layer_type, sweep in sweeps_by_kind(truncation).items():
        edits = table["edit"].isin(sweep["edit"].values)
        suffix = "" if layer_type == "all" else f"-{layer_type}"
        figures += draw_sweep(sweep, table[edits], suffix)
    return SweepSection(
        text=str(truncation.attrs.get("text", "")),
        figures=figures,
        sentences=sweep_sentences(truncation, table),
        has_labels="label" in truncation,
    )


def _map_colors(
    profile: xr.Dataset, heads: pd.DataFrame, contents: PageContents
) -> dict[str, str]:
    """The menu of what colours the map of heads, by column; "" is the first colouring."""
    colors = {"": "attribution" if contents.is_prompt else "label"}
    for name, words in MAP_COLORS.items():
        if name in heads:
            colors[name] = words
    for column in searched_columns(profile, heads):
        colors[column.name] = column.meaning
    return colors


def _check_results(results: xr.Dataset, kind: str, profile: xr.Dataset) -> None:
    """Raise `BadArgument` if the results have another kind or another number of heads."""
    expected = (profile.sizes.get("layer"), profile.sizes.get("head"))
    sizes = (results.sizes.get("layer"), results.sizes.get("head"))
    other_sizes = None not in sizes and sizes != expected
    actual = results.attrs.get("kind")
    if actual != kind or other_sizes:
        raise BadArgument(
            f"This is not a {kind} of the profile's model.",
            seen=f"{actual}, layers and heads {sizes}; the profile has {expected}",
            hint=f"pass the result of {kind} for the same model",
        )
