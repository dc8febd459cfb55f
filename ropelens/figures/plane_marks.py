"""Where the trained context and the predicted high-norm band lie among the planes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import xarray as xr
from jaxtyping import Float

BAND_RATIO = 3.657
"""Oka et al. 2026: queries are longest at plane (D/2) log_base(context / 3.657)."""


@dataclass(frozen=True)
class Mark:
    """A wavelength (tokens) that a figure of planes points at, and its words there."""

    name: str
    words: str
    wavelength: float


def marks(dataset: xr.Dataset) -> tuple[Mark, ...]:
    """The marks of a model; none where its trained context is not known.

    Oka's plane i has base^(2 i / D) = context / 3.657, so its wavelength, 2 pi times that, is
    1.72 contexts: no base is needed, and any list of frequencies has such a place.
    """
    context = int(dataset.attrs.get("trained_context", 0))
    if not context:
        return ()
    return (
        Mark("context", f"trained context<br>{context:,} tokens", float(context)),
        Mark("band", "high-norm band,<br>predicted", 2 * np.pi * context / BAND_RATIO),
    )


def turning_wavelengths(dataset: xr.Dataset) -> tuple[int, Float[np.ndarray, " plane"]]:
    """The layer with the most rotating planes (the first of them), and their wavelengths."""
    wavelength = dataset["wavelength"].transpose("layer", "frequency").values
    layer = int(np.isfinite(wavelength).sum(axis=1).argmax())
    return layer, wavelength[layer][np.isfinite(wavelength[layer])]


def alike(dataset: xr.Dataset) -> bool:
    """Whether all layers that rotate have the same planes."""
    wavelength = dataset["wavelength"].transpose("layer", "frequency").values
    turning = wavelength[np.isfinite(wavelength).any(axis=1)]
    return np.allclose(turning, turning[:1], rtol=1e-3, equal_nan=True)


def plane_index(wavelength: Float[np.ndarray, " plane"], length: float) -> float | None:
    """The fractional number of the plane of wavelength `length`; None beyond the planes.

    Between planes the logarithm of the wavelength is taken to grow evenly.
    """
    if len(wavelength) < 2 or not wavelength[0] <= length <= wavelength[-1]:
        return None
    return float(np.interp(np.log(length), np.log(wavelength), np.arange(len(wavelength))))
