"""The page of a folder of results, made again from its numbers."""

from __future__ import annotations

from pathlib import Path

from ropelens.errors import BadArgument
from ropelens.files.folder import output_folder, write_whole
from ropelens.files.record import read_record
from ropelens.files.results import open_comparison, open_profile, open_truncation
from ropelens.measure.heads import classify_heads
from ropelens.report.comparison import render_comparison
from ropelens.report.page import write_report


def rewrite_page(folder: Path) -> Path:
    """Make index.html of `folder` anew, from profile.nc (and truncation.nc) or comparison.nc.

    Returns its path. Raises `BadArgument` where they are missing or damaged, or the page is
    an analysis's own; the page that was there then stays.
    """
    page = folder / "index.html"
    if (folder / "comparison.nc").exists():
        comparison = open_comparison(folder / "comparison.nc")
        return write_whole(page, render_comparison(comparison))
    record = read_record(folder)
    if "question" in record:
        raise BadArgument(
            f"The page in {folder} is an analysis's own, which its script alone can draw.",
            seen=str(record["question"]),
            attempt=str(record.get("command", "the script of the analysis")),
        )
    profile = open_profile(folder / "profile.nc")
    heads = classify_heads(profile, seed=int(profile.attrs["seed"]))
    sweep = folder / "truncation.nc"
    truncation = open_truncation(sweep) if sweep.exists() else None
    with output_folder(folder) as results:
        write_report(profile, results / page.name, heads=heads, truncation=truncation)
    return page
