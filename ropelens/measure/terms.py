"""What figures and reports must know of how numbers came about, without torch."""

from __future__ import annotations

NEEDLES = 8
"""Needles of a prompt, of which one is asked for: chance is 1 in 8."""

OWN = "own"
"""What stands among variants for the model's own rotation, as it was measured."""
