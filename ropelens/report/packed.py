"""Arrays on their way into a page: few bytes, and what the script must know to read them."""

from __future__ import annotations

import base64

import numpy as np


def packed(values: np.ndarray, *, dims: tuple[str, ...] = ()) -> dict[str, object]:
    """An array as base64, little-endian: bytes and short integers as they are, else float32."""
    dtype = np.dtype({"u1": "u1", "i2": "<i2"}.get(values.dtype.str[1:], "<f4"))
    data = np.ascontiguousarray(values, dtype=dtype)
    return {
        "dtype": dtype.name,
        "shape": list(data.shape),
        "dims": list(dims),
        "data": base64.b64encode(data.tobytes()).decode(),
    }
