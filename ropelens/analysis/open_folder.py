"""Saved results: opened in Python, and their pages drawn again."""

from functools import partial
from pathlib import Path

import xarray as xr

from ropelens.analysis import hub
from ropelens.analysis.analysis_result import Analysis, open_analysis
from ropelens.analysis.model_pages import write_model_pages
from ropelens.arguments import public
from ropelens.comparison.recalibration_table import (
    is_recalibration,
    summarize_recalibration,
)
from ropelens.comparison.summary import summarize_comparison
from ropelens.errors import BadArgument
from ropelens.profiles.measures import complete_profile
from ropelens.report.comparison_page import render_comparison
from ropelens.report.figure_page import render_steps
from ropelens.report.recalibration_page import render_recalibration
from ropelens.runtime.folder import locked
from ropelens.runtime.netcdf import open_results
from ropelens.runtime.result_folder import write_page
from ropelens.runtime.run_record import read_record
from ropelens.train.watched_numbers import open_steps


@public
def open(path: str | Path) -> Analysis | xr.Dataset:
    """Read the `Analysis` or comparison in a folder, or the dataset in a .nc file.

    The folder of `ropelens.watch` gives a dataset over `step`, with `numbers` (step, number).
    `path` may be a dataset on the Hub, "hf://datasets/name/dataset" or "...@revision". Only its
    numbers are fetched. No file is unpickled, no code of it runs, and no model is loaded.

    Raises `BadArgument` for files that are missing, damaged or of another kind.
    """
    folder = Path(path)
    if str(path).startswith(hub.PREFIX):
        folder = hub.download(str(path))
    kind = read_record(folder).get("kind")
    if kind == "comparison":
        return _open_comparison(folder)
    if kind == "watch":
        return open_steps(folder)
    if folder.is_dir():
        return open_analysis(folder)
    return complete_profile(open_results(folder), folder)


def rewrite_page(folder: str | Path) -> Path:
    """Draw the page of a result folder again."""
    folder = Path(folder)
    record = read_record(folder)
    kind = record.get("kind")
    if kind == "answer":
        raise BadArgument(
            f"Only the script that wrote {folder} can draw its page.",
            seen=str(record["question"]),
            hint=str(record.get("command")),
        )
    if kind == "comparison":
        comparison = write_model_pages(folder, _open_comparison(folder))
        return write_page(folder, partial(_comparison_page, comparison))
    if kind == "watch":
        steps = open_steps(folder)
        return write_page(folder, partial(render_steps, steps))
    with locked(folder):
        analysis = open_analysis(folder)
        return write_page(folder, analysis.page)


def _comparison_page(comparison: xr.Dataset) -> str:
    if is_recalibration(comparison):
        table = summarize_recalibration(comparison)
        return render_recalibration(comparison, table)
    return render_comparison(comparison, summarize_comparison(comparison))


def _open_comparison(folder: Path) -> xr.Dataset:
    return open_results(folder / "comparison.nc", "comparison")
