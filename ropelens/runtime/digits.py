"""Numbers with fewer digits, which compress better."""

import numpy as np
import xarray as xr

FRACTION_BITS = 23  # a float32 has these bits after the first digit
THREE_DIGITS = 10  # bits; the relative error is at most 0.0005
FOUR_DIGITS = 13  # bits; 0.00006
FIVE_DIGITS = 16  # bits; 0.000008


def rounded(values: np.ndarray, bits: int) -> np.ndarray:
    """Numbers in float32 with `bits` (below 23) after the first digit; NaN and inf stay."""
    single = values.astype(np.float32)
    dropped = FRACTION_BITS - bits
    half = np.uint32(2 ** (dropped - 1))
    kept = np.uint32(2**32 - 2**dropped)
    nearest = ((single.view(np.uint32) + half) & kept).view(np.float32)
    return np.where(np.isfinite(single), nearest, single)


def with_digits(results: xr.Dataset, bits: int) -> xr.Dataset:
    """The results in float32 with `bits` after the first digit. Coordinates stay."""
    fewer = results.copy()
    for name, variable in results.data_vars.items():
        if variable.dtype.kind == "f":
            fewer[name] = variable.copy(data=rounded(variable.values, bits))
    return fewer


def in_float32(results: xr.Dataset) -> xr.Dataset:
    """The results with seven digits: figures and sentences show four at most."""
    fewer = results.copy()
    for name, variable in results.data_vars.items():
        if variable.dtype == np.float64:
            fewer[name] = variable.astype(np.float32)
    return fewer
