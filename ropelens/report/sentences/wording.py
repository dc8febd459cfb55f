"""Parts of sentences: changes with their intervals, shares, and verbs for counts."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ropelens.figures.formats import NO_NUMBER, change_and_interval


@dataclass(frozen=True)
class Change:
    """A change and the bounds of its 95% interval; NaN for what was not measured."""

    value: float
    low: float
    high: float

    @property
    def measured(self) -> bool:
        return not math.isnan(self.value)

    def in_words(self, unit: str = "") -> str:
        """The change in this unit, and the interval in brackets if it is known."""
        value, interval = change_and_interval(self.value, self.low, self.high)
        if interval == NO_NUMBER:
            return f"{value}{unit}"
        return f"{value}{unit} (95% interval {interval})"


def change_in(row: Mapping[Any, Any], name: str) -> Change:
    """The change in the columns `name`, `name`_low and `name`_high of a row of a table."""
    return Change(
        value=float(row[name]),
        low=float(row[f"{name}_low"]),
        high=float(row[f"{name}_high"]),
    )


def percent(share: float) -> str:
    """The share as "7.46%", with up to three significant digits."""
    return f"{100 * share:.3g}%"


def is_or_are(count: int) -> str:
    return "is" if count == 1 else "are"


def one_line(sentence: str) -> str:
    """`sentence` without line breaks and without spaces before punctuation.

    Names and prompts of users may contain both.
    """
    words = " ".join(sentence.split())
    return re.sub(r" (?=[,;.:)])", "", words)
