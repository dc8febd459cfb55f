"""Text files become documents."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

from ropelens.arguments import public
from ropelens.errors import BadText
from ropelens.text.file_formats import CONTENTS, DECOMPRESSORS, TABLES, UNPACK
from ropelens.text.folders import files_in
from ropelens.text.read_file import read_file
from ropelens.text.strings import check_no_nul

ENDINGS = (*CONTENTS, *DECOMPRESSORS, *TABLES, *UNPACK)


@public
def read_documents(paths: str | Path | Iterable[str | Path]) -> list[str]:
    """Read the documents in files and folders, in the given order.

    A file is one document. A `.jsonl` file has one document per line, under the key "text", and
    a `.parquet` file one per row, in the column "text". Files that end in .gz, .bz2 or .xz are
    decompressed. A folder stands for its *.txt, *.md, *.jsonl and *.parquet files at any depth,
    in the order of their paths. A warning counts its other files, and the names that begin with
    a dot, which are skipped.

    Text is UTF-8, or UTF-16 or UTF-32 with a byte-order mark. The mark and the line ends at the
    end of a file are dropped, and other line ends become "\\n". Empty documents in folders,
    `.jsonl` and `.parquet` files are skipped.

    Raises `BadText` if a file cannot be read, is empty, is not text in its encoding or contains
    NUL characters, if it is a device, and for tables in .json and .csv. The error names the
    file, and the line of a `.jsonl` file that is malformed.
    """
    if isinstance(paths, str | Path):
        paths = [paths]
    documents: list[str] = []
    for path in map(Path, paths):
        texts: list[str] = []
        is_folder = os.path.isdir(path)  # noqa: PTH112 (no error for a long name)
        for file in files_in(path) if is_folder else [path]:
            texts += [text for text in read_file(file) if text.strip()]
        if not texts:
            raise BadText(f"{path} contains no text.", hint="files that are not empty")
        documents += texts
    return documents


def check_document(text: str) -> None:
    """Raise `BadText` if `text` has NUL characters, or is or looks like the name of a file."""
    check_no_nul(text)
    looks_so = text.lower().endswith(ENDINGS) and len(text.split()) == 1
    if looks_so or os.path.exists(text):  # noqa: PTH110 (False for a text of any length)
        hint = f"Path({text!r}) for ropelens.analyze, else ropelens.read_documents"
        raise BadText(f"{text!r} is a text that looks like a file.", hint=hint)


def documents_sha256(documents: Iterable[str]) -> str:
    """SHA-256, in hex, of the UTF-8 of the documents with a zero byte between them."""
    return hashlib.sha256("\0".join(documents).encode()).hexdigest()
