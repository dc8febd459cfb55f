"""Opening of saved profiles, also of profiles that are older than some measures."""

import warnings
from pathlib import Path

import numpy as np
import xarray as xr

from ropelens.attention.variables import labelled
from ropelens.profiles.measures import missing_measures
from ropelens.runtime.results import open_results


def open_profile(path: str | Path) -> xr.Dataset:
    """Read a profile that `save` wrote; raises `BadArgument` as `open_results` does."""
    return complete_profile(open_results(path, "profile"), path)


def complete_profile(profile: xr.Dataset, path: str | Path) -> xr.Dataset:
    """`profile`, with NaN for each measure that did not exist when it was saved to `path`.

    One warning names these measures.
    """
    rows = missing_measures(profile)
    if not rows:
        return profile
    names = ", ".join(row.name for row in rows)
    warnings.warn(f"{path} was saved before ropelens measured {names}: NaN", stacklevel=3)
    shapes = {row.name: [profile.sizes.get(dim, 1) for dim in row.saved_dims] for row in rows}
    values = {name: np.full(shape, np.nan) for name, shape in shapes.items()}
    return profile.assign(labelled(values, rows))
