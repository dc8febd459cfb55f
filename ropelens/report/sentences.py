"""Records of numbers to sentences, by the templates in templates/sentences.

A file there is about one subject, and each macro in it words one sentence. White space in
a macro is layout: a sentence comes out with single spaces, and none before a comma.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

import jinja2

from ropelens.figures.text import (
    NOTHING,
    change_and_interval,
    mean_count,
    number,
    short_count,
    signed,
)
from ropelens.report.render import TEMPLATES


def say(subject: str, sentence: str, /, **record: object) -> str:
    """The sentence that a macro of `subject` makes of a record; "" where it says nothing.

    The text is plain: whoever writes it into HTML escapes it.
    """
    macros = _environment().get_template(f"{subject}.txt").module
    words = str(getattr(macros, sentence)(**record)).split()
    return re.sub(r" (?=[,;.:)])", "", " ".join(words))


def plural(count: int, noun: str) -> str:
    """ "1 head", "2 heads", "1,024 heads"."""
    return f"{count:,} {noun}" + ("" if count == 1 else "s")


def in_words(parts: Sequence[object]) -> str:
    """["a", "b", "c"] as "a, b and c"."""
    *some, last = map(str, parts)
    return f"{', '.join(some)} and {last}" if some else last


def ranges(numbers: Sequence[int]) -> str:
    """[0, 1, 2, 5] as "0–2 and 5"; `numbers` rise."""
    firsts = [n for n in numbers if n - 1 not in numbers]
    lasts = [n for n in numbers if n + 1 not in numbers]
    runs = zip(firsts, lasts, strict=True)
    return in_words([f"{a}" if a == b else f"{a}–{b}" for a, b in runs])


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES / "sentences"),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": number,
        "signed": signed,
        "short": short_count,
        "mean_count": mean_count,
        "percent": lambda share: f"{100 * share:.3g}%",
        "plural": plural,
        "in_words": in_words,
        "ranges": ranges,
    }
    environment.globals |= {"NOTHING": NOTHING, "change_and_interval": change_and_interval}
    return environment
