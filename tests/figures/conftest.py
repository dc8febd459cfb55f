"""Fixtures of this room."""

from synthetic_truncation import small, sweep

__all__ = ["small", "sweep"]
