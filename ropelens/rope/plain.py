"""Numbers and lists as they are given, of Python, numpy or torch, made plain."""

from __future__ import annotations

import math
from collections.abc import Collection
from numbers import Real
from typing import Any

import numpy as np


def plain_number(value: object) -> float:
    """The number that `value` is, of numpy and torch too; NaN for what is not one number.

    A short float is what it prints as: float32's 0.6 is 0.6, so that shares count alike.
    """
    try:
        if isinstance(value, Real) and not isinstance(value, np.generic):
            return float(value)
        number = np.asarray(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return math.nan
    one = number.ndim == 0 and number.dtype.kind in "iuf"
    return float(str(number[()])) if one else math.nan


def plain_list(values: Any) -> list[Any] | None:
    """What `values` lists; None for a text, a number, and what can be read but once."""
    if isinstance(values, str | bytes) or not isinstance(values, Collection):
        return None
    if not hasattr(values, "ndim"):
        return list(values)
    return list(np.asarray(values)) if values.ndim else None
