"""Fixtures of this room."""

from trained import prose, trained_run

__all__ = ["prose", "trained_run"]
