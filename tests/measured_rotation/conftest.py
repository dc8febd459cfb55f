"""Fixtures of this room."""

from cli_runs import ropelens

__all__ = ["ropelens"]
