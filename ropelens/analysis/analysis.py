"""What was measured of a model, what a script answers, and their folders with a page."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from torch import nn

from ropelens.analysis.plan import Plan, this_command
from ropelens.checkpoints.files import fingerprint
from ropelens.checkpoints.load import Opened
from ropelens.claims.heads import classify_heads
from ropelens.comparison.compare import compare
from ropelens.comparison.table import summarize_comparison
from ropelens.errors import BadArgument, explained, public, words_of
from ropelens.interventions.truncation_table import summarize_truncation
from ropelens.profiles.measurement import versions
from ropelens.profiles.saved import complete_profile, open_profile
from ropelens.report.page import QUESTION, render_comparison, render_figures, render_page
from ropelens.report.tables import about
from ropelens.report.words import (
    attention_sentences,
    comparison_sentences,
    heads_sentences,
    scope,
    sweep_sentences,
)
from ropelens.runtime.folder import file_name, write_whole
from ropelens.runtime.results import open_results, read_record, write_folder, write_page
from ropelens.runtime.savepoint import UNFINISHED
from ropelens.text.text import Text
from ropelens.train.data import differences


@dataclass(frozen=True, eq=False, repr=False)
class Analysis:
    """What `ropelens.analyze` returns: the numbers of a model, and how they came about.

    `profile` is what `ropelens.profile` returns, `heads` what `classify_heads` makes of it,
    `provenance` what run.json says beside the kind and `findings`. `truncation` is a sweep
    and `reach` what `ropelens.reach` returns, or None. `model`, its `tokenizer` and `text`
    are what was measured; None in an analysis that was read from a folder.
    """

    profile: xr.Dataset
    heads: pd.DataFrame
    provenance: dict[str, Any]
    truncation: xr.Dataset | None = None
    model: nn.Module | None = None
    text: Text | None = None
    reach: xr.Dataset | None = None
    tokenizer: Any = None

    @cached_property
    def truncation_table(self) -> pd.DataFrame | None:
        """The sweep as truncation.csv has it, a row an edit; None without a sweep."""
        return None if self.truncation is None else summarize_truncation(self.truncation)

    @property
    def results(self) -> dict[str, xr.Dataset | pd.DataFrame]:
        """All numbers by the names of their files."""
        results = {
            "profile.nc": self.profile,
            "heads.csv": self.heads,
            "truncation.nc": self.truncation,
            "truncation.csv": self.truncation_table,
            "reach.nc": self.reach,
        }
        return {name: result for name, result in results.items() if result is not None}

    @property
    def findings(self) -> list[str]:
        """What the results show in sentences: labels, the claim's verdict, the sweep, ..."""
        of = self.truncation
        swept = [] if of is None else sweep_sentences(of, self.truncation_table)
        first, *more = heads_sentences(self.heads)
        more += [scope(self.profile.attrs)]
        return [*filter(None, [*swept[:4], first, *attention_sentences(self.profile), *more])]

    def page(self, *, beside: Analysis | None = None) -> str:
        """The page, as text; with the heads of another analysis `beside` those of this one."""
        return render_page(
            self.profile,
            self.heads,
            self.truncation,
            self.truncation_table,
            self.reach,
            None if beside is None else (beside.profile, beside.heads),
        )

    def report(self, path: str | Path, *, beside: Analysis | None = None) -> Path:
        """Write the page alone to the file `path`, whole or not at all; return `path`.

        With `beside`, an analysis of another model of any size, the page also shows its
        heads, each beside the chosen one: with the same planes stopped, and on the excerpts
        that both models read.
        """
        return write_whole(path, self.page(beside=beside))

    def save(self, folder: str | Path) -> Path:
        """Write index.html, profile.nc, heads.csv and run.json to `folder`; the page's path.

        A sweep is written to truncation.nc and truncation.csv. A sweep or a reach of the same
        weights that `folder` has already stays, and is on the page. The numbers are written
        all or none, before the page is drawn. Raises `BadArgument` for a folder that cannot be
        written to, or that holds a model or results of another kind.
        """
        weights, whole = self.provenance.get("model", {}).get("fingerprint"), self
        if earlier := earlier_analysis(Path(folder), weights):
            swept = earlier.truncation if self.truncation is None else self.truncation
            reach = earlier.reach if self.reach is None else self.reach
            whole = replace(self, truncation=swept, reach=reach)
        kind = "analysis" if whole.truncation is None else "truncation"
        record = self.provenance | {"kind": kind, "findings": whole.findings}
        unfinished = Path(folder) / UNFINISHED

        def page() -> str:
            shutil.rmtree(unfinished, ignore_errors=True)  # its numbers stand by now
            return whole.page()

        try:
            return write_folder(folder, record=record, results=whole.results, page=page)
        except OSError as error:
            goes_on = f"the same command goes on from {unfinished}" * unfinished.exists()
            what = f"Not all results could be written to {folder}."
            raise BadArgument(what, seen=words_of(error), hint=goes_on) from error

    def __repr__(self) -> str:
        return f"<Analysis of {self.profile.attrs['model']}: {self.findings[0]}>"


@public
def open(path: str | Path) -> Analysis | xr.Dataset:
    """Read results of any kind: a folder of `ropelens analyze` or `compare`, or a .nc file.

    A folder gives an `Analysis`, or the dataset of a comparison; a file gives the dataset that
    `save` wrote. Raises `BadArgument` for files that are missing, damaged or of another kind.
    """
    if not Path(path).is_dir():
        results = open_results(path)
        is_profile = results.attrs.get("kind") == "profile"
        return complete_profile(results, path) if is_profile else results
    if read_record(path).get("kind") == "comparison":
        return open_results(Path(path) / "comparison.nc", "comparison")
    return open_analysis(path)


def open_analysis(folder: str | Path) -> Analysis:
    """Read an analysis that `Analysis.save` or `ropelens analyze` wrote.

    Labels and their confidence are computed anew from the profile. A reach.nc beside it
    becomes a tab of the page. Raises `BadArgument` for files that are missing, damaged or of
    another kind, and for a reach of another model.
    """
    folder = Path(folder)
    record, reach = read_record(folder), None
    swept = record.get("kind") == "truncation"
    profile = open_profile(folder / "profile.nc")
    profile.attrs |= {"command": str(record["command"])} if "command" in record else {}
    if (folder / "reach.nc").exists():
        reach = open_results(folder / "reach.nc", "reach")
        model, other = (of.attrs.get("model") for of in (profile, reach))
        if model != other:
            file = folder / "reach.nc"
            raise BadArgument(
                f"{file} is of {other}, and the profile beside it of {model}.",
                hint=f"{file} moved away, or measured again",
            )
    what = f"{folder / 'profile.nc'} lacks numbers that labels are made of."
    with explained(what, "measure again", error=BadArgument):
        heads = classify_heads(profile, seed=profile.attrs["seed"])
    sweep = open_results(folder / "truncation.nc", "truncation") if swept else None
    return Analysis(profile, heads, record, truncation=sweep, reach=reach)


def earlier_analysis(folder: Path, weights: str | None) -> Analysis | None:
    """The analysis in `folder`, where it is whole and of these weights; else None."""
    record = read_record(folder)
    same = weights is not None and record.get("model", {}).get("fingerprint") == weights
    with contextlib.suppress(BadArgument):  # a damaged one is replaced
        if same and record["kind"] in ("analysis", "truncation"):
            return open_analysis(folder)
    return None


def check_sweep(folder: Path, arguments: Mapping[str, Any]) -> None:
    """Raise `BadArgument` where `folder` has a sweep that was asked for otherwise."""
    if read_record(folder).get("kind") != "truncation":
        return
    other = ""
    with contextlib.suppress(AttributeError, KeyError, ValueError):  # a damaged one is replaced
        sweep = open_results(folder / "truncation.nc", "truncation")
        asked = json.loads(sweep.attrs["arguments"])
        other = differences(asked, arguments, asked | arguments, between=", now ")
    if other:
        raise BadArgument(
            f"{folder} has a sweep with other options, which this one would replace.",
            seen=other[:300],
            hint="another folder, or the same options",
        )


@dataclass(frozen=True)
class Answer:
    """What a script answers: one question on one model, or on several.

    `findings` are sentences with numbers, the most important first; `figures` go by their
    captions, each explained in a sentence or two, in order; `more` are further results by
    the names of their files ("reach.nc", "truncation.csv").
    """

    question: str = QUESTION
    findings: Sequence[str] = ()
    figures: Mapping[str, go.Figure] = field(default_factory=dict)
    more: Mapping[str, xr.Dataset | pd.DataFrame] = field(default_factory=dict)

    def save(self, folder: str | Path, comparison: xr.Dataset, *, lead: str = "") -> Path:
        """Write what `compare` returns, and its table, to `folder`; the path of the page.

        `folder` gets index.html, comparison.nc, comparison.csv, run.json and `more`; the
        page is drawn last. The sentence `lead` comes first, `findings` after the
        sentences that the numbers give by themselves.
        """
        comparison = comparison.assign_attrs(
            question=self.question,
            command=this_command(),
            lead=lead,
            findings="\n".join(self.findings),
        )
        table, facts = summarize_comparison(comparison), comparison.attrs
        entries = comparison["entry"].values.tolist()
        findings = [*comparison_sentences(comparison, table), *filter(None, [scope(facts)])]
        record: dict[str, Any] = facts | {
            "kind": "comparison",
            "findings": findings,
            "model": {"name": str(facts["model"])},
            "entries": entries,
            "versions": json.loads(facts["versions"]),
        }
        if "fingerprint" in comparison.coords:
            prints = comparison["fingerprint"].values.tolist()
            record["fingerprints"] = dict(zip(entries, prints, strict=True))
        Path(folder).parent.mkdir(parents=True, exist_ok=True)
        results = {"comparison.nc": comparison, "comparison.csv": table, **self.more}
        page = partial(render_comparison, comparison, table)
        return write_folder(folder, record=record, results=results, page=page)


def write_answer(folder: str | Path, analysis: Analysis, answer: Answer) -> Path:
    """Write what a script answers about one model; the path of its page.

    The results go into a folder in the script's `folder` that is named after the model:
    index.html, run.json, and the numbers of `analysis` and of the answer; the page is
    drawn last.
    """
    attrs = analysis.profile.attrs
    folder = Path(folder) / (file_name(str(attrs["model"])).strip(".-") or "model")
    folder.parent.mkdir(parents=True, exist_ok=True)
    of_analyze = ("revision", "backend", "text", "command", "warnings")
    facts = {name: attrs[name] for name in of_analyze}
    findings = [*answer.findings, *filter(None, [scope(attrs)])]
    more = {
        name: result.assign_attrs(facts) if isinstance(result, xr.Dataset) else result
        for name, result in answer.more.items()
    }
    return write_folder(
        folder,
        record=analysis.provenance
        | {"kind": "answer", "question": answer.question, "findings": findings},
        results=analysis.results | more,
        page=lambda: render_figures(
            "answer.html",
            answer.figures,
            question=answer.question,
            findings=answer.findings,
            **about(analysis.profile, analysis.heads),
        ),
    )


def rewrite_page(folder: str | Path, *, beside: str | Path | None = None) -> Path:
    """Make the page of a result folder again, from the numbers in it; its path.

    `beside` is the folder of another analysis, whose heads the page then has too. Raises
    `BadArgument` for numbers that are missing or damaged, and for the page of an answer,
    which only its script can draw; the page that was there then stays.
    """
    folder, record = Path(folder), read_record(folder)
    kind = record.get("kind")
    if kind == "answer":
        raise BadArgument(
            f"Only its script can draw the page in {folder}.",
            seen=str(record.get("question")),
            hint=str(record.get("command")),
        )
    if kind == "comparison" and beside is None:
        comparison = open_results(folder / "comparison.nc", "comparison")
        return write_page(folder, lambda: render_comparison(comparison))
    other = None if beside is None else open_analysis(beside)
    analysis = open_analysis(folder)
    return write_page(folder, lambda: analysis.page(beside=other))


def is_measured(folder: Path, plan: Plan) -> bool:
    """Whether `folder` has what the plan would give: of these weights, text and versions."""
    assert isinstance(plan.source, Opened)
    record = read_record(folder)
    if (record.get("arguments"), record.get("versions")) != (plan.arguments, versions()):
        return False
    prints = (record.get(name, {}).get("fingerprint") for name in ("model", "text"))
    weights = fingerprint(plan.source.checkpoint.path)
    return tuple(prints) == (weights, plan.text.documents_sha256)


def write_checkpoints(folder: Path, names: Sequence[str]) -> Path:
    """Set the analyses in `folder`, a folder each, side by side there; the path of the page.

    Beside what `Answer.save` writes there is heads.csv, in which the column `checkpoint`
    comes first.
    """
    heads = pd.concat(
        {name: open_analysis(folder / name).heads for name in names}, names=["checkpoint", None]
    )
    comparison = compare([folder / name for name in names], cache=folder)  # which stays empty
    return Answer(more={"heads.csv": heads.reset_index("checkpoint")}).save(folder, comparison)
