"""Documents as strings: columns of datasets and tables, and values that are not strings."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from ropelens.arguments import IN_WORDS
from ropelens.errors import BadArgument, BadText

Strings = str | Iterable[Any]
"""One document, or several, which `list_documents` checks."""
IN_WORDS[Strings] = (
    "a string, or several: a list, an iterator, or a column of a dataset or a table"
)

COLUMN = 'a column, such as documents["text"]'


def list_documents(
    documents: Iterable[Any], *, types: tuple[type, ...] = (str,)
) -> list[Any]:
    """The documents as a list; raises `BadArgument` if one has another type.

    Strings of arrow become strings of Python.
    """
    check_not_table(documents)
    listed = []
    for index, value in enumerate(documents):
        document = plain_value(value)
        if not isinstance(document, types):
            raise not_a_string(document, index)
        listed.append(document)
    return listed


def check_not_table(documents: Iterable[Any]) -> None:
    """Raise `BadArgument` for a table or a mapping: only its names would be read."""
    if isinstance(documents, Mapping):
        names = list(documents)
        hint = f"{COLUMN}, or documents[SPLIT]['text'] if it has splits"
    elif isinstance(documents, pd.DataFrame):
        names = list(documents.columns)
        hint = COLUMN
    else:
        return
    raise BadArgument(
        "Documents must be strings, not a table.",
        seen=f"{type(documents).__name__} of {', '.join(map(repr, names))}"[:200],
        hint=hint,
    )


def plain_value(value: Any) -> Any:
    """A scalar of arrow as a value of Python; other values are unchanged."""
    return value.as_py() if hasattr(value, "as_py") else value


def not_a_string(value: Any, index: int) -> BadArgument:
    """The error for a document that is not a string."""
    if isinstance(value, Mapping):
        hint = f'{COLUMN}, or [row["text"] for row in documents]'
    elif isinstance(value, Path):
        hint = "rl.read_documents for files and folders"
    elif isinstance(value, bytes):
        hint = "document.decode()"
    elif is_missing(value):
        hint = "[text for text in documents if isinstance(text, str)]"
    else:
        hint = "strings; for token ids, rl.Text instead of rl.tokenize"
    return BadArgument(
        "Each document must be a string.",
        seen=f"{type(value).__name__} at index {index}: {value!r:.60}",
        hint=hint,
    )


def is_missing(value: Any) -> bool:
    """Whether the value is None, NaN or another mark of tables for a missing value."""
    return pd.api.types.is_scalar(value) and bool(pd.isna(value))


def check_no_nul(text: str) -> None:
    """Raise `BadText` for NUL characters, which mark a wrong encoding or a binary file."""
    place = text.find("\0")
    if place >= 0:
        begin = max(0, place - 10)
        raise BadText(
            "The text contains NUL characters.",
            seen=f"{text[begin : place + 10]!r} at character {place:,}",
            means="it was read in a wrong encoding, or it is not a text",
            hint='text.replace("\\0", "") if they mean nothing',
        )
