"""What figures, reports and commands must know of how numbers come about, without torch."""

from __future__ import annotations

from collections.abc import Sequence

from ropelens.errors import BadArgument

MEASURES = ("loss", "induction", "retrieval", "change", "labels")
"""What `ropelens.evaluate` measures where nothing is asked for."""

ON_REQUEST = ("copying",)
"""What it measures beside these."""

NEEDLES = 8
"""Needles of a prompt, of which one is asked for: chance is 1 in 8."""

OWN = "own"
"""What stands among variants for the model's own rotation, as it was measured."""


def wanted_measures(measures: str | Sequence[str]) -> set[str]:
    """The measures asked for; `BadArgument` for those that do not exist."""
    names = [measures] if isinstance(measures, str) else list(measures)
    unknown = [name for name in names if name not in (*MEASURES, *ON_REQUEST)]
    if unknown or not names:
        raise BadArgument(
            f"There is no measure {unknown[0]!r}." if unknown else "Nothing is to be measured.",
            attempt=f"measures: any of {', '.join((*MEASURES, *ON_REQUEST))}",
        )
    return set(names)
