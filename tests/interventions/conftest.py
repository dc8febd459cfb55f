"""Fixtures of this room."""

from oracles.tiny import llama
from synthetic_truncation import sweep

__all__ = ["llama", "sweep"]
