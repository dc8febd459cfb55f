"""Answers of scripts to one question about models, and comparisons, as result folders."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from os.path import relpath
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.analysis.analysis_result import Analysis, open_analysis
from ropelens.analysis.model_pages import write_model_pages
from ropelens.analysis.saved_numbers import is_same_model
from ropelens.comparison.compare import compare
from ropelens.comparison.recalibration_table import (
    is_recalibration,
    summarize_recalibration,
)
from ropelens.comparison.summary import summarize_comparison
from ropelens.report.comparison_page import QUESTION, render_comparison
from ropelens.report.figure_page import render_figures
from ropelens.report.recalibration_page import render_recalibration
from ropelens.report.run_facts import profile_facts
from ropelens.report.sentences.comparison import comparison_sentences
from ropelens.report.sentences.profile import scope_sentence
from ropelens.report.sentences.recalibration import recalibration_sentences
from ropelens.runtime.digits import FIVE_DIGITS, in_float32, with_digits
from ropelens.runtime.folder import file_name
from ropelens.runtime.netcdf import as_saved
from ropelens.runtime.own_folder import own_folder
from ropelens.runtime.result_folder import ResultFolder, Results
from ropelens.runtime.run_record import read_record, this_command
from ropelens.schema.excerpts import EXCERPTS

# Attributes of a profile that the datasets of an answer get too
OF_TEXT = ("text", "context", "sequences")  # arguments that choose the tokens
PROVENANCE = ("revision", "backend", "text", "command", "warnings")


@dataclass(frozen=True)
class Answer:
    """Answer of a script to one question about models.

    `findings` are sentences with numbers, the most important one first. `figures` has captions
    as keys. `more` maps names of files to further results ("reach.nc").
    """

    question: str = QUESTION
    findings: Sequence[str] = ()
    figures: Mapping[str, go.Figure] = field(default_factory=dict)
    more: Mapping[str, Results] = field(default_factory=dict)

    def save(
        self,
        folder: str | Path,
        comparison: xr.Dataset,
        *,
        lead: str = "",
        picture: str = "",
    ) -> Path:
        """Write the result of `compare` and its table to `folder`; return the page.

        `folder` gets index.html, comparison.nc, comparison.csv, run.json and `more`. The page
        has the sentence `lead`, sentences about the numbers, and then the `findings`. It begins
        with the figure of the losses, or with the figure `picture` (the name of a row of the
        catalog of figures).
        """
        comparison = as_saved(comparison)
        comparison = _with_relative_files(comparison, Path(folder)).assign_attrs(
            question=self.question,
            command=this_command(),
            lead=lead,
            picture=picture,
            findings="\n".join(self.findings),
        )
        table = summarize_comparison(comparison)
        sentences = [
            *comparison_sentences(comparison, table),
            scope_sentence(comparison.attrs),
        ]
        results = ResultFolder(
            kind="comparison",
            findings=[sentence for sentence in sentences if sentence],
            files={"comparison.nc": comparison, "comparison.csv": table, **self.more},
            record=_comparison_record(comparison),
            page=partial(render_comparison, comparison, table),
        )
        return results.write(folder)


def save_comparison(
    folder: str | Path, comparison: xr.Dataset, *, with_models: bool = True
) -> Path:
    """Write the result of `compare`, its table, pages and run.json; return the page.

    The pages of models whose profiles the comparison saved are in models/. Without them, the
    folder is for reports: numbers have five digits, and paths of profiles are left out.
    """
    if with_models:
        comparison = write_model_pages(Path(folder), comparison)
    else:
        comparison = with_digits(comparison, FIVE_DIGITS)
        comparison = comparison.drop_vars("profile", errors="ignore")
    if is_recalibration(comparison):
        return _save_recalibration(Path(folder), comparison)
    return Answer().save(folder, comparison)


def _save_recalibration(folder: Path, comparison: xr.Dataset) -> Path:
    comparison = _with_relative_files(as_saved(comparison), folder)
    comparison = comparison.assign_attrs(command=this_command())
    table = summarize_recalibration(comparison)
    results = ResultFolder(
        kind="comparison",
        findings=recalibration_sentences(comparison, table),
        files={"comparison.nc": comparison, "comparison.csv": table},
        record=_comparison_record(comparison),
        page=partial(render_recalibration, comparison, table),
    )
    return results.write(folder)


def _with_relative_files(comparison: xr.Dataset, folder: Path) -> xr.Dataset:
    """The comparison with the pages and profiles of models as paths from `folder`."""
    for name in ("page", "profile"):
        if name not in comparison.coords:
            continue
        files = []
        for path in comparison[name].values.astype(str).tolist():
            file = path
            if Path(file).is_absolute():
                file = Path(relpath(file, folder.resolve())).as_posix()
            files.append(file)
        relative = np.array(files, dtype=object)
        comparison = comparison.assign_coords({name: ("entry", relative)})
    return comparison


def _comparison_record(comparison: xr.Dataset) -> dict[str, Any]:
    """The run.json of a comparison, without its kind and findings."""
    entries = comparison["entry"].values.tolist()
    record = dict(comparison.attrs)
    record["entries"] = entries
    record["versions"] = json.loads(comparison.attrs["versions"])
    record["model"] = {"name": str(comparison.attrs["model"])}
    if "fingerprint" in comparison.coords:
        fingerprints = comparison["fingerprint"].values.tolist()
        record["fingerprints"] = dict(zip(entries, fingerprints, strict=True))
    return record


def write_answer(folder: str | Path, analysis: Analysis, answer: Answer) -> Path:
    """Write the answer and all numbers to a folder in `folder` named after the model.

    The datasets have seven digits (float32), and the profile has no excerpts of the text.

    An answer about another model, text, context or number of sequences is not replaced: the
    folder is then NAME-2, ...
    """
    attrs = analysis.profile.attrs
    name = file_name(str(attrs["model"])).strip(".-") or "model"
    provenance = {attribute: attrs[attribute] for attribute in PROVENANCE}
    files = _files_without_excerpts(analysis.results)
    for file, result in answer.more.items():
        if isinstance(result, xr.Dataset):
            files[file] = result.assign_attrs(provenance)
        else:
            files[file] = result
    for file, result in files.items():
        if isinstance(result, xr.Dataset):
            files[file] = in_float32(result)
    sentences = [*answer.findings, scope_sentence(attrs)]
    results = ResultFolder(
        kind="answer",
        findings=[sentence for sentence in sentences if sentence],
        files=files,
        record={**analysis.provenance, "question": answer.question},
        page=partial(_render_answer, answer, analysis),
    )
    owns = partial(_is_same_measurement, provenance=analysis.provenance)
    return results.write(own_folder(Path(folder) / name, owns))


def _files_without_excerpts(results: Mapping[str, Results]) -> dict[str, Results]:
    """The files of an analysis without excerpts, which the page of an answer does not show."""
    files = dict(results)
    profile = files["profile.nc"]
    if isinstance(profile, xr.Dataset):
        files["profile.nc"] = without_excerpts(profile)
    return files


def without_excerpts(results: xr.Dataset) -> xr.Dataset:
    return results.drop_vars([row.name for row in EXCERPTS if row.name in results])


def _is_same_measurement(folder: Path, provenance: Mapping[str, Any]) -> bool:
    """Whether `folder` has an answer about the same model and the same part of a text."""
    record = read_record(folder)
    before = record.get("arguments", {})
    after = provenance.get("arguments", {})
    if any(before.get(name) != after.get(name) for name in OF_TEXT):
        return False
    return is_same_model(record.get("model", {}), provenance.get("model", {}))


def comparison_folder(first: Path, comparison: xr.Dataset) -> Path:
    """`first`, or the next folder in which no comparison of other runs is saved."""
    fingerprints = _comparison_record(comparison).get("fingerprints")
    return own_folder(
        first, lambda folder: read_record(folder).get("fingerprints") == fingerprints
    )


def _render_answer(answer: Answer, analysis: Analysis) -> str:
    """Text of the page of an answer."""
    return render_figures(
        "answer.html",
        answer.figures,
        question=answer.question,
        findings=answer.findings,
        about=profile_facts(analysis.profile, analysis.heads),
    )


def write_checkpoints(folder: Path, names: Sequence[str]) -> Path:
    """Compare the analyses `names` in `folder`, with a table of all heads; return the page."""
    tables = {name: open_analysis(folder / name).heads for name in names}
    heads = pd.concat(tables, names=["checkpoint", None]).reset_index("checkpoint")
    folders = [folder / name for name in names]
    comparison = compare(folders, cache=folder)  # analyses need no cache
    return Answer(more={"heads.csv": heads}).save(folder, comparison)
