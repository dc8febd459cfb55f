"""A seed may be any whole number."""

from __future__ import annotations

from numbers import Integral

from ropelens.errors import BadArgument


def whole_seed(seed: object) -> int:
    """A seed, of whatever kind of whole number; BadArgument for other things."""
    if not isinstance(seed, Integral):
        raise BadArgument(f"seed is {repr(seed)[:80]}; it is a whole number.")
    return int(seed)
