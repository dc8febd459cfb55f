"""Pages that need no network: a profile's, and those that answer a question."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.comparison.table import summarize_comparison
from ropelens.errors import BadArgument, public
from ropelens.figures.head import reach_arrays
from ropelens.figures.heads import claim_title
from ropelens.figures.inputs import head_table
from ropelens.figures.style import COLORS, SIGNS
from ropelens.figures.text import change_and_interval
from ropelens.figures.truncated_heads import head_steps
from ropelens.files.folder import write_whole
from ropelens.measure.truncation_table import summarize_truncation
from ropelens.report import words
from ropelens.report.catalog import (
    BESIDE,
    COMPARISON,
    PROFILE,
    REACH,
    SWEEP,
    SWEEP_OF_HEAD,
    bare,
    card,
    draw,
)
from ropelens.report.facts import (
    beside_name,
    comparison_facts,
    comparison_run_facts,
    model_name,
    run_facts,
    short_facts,
    versions,
)
from ropelens.report.payload import (
    beside_payload,
    build_payload,
    packed_by_head,
    page_templates,
    reach_payload,
    stopped_payload,
)
from ropelens.report.render import render
from ropelens.report.tables import (
    comparison_columns,
    comparison_rows,
    head_columns,
    head_rows,
    searched_columns,
)
from ropelens.statistics.labels import Thresholds

SCRIPTS = [
    "save.js",
    *(
        f"page/{name}.js"
        for name in ("arrays", "inside", "figures", "live", "pair", "tabs", "lists", "choice")
    ),
]

MAP_BY = {
    "": "label",
    "total_bits": "bits",
    "top_wavelength": "strongest plane (tokens)",
    "induction": "induction",
    "sink_mass": "attention on sinks",
}
"""The columns that the map of heads is coloured by."""


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
    selected = first_head(heads)
    figures = draw(PROFILE, profile, heads, selected)
    if truncation is not None:
        _check(truncation, "truncation", profile)
        figures |= draw(SWEEP_OF_HEAD, truncation, selected)
        table = summarize_truncation(truncation) if table is None else table
    if reach is not None:
        _check(reach, "reach", profile)
        figures |= draw(REACH, reach)
    other = {} if beside is None else _beside(profile, *beside, figures)
    payload = build_payload(profile, heads, figures, selected=selected)
    payload |= {"name": model_name(profile), "beside": other.pop("payload", None)}
    payload |= {"sweep": None, "stopped": [], "reach": None}
    if reach is not None:
        payload["reach"] = reach_payload(reach)
        payload["arrays"] |= packed_by_head(reach_arrays(reach))
    section = None
    if truncation is not None and table is not None:
        drawn = draw(SWEEP, truncation, table)
        payload["figures"] |= {row.name: bare(figure) for row, figure in drawn.items()}
        payload |= {"sweep": stopped_payload(truncation), "stopped": _stopped(table)}
        payload["arrays"] |= packed_by_head(head_steps(truncation))
        section = {
            "sentences": words.sweep_sentences(truncation, table),
            "text": str(truncation.attrs.get("text", "")),
            "cards": [card(row, figure) for row, figure in drawn.items()],
        }
    columns = head_columns(profile, heads)
    claim = heads.attrs.get("claim")
    return render(
        "page.html",
        scripts=SCRIPTS,
        payload=payload,
        truncation=section,
        cards=[card(row, figure) for row, figure in figures.items()],
        pinned=BESIDE,
        colors=COLORS,
        glyphs=SIGNS,
        counts=words.label_counts(heads),
        model=model_name(profile),
        facts=short_facts(profile),
        beside=other,
        scope=words.scope(profile.attrs),
        run=run_facts(profile, heads),
        command=str(profile.attrs.get("command", "")),
        versions=versions(profile.attrs),
        cautions=words.cautions(profile, heads),
        headline=words.headline(heads),
        notes=[words.claim_sentence(claim), *words.heads_sentences(heads)[1:]],
        claim_numbers=claim_title(claim),
        verdict=claim["verdict"] if claim else "",
        label_rules=words.label_rules(heads.attrs.get("thresholds")),
        slow_planes=words.slow_planes(profile),
        map_by={name: words for name, words in MAP_BY.items() if not name or name in heads}
        | {column.name: column.meaning for column in searched_columns(profile, heads)},
        columns=columns,
        rows=head_rows(heads, columns),
        layers=profile.sizes["layer"],
        heads=profile.sizes["head"],
    )


def first_head(heads: pd.DataFrame) -> tuple[int, int]:
    """The head to open the page with: the one with most position bits."""
    row = heads.iloc[int(heads["position_bits"].fillna(-1).to_numpy().argmax())]
    return int(row["layer"]), int(row["head"])


def _check(results: xr.Dataset, kind: str, profile: xr.Dataset) -> None:
    """Raise `BadArgument` for results of another kind, or of another number of heads."""
    if results.attrs.get("kind") != kind:
        raise BadArgument(
            f"This dataset holds no {kind}.", attempt=f"pass what {kind} measured"
        )
    of_profile, others = (
        tuple(one.sizes.get(name) for name in ("layer", "head")) for one in (profile, results)
    )
    if None not in others and others != of_profile:
        raise BadArgument(
            f"The {kind} and the profile are of other models.",
            seen="{} layers of {} heads, and {} of {}".format(*others, *of_profile),
        )


def _beside(
    profile: xr.Dataset, other: xr.Dataset, heads: pd.DataFrame, figures: dict[Any, go.Figure]
) -> dict[str, Any]:
    """The other model: its name and facts for the template, and the script's payload."""
    name = beside_name(other, profile)
    tokens = {one.attrs.get("tokens_sha256") for one in (profile, other)}
    at = first_head(heads)
    payload = beside_payload(other, heads, of_page=profile, figures=figures, selected=at)
    return {
        "name": name,
        "facts": short_facts(other),
        "same_tokens": len(tokens) == 1 and None not in tokens,
        "payload": {"name": name} | payload,
    }


def _stopped(table: pd.DataFrame) -> list[dict]:
    """What stopping the slowest planes costs, by the share that is `kept`."""
    rows = table[(table["kind"] == "slow") & table["loss_change"].notna()]
    ends = rows[["loss_change", "loss_change_low", "loss_change_high"]].to_numpy(float)
    texts = [change_and_interval(*one) for one in ends]
    return [
        {"kept": float(kept), "words": f"{change} nats/token ({interval})"}
        for kept, (change, interval) in zip(rows["kept"], texts, strict=True)
    ]


QUESTION = "How do these models differ in their use of RoPE's frequencies?"


def render_answer(
    question: str,
    findings: Sequence[str],
    figures: Mapping[str, go.Figure],
    profile: xr.Dataset,
    heads: pd.DataFrame,
) -> str:
    """The page of a script's answer on one model, as text.

    `findings` are sentences with numbers, the most important first; `figures` go by their
    captions, each explained in a sentence or two, in order.
    """
    return render_figures(
        "answer.html",
        figures,
        question=question,
        model=model_name(profile),
        facts=short_facts(profile),
        scope=words.scope(profile.attrs),
        findings=findings,
        run=run_facts(profile, heads),
        versions=versions(profile.attrs),
        command=str(profile.attrs.get("command", "")),
    )


def render_comparison(comparison: xr.Dataset, table: pd.DataFrame | None = None) -> str:
    """The page of a comparison as it was saved, as text; `table` is its summary."""
    table = summarize_comparison(comparison) if table is None else table
    return render_figures(
        "comparison.html",
        comparison_figures(comparison, table),
        question=str(comparison.attrs.get("question", QUESTION)),
        model=str(comparison.attrs["model"]),
        facts=comparison_facts(comparison, table),
        scope=words.scope(comparison.attrs),
        findings=words.comparison_sentences(comparison, table),
        columns=comparison_columns(table),
        rows=comparison_rows(table),
        run=comparison_run_facts(comparison),
        versions=versions(comparison.attrs),
        label_rules=words.label_rules(dataclasses.asdict(Thresholds())),
        command=str(comparison.attrs.get("command", "")),
    )


def comparison_figures(comparison: xr.Dataset, table: pd.DataFrame) -> dict[str, go.Figure]:
    """The figures that this comparison has something to show in, by their captions."""
    figures = draw(COMPARISON, comparison, table)
    return {row.explain.format(**comparison.attrs): figure for row, figure in figures.items()}


def render_figures(template: str, figures: Mapping[str, go.Figure], **values: object) -> str:
    """A page of `figures` by their captions; `values` are the other names of its template."""
    drawn = enumerate(figures.items())
    return render(
        template,
        scripts=["save.js", "answer.js"],
        payload={
            "figures": [bare(figure) for figure in figures.values()],
            "templates": page_templates(),
        },
        cards=[
            {"name": number, "title": figure.layout.title.text, "explain": caption}
            for number, (caption, figure) in drawn
        ],
        **values,
    )
