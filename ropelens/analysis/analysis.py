"""What was measured of one model on one text, ready to look at, save and report."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr
from torch import nn

from ropelens.analysis.notebook import shown
from ropelens.errors import BadArgument, public
from ropelens.files.folder import write_whole
from ropelens.files.results import open_results, read_own_record, write_folder
from ropelens.measure.heads import classify_heads
from ropelens.measure.truncation_table import summarize_truncation
from ropelens.models.texts import Sequences
from ropelens.report.page import render_page
from ropelens.report.words import claim_sentence, headline
from ropelens.statistics.seeds import whole_seed

FACTS = ("revision", "backend", "text", "command", "warnings")
"""Attributes that results have from `analyze`, beside those of `profile`."""


@dataclass(frozen=True, eq=False, repr=False)
class Analysis:
    """What `ropelens.analyze` gives: the numbers of a model, and where they come from.

    `profile` is what `ropelens.profile` gives, `heads` what `classify_heads` makes of it,
    `provenance` what run.json says. `truncation` is a sweep, where one was asked for; `reach`
    what `ropelens.reach` gave, where its reach.nc lay in the folder that was opened.
    `model` and `sequences` are what was measured; None where the analysis was read from a
    folder.
    """

    profile: xr.Dataset
    heads: pd.DataFrame
    provenance: dict[str, Any]
    truncation: xr.Dataset | None = None
    model: nn.Module | None = None
    sequences: Sequences | None = None
    reach: xr.Dataset | None = None

    @cached_property
    def truncation_table(self) -> pd.DataFrame | None:
        """The sweep as truncation.csv has it, a row an edit; None without a sweep."""
        return None if self.truncation is None else summarize_truncation(self.truncation)

    @property
    def results(self) -> dict[str, xr.Dataset | pd.DataFrame]:
        """All numbers by the names of their files."""
        results: dict[str, xr.Dataset | pd.DataFrame] = {
            "profile.nc": self.profile,
            "heads.csv": self.heads,
        }
        if self.truncation is not None and self.truncation_table is not None:
            results |= {
                "truncation.nc": self.truncation,
                "truncation.csv": self.truncation_table,
            }
        if self.reach is not None:
            results["reach.nc"] = self.reach
        return results

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
        """Write the page alone to `path` (a file), whole or not at all; that path.

        `beside` is an analysis of another model, checkpoint or variant, of whatever size:
        the page then shows its heads too, each beside the chosen one, with the same planes
        stopped and on the same text where both have read it.
        """
        return write_whole(path, self.page(beside=beside))

    def save(self, folder: str | Path) -> Path:
        """Write index.html, profile.nc, heads.csv and run.json to `folder`; the page's path.

        With a sweep also truncation.nc and truncation.csv. All of them are written or, after
        an error, what was there before stays. Raises `BadArgument` for a folder that cannot
        be written to, or that holds a model or results of another kind.
        """
        record, results = self.provenance, self.results
        return write_folder(folder, record=record, results=results, page=self.page)

    def __repr__(self) -> str:
        return f"<Analysis of {self.profile.attrs['model']}: {self._finding}>"

    def _repr_html_(self) -> str:
        """For notebooks: what was found, a map of the heads, and their labels by layer."""
        claim = claim_sentence(self.heads.attrs.get("claim"))
        findings = [sentence for sentence in (headline(self.heads), claim) if sentence]
        return shown(str(self.profile.attrs["model"]), findings, self.heads)

    @property
    def _finding(self) -> str:
        return " ".join(self.provenance["findings"][:1])


@public
def open(path: str | Path) -> Analysis | xr.Dataset:
    """Read results of any kind: a folder of `ropelens analyze` or `compare`, or a .nc file.

    A folder gives an `Analysis`, or the dataset of a comparison; a file gives the dataset that
    `save` wrote. Raises `BadArgument` for files that are missing, damaged or of another kind.
    """
    if not Path(path).is_dir():
        return open_results(path)
    if read_own_record(path).get("kind") == "comparison":
        return open_results(Path(path) / "comparison.nc", "comparison")
    return open_analysis(path)


def open_analysis(folder: str | Path) -> Analysis:
    """Read an analysis that `Analysis.save` or `ropelens analyze` wrote.

    Labels and their confidence are computed anew from the profile. A reach.nc beside it, which
    `save` wrote of what `reach` gave, becomes a tab of the page. Raises `BadArgument`
    for files that are missing, damaged, of another kind, or a reach of another model.
    """
    folder = Path(folder)
    record = {"kind": "analysis", "findings": []} | read_own_record(folder)
    profile = open_results(folder / "profile.nc", "profile")
    swept = record["kind"] == "truncation"
    reached = folder / "reach.nc"
    reach = open_results(reached, "reach") if reached.exists() else None
    if reach is not None and reach.attrs.get("model") != profile.attrs.get("model"):
        raise BadArgument(
            f"{reached} is not of the model that the profile is of.",
            seen=f"{reach.attrs.get('model')}, and {profile.attrs.get('model')}",
            attempt="move it away, or put the reach of this model there",
        )
    return Analysis(
        profile,
        classify_heads(profile, seed=whole_seed(profile.attrs.get("seed"))),
        record,
        truncation=open_results(folder / "truncation.nc", "truncation") if swept else None,
        reach=reach,
    )
