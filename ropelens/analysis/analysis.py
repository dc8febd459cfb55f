"""Analyses of models and answers of scripts, in memory and as result folders with a page."""

import contextlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import pandas as pd
import plotly.graph_objects as go
import xarray as xr
from torch import nn

from ropelens.analysis import hub
from ropelens.analysis.plan import Plan, this_command
from ropelens.arguments import public
from ropelens.claims.tables import classify_heads
from ropelens.comparison.compare import compare
from ropelens.comparison.table import summarize_comparison
from ropelens.errors import BadArgument, explained
from ropelens.interventions.truncation_table import summarize_truncation
from ropelens.profiles.measurement import versions
from ropelens.profiles.measures import complete_profile, open_profile
from ropelens.report import words
from ropelens.report.notebook import display
from ropelens.report.page import (
    QUESTION,
    render_comparison,
    render_figures,
    render_page,
    render_steps,
)
from ropelens.report.tables import about
from ropelens.runtime.folder import file_name, locked, write_whole
from ropelens.runtime.keys import Key
from ropelens.runtime.results import (
    PAGE,
    open_results,
    read_record,
    write_folder,
    write_page,
)
from ropelens.runtime.savepoint import UNFINISHED
from ropelens.text.text import Text


@dataclass(frozen=True, eq=False, repr=False)
class Analysis:
    """Result of `ropelens.analyze`: the numbers of a model and their provenance.

    `heads` is the result of `classify_heads`; `profile`, `truncation` and `reach` come from the
    functions of these names. `provenance` is run.json without `kind` and `findings`. An
    analysis from a folder has no `model`, `tokenizer` and `text`. `pages` are the paths of the
    pages that were written. A notebook shows the findings, a map of the heads, and the path of
    the last page.
    """

    profile: xr.Dataset
    heads: pd.DataFrame
    provenance: dict[str, Any]
    truncation: xr.Dataset | None = None
    model: nn.Module | None = None
    text: Text | None = None
    reach: xr.Dataset | None = None
    tokenizer: Any = None
    pages: list[Path] = field(default_factory=list)

    @cached_property
    def truncation_table(self) -> pd.DataFrame | None:
        """The table in truncation.csv, with a row for each edit; None without a sweep."""
        return (
            None if self.truncation is None else summarize_truncation(self.truncation)
        )

    @property
    def results(self) -> dict[str, xr.Dataset | pd.DataFrame]:
        """All datasets and tables, by the names of their files."""
        results = {
            "profile.nc": self.profile,
            "heads.csv": self.heads,
            "reach.nc": self.reach,
        }
        results |= {
            "truncation.nc": self.truncation,
            "truncation.csv": self.truncation_table,
        }
        return {name: result for name, result in results.items() if result is not None}

    @property
    def findings(self) -> list[str]:
        """Sentences about the sweep, the labels, the verdict of the claim and the scope."""
        table, sweep = self.truncation_table, list[str]()
        if self.truncation is not None and table is not None:
            sweep = words.sweep_sentences(self.truncation, table)[:4]
        first, *more = words.heads_sentences(self.heads)
        searched = words.attention_sentences(self.profile)
        return [
            *filter(
                None, [*sweep, first, *searched, *more, words.scope(self.profile.attrs)]
            )
        ]

    def page(self, *, beside: "Analysis | None" = None) -> str:
        """The page as HTML; with `beside`, it also shows the heads of another analysis."""
        other = None if beside is None else (beside.profile, beside.heads)
        results = self.profile, self.heads, self.truncation, self.reach
        return render_page(*results, other, self.truncation_table)

    def report(self, path: str | Path, *, beside: "Analysis | None" = None) -> Path:
        """Write only the page to the file `path`, completely or not at all; return `path`.

        With `beside`, the page also shows the heads of that analysis, with the same planes
        stopped, and on the excerpts that both models read.
        """
        self.pages.append(write_whole(path, self.page(beside=beside)))
        return self.pages[-1]

    def save(self, folder: str | Path, *, again: str = "") -> Path:
        """Write the page, `results` and run.json to `folder`; return the page.

        A sweep or a reach of the same model in `folder` is kept and shown on the page. Either
        all numbers are written or none; then the page is drawn. Raises `BadArgument` for a
        folder that cannot be written to, or that holds something else, such as results of
        another model; but results of the model argument `again` are replaced.
        """
        folder, model = Path(folder), self.provenance.get("model", {})
        unfinished = folder / UNFINISHED
        with locked(folder):
            check_model(folder, model, again=again)
            earlier = earlier_results(folder, model.get("fingerprint")) or {}
            lacking = [
                name for name in ("truncation", "reach") if getattr(self, name) is None
            ]
            added: Any = {name: earlier.get(name) for name in lacking}
            joined = replace(self, **added)
            kind = "analysis" if joined.truncation is None else "truncation"
            record = self.provenance | {"kind": kind, "findings": joined.findings}

            def page() -> str:
                shutil.rmtree(unfinished, ignore_errors=True)  # all numbers are written
                if joined.reach is None:  # a reach of another model
                    (folder / "reach.nc").unlink(missing_ok=True)
                return joined.page()

            hint = f"the same command continues from {unfinished}" * unfinished.exists()
            what = f"Not all results could be written to {folder}."
            with explained(what, hint, error=BadArgument, catch=OSError):
                written = write_folder(
                    folder, record=record, results=joined.results, page=page
                )
        self.pages.append(written)
        return written

    def push_to_hub(self, repo: str, *, private: bool = True) -> str:
        """Upload the files of `save` as the dataset `repo` (name/dataset); return its address.

        A card is added. The page and profile.nc contain excerpts of the text. Raises
        `BadArgument` if `private`, and the dataset is public, or if it has other files.
        """
        with TemporaryDirectory() as folder:
            results = Path(folder) / "results"
            replace(self, pages=[]).save(results)
            return hub.upload(
                results, repo, self.provenance, self.findings, private=private
            )

    def _repr_html_(self) -> str:
        page = self.pages[-1] if self.pages else None
        return display(self.findings, self.heads, self.profile, page=page).html

    def __repr__(self) -> str:
        return f"<Analysis of {self.profile.attrs['model']}: {self.findings[0]}>"


@public
def open(path: str | Path) -> Analysis | xr.Dataset:
    """Read the `Analysis` or comparison in a folder, or the dataset in a .nc file.

    The folder of `ropelens.watch` gives a dataset over `step`, with `numbers` (step, number).
    `path` may be a dataset on the Hub, "hf://datasets/name/dataset" or "...@revision". Only its
    numbers are fetched. No file is unpickled, no code of it runs, and no model is loaded.

    Raises `BadArgument` for files that are missing, damaged or of another kind.
    """
    if str(path).startswith(hub.PREFIX):
        path = hub.download(str(path))
    if (kind := read_record(path).get("kind")) == "comparison":
        return open_results(Path(path) / "comparison.nc", "comparison")
    if kind == "watch":
        from ropelens.train.watch import (
            open_steps,
        )  # slow: imports transformers' Trainer

        return open_steps(Path(path))
    if Path(path).is_dir():
        return open_analysis(path)
    results = open_results(path)
    is_profile = results.attrs.get("kind") == "profile"
    return complete_profile(results, path) if is_profile else results


def _read_numbers(folder: Path) -> dict[str, Any]:
    """Arguments of `Analysis` without the heads; raises the errors of `open_analysis`."""
    with locked(folder):
        record = read_record(folder)
        profile = open_profile(folder / "profile.nc")
        profile.attrs |= (
            {"command": str(record["command"])} if "command" in record else {}
        )
        file, swept = folder / "reach.nc", record.get("kind") == "truncation"
        reach = open_results(file, "reach") if file.exists() else None
        sweep = open_results(folder / "truncation.nc", "truncation") if swept else None
    return {
        "profile": profile,
        "provenance": record,
        "truncation": sweep,
        "reach": reach,
    }


def open_analysis(
    folder: str | Path, numbers: Mapping[str, Any] | None = None
) -> Analysis:
    """Read an analysis that `Analysis.save` wrote, or take its `numbers`; label its heads."""
    numbers, file = numbers or _read_numbers(Path(folder)), Path(folder) / "profile.nc"
    what = f"{file} lacks numbers that labels are computed from."
    with explained(what, "measure again", error=BadArgument):
        heads = classify_heads(
            numbers["profile"], seed=numbers["profile"].attrs["seed"]
        )
    return Analysis(heads=heads, pages=[*Path(folder).glob(PAGE)], **numbers)


def recorded_key(record: Mapping[str, Any]) -> dict[str, Any]:
    """The fingerprints and settings in the run.json of an analysis, for a `Key`."""
    return {
        "model": record.get("model", {}).get("fingerprint"),
        "text": record.get("text", {}).get("fingerprint"),
        "arguments": record.get("arguments"),
        "versions": record.get("versions"),
    }


def earlier_results(folder: Path, fingerprint: str | None) -> dict[str, Any] | None:
    """Results in `folder` that were measured on this model; None if missing or damaged."""
    record = read_record(folder)
    if fingerprint is None or record.get("kind") not in ("analysis", "truncation"):
        return None
    with contextlib.suppress(BadArgument):  # damaged results are replaced
        if Key({"model": fingerprint}).fits(recorded_key(record)):
            return _read_numbers(folder)
    return None


def check_model(folder: Path, model: Mapping[str, Any], *, again: str = "") -> None:
    """Raise `BadArgument` if `folder` has results of another model than `model` in a run.json.

    Results of the model argument `again` may be replaced. If the fingerprints are of different
    kinds, the names count.
    """
    record = read_record(folder)
    before, argument = record.get("model", {}), record.get("arguments", {}).get("model")
    old, new = (str(facts.get("fingerprint")) for facts in (before, model))
    same = old == new or (again != "" and again == argument)
    if old.partition(":")[0] != new.partition(":")[0]:
        same |= before.get("name") in (None, model.get("name"))
    if record.get("kind") in ("analysis", "truncation") and not same:
        what = f"{folder} has results of another model, {before.get('name')}."
        seen = f"its fingerprint is {old[:18]}, now it is {new[:18]}; it covers the weights, "
        seen += "configuration, adapters, tokenizer, dtype and quantization"
        raise BadArgument(what, seen=seen, hint="another --out, or delete the folder")


def check_sweep(folder: Path, arguments: Mapping[str, Any]) -> None:
    """Raise `BadArgument` if `folder` has a sweep with other arguments."""
    if read_record(folder).get("kind") != "truncation":
        return
    changes = ""
    with contextlib.suppress(
        AttributeError, KeyError, TypeError, ValueError
    ):  # damage is replaced
        sweep = open_results(folder / "truncation.nc", "truncation")
        before = json.loads(sweep.attrs["arguments"])
        changes = Key(dict.fromkeys(before) | dict(arguments)).changes(before)
    if changes:
        what = (
            f"{folder} has a sweep with other options, which this sweep would replace."
        )
        raise BadArgument(
            what, seen=changes[:300], hint="another folder, or the same options"
        )


@dataclass(frozen=True)
class Answer:
    """Answer of a script to one question about models.

    `findings` are sentences with numbers, the most important one first. `figures` has captions
    as keys. `more` maps names of files to further results ("reach.nc").
    """

    question: str = QUESTION
    findings: Sequence[str] = ()
    figures: Mapping[str, go.Figure] = field(default_factory=dict)
    more: Mapping[str, xr.Dataset | pd.DataFrame] = field(default_factory=dict)

    def save(
        self, folder: str | Path, comparison: xr.Dataset, *, lead: str = ""
    ) -> Path:
        """Write the result of `compare` and its table to `folder`; return the page.

        `folder` gets index.html, comparison.nc, comparison.csv, run.json and `more`. The page
        has the sentence `lead`, sentences about the numbers, and then the `findings`.
        """
        said = {"question": self.question, "command": this_command(), "lead": lead}
        comparison = comparison.assign_attrs(said, findings="\n".join(self.findings))
        table, facts = summarize_comparison(comparison), comparison.attrs
        entries = comparison["entry"].values.tolist()
        findings = [*words.comparison_sentences(comparison, table), words.scope(facts)]
        record: Any = facts | {
            "kind": "comparison",
            "findings": [*filter(None, findings)],
        }
        record |= {"entries": entries, "versions": json.loads(facts["versions"])}
        record["model"] = {"name": str(facts["model"])}
        if "fingerprint" in comparison.coords:
            fingerprints = comparison["fingerprint"].values.tolist()
            record["fingerprints"] = dict(zip(entries, fingerprints, strict=True))
        results = {"comparison.nc": comparison, "comparison.csv": table, **self.more}
        page = partial(render_comparison, comparison, table)
        return write_folder(folder, record=record, results=results, page=page)


def write_answer(folder: str | Path, analysis: Analysis, answer: Answer) -> Path:
    """Write the answer and all numbers to a folder in `folder` named after the model."""
    attrs = analysis.profile.attrs
    folder = Path(folder) / (file_name(str(attrs["model"])).strip(".-") or "model")
    facts = {
        n: attrs[n] for n in ("revision", "backend", "text", "command", "warnings")
    }
    findings = [*filter(None, [*answer.findings, words.scope(attrs)])]
    record: Any = {"kind": "answer", "question": answer.question, "findings": findings}
    more = {
        name: result.assign_attrs(facts) if isinstance(result, xr.Dataset) else result
        for name, result in answer.more.items()
    }
    shown = {"question": answer.question, "findings": answer.findings}
    shown |= about(analysis.profile, analysis.heads)
    page = partial(render_figures, "answer.html", answer.figures, **shown)
    record, results = analysis.provenance | record, analysis.results | more
    return write_folder(folder, record=record, results=results, page=page)


def rewrite_page(folder: str | Path, *, beside: str | Path | None = None) -> Path:
    """Draw the page of a result folder again, also with the heads of the folder `beside`."""
    folder, record = Path(folder), read_record(folder)
    if record.get("kind") == "answer":
        what = f"Only the script that wrote {folder} can draw its page."
        raise BadArgument(
            what, seen=str(record["question"]), hint=str(record.get("command"))
        )
    if record.get("kind") == "comparison" and beside is None:
        comparison = open_results(folder / "comparison.nc", "comparison")
        table = summarize_comparison(comparison)
        return write_page(folder, lambda: render_comparison(comparison, table))
    if record.get("kind") == "watch":
        return write_page(folder, lambda: render_steps(cast(xr.Dataset, open(folder))))
    other = None if beside is None else open_analysis(beside)
    with locked(folder):
        analysis = open_analysis(folder)
        return write_page(folder, lambda: analysis.page(beside=other))


def is_measured(folder: Path, plan: Plan) -> bool:
    """True if `folder` has the results of the plan, with the same model and versions."""
    key = Key(
        {
            "model": plan.model["fingerprint"],
            "text": plan.text.documents_sha256,
            "arguments": plan.arguments,
            "versions": versions(),
        }
    )
    return key.fits(recorded_key(read_record(folder)))


def write_checkpoints(folder: Path, names: Sequence[str]) -> Path:
    """Compare the analyses `names` in `folder`, with a table of all heads; return the page."""
    tables = {name: open_analysis(folder / name).heads for name in names}
    heads = pd.concat(tables, names=["checkpoint", None])
    comparison = compare(
        [folder / name for name in names], cache=folder
    )  # writes no cache
    return Answer(more={"heads.csv": heads.reset_index("checkpoint")}).save(
        folder, comparison
    )
