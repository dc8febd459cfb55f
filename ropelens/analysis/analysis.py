"""What was measured of one model on one text, ready to look at, save and report."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import xarray as xr
from torch import nn

from ropelens.errors import BadArgument, public
from ropelens.files.folder import write_whole
from ropelens.files.results import open_results, read_record, write_folder
from ropelens.measure.heads import classify_heads
from ropelens.measure.savepoint import UNFINISHED, remove_savepoint
from ropelens.measure.truncation_table import summarize_truncation
from ropelens.models.texts import Sequences
from ropelens.report.page import render_page
from ropelens.report.words import (
    attention_on,
    heads_sentences,
    scope,
    sweep_sentences,
)


@dataclass(frozen=True, eq=False, repr=False)
class Analysis:
    """What `ropelens.analyze` returns: the numbers of a model, and how they came about.

    `profile` is what `ropelens.profile` returns, `heads` what `classify_heads` makes of it,
    `provenance` what run.json says beside the kind and `findings`. `truncation` is a sweep
    and `reach` what `ropelens.reach` returns, or None. `model` and `sequences` are what was
    measured; None in an analysis that was read from a folder.
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
        first, *more = heads_sentences(self.heads)
        if self.truncation is not None:
            more = [*sweep_sentences(self.truncation, self.truncation_table)[:2], *more]
        attrs = self.profile.attrs
        return [first, *attention_on(self.profile), *more, *filter(None, [scope(attrs)])]

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
        weights that `folder` has already stays, and is on the page. After an error `folder`
        is as it was before. Raises `BadArgument` for a folder that cannot be written to, or
        that holds a model or results of another kind.
        """
        weights, whole = self.provenance.get("model", {}).get("fingerprint"), self
        if earlier := earlier_analysis(Path(folder), weights):
            swept = earlier.truncation if self.truncation is None else self.truncation
            reach = earlier.reach if self.reach is None else self.reach
            whole = replace(self, truncation=swept, reach=reach)
        kind = "analysis" if whole.truncation is None else "truncation"
        record = self.provenance | {"kind": kind, "findings": whole.findings}
        page = write_folder(folder, record=record, results=whole.results, page=whole.page)
        remove_savepoint(Path(folder) / UNFINISHED)
        return page

    def __repr__(self) -> str:
        return f"<Analysis of {self.profile.attrs['model']}: {self.findings[0]}>"


@public
def open(path: str | Path) -> Analysis | xr.Dataset:
    """Read results of any kind: a folder of `ropelens analyze` or `compare`, or a .nc file.

    A folder gives an `Analysis`, or the dataset of a comparison; a file gives the dataset that
    `save` wrote. Raises `BadArgument` for files that are missing, damaged or of another kind.
    """
    if not Path(path).is_dir():
        return open_results(path)
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
    profile = open_results(folder / "profile.nc", "profile")
    if (folder / "reach.nc").exists():
        reach = open_results(folder / "reach.nc", "reach")
        if reach.attrs.get("model") != profile.attrs.get("model"):
            raise BadArgument(
                f"{folder / 'reach.nc'} is of {reach.attrs.get('model')}, and the profile "
                f"beside it of {profile.attrs.get('model')}."
            )
    return Analysis(
        profile,
        classify_heads(profile, seed=profile.attrs["seed"]),
        record,
        truncation=open_results(folder / "truncation.nc", "truncation") if swept else None,
        reach=reach,
    )


def earlier_analysis(folder: Path, weights: str | None) -> Analysis | None:
    """The analysis in `folder`, where it is whole and of these weights; else None."""
    record = read_record(folder)
    if record.get("kind") not in ("analysis", "truncation") or weights is None:
        return None
    if record.get("model", {}).get("fingerprint") != weights:
        return None
    with contextlib.suppress(BadArgument):  # a damaged one is replaced
        return open_analysis(folder)
    return None
