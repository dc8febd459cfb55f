"""Fixtures of this room."""

from oracles.tiny import llama

__all__ = ["llama"]
