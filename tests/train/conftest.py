"""Fixtures of this room."""

from trained import prose, trained_run, trained_study

__all__ = ["prose", "trained_run", "trained_study"]
