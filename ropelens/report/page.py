"""Pages that need no network: a profile's, and those that answer a question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.budget.labels import Thresholds
from ropelens.claims.ledger import ledger
from ropelens.comparison.table import summarize_comparison
from ropelens.errors import BadArgument, public
from ropelens.figures.heads import claim_title
from ropelens.figures.inputs import head_table, idle_layers
from ropelens.figures.style import COLORS, SIGNS
from ropelens.interventions.truncation_table import summarize_truncation
from ropelens.report import catalog, tables, words
from ropelens.report.catalog import bare, card, draw
from ropelens.report.claims import GLYPHS, claims_sentences, ledger_rows
from ropelens.report.payload import beside_payload, build_payload, page_templates
from ropelens.report.render import page_words, render, say
from ropelens.report.tables import about, about_comparison, model_name, short_facts
from ropelens.runtime.folder import write_whole

SCRIPTS = ["arrays", "inside", "figures", "live", "pair", "tabs", "lists", "choice"]


@public
def write_report(
    profile: xr.Dataset,
    path: str | Path,
    *,
    heads: pd.DataFrame | None = None,
    truncation: xr.Dataset | None = None,
    reach: xr.Dataset | None = None,
) -> Path:
    """Write the page of `profile` to `path` (a file) and return that path.

    `heads`: what `classify_heads` gave; None classifies by the defaults. `truncation` and
    `reach`: what `truncate` and `reach` gave for the same model, each a tab of the chosen head,
    the sweep also a section. The page is written aside and renamed into place, so an error
    leaves an earlier page as it was. Raises `BadArgument` for results of another model or kind.
    """
    heads = head_table(profile, heads)
    return write_whole(Path(path), render_page(profile, heads, truncation, reach=reach))


def render_page(
    profile: xr.Dataset,
    heads: pd.DataFrame,
    truncation: xr.Dataset | None = None,
    table: pd.DataFrame | None = None,
    reach: xr.Dataset | None = None,
    beside: tuple[xr.Dataset, pd.DataFrame] | None = None,
) -> str:
    """The page as text; `table` is the summary of `truncation`.

    `beside`: the profile and the heads of another model, which stand beside those of this one.
    """
    for results, kind in ((truncation, "truncation"), (reach, "reach")):
        if results is not None:
            _check(results, kind, profile)
    if truncation is not None and table is None:
        table = summarize_truncation(truncation)
    selected = first_head(heads)
    figures = draw(catalog.PROFILE, profile, heads, selected)
    figures |= draw(catalog.SWEEP_OF_HEAD, truncation, selected) | draw(catalog.REACH, reach)
    other = {} if beside is None else _beside(profile, *beside, figures)
    measured: dict[str, Any] = {"truncation": truncation, "reach": reach}
    payload = build_payload(profile, heads, figures, selected=selected, **measured)
    payload["beside"] = other.pop("payload", None)
    section = None if truncation is None else _sweep_section(truncation, table, payload)
    columns, said = tables.head_columns(profile, heads), words.head_words(heads)
    claims = ledger(profile).assign(model="")
    claim, thresholds = (heads.attrs.get(name) for name in ("claim", "thresholds"))
    return render(
        "page.html",
        scripts=["save.js", *(f"page/{name}.js" for name in SCRIPTS)],
        payload=payload,
        truncation=section,
        labelled="label" in (truncation or ()),
        cards=[card(row, figure) for row, figure in figures.items()],
        pinned=catalog.BESIDE,
        colors=COLORS,
        glyphs=SIGNS,
        claims=ledger_rows(claims),
        claims_sentence=claims_sentences(claims)[0],
        claim_glyphs=GLYPHS,
        idle_layers=idle_layers(profile),
        idle=words.idle_words(profile),
        counts=words.label_counts(heads),
        beside=other,
        cautions=words.cautions(profile, heads),
        headline=said.pop("headline"),
        notes=said.values(),
        claim_numbers=claim_title(claim),
        verdict=claim["verdict"] if claim else "",
        label_rules=say("profile", "label_rules", thresholds=thresholds),
        map_by={n: by for n, by in page_words()["map_by"].items() if not n or n in heads}
        | {one.name: one.meaning for one in tables.searched_columns(profile, heads)},
        columns=columns,
        rows=tables.head_rows(heads, columns),
        sizes=profile.sizes,
        **about(profile, heads),
    )


def _sweep_section(
    truncation: xr.Dataset, table: pd.DataFrame | None, payload: dict[str, Any]
) -> dict[str, Any]:
    """The section of a sweep, as the template reads it; its figures go into the `payload`."""
    swept = draw(catalog.SWEEP, truncation, table)
    payload["figures"] |= {row.name: bare(figure) for row, figure in swept.items()}
    return {
        "sentences": words.sweep_sentences(truncation, table),
        "text": str(truncation.attrs.get("text", "")),
        "cards": [card(row, figure) for row, figure in swept.items()],
    }


def first_head(heads: pd.DataFrame) -> tuple[int, int]:
    """The head to open the page with: the one with most position bits."""
    row = heads.iloc[int(heads["position_bits"].fillna(-1).to_numpy().argmax())]
    return int(row["layer"]), int(row["head"])


def _check(results: xr.Dataset, kind: str, profile: xr.Dataset) -> None:
    """Raise `BadArgument` for results of another kind, or of another number of heads."""
    of_profile, others = (
        tuple(one.sizes.get(name) for name in ("layer", "head")) for one in (profile, results)
    )
    found = results.attrs.get("kind")
    if found != kind or (None not in others and others != of_profile):
        raise BadArgument(
            f"This is no {kind} of the profile's model.",
            seen=f"{found}, layers and heads {others}; the profile's {of_profile}",
            hint=f"pass what {kind} gave",
        )


def _beside(
    profile: xr.Dataset, other: xr.Dataset, heads: pd.DataFrame, figures: dict[Any, go.Figure]
) -> dict[str, Any]:
    """The other model: its name and facts for the template, and the script's payload."""
    name, revision = model_name(other), other.attrs["revision"][:12]
    if name == model_name(profile):
        name += f" at {revision}" if revision else " (beside)"
    tokens = {one.attrs.get("tokens_sha256") for one in (profile, other)}
    at = first_head(heads)
    payload = beside_payload(other, heads, of_page=profile, figures=figures, selected=at)
    return {
        "name": name,
        "facts": short_facts(other),
        "same_tokens": len(tokens) == 1 and None not in tokens,
        "payload": {"name": name} | payload,
    }


QUESTION = "How do these models differ in their use of RoPE's frequencies?"


def render_comparison(comparison: xr.Dataset, table: pd.DataFrame | None = None) -> str:
    """The page of a comparison as it was saved, as text; `table` is its summary."""
    table = summarize_comparison(comparison) if table is None else table
    captions = {
        page_words()["figures"][row.name]["explain"].format(**comparison.attrs): figure
        for row, figure in draw(catalog.COMPARISON, comparison, table).items()
    }
    return render_figures(
        "comparison.html",
        captions,
        question=str(comparison.attrs.get("question", QUESTION)),
        findings=words.comparison_sentences(comparison, table),
        columns=tables.comparison_columns(table),
        rows=tables.comparison_rows(table),
        label_rules=say("profile", "label_rules", thresholds=asdict(Thresholds())),
        **about_comparison(comparison, table),
    )


def render_figures(template: str, figures: Mapping[str, go.Figure], **values: object) -> str:
    """A page of `figures` by their captions; `values` are the other names of its template."""
    bare_figures = [bare(figure) for figure in figures.values()]
    return render(
        template,
        scripts=["save.js", "answer.js"],
        payload={"figures": bare_figures, "templates": page_templates()},
        cards=[
            {"name": number, "title": figure.layout.title.text, "explain": caption}
            for number, (caption, figure) in enumerate(figures.items())
        ],
        **values,
    )
