"""Fixtures of this room."""

from cli_runs import pageless

__all__ = ["pageless"]
