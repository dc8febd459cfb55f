"""Fixtures of this room."""

from cli_runs import pageless
from tiny_checkpoints import folder

__all__ = ["folder", "pageless"]
