"""Files of text by the endings of their names: which are read, and remedies for others."""

import bz2
import gzip
import lzma
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PLAIN = (".txt", ".md")
LINES = ".jsonl"
PARQUET = ".parquet"
CONTENTS = (*PLAIN, LINES, PARQUET)

DECOMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.decompress,
    ".bz2": bz2.decompress,
    ".xz": lzma.decompress,
}
"""Functions that decompress the content of a file, by the ending of its name."""

ACCEPTED = "*.txt, *.md, *.jsonl and *.parquet, also with .gz, .bz2 or .xz at the end"
"""The files of a folder that are read, in words."""

TO_LINES = '.to_json("texts.jsonl", orient="records", lines=True)'
TABLES = {
    ".json": "pandas.read_json({path!r}, dtype=False)" + TO_LINES,
    ".csv": "pandas.read_csv({path!r}, dtype=str)" + TO_LINES,
    ".tsv": 'pandas.read_csv({path!r}, dtype=str, sep="\\t")' + TO_LINES,
    ".arrow": 'datasets.Dataset.from_file({path!r}).to_parquet("texts.parquet")',
}
"""How Python converts tables that are not read. The texts must be in the column "text"."""

UNPACK = {
    ".zst": "zstd -d {path}",
    ".zip": "unzip {path}",
    ".tgz": "tar -xf {path}",
    ".tar": "tar -xf {path}",
    ".7z": "7z x {path}",
}
"""Commands that unpack files that are not read."""


@dataclass(frozen=True)
class FileFormat:
    """The content of a file and its compression by the endings of its name, or ""."""

    content: str
    compression: str

    @property
    def may_be_text(self) -> bool:
        """Whether a folder that has the file is expected to have its text."""
        return self.content in CONTENTS or self.content in TABLES


def format_of(path: Path) -> FileFormat:
    """The format of a file by its name, in upper or lower case."""
    endings = [ending.lower() for ending in path.suffixes]
    compression = ""
    if endings and (endings[-1] in DECOMPRESSORS or endings[-1] in UNPACK):
        compression = endings.pop()
    content = endings[-1] if endings else ""
    return FileFormat(content, compression)


def remedy_for(path: Path) -> str:
    """How to convert a file that is not read, or "" for a file that is read."""
    file_format = format_of(path)
    if file_format.compression in UNPACK:
        return UNPACK[file_format.compression].format(path=path)
    if file_format.content in UNPACK:  # such as .tar.gz
        return UNPACK[file_format.content].format(path=path)
    if file_format.content in TABLES:
        convert = TABLES[file_format.content].format(path=str(path))
        return f'{convert} in Python, with the texts in the column "text"'
    if file_format.content == PARQUET and file_format.compression:
        return f"decompress {path}"
    return ""
