"""One question, its answer in words and figures, and the numbers behind it, in a folder."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
import plotly.graph_objects as go
import xarray as xr

from ropelens.files.folder import file_name, output_folder, write_whole
from ropelens.files.results import save_results
from ropelens.report.page import model_name, run_facts, short_facts, versions
from ropelens.report.page_figures import bare
from ropelens.report.payload import page_template
from ropelens.report.render import render


def write_answer(
    folder: str | Path,
    *,
    question: str,
    findings: Sequence[str],
    figures: Mapping[str, go.Figure],
    profile: xr.Dataset,
    heads: pd.DataFrame,
    more: Mapping[str, xr.Dataset | pd.DataFrame] | None = None,
) -> Path:
    """Write what an analysis found on one model; return the path of its page.

    `folder` is the analysis's; the results go into a folder in it named after the model.
    `findings` are sentences with numbers, the most important first; `figures` by their
    captions, each explained in a sentence or two, in order. There will be
    index.html (one file, no network), profile.nc, heads.csv and run.json, and the further
    results in `more` by the names of their files ("truncation.nc", "truncation.csv"): all
    of them or, after an error, what was there before.
    """
    name = file_name(profile.attrs["model"])
    folder = Path(folder) / (name.strip(".-") or "model")
    folder.parent.mkdir(parents=True, exist_ok=True)
    command = shlex.join(["python", *sys.argv])
    page = _render(question, findings, figures, profile, heads, command)
    record = {
        "command": command,
        "question": question,
        "finding": findings[0],
        "findings": list(findings),
        "model": {"name": str(profile.attrs["model"])},
        "versions": json.loads(profile.attrs["versions"]),
        **{name: profile.attrs[name] for name in ("seed", "context", "sequences", "tokens")},
    }
    with output_folder(folder) as results:
        for file, result in {"profile.nc": profile, "heads.csv": heads, **(more or {})}.items():
            if isinstance(result, xr.Dataset):
                save_results(result, results / file)
            else:
                table = result.to_csv(index=False, lineterminator="\n")
                write_whole(results / file, table)
        write_whole(results / "index.html", page)
        write_whole(results / "run.json", json.dumps(record, indent=2) + "\n")
    return folder / "index.html"


def _render(
    question: str,
    findings: Sequence[str],
    figures: Mapping[str, go.Figure],
    profile: xr.Dataset,
    heads: pd.DataFrame,
    command: str,
) -> str:
    """The page as text."""
    return render_figures(
        "answer.html",
        figures,
        question=question,
        model=model_name(profile),
        facts=short_facts(profile),
        findings=findings,
        run=run_facts(profile, heads),
        versions=versions(profile),
        command=command,
    )


def render_figures(template: str, figures: Mapping[str, go.Figure], **values: object) -> str:
    """A page of `figures` by their captions; `values` are what else its template names."""
    return render(
        template,
        script="answer.js",
        payload={
            "figures": [bare(figure) for figure in figures.values()],
            "templates": {theme: page_template(theme) for theme in ("light", "dark")},
        },
        cards=[
            {"name": number, "title": figure.layout.title.text, "explain": caption, "terms": ()}
            for number, (caption, figure) in enumerate(figures.items())
        ],
        **values,
    )
