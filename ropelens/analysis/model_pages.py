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


def write_model_pages(folder: Path, comparison: xr.Dataset) -> xr.Dataset:
    """Draw pages of models that have none; return the comparison with all addresses.

    Models of later seeds get no page.
    """
    if "profile" not in comparison.coords:
        return comparison
    pages = comparison["page"].values.astype(object)
    for index in _shown(comparison):
        file = Path(str(comparison["profile"].values[index]))
        if pages[index] or not file.is_file():
            continue
        entry = str(comparison["entry"].values[index])
        profile = complete_profile(open_results(file), file).assign_attrs(model=entry)
        page = Path(MODELS, f"{file_name(entry)}.html")
        (folder / MODELS).mkdir(parents=True, exist_ok=True)
        write_report(profile, folder / page)
        pages[index] = page.as_posix()
    return comparison.assign_coords(page=("entry", pages))


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
