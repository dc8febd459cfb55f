"""Analyses of models and answers of scripts, in memory and as result folders with a page."""

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
from ropelens.claims.tables import classify_heads
from ropelens.comparison.compare import compare
from ropelens.comparison.table import summarize_comparison
from ropelens.errors import BadArgument, explained, public, words_of
from ropelens.interventions.truncation_table import summarize_truncation
from ropelens.profiles.measurement import versions
from ropelens.profiles.measures import complete_profile, open_profile
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
    """Result of `ropelens.analyze`: the numbers of a model and their provenance.

    `profile`, `heads`, `truncation` and `reach` are the results of `ropelens.profile`,
    `classify_heads`, `truncate` and `reach`; `truncation` and `reach` may be None. `provenance`
    is the contents of run.json without `kind` and `findings`. `model`, `tokenizer` and `text`
    are None in an analysis that was read from a folder.
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
        """The table in truncation.csv, with a row for each edit; None without a sweep."""
        return None if self.truncation is None else summarize_truncation(self.truncation)

    @property
    def results(self) -> dict[str, xr.Dataset | pd.DataFrame]:
        """All datasets and tables, by the names of their files."""
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
        """Sentences about the sweep, the labels, the verdict of the claim and the scope."""
        sweep = []
        if self.truncation is not None:
            sweep = sweep_sentences(self.truncation, self.truncation_table)
        first, *more = heads_sentences(self.heads)
        more += [scope(self.profile.attrs)]
        return [*filter(None, [*sweep[:4], first, *attention_sentences(self.profile), *more])]

    def page(self, *, beside: "Analysis | None" = None) -> str:
        """The page as HTML; with `beside`, it also shows the heads of another analysis."""
        return render_page(
            self.profile,
            self.heads,
            self.truncation,
            self.truncation_table,
            self.reach,
            None if beside is None else (beside.profile, beside.heads),
        )

    def report(self, path: str | Path, *, beside: "Analysis | None" = None) -> Path:
        """Write only the page to the file `path`, completely or not at all; return `path`.

        With `beside`, an analysis of another model of any size, the page also shows the heads
        of that model next to the selected head: with the same planes stopped, and on the
        excerpts that both models read.
        """
        return write_whole(path, self.page(beside=beside))

    def save(self, folder: str | Path) -> Path:
        """Write index.html, profile.nc, heads.csv and run.json to `folder`; return the page.

        A sweep is written to truncation.nc and truncation.csv. If `folder` already has a sweep
        or a reach of the same weights, it is kept and shown on the page. Either all numbers are
        written or none; then the page is drawn. Raises `BadArgument` for a folder that cannot
        be written to, or that holds a model or results of another kind.
        """
        weights, joined = self.provenance.get("model", {}).get("fingerprint"), self
        if earlier := earlier_results(Path(folder), weights):
            sweep = earlier.truncation if self.truncation is None else self.truncation
            reach = earlier.reach if self.reach is None else self.reach
            joined = replace(self, truncation=sweep, reach=reach)
        kind = "analysis" if joined.truncation is None else "truncation"
        record = self.provenance | {"kind": kind, "findings": joined.findings}
        unfinished = Path(folder) / UNFINISHED

        def page() -> str:
            shutil.rmtree(unfinished, ignore_errors=True)  # all numbers are written
            return joined.page()

        try:
            return write_folder(folder, record=record, results=joined.results, page=page)
        except OSError as error:
            hint = f"the same command continues from {unfinished}" * unfinished.exists()
            what = f"Not all results could be written to {folder}."
            raise BadArgument(what, seen=words_of(error), hint=hint) from error

    def __repr__(self) -> str:
        return f"<Analysis of {self.profile.attrs['model']}: {self.findings[0]}>"


@public
def open(path: str | Path) -> Analysis | xr.Dataset:
    """Read results: a folder of `ropelens analyze` or `compare`, or a .nc file.

    Returns the `Analysis` or the dataset of the comparison in a folder, or the dataset that
    `save` wrote to a file. Raises `BadArgument` for files that are missing or damaged, or
    have another kind.
    """
    if not Path(path).is_dir():
        results = open_results(path)
        is_profile = results.attrs.get("kind") == "profile"
        return complete_profile(results, path) if is_profile else results
    if read_record(path).get("kind") == "comparison":
        return open_results(Path(path) / "comparison.nc", "comparison")
    return open_analysis(path)


@dataclass(frozen=True, eq=False)
class SavedResults:
    """Numbers of an analysis in `folder`, before the labels of the heads are computed."""

    folder: Path
    profile: xr.Dataset
    provenance: dict[str, Any]
    truncation: xr.Dataset | None
    reach: xr.Dataset | None

    @classmethod
    def read(cls, folder: Path) -> "SavedResults":
        """Read the numbers; raises the errors of `open_analysis`."""
        record = read_record(folder)
        profile = open_profile(folder / "profile.nc")
        profile.attrs |= {"command": str(record["command"])} if "command" in record else {}
        sweep = reach = None
        if (file := folder / "reach.nc").exists():
            reach = open_results(file, "reach")
            model, other = (results.attrs.get("model") for results in (profile, reach))
            if model != other:
                raise BadArgument(
                    f"{file} was measured on {other}, but the profile in the same folder was "
                    f"measured on {model}.",
                    hint=f"move {file} away, or measure it again",
                )
        if record.get("kind") == "truncation":
            sweep = open_results(folder / "truncation.nc", "truncation")
        return cls(folder, profile, record, sweep, reach)

    def classify(self) -> Analysis:
        """The analysis, with labels that are computed from the profile."""
        what = f"{self.folder / 'profile.nc'} lacks numbers that labels are computed from."
        with explained(what, "measure again", error=BadArgument):
            heads = classify_heads(self.profile, seed=self.profile.attrs["seed"])
        return Analysis(
            self.profile, heads, self.provenance, truncation=self.truncation, reach=self.reach
        )


def open_analysis(folder: str | Path) -> Analysis:
    """Read an analysis that `Analysis.save` or `ropelens analyze` wrote.

    Labels and their confidence are computed again from the profile. If the folder has a
    reach.nc, it becomes a tab of the page. Raises `BadArgument` for files that are missing or
    damaged, or have another kind, and for a reach of another model.
    """
    return SavedResults.read(Path(folder)).classify()


def earlier_results(folder: Path, weights: str | None) -> SavedResults | None:
    """Results in `folder` that were measured on these weights; None if missing or damaged."""
    record = read_record(folder)
    same = weights is not None and record.get("model", {}).get("fingerprint") == weights
    with contextlib.suppress(BadArgument):  # damaged results are replaced
        if same and record["kind"] in ("analysis", "truncation"):
            return SavedResults.read(folder)
    return None


def check_sweep(folder: Path, arguments: Mapping[str, Any]) -> None:
    """Raise `BadArgument` if `folder` has a sweep with other arguments."""
    if read_record(folder).get("kind") != "truncation":
        return
    changes = ""
    with contextlib.suppress(AttributeError, KeyError, ValueError):  # damage is replaced
        sweep = open_results(folder / "truncation.nc", "truncation")
        before = json.loads(sweep.attrs["arguments"])
        changes = differences(before, arguments, before | arguments, between=", now ")
    if changes:
        raise BadArgument(
            f"{folder} has a sweep with other options, which this sweep would replace.",
            seen=changes[:300],
            hint="another folder, or the same options",
        )


@dataclass(frozen=True)
class Answer:
    """Answer of a script to one question about one model, or about several models.

    `findings` are sentences with numbers, the most important sentence first. `figures` maps
    captions of one or two sentences to figures, in order. `more` maps names of files to further
    results ("reach.nc", "truncation.csv").
    """

    question: str = QUESTION
    findings: Sequence[str] = ()
    figures: Mapping[str, go.Figure] = field(default_factory=dict)
    more: Mapping[str, xr.Dataset | pd.DataFrame] = field(default_factory=dict)

    def save(self, folder: str | Path, comparison: xr.Dataset, *, lead: str = "") -> Path:
        """Write the result of `compare` and its table to `folder`; return the page.

        `folder` gets index.html, comparison.nc, comparison.csv, run.json and `more`; the
        page is drawn last. It starts with the sentence `lead` and the sentences that follow
        from the numbers, and then has the `findings`.
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
            fingerprints = comparison["fingerprint"].values.tolist()
            record["fingerprints"] = dict(zip(entries, fingerprints, strict=True))
        Path(folder).parent.mkdir(parents=True, exist_ok=True)
        results = {"comparison.nc": comparison, "comparison.csv": table, **self.more}
        page = partial(render_comparison, comparison, table)
        return write_folder(folder, record=record, results=results, page=page)


def write_answer(folder: str | Path, analysis: Analysis, answer: Answer) -> Path:
    """Write the answer of a script about one model; return the page.

    A folder in `folder`, named after the model, gets index.html, run.json, and the numbers of
    `analysis` and `answer`. The page is drawn last.
    """
    attrs = analysis.profile.attrs
    folder = Path(folder) / (file_name(str(attrs["model"])).strip(".-") or "model")
    folder.parent.mkdir(parents=True, exist_ok=True)
    facts = {n: attrs[n] for n in ("revision", "backend", "text", "command", "warnings")}
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
    """Draw the page of a result folder again from its numbers; return the page.

    `beside` is the folder of another analysis, whose heads the page shows as well. Raises
    `BadArgument` for numbers that are missing or damaged, and for the folder of an answer. The
    earlier page is then kept.
    """
    folder, record = Path(folder), read_record(folder)
    kind = record.get("kind")
    if kind == "answer":
        raise BadArgument(
            f"Only the script that wrote {folder} can draw its page.",
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
    """True if `folder` has the results of the plan, with the same weights and versions."""
    assert isinstance(plan.source, Opened)
    record = read_record(folder)
    if (record.get("arguments"), record.get("versions")) != (plan.arguments, versions()):
        return False
    saved = [record.get(name, {}).get("fingerprint") for name in ("model", "text")]
    return saved == [fingerprint(plan.source.checkpoint.path), plan.text.documents_sha256]


def write_checkpoints(folder: Path, names: Sequence[str]) -> Path:
    """Compare the analyses in the folders `names` of `folder`; return the page.

    In addition to the files of `Answer.save`, `folder` gets heads.csv with a first column
    `checkpoint`.
    """
    heads = pd.concat(
        {name: open_analysis(folder / name).heads for name in names}, names=["checkpoint", None]
    )
    comparison = compare([folder / name for name in names], cache=folder)  # writes no cache
    return Answer(more={"heads.csv": heads.reset_index("checkpoint")}).save(folder, comparison)
