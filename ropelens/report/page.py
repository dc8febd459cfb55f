"""Offline pages of profiles and comparisons, and the gallery of all pages."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.arguments import public
from ropelens.claims.ledger import ledger
from ropelens.errors import BadArgument
from ropelens.figures.claim import claim_title
from ropelens.figures.formats import plural
from ropelens.figures.inputs import head_table, idle_layers
from ropelens.figures.steps import plot_maps, plot_numbers
from ropelens.figures.style import COLORS, SIGNS
from ropelens.interventions.truncation_table import summarize_truncation, sweeps_by_kind
from ropelens.profiles.measures import complete_profile
from ropelens.report import catalog, tables
from ropelens.report.catalog import bare, card, draw, draw_profile
from ropelens.report.claims import GLYPHS, ledger_rows
from ropelens.report.payload import build_payload, page_templates
from ropelens.report.render import page_words, render
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
from ropelens.report.tables import about
from ropelens.runtime.folder import file_name, write_whole
from ropelens.runtime.run_record import read_record

COMMON_SCRIPTS = ("arrays.js", "plots.js", "save.js")
SCRIPTS = (
    "state",
    "inside",
    "figures",
    "live",
    "pair",
    "pair_figure",
    "excerpt",
    "tabs",
    "lists",
    "words",
    "choice",
)
"""Files in templates/page, in the order in which they run."""


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
    prompt: Mapping[str, Any] | None = None,
) -> str:
    """Text of the page; `table` is the summary of `truncation`.

    `prompt` has the figures and sentences of a prompt, which replace the claims and labels.
    """
    _check_results(truncation, "truncation", profile)
    _check_results(reach, "reach", profile)
    shown = _labels_and_claims(profile, heads) if prompt is None else dict(prompt)
    figures, selected = shown.pop("figures"), shown.pop("selected")
    place = {"layer": selected[0], "head": selected[1]}
    figures |= draw([catalog.HEAD_SWEEP_FIGURE], truncation, **place)
    figures |= draw([catalog.REACH_FIGURE], reach)
    measured: dict[str, Any] = {"truncation": truncation, "reach": reach}
    payload = build_payload(profile, heads, figures, selected=selected, **measured)
    payload |= {"prompt": prompt is not None}
    claim, thresholds = (heads.attrs.get(name) for name in ("claim", "thresholds"))
    columns = tables.head_columns(profile, heads)
    colours = {
        n: words for n, words in page_words()["map_by"].items() if not n or n in heads
    }
    colours |= {} if prompt is None else {"": "attribution"}
    colours |= {x.name: x.meaning for x in tables.searched_columns(profile, heads)}
    values = about(profile, heads) | {
        "truncation": truncation is not None
        and _sweep_section(truncation, table, payload),
        "labelled": "label" in (truncation or ()),
        "cards": [card(row, figure) for row, figure in figures.items()],
        "with_pinned": catalog.WITH_PINNED,
        "colors": COLORS,
        "glyphs": SIGNS,
        "prompt": prompt,
        "claim_glyphs": GLYPHS,
        "idle_layers": idle_layers(profile),
        "idle": idle_sentence(profile),
        "counts": label_counts(heads),
        "claim_numbers": claim_title(claim),
        "verdict": claim["verdict"] if claim else "",
        "label_rules": label_rules(thresholds),
        "map_by": colours,
        "columns": columns,
        "rows": tables.head_rows(heads, columns),
        "sizes": profile.sizes,
    }
    scripts = [*COMMON_SCRIPTS, *(f"page/{name}.js" for name in SCRIPTS)]
    return render("page.html", scripts=scripts, payload=payload, **values | shown)


def _labels_and_claims(profile: xr.Dataset, heads: pd.DataFrame) -> dict[str, Any]:
    """The figures, sentences and claims of a profile, for its page."""
    selected, claims = first_head(heads), ledger(profile).assign(model="")
    shown: dict[str, Any] = {"selected": selected}
    shown |= {
        "headline": labels_sentence(heads),
        "notes": [claim_sentence(heads), *detail_sentences(heads)],
    }
    shown |= {
        "claims": ledger_rows(claims),
        "claims_sentence": claims_sentences(claims)[0],
    }
    shown["figures"] = draw_profile(profile, heads, selected)
    return shown | {"cautions": caution_sentences(profile, heads)}


def _sweep_section(
    truncation: xr.Dataset, table: pd.DataFrame | None, payload: dict[str, Any]
) -> dict[str, Any]:
    """Section of a sweep for the template. Adds its figures to the `payload`."""
    table, cards = summarize_truncation(truncation) if table is None else table, []
    for kind, sweep in sweeps_by_kind(truncation).items():
        rows = table[table["edit"].isin(sweep["edit"].values)]
        for row, figure in draw(catalog.SWEEP_FIGURES, sweep, table=rows).items():
            name = row.name if kind == "all" else f"{row.name}-{kind}"
            payload["figures"][name] = bare(figure)
            cards.append(card(row, figure) | {"name": name})
    sentences = sweep_sentences(truncation, table)
    text = str(truncation.attrs.get("text", ""))
    return {"text": text, "cards": cards, "sentences": sentences}


def first_head(heads: pd.DataFrame) -> tuple[int, int]:
    """The head that a page shows first: the head with most position bits."""
    row = heads.iloc[int(heads["position_bits"].fillna(-1).to_numpy().argmax())]
    return int(row["layer"]), int(row["head"])


def _check_results(results: xr.Dataset | None, kind: str, profile: xr.Dataset) -> None:
    """Raise `BadArgument` if the results have another kind or another number of heads."""
    if results is None:
        return
    expected, sizes = (
        (d.sizes.get("layer"), d.sizes.get("head")) for d in (profile, results)
    )
    actual = results.attrs.get("kind")
    if actual != kind or (None not in sizes and sizes != expected):
        seen = f"{actual}, layers and heads {sizes}; the profile has {expected}"
        hint = f"pass the result of {kind} for the same model"
        raise BadArgument(
            f"This is not a {kind} of the profile's model.", seen=seen, hint=hint
        )


def render_steps(steps: xr.Dataset) -> str:
    """Text of the page of a training, from the folder of `ropelens.watch`."""
    ends, explained = steps.isel(step=[0, -1]), page_words()["steps"]
    numbers, (first, last) = ends["numbers"].values.T, ends["step"].values.tolist()
    findings = [
        f"{str(name).replace('_', ' ')}: {a:.3g} at step {first:,}, {b:.3g} at step {last:,}"
        for name, (a, b) in zip(ends["number"].values, numbers, strict=True)
    ]
    figures = {
        explained["numbers"]: plot_numbers(steps),
        explained["maps"]: plot_maps(steps),
    }
    question = "How do heads and planes change during training?"
    shown = {"question": question, "findings": findings} | about(steps, pd.DataFrame())
    return render_figures("answer.html", figures, **shown)


def render_figures(
    template: str,
    figures: Mapping[str, go.Figure],
    *,
    placed: Mapping[str, go.Figure] | None = None,
    scripts: Sequence[str] = (),
    payload: Mapping[str, object] | None = None,
    **values: object,
) -> str:
    """Text of a page with figures by their captions; `values` are used by the template.

    The template names the places of the figures `placed`. `scripts` read the `payload`.
    """
    numbered = {str(number): figure for number, figure in enumerate(figures.values())}
    drawn = numbered | dict(placed or {})
    sent = {
        "figures": {name: bare(figure) for name, figure in drawn.items()},
        "templates": page_templates(),
        **(payload or {}),
    }
    values["cards"] = [
        {"name": number, "title": figure.layout.title.text, "explain": caption}
        for number, (caption, figure) in enumerate(figures.items())
    ]
    files = [*COMMON_SCRIPTS, "answer.js", *scripts]
    return render(template, scripts=files, payload=sent, **values)


@public
def write_index(folder: str | Path) -> Path:
    """Write `folder`/index.html, a gallery of every `folder`/<analysis>/<model>/index.html.

    The model and the sentence come from the run.json of a page, if it has one. Large models
    come first.
    """
    folder = Path(folder)
    analyses: dict[str, list[dict[str, Any]]] = {}
    pages = sorted(page for page in folder.glob("*/*/index.html") if page.is_file())
    for page in pages:
        record = read_record(page.parent)
        first = (record.get("findings") or [""])[0]
        model, name = record.get("model", {}).get("name"), page.parent.name
        entry = {
            "model": name if file_name(str(model)) == name else model or name,
            "link": quote(page.relative_to(folder).as_posix()),
            "finding": re.split(r"(?<=\.) (?=[A-Z])", first)[0],
            "heads": sum(record.get("labels", {}).values()),
        }
        analyses.setdefault(page.parent.parent.name, []).append(entry)
        analyses[page.parent.parent.name].sort(key=lambda entry: -entry["heads"])
    text = render("index.html", analyses=analyses, facts=[plural(len(pages), "page")])
    return write_whole(folder / "index.html", text)
