"""Pages of the models in a comparison, drawn from the profiles that it saved."""

from pathlib import Path

import xarray as xr

from ropelens.comparison.pairs import NO_PARTNER
from ropelens.comparison.recalibration_table import AFTER
from ropelens.profiles.measures import complete_profile
from ropelens.report.page import write_report
from ropelens.runtime.folder import file_name
from ropelens.runtime.netcdf import open_results

MODELS = "models"
"""The folder of the pages, next to the page of the comparison."""

NEEDED = "excerpt_length"
"""A variable of profiles that a page needs, and that kept studies do not have."""


def write_model_pages(folder: Path, comparison: xr.Dataset) -> xr.Dataset:
    """Draw pages of models that have no other page; return the comparison with all addresses.

    The addresses are paths from `folder`. Models of later seeds get no page, and neither do
    models whose saved profile lacks the excerpts of a page.
    """
    if "profile" not in comparison.coords:
        return comparison
    pages = comparison["page"].values.astype(object)
    for index in _shown(comparison):
        drawn = str(pages[index]).startswith(f"{MODELS}/")
        file = folder / str(comparison["profile"].values[index])
        if not file.is_file() or (pages[index] and not drawn):
            continue
        profile = complete_profile(open_results(file), file)
        if NEEDED not in profile:
            continue
        entry = str(comparison["entry"].values[index])
        page = Path(MODELS, f"{file_name(entry)}.html")
        (folder / MODELS).mkdir(parents=True, exist_ok=True)
        write_report(
            profile.assign_attrs(model=_title(comparison, entry)), folder / page
        )
        pages[index] = page.as_posix()
    return comparison.assign_coords(page=("entry", pages))


def _title(comparison: xr.Dataset, entry: str) -> str:
    """The name of a model on its page, with the base if it was recalibrated."""
    base = comparison.attrs.get("base")
    return f"{base}, recalibrated: {entry}" if base else entry


def _shown(comparison: xr.Dataset) -> list[int]:
    """The first finished run of each group, and the models with which runs are paired."""
    first: dict[str, int] = {}
    for index, group in enumerate(comparison["group"].values.tolist()):
        is_finished = "phase" not in comparison.coords
        if is_finished or comparison["phase"].values[index] == AFTER:
            first.setdefault(group, index)
    shown = set(first.values())
    for index in first.values():
        partner = int(comparison["partner"].values[index])
        if partner != NO_PARTNER:
            shown.add(partner)
    return sorted(shown)
