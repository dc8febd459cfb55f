"""Token strings made safe and visible: they come from a tokenizer file, so from anyone.

plotly reads a little HTML in every label ("<b>", "<a href=...>", "&lt;"), and hands
"$...$" to MathJax where a notebook has it; `plotly_text` takes that meaning away.
"""

from __future__ import annotations

import unicodedata

VISIBLE = {" ": "␣", "\n": "↵", "\r": "␍", "\t": "⇥"}
INVISIBLE = {"Cc", "Cf", "Co", "Cs", "Cn", "Zl", "Zp", "Zs"}
ENTITIES = {"&": "&amp;", "<": "&lt;", ">": "&gt;", "$": "&#36;"}


def visible_token(token: str, *, longest: int = 24) -> str:
    """`token` with white space, control and direction marks shown as characters."""
    shown = "".join(_visible_character(character) for character in token)
    if not shown:
        return "∅"
    return shown if len(shown) <= longest else shown[: longest - 1] + "…"


def _visible_character(character: str) -> str:
    if character in VISIBLE:
        return VISIBLE[character]
    if unicodedata.category(character) in INVISIBLE:
        return f"\\u{ord(character):04x}"
    return character


def plotly_text(text: str) -> str:
    """`text` so that plotly shows it letter by letter, in labels, ticks and hovers."""
    return "".join(ENTITIES.get(character, character) for character in text)
