"""Results appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ropelens.errors import BadArgument, words_of

LAST = "run.json"  # stands for the whole set: taken away first, put in place last
SCRATCH = ".ropelens-part"
"""The hidden folder in which results are made, in their folder or beside a new one."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def output_folder(path: str | Path) -> Iterator[Path]:
    """A folder to write results in, whose files move to `path` when the body succeeds.

    An error, a full disk or Ctrl-C in the body leaves `path` as it was. A new `path` appears
    with all its files, by one rename. In a folder that exists, files of the same names are
    replaced one by one and others stay; `run.json` leaves first and comes last, so a folder
    whose `run.json` is missing may hold files of two runs. A second process waits until the
    first has written.

    Raises BadArgument where `path` cannot be written to (see `check_writable`) and where
    the disk is full. (netCDF: make it in memory and write the bytes, for HDF5 crashes the
    process when the disk is full.)
    """
    folder = Path(path).absolute()  # the body may change the working directory
    with (
        _scratch(folder) as results,
        explain_full_disk(f"the results do not fit into {folder}"),
    ):
        yield results
        if not folder.exists():
            results.rename(folder)
            return
        files = sorted(results.iterdir(), key=lambda file: file.name == LAST)
        for file in files:
            if (folder / file.name).is_dir() and not (folder / file.name).is_symlink():
                raise BadArgument(f"{folder / file.name} is a folder, where a file belongs.")
        if (results / LAST).exists():
            (folder / LAST).unlink(missing_ok=True)
        for file in files:
            file.replace(folder / file.name)  # a symbolic link is replaced, not followed


@contextmanager
def explain_full_disk(what: str) -> Iterator[None]:
    """Raise BadArgument, saying `what`, where the disk runs full in the block."""
    try:
        yield
    except Exception as error:
        # Libraries that write through Rust say it in words, in errors of their own.
        known = isinstance(error, OSError) and error.errno in FULL
        if not known and not any(os.strerror(number) in str(error) for number in FULL):
            raise
        raise BadArgument(
            f"The disk is full: {what}.",
            seen=words_of(error),
            attempt="free some space; the same command then goes on",
        ) from error


def make_folder(path: Path) -> None:
    """Make the folder `path` and those that it lies in; BadArgument where that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadArgument(f"{path} cannot be made: {error.strerror}.") from error


def check_writable(path: str | Path) -> None:
    """Raise BadArgument unless results can be written to the folder `path`.

    The folder may be missing; the one it lies in must exist. This makes and removes a folder,
    for permissions say nothing of read-only disks.
    """
    with _scratch(Path(path)):
        pass


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """The scratch folder for `folder`, empty: in it, or beside it where it is missing.

    One that a killed process left is removed, by its name and whatever it holds. The lock of
    the parent makes sure that nobody works in it.
    """
    parent = folder.absolute().parent
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        raise BadArgument(f"{folder} is not a folder; results go into one.")
    if not parent.is_dir():
        raise BadArgument(
            f"{folder} cannot be made: there is no folder {parent}.",
            attempt=f"mkdir -p {parent}",
        )
    with _locked(parent):
        scratch = (folder if folder.exists() else parent) / SCRATCH
        try:
            if scratch.is_dir() and not scratch.is_symlink():
                shutil.rmtree(scratch)
            scratch.unlink(missing_ok=True)
            scratch.mkdir()
        except OSError as error:
            raise BadArgument(
                f"{folder} cannot be written to.", seen=f"{error.strerror} in {scratch.parent}"
            ) from error
        try:
            yield scratch
        finally:
            shutil.rmtree(scratch, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock of `folder` while the block runs, on disks that have locks."""
    handle = None
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(handle, fcntl.LOCK_EX)
    except OSError:
        pass
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


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
    with _locked(path.parent):
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
