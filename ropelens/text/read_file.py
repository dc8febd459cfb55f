"""One file of text becomes documents, by the format and the encoding of the file."""

import codecs
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ropelens.errors import BadText, explained
from ropelens.text.file_formats import (
    DECOMPRESSORS,
    LINES,
    PARQUET,
    TO_LINES,
    format_of,
    remedy_for,
)
from ropelens.text.folders import check_regular
from ropelens.text.strings import plain_value

LINE = 'each line of a .jsonl file is an object such as {"text": "Once"}'


def read_file(path: Path) -> list[str]:
    """The documents of a file, some of which may be empty; see `read_documents`."""
    check_regular(path)
    remedy = remedy_for(path)
    if remedy:
        raise BadText(
            f"{path} is not a file of text.",
            seen=f"its name ends in {path.suffix}",
            hint=f"{remedy}; or move it elsewhere",
        )
    content = format_of(path).content
    if content == PARQUET:
        return _read_parquet(path)
    text = _decode(_read_bytes(path), path)
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if content == LINES:
        return _read_lines(text, path)
    return [text.rstrip("\n")]


def _read_bytes(path: Path) -> bytes:
    """The content of a file, decompressed."""
    compression = format_of(path).compression
    hint = "the permission to read it, or another file"
    with explained(f"{path} cannot be read.", hint, error=BadText):
        data = path.read_bytes()
        if compression != "":
            data = DECOMPRESSORS[compression](data)
        return data


@dataclass(frozen=True)
class Encoding:
    """An encoding of text, and the bytes with which a file in it begins."""

    name: str
    mark: bytes
    codec: str


UTF_8 = Encoding("UTF-8", codecs.BOM_UTF8, "utf-8")
ENCODINGS = (
    UTF_8,
    Encoding(
        "UTF-32", codecs.BOM_UTF32_LE, "utf-32-le"
    ),  # before UTF-16, its beginning
    Encoding("UTF-32", codecs.BOM_UTF32_BE, "utf-32-be"),
    Encoding("UTF-16", codecs.BOM_UTF16_LE, "utf-16-le"),
    Encoding("UTF-16", codecs.BOM_UTF16_BE, "utf-16-be"),
)


def _decode(data: bytes, path: Path) -> str:
    """The text of a file, without its byte-order mark."""
    encoding = UTF_8
    for marked in ENCODINGS:
        if data.startswith(marked.mark):
            encoding = marked
            break
    content = data.removeprefix(encoding.mark)
    hint = _conversion(content)
    if content != data:
        hint = "save it again as UTF-8; it may be cut off"
    fault = f"{path} cannot be read as text in {encoding.name}."
    with explained(fault, hint, error=BadText):
        text = content.decode(encoding.codec)
    if "\0" in text:
        if not _looks_like_utf_16(content):
            hint = f"tr -d '\\000' < {path}, if the NUL characters mean nothing"
        raise BadText(
            f"{path} contains NUL characters.",
            seen=f"{text[:20]!r}",
            means=f"it has another encoding than {encoding.name}, or it is not a text",
            hint=hint,
        )
    return text


def _conversion(data: bytes) -> str:
    """How to convert data that is not UTF-8."""
    if _looks_like_utf_16(data):
        order = (
            "LE" if data.find(b"\0") % 2 else "BE"
        )  # the zero byte of a Latin letter
        return f"iconv -f UTF-16{order} -t UTF-8 if it is UTF-16"
    if b"\0" in data:
        return "convert it to plain text; it has bytes that no text has"
    return "iconv -f LATIN1 -t UTF-8 for an older text"


def _looks_like_utf_16(data: bytes) -> bool:
    """Whether a quarter of the bytes are zero, as in Latin letters in UTF-16."""
    return b"\0" in data and 4 * data.count(b"\0") >= len(data)


def _read_lines(text: str, path: Path) -> list[str]:
    """The documents in the lines of a .jsonl file."""
    documents = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            fault = f"Line {number} of {path} holds no text: {line[:40]!r}."
            with explained(fault, LINE, error=BadText):
                row = json.loads(line)
                document = _text_of(row, fault, path)
                document.encode()  # an error for half of a character
            if "\0" in document:
                raise BadText(
                    f"Line {number} of {path} contains NUL characters.",
                    seen=f"{line[:40]!r}",
                    hint="another encoding, or lines without \\u0000",
                )
            documents.append(document)
    return documents


def _text_of(row: Any, fault: str, path: Path) -> str:
    """The text of a line; raises `BadText` with the `fault` if there is none."""
    if not isinstance(row, dict):
        seen = f"{type(row).__name__} instead of an object"
        raise BadText(fault, seen=seen, hint=LINE)
    if "text" not in row:
        names = ", ".join(json.dumps(name) for name in row)
        seen = f"its keys are {names}"[:200]
        raise BadText(fault, seen=seen, hint=_renamed(row, path))
    text = row["text"]
    if not isinstance(text, str):
        seen = f'"text" is {type(text).__name__}: {text!r:.40}'
        raise BadText(fault, seen=seen, hint=f"{LINE}; or remove the line")
    return text


def _renamed(row: dict[str, Any], path: Path) -> str:
    """How to rename the key of the longest string of a row to "text"."""
    longest = ""
    for name, value in row.items():
        if isinstance(value, str) and len(value) >= len(row.get(longest, "")):
            longest = name
    if longest == "":
        return LINE
    return (
        f"pandas.read_json({str(path)!r}, lines=True, dtype=False)"
        f'.rename(columns={{{longest!r}: "text"}}){TO_LINES} in Python'
    )


def _read_parquet(path: Path) -> list[str]:
    """The strings in the column "text"; needs pyarrow or fastparquet."""
    fault = f'{path} cannot be read as a table with the column "text".'
    columns = f"pandas.read_parquet({str(path)!r}).columns"
    hint = f'{columns} lists the columns; rename one of them to "text"'
    with (
        explained(fault, hint, error=BadText),
        explained(fault, "pip install pyarrow", error=BadText, catch=ImportError),
    ):
        column = pd.read_parquet(path, columns=["text"])["text"]
    documents = []
    for number, value in enumerate(column):
        document = plain_value(value)
        if not isinstance(document, str) or "\0" in document:
            raise BadText(
                f"Row {number} of {path} holds no text.",
                seen=f"{type(document).__name__}: {document!r:.40}",
                hint="a table without such rows",
            )
        documents.append(document)
    return documents
