"""Text files become documents."""

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from ropelens.arguments import public
from ropelens.errors import BadText, explained

TEXT_SUFFIXES = (".txt", ".md", ".jsonl")


@public
def read_documents(paths: str | Path | Iterable[str | Path]) -> list[str]:
    """Read the documents in files and folders, in the given order.

    A file is one document. A `.jsonl` file has one document per line, under the key "text". A
    folder stands for its *.txt, *.md and *.jsonl files at any depth, in the order of their
    paths. Text is UTF-8. A byte-order mark and the line ends at the end of a file are dropped,
    and other line ends become "\\n". Empty documents in folders and `.jsonl` files are skipped.

    Raises `BadText` if a file cannot be read, is empty or is not UTF-8, or if a line of a
    `.jsonl` file is malformed (the error states its number).
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    documents: list[str] = []
    for path in map(Path, paths):
        texts: list[str] = []
        for file in _files(path):
            texts += [text for text in _read(file) if text.strip()]
        if not texts:
            raise BadText(f"{path} contains no text.")
        documents += texts
    return documents


def _files(path: Path) -> list[Path]:
    """The file, or the files of texts in the folder at any depth, in order."""
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in TEXT_SUFFIXES)


def _read(path: Path) -> list[str]:
    with explained(
        f"{path} cannot be read as text in UTF-8.",
        "iconv -f LATIN1 -t UTF-8 for an older text, or a folder of *.txt, *.md and *.jsonl",
        error=BadText,
    ):
        text = path.read_bytes().decode("utf-8-sig")
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    if path.suffix != ".jsonl":
        return [text.rstrip("\n")]
    documents = []
    for number, line in enumerate(text.split("\n"), start=1):
        with explained(
            f"Line {number} of {path} holds no text: {line[:40]!r}.",
            'each line of a .jsonl file is an object such as {"text": "Once"}',
            error=BadText,
        ):
            if line.strip():
                document = json.loads(line)["text"]
                document.encode()  # an error for half of a character, or for no text
                documents.append(document)
    return documents


def check_document(text: str) -> None:
    """Raise `BadText` if `text` is, or looks like, the name of a file."""
    looks_so = text.endswith(TEXT_SUFFIXES) and len(text.split()) == 1
    if looks_so or os.path.exists(text):  # noqa: PTH110 (False for a text of any length)
        hint = f"Path({text!r}) for ropelens.analyze, else ropelens.read_documents"
        raise BadText(f"{text!r} is a text that looks like a file.", hint=hint)


def documents_sha256(documents: Iterable[str]) -> str:
    """SHA-256, in hex, of the UTF-8 of the documents with a zero byte between them."""
    return hashlib.sha256("\0".join(documents).encode()).hexdigest()
