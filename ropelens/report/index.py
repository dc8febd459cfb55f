"""One page that lists many: <analysis>/<model>/index.html, with what each found."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import pandas as pd

from ropelens.figures.claim import OUTSIDE
from ropelens.files.folder import write_whole
from ropelens.files.record import read_record
from ropelens.report import words
from ropelens.report.render import asset, content_policy, environment
from ropelens.report.sentences import plural, say

CLAIM = {"rank_correlation", "low", "high", "heads"}
"""What run.json says of the claim, where it says it."""


@dataclass(frozen=True)
class Entry:
    """A line of the index: a page, the model it is about, what it found."""

    analysis: str
    model: str
    link: str
    finding: str


def write_index(folder: str | Path) -> Path:
    """Write `folder`/index.html, linking every `folder`/<analysis>/<model>/index.html.

    The finding is the "finding" of the run.json beside a page; else how many heads of its
    heads.csv do what, and the "claim" of run.json, or the rank correlation that heads.csv
    gives. A page with neither file is listed without a finding.
    """
    folder = Path(folder)
    pages = sorted(folder.glob("*/*/index.html"))
    analyses: dict[str, list[Entry]] = {}
    for page in pages:
        entry = _entry(page, folder)
        analyses.setdefault(entry.analysis, []).append(entry)
    template = environment().get_template("index.html")
    text = template.render(
        analyses=analyses,
        facts=[plural(len(pages), "page")],
        policy=content_policy(),
        style=asset("page.css"),
    )
    return write_whole(folder / "index.html", text)


def _entry(page: Path, folder: Path) -> Entry:
    place = page.parent
    run = read_record(place)
    finding = run.get("finding")
    if not isinstance(finding, str):
        finding = _from_heads(place / "heads.csv", claim=_claim(run))
    model = run.get("model")
    name = model.get("name") if isinstance(model, dict) else model
    return Entry(
        analysis=place.parent.name,
        model=name if isinstance(name, str) and name else place.name,
        link=quote(page.relative_to(folder).as_posix()),
        finding=finding,
    )


def _claim(run: dict) -> dict | None:
    """The claim in run.json, null being NaN; None where it holds none."""
    claim = run.get("claim")
    if not isinstance(claim, dict) or not claim.keys() >= CLAIM:
        return None
    return {name: math.nan if claim[name] is None else claim[name] for name in CLAIM}


def _from_heads(path: Path, *, claim: dict | None) -> str:
    if not path.is_file():
        return ""
    heads = pd.read_csv(path)
    if "label" not in heads or not len(heads):
        return ""
    said = words.claim_sentence(claim)
    return f"{words.headline(heads)} {said or _correlation(heads)}".strip()


def _correlation(heads: pd.DataFrame) -> str:
    columns = ["positional_fraction", "mean_wavelength"]
    if not set(columns) <= set(heads):
        return ""
    kept = heads.loc[~heads["label"].isin(OUTSIDE), columns].dropna()
    # Spearman's: Pearson's of the ranks; both columns must vary.
    if len(kept) < 3 or (kept.nunique() < 2).any():
        return ""
    value = kept.rank()["positional_fraction"].corr(kept.rank()["mean_wavelength"])
    return say("profile", "correlation", value=float(value))
