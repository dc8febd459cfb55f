"""Layers that differ in size, as one array."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from torch import Tensor


def stack(arrays: Iterable[Tensor]) -> np.ndarray:
    """Arrays of one rank stacked along a new first axis, in float64, NaN where one ends."""
    parts = [array.detach().double().cpu().numpy() for array in arrays]
    shape = np.max([part.shape for part in parts], axis=0)
    stacked = np.full((len(parts), *shape), np.nan)
    for place, part in zip(stacked, parts, strict=True):
        place[tuple(slice(size) for size in part.shape)] = part
    return stacked
