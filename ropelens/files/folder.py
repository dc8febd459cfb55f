"""Results appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ropelens.errors import BadArgument, words_of

LAST = "run.json"  # stands for the whole set: taken away first, put in place last
SCRATCH = ".ropelens-part-"
"""How the names of the hidden folders begin in which results are made."""
SCRATCH_NAME = re.compile(re.escape(SCRATCH) + "[a-z0-9_]{8}")
"""What `tempfile.mkdtemp` makes of `SCRATCH`."""
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
TORCH_SAVE_FAILED = ("PytorchStreamWriter failed", "unexpected pos", "iostream error")
"""What torch.save says where it could not write, whatever the reason."""


@contextmanager
def output_folder(path: str | Path) -> Iterator[Path]:
    """A folder to write results in, whose files move to `path` when the body succeeds.

    An error, a full disk or Ctrl-C in the body leaves `path` as it was. A new `path` appears
    with all its files, by one rename. In a folder that exists, files of the same names are
    replaced one by one and others stay; `run.json` leaves first and comes last, so a folder
    whose `run.json` is missing may hold files of two runs. If two processes write at once,
    each leaves a whole set.

    Raises BadArgument where `path` cannot be written to (see `check_writable`) and where
    the disk is full. (netCDF: make it in memory and write the bytes, for HDF5 crashes the
    process when the disk is full.)
    """
    folder = Path(path).absolute()  # the body may change the working directory
    explained = explain_full_disk(
        f"the results do not fit into {folder}",
        means=lambda: "nothing was written; results of an earlier run are as they were",
        attempt="free some space, or write to another disk",
    )
    with _scratch(folder) as scratch, explained:
        results = scratch / "new"
        results.mkdir()
        yield results
        with _locked(folder.parent):
            if folder.exists():
                _move_into(folder, results)
            else:
                results.rename(folder)


def _move_into(folder: Path, results: Path) -> None:
    """Rename every file of `results` into `folder`, `run.json` last."""
    files = sorted(results.iterdir(), key=lambda path: path.name == LAST)
    for file in files:
        if (folder / file.name).is_dir() and not (folder / file.name).is_symlink():
            raise BadArgument(
                f"{folder / file.name} is a folder; a result of that name is a file."
            )
    if (results / LAST).exists():
        (folder / LAST).unlink(missing_ok=True)
    for file in files:
        file.replace(folder / file.name)  # a symbolic link is replaced, not followed


@contextmanager
def explain_full_disk(what: str, *, means: Callable[[], str], attempt: str) -> Iterator[None]:
    """Raise BadArgument, saying `what`, where the disk runs full in the block.

    `means` is called then, and tells what is lost or kept.
    """
    try:
        yield
    except Exception as error:
        if not _disk_full(error):
            raise
        raise BadArgument(
            f"The disk is full: {what}.",
            seen=words_of(error),
            means=means(),
            attempt=attempt,
        ) from error


def make_folder(path: Path) -> None:
    """Make the folder `path` and those that it lies in; BadArgument where that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadArgument(
            f"{path} cannot be made: {error.strerror}.", attempt="another folder"
        ) from error


def check_writable(path: str | Path) -> None:
    """Raise BadArgument unless results can be written to the folder `path`.

    The folder may be missing; the one it lies in must exist. This makes and removes a folder,
    for permissions say nothing of read-only disks.
    """
    with _scratch(Path(path)):
        pass


def _disk_full(error: Exception) -> bool:
    """Whether `error`, of whatever library, says that a disk (or a quota) is full."""
    # Libraries that write through C or Rust say it in words, in errors of their own.
    words = [*map(os.strerror, FULL), *TORCH_SAVE_FAILED]
    known = isinstance(error, OSError) and error.errno in FULL
    return known or any(word in str(error) for word in words)


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A hidden folder on the disk of `folder`: in it, or beside it where it is missing.

    It is locked while the block runs. Unlocked ones of earlier processes, which were killed,
    are removed.
    """
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        raise BadArgument(f"{folder} is not a folder; results go into one.")
    place = folder if folder.exists() else folder.absolute().parent
    if not place.is_dir():
        raise BadArgument(
            f"{folder} cannot be made: there is no folder {place}.", attempt=f"mkdir -p {place}"
        )
    try:
        with _locked(place):
            _remove_abandoned(place)
            scratch = Path(tempfile.mkdtemp(prefix=SCRATCH, dir=place))
            lock = _lock(scratch)
    except OSError as error:
        raise BadArgument(
            f"{folder} cannot be written to.",
            seen=f"{error.strerror} in {place}",
            attempt="another folder, or its permissions and disk",
        ) from error
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _remove_abandoned(place: Path) -> None:
    """Remove the scratch folders in `place` that are ours and that no process works in.

    The name alone decides, never what a folder contains: results come from anywhere.
    Symbolic links are not followed.
    """
    for path in place.iterdir():
        if not SCRATCH_NAME.fullmatch(path.name):
            continue
        lock = _lock(path)
        if lock is None:
            continue
        try:
            if os.fstat(lock).st_uid == os.geteuid():
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(lock)


def _lock(folder: Path, *, wait: bool = False) -> int | None:
    """A handle that locks `folder` until it is closed, or the process ends.

    None where another process has the lock (unless `wait`), on a disk that has no locks, and
    for a symbolic link or what is no folder.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | (0 if wait else os.O_NOFOLLOW))
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        os.close(handle)
        return None
    return handle


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Rename files in `folder` while no other process does."""
    lock = _lock(folder, wait=True)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def file_name(text: str) -> str:
    """`text` as the name of a file or folder: letters, digits, ".", "_" and "-" alone."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in text)


def write_whole(path: str | Path, content: str | bytes) -> Path:
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
