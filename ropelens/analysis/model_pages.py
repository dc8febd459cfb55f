"""Pages of the models in a comparison, drawn from the profiles that it saved."""

from pathlib import Path

import xarray as xr

from ropelens.profiles.measures import complete_profile
from ropelens.report.page import write_report
from ropelens.report.recalibrated_heads import first_runs
from ropelens.runtime.folder import file_name
from ropelens.runtime.netcdf import open_results

MODELS = "models"
"""The folder of the pages, next to the page of the comparison."""


def write_model_pages(folder: Path, comparison: xr.Dataset) -> xr.Dataset:
    """Draw a page for each shown run without one; return the comparison with all addresses.

    Shown are the first run of each variant after training, and its control.
    """
    shown = set(first_runs(comparison))
    shown |= {int(comparison["partner"][index]) for index in shown}
    pages = comparison["page"].values.astype(object)
    for index in sorted(shown):
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
