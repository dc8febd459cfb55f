"""A profile as one HTML file that needs no network."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

import pandas as pd
import xarray as xr

from ropelens.figures.claim import claim_title
from ropelens.figures.inputs import head_table
from ropelens.figures.style import COLORS, SIGNS
from ropelens.files.folder import write_whole
from ropelens.report import words
from ropelens.report.beside import beside_payload
from ropelens.report.head_tabs import check_same_heads, reach_payload, stopped_payload
from ropelens.report.page_figures import PROFILE, REACH, SWEEP_OF_HEAD, card, draw
from ropelens.report.payload import build_payload
from ropelens.report.render import render
from ropelens.report.table import searched_columns, shown_columns, table_rows
from ropelens.report.truncation import truncation_section

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

LIST_BY = {
    "total_bits": "bits",
    "positional_fraction": "share of position",
    "content_fraction": "share of content",
    "induction": "induction",
    "previous_token": "attention on the token before",
    "top_wavelength": "wavelength of the strongest plane",
    "": "layer",
}
"""The columns that the list of heads is sorted by, the largest first."""


def write_report(
    profile: xr.Dataset,
    path: str | Path,
    *,
    heads: pd.DataFrame | None = None,
    truncation: xr.Dataset | None = None,
    reach: xr.Dataset | None = None,
) -> Path:
    """Write the page of `profile` to `path` (a file) and return that path.

    `heads`: what `classify_heads` gave; None classifies by the defaults. `truncation`: what
    `truncate` gave for the same model, which gets a section of its own and a tab of the chosen
    head. `reach`: what `reach` gave, a tab of the head. The page is written aside and renamed
    into place, so an error leaves an earlier page as it was. Raises `BadArgument` where heads,
    sweep or reach are not of the profile's model, or something else.
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
    section = None if truncation is None else truncation_section(truncation, table)
    selected = words.first_head(heads)
    figures = draw(PROFILE, profile, heads, selected)
    if truncation is not None:
        check_same_heads(profile, truncation, "truncation")
        figures |= draw(SWEEP_OF_HEAD, truncation, selected)
    if reach is not None:
        check_same_heads(profile, reach, "reach")
        figures |= draw(REACH, reach)
    other, other_facts = None, None
    if beside is not None:
        name = {"name": beside_name(beside[0], profile)}
        other = name | beside_payload(*beside, of_page=profile, figures=figures)
        alike = read_alike(profile, beside[0])
        other_facts = name | {"facts": short_facts(beside[0]), "same_tokens": alike}
    payload = build_payload(profile, heads, figures, selected=selected)
    payload["name"], payload["beside"] = model_name(profile), other
    payload["stopped"] = [] if section is None else section.stopped
    payload["sweep"] = None if truncation is None else stopped_payload(truncation)
    payload["reach"] = None if reach is None else reach_payload(reach)
    if section is not None:
        payload["figures"] |= section.figures
    columns = shown_columns(profile, heads)
    claim = heads.attrs.get("claim")
    counts = words.label_counts(heads)
    return render(
        "page.html",
        scripts=SCRIPTS,
        rotations=[] if reach is None else reach["variant"].values.tolist(),
        payload=payload,
        truncation=section,
        cards=[card(row, figure) for row, figure in figures.items()],
        colors=COLORS,
        glyphs=SIGNS,
        counts=counts,
        model=model_name(profile),
        facts=short_facts(profile),
        beside=other_facts,
        scope=words.scope(profile.attrs),
        run=run_facts(profile, heads),
        command=str(profile.attrs.get("command", "")),
        versions=versions(profile),
        cautions=words.cautions(profile, heads),
        headline=words.headline(heads),
        where_positional=words.where_positional(heads),
        through=words.through_wavelengths(heads),
        claim=words.claim_sentence(claim),
        claim_numbers=claim_title(claim),
        verdict=claim["verdict"] if claim else "",
        label_rules=words.label_rules(heads.attrs.get("thresholds")),
        slow_planes=words.slow_planes(profile),
        map_summary=words.map_summary(profile, heads),
        map_by=choices(MAP_BY, profile, heads),
        list_by=choices(LIST_BY, profile, heads),
        columns=columns,
        rows=table_rows(heads, columns),
        layers=profile.sizes["layer"],
        heads=profile.sizes["head"],
    )


def choices(by: Mapping[str, str], profile: xr.Dataset, heads: pd.DataFrame) -> dict[str, str]:
    """The columns of a menu that there are, and those of tokens that were searched for."""
    known = {name: said for name, said in by.items() if not name or name in heads}
    searched = searched_columns(profile, heads)
    return known | {column.name: column.meaning for column in searched}


def model_name(profile: xr.Dataset) -> str:
    """A Hub id as it is, a folder by its last part; the run's facts have the whole path."""
    name = str(profile.attrs.get("model", "")) or "unnamed model"
    parts = [part for part in name.split("/") if part not in ("", ".", "..")]
    is_folder = name.startswith(("/", ".", "~")) or name.count("/") > 1
    return parts[-1] if is_folder and parts else name


def beside_name(profile: xr.Dataset, of_page: xr.Dataset) -> str:
    """The other model's name; with its revision where the page's own has the same name."""
    name, revision = model_name(profile), str(profile.attrs.get("revision", ""))
    if name != model_name(of_page):
        return name
    same = revision in ("", of_page.attrs.get("revision"))
    return f"{name} (beside)" if same else f"{name} at {revision[:12]}"


def read_alike(*profiles: xr.Dataset) -> bool:
    """Whether profiles are of the same tokens, as far as they say."""
    tokens = {profile.attrs.get("tokens_sha256") for profile in profiles}
    return len(tokens) == 1 and None not in tokens


def short_facts(profile: xr.Dataset) -> list[str]:
    """The line under the title: size, text, loss."""
    attrs = profile.attrs
    facts = [f"{profile.sizes['layer']} layers × {profile.sizes['head']} heads"]
    if "tokens" in attrs:
        facts.append(f"{int(attrs['tokens']):,} tokens")
    if "context" in attrs:
        facts.append(f"context {int(attrs['context']):,}")
    if "loss" in attrs:
        facts.append(f"loss {loss_text(profile)}")
    return facts


def loss_text(profile: xr.Dataset) -> str:
    """The mean loss with its standard error, in nats per token."""
    error = profile.attrs.get("loss_se")
    loss = f"{float(profile.attrs['loss']):.3f}"
    if error is None or not math.isfinite(float(error)):
        return f"{loss} nats per token"
    return f"{loss} ± {float(error):.3f} nats per token (standard error)"


def run_facts(profile: xr.Dataset, heads: pd.DataFrame) -> list[tuple[str, str]]:
    """What was run, as pairs of a name and a value with its unit."""
    attrs = profile.attrs
    names = (
        "model",
        "revision",
        "dtype",
        "text",
        "tokens",
        "sequences",
        "documents",
        "context",
        "rows",
        "seed",
    )
    units = {"context": "tokens", "rows": "of each sequence"}
    facts = []
    for name in names:
        if name in attrs:
            value = attrs[name]
            if name in ("tokens", "sequences", "documents"):
                text = f"{value:,}" if value else ""
            else:
                text = str(value)
            facts.append((name, f"{text} {units.get(name, '')}".strip() or "not recorded"))
    if "loss" in attrs:
        facts.append(("loss", loss_text(profile)))
    kv_heads = profile.sizes["kv_head"]
    if kv_heads != profile.sizes["head"]:
        facts.append(("key-value heads", f"{kv_heads} a layer"))
    thresholds = heads.attrs.get("thresholds")
    if thresholds:
        shown = ", ".join(f"{name} {value:.3g}" for name, value in thresholds.items())
        facts.append(("label thresholds", shown))
    if "created" in attrs:
        facts.append(("created", str(attrs["created"])))
    return facts


def versions(profile: xr.Dataset) -> str:
    """Package versions as "torch 2.13.0, ..."; the attribute as it is where not JSON."""
    text = str(profile.attrs.get("versions", ""))
    try:
        found = json.loads(text)
    except json.JSONDecodeError:
        return text
    if not isinstance(found, dict):
        return text
    return ", ".join(f"{name} {version}" for name, version in found.items())
