"""Profiles as files: one netCDF each, readable by anything that reads netCDF 4."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xarray as xr

from ropelens.errors import BadArgument
from ropelens.output import write_whole


def save_profile(profile: xr.Dataset, path: str | Path) -> Path:
    """Write a profile to `path`, whole or not at all; float32 where bits are not at stake.

    The file is made in memory: HDF5 crashes the process where a disk runs full under it.
    """
    encoding = {
        name: {"zlib": True, "complevel": 4}
        for name, variable in profile.variables.items()
        if variable.dtype.kind == "f" and variable.ndim >= 2
    }
    return write_whole(path, bytes(profile.to_netcdf(engine="h5netcdf", encoding=encoding)))


def open_profile(path: str | Path) -> xr.Dataset:
    """Read a profile that `save_profile` or `ropelens analyze` wrote, into memory.

    Raises `BadArgument` for a file that is missing or is no profile.
    """
    path = Path(path)
    if not path.is_file():
        raise BadArgument(
            f"There is no profile at {path}.", attempt="a folder that ropelens analyze wrote"
        )
    try:
        profile = xr.load_dataset(path, engine="h5netcdf")
    except (OSError, ValueError, KeyError) as error:
        raise BadArgument(
            f"{path} is no profile.",
            seen=" ".join(str(error).split())[:200],
            attempt="run ropelens analyze again",
        ) from error
    missing = {"selectivity", "total_bits", "group_rows"} - set(profile.variables)
    if missing:
        raise BadArgument(
            f"{path} is no profile.",
            seen=f"it has no {sorted(missing)[0]}",
            attempt="a profile.nc that ropelens analyze wrote",
        )
    for variable in profile.variables.values():
        if variable.dtype.kind == "S":
            variable.values = np.char.decode(variable.values, "utf-8")
    return profile
