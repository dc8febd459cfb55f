"""Results appear whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from ropelens.errors import BadArgument, explained

LAST = "run.json"  # stands for the whole set: taken away first, put in place last


@contextmanager
def output_folder(path: str | Path) -> Iterator[Path]:
    """A folder to write results in, whose files move to `path` when the body succeeds.

    An error, a full disk or Ctrl-C in the body leaves `path` as it was. A new `path` appears
    with all its files, by one rename. In a folder that exists, files of the same names are
    replaced one by one and others stay; `run.json` leaves first and comes last, so a folder
    whose `run.json` is missing may hold files of two runs.

    Raises BadArgument where `path` cannot be written to. (netCDF: make it in memory and write
    the bytes, for HDF5 crashes the process when the disk is full.)
    """
    folder = Path(path).absolute()  # the body may change the working directory
    with _scratch(folder) as results:
        yield results
        if not folder.exists():
            results.rename(folder)
            return
        if (results / LAST).exists():
            (folder / LAST).unlink(missing_ok=True)
        for file in sorted(results.iterdir(), key=lambda file: file.name == LAST):
            file.replace(folder / file.name)  # a symbolic link is replaced, not followed


def check_writable(path: str | Path) -> None:
    """Raise BadArgument unless results can be written to the folder `path`.

    The folder may be missing; the one it lies in must exist. This makes and removes a folder,
    for permissions say nothing of read-only disks.
    """
    with _scratch(Path(path).absolute()):
        pass


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A new hidden folder, in `folder` or beside a missing one, that goes with the block."""
    place = folder if os.path.lexists(folder) else folder.parent
    with explained(f"{folder} cannot be written to.", error=BadArgument):
        hidden = TemporaryDirectory(prefix=".ropelens-", dir=place, ignore_cleanup_errors=True)
    with hidden as name:
        results = Path(name) / "results"  # others may read it, as no temporary folder
        results.mkdir()
        yield results


def file_name(text: str) -> str:
    """`text` as the name of a file or folder: letters, digits, ".", "_" and "-" alone."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in text)


def write_whole(path: str | Path, content: str | bytes | memoryview) -> Path:
    """Write a file aside and rename it into place: never half a file, nor none.

    What UTF-8 cannot hold (lone surrogates of a broken tokenizer) becomes a backslash
    escape. After an error the earlier file is as it was.
    """
    path = Path(path)
    if isinstance(content, str):
        content = content.encode("utf-8", errors="backslashreplace")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.part")
    aside.unlink(missing_ok=True)  # of a process that was killed, or a link
    try:
        with aside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)
    return path
