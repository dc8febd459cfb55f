"""Results as files: one netCDF each, readable by anything that reads netCDF 4."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import xarray as xr

from ropelens.errors import BadArgument, words_of
from ropelens.files.folder import write_whole

EXPECTED = (
    *("inv_freq", "wavelength", "offset_start", "offset_stop", "offset_share", "kernel"),
    *("q_norm", "k_norm", "q_coherence", "k_coherence", "selectivity", "offset_mass"),
    *("sink_mass", "entropy_bits", "total_bits", "sink_bits", "position_bits"),
    *("content_bits", "group_rows", "excerpt_attention", "excerpt_token"),
    *("previous_token", "self_mass", "induction", "duplicate_token", "predicted_kernel"),
    *("group_total_bits", "group_sink_bits", "group_position_gain", "group_content_gain"),
)
"""Variables by which a file is known to be a profile: what labels and the page need."""


EXPECTED_OF_TRUNCATION = (
    *("edit", "kind", "kept", "planes", "planes_stopped", "draw", "band"),
    *("wavelength_low", "wavelength_high", "wavelength"),
)
"""Variables by which a file is known to be a truncation sweep: what its figures need."""


EXPECTED_OF_COMPARISON = (
    *("entry", "group", "variant", "size", "partner", "loss", "loss_se", "label"),
    *("q_norm", "k_norm", "selectivity", "wavelength", "mean_wavelength", "previous_token"),
)
"""Variables by which a file is known to be a comparison: what its table and figures need."""


EXPECTED_OF_RUNS = (
    *("position_loss", "position_start", "first_loss", "repeat_loss", "retrieval_hit", "step"),
    *("growth_loss", "growth_label", "growth_q_norm", "growth_previous_token"),
    *("growth_position_loss", "growth_first_loss", "growth_repeat_loss"),
    *("growth_retrieval", "growth_induction"),
)
"""What a comparison of trained runs has besides."""


AGAIN = "a folder that {} wrote; where it was damaged, run that again"


def save_profile(profile: xr.Dataset, path: str | Path) -> Path:
    """Write a profile to `path`, whole or not at all; see `save_results`."""
    return save_results(profile, path)


def save_results(results: xr.Dataset, path: str | Path) -> Path:
    """Write a profile, a sweep or any other labelled arrays to `path`, whole or not at all.

    Numbers keep every bit. Of texts, what netCDF cannot hold is told in another way: a
    NUL becomes "␀", half a surrogate pair a backslash escape. The file is made in memory,
    for HDF5 crashes the process where a disk runs full under it.
    """
    told = results.assign_attrs({name: _told(value) for name, value in results.attrs.items()})
    for name, variable in results.variables.items():
        if variable.dtype.kind in "OUT":
            texts = [_told(str(text)) for text in variable.values.ravel()]
            values = np.array(texts, dtype=object).reshape(variable.shape)
            told[name] = (variable.dims, values, variable.attrs)  # a coordinate stays one
    encoding = {
        name: {"zlib": True, "complevel": 4}
        for name, variable in results.variables.items()
        if variable.dtype.kind == "f" and variable.ndim >= 2
    }
    return write_whole(path, bytes(told.to_netcdf(engine="h5netcdf", encoding=encoding)))


def open_profile(path: str | Path) -> xr.Dataset:
    """Read a profile that `save_profile` or `ropelens analyze` wrote, into memory.

    Raises `BadArgument` for a file that is missing, damaged or no profile.
    """
    return open_results(path, "profile", by="ropelens analyze", variables=EXPECTED)


def open_truncation(path: str | Path) -> xr.Dataset:
    """Read a sweep that `save_results` or `ropelens truncate` wrote, into memory.

    Raises `BadArgument` for a file that is missing, damaged or no truncation sweep.
    """
    expected = EXPECTED_OF_TRUNCATION
    return open_results(path, "truncation sweep", by="ropelens truncate", variables=expected)


def open_comparison(path: str | Path) -> xr.Dataset:
    """Read a comparison that `save_results` or `ropelens compare` wrote, into memory.

    Raises `BadArgument` for a file that is missing, damaged or no comparison.
    """
    expected = EXPECTED_OF_COMPARISON
    found = open_results(path, "comparison", by="ropelens compare", variables=expected)
    if "position_loss" in found:
        _require(
            found, Path(path), "comparison", by="ropelens compare", variables=EXPECTED_OF_RUNS
        )
    return found


def open_results(
    path: str | Path, what: str, *, by: str, variables: tuple[str, ...]
) -> xr.Dataset:
    """The results in a file that the command `by` writes, if it has all `variables`."""
    path = Path(path)
    again = AGAIN.format(by)
    if not path.is_file():
        raise BadArgument(f"There is no {what} at {path}.", attempt=again)
    try:
        results = xr.load_dataset(path, engine="h5netcdf")
    except Exception as error:  # whatever a damaged file makes HDF5, h5py and xarray raise
        raise BadArgument(
            f"{path} is no {what}.",
            seen=words_of(error, kind=True),
            attempt=again,
        ) from error
    _require(results, path, what, by=by, variables=variables, attributes=("model", "seed"))
    plain = (v.item() if isinstance(v, np.generic) else v for v in results.attrs.values())
    results.attrs = dict(zip(results.attrs, plain, strict=True))
    return results


def _require(
    results: xr.Dataset,
    path: Path,
    what: str,
    *,
    by: str,
    variables: tuple[str, ...],
    attributes: tuple[str, ...] = (),
) -> None:
    """Raise BadArgument for results from the file at `path` that lack any of these."""
    missing = [name for name in variables if name not in results.variables]
    missing += [name for name in attributes if name not in results.attrs]
    if missing:
        raise BadArgument(
            f"{path} is no {what}.", seen=f"it has no {missing[0]}", attempt=AGAIN.format(by)
        )


def _told(value: object) -> object:
    """`value`; a text without what netCDF cannot hold."""
    if not isinstance(value, str):
        return value
    return value.encode("utf-8", "backslashreplace").decode().replace("\0", "␀")
