"""Results appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ropelens.errors import BadArgument, words_of

LAST = "run.json"  # stands for the whole set: taken away first and put back last
SCRATCH = ".ropelens-part-"
"""How the names of hidden folders begin in which results are made; a kill leaves them."""
MOVING = "moving.json"
"""In such a folder while its files move: where to, and which of them are new there."""
PATIENCE = 10.0  # seconds; others hold a folder for as long as a few files move
FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
TORCH_SAVE_FAILED = ("PytorchStreamWriter failed", "unexpected pos", "iostream error")
"""What torch.save says where it could not write, whatever the reason."""


@contextmanager
def output_folder(path: str | Path) -> Iterator[Path]:
    """A folder to write results in, whose files move to `path` when the body succeeds.

    Whatever ends the body or the moving early (an error, a full disk, Ctrl-C), `path` is as
    it was before and the unfinished files are gone. Each file appears whole, by a rename; a
    new `path` appears with all of them at once. In one that exists, files of the same
    names are replaced and others stay, and `run.json` comes last: where a run was killed
    while its files moved, it is missing, until the next call puts back what was there and
    clears away what killed runs left. Of two that write at once, each leaves a whole set.

    Raises BadArgument where `path` cannot be written to (see `check_writable`) and where
    the disk is full. (netCDF: have it made in memory and write the bytes, for HDF5 crashes
    the process when a disk runs full under it.)
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
        with _alone(folder.parent):
            if folder.exists():
                _replace(results, folder, kept=scratch / "old")
            else:
                results.rename(folder)


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

    The folder may be missing, the one it lies in may not. Tried, not looked up: permissions
    do not tell of read-only disks. Nothing is left behind, and what killed runs left is cleared
    away, as `output_folder` does.
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

    (In it, since it may be a disk of its own, and files move by a rename only within one.)
    It is locked while the block runs, which tells it from one that a killed process left.
    """
    if (folder.exists() or folder.is_symlink()) and not folder.is_dir():
        raise BadArgument(f"{folder} is not a folder; results go into one.")
    place = folder if folder.exists() else folder.absolute().parent
    if not place.is_dir():
        raise BadArgument(
            f"{folder} cannot be made: there is no folder {place}.", attempt=f"mkdir -p {place}"
        )
    for near in {place, folder.absolute().parent}:
        with _alone(near):
            _clear_away(near)
    try:
        with _alone(place):
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
        # Should an earlier run's files not have gone back, this is all there is of them.
        if not any(path.is_file() for path in (scratch / "old").rglob("*")):
            _persist(lambda: shutil.rmtree(scratch, ignore_errors=True))
        if lock is not None:
            os.close(lock)


def _lock(folder: Path) -> int | None:
    """A handle that keeps others from `folder` until it is closed, or the process ends.

    None where another has it, or on a disk that has no locks.
    """
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    return handle


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Move files in `folder` while no other process does; see `PATIENCE`."""
    end = time.monotonic() + PATIENCE
    while (lock := _lock(folder)) is None and time.monotonic() < end:
        time.sleep(0.01)
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def _clear_away(place: Path) -> None:
    """Remove what killed processes left in `place`, and put back what they had moved."""
    for left in place.glob(f"{SCRATCH}*"):
        lock = _lock(left)  # none where its process is at work
        if lock is None:
            continue
        try:
            if left.stat().st_uid == os.geteuid():  # what it says to move, nobody else said
                _undo(left)
                shutil.rmtree(left, ignore_errors=True)
        finally:
            os.close(lock)


def _undo(scratch: Path) -> None:
    """Take back the moves that a killed process had begun, if it had."""
    try:
        moving = json.loads((scratch / MOVING).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # a note that is cut off was never acted on
        return
    kept = scratch / "old"
    _put_back(
        scratch / "new",
        scratch.parent / moving["into"],
        kept,
        replaced=[path.relative_to(kept) for path in kept.rglob("*") if path.is_file()],
        fresh=[Path(name) for name in moving["fresh"]],
    )


def _replace(results: Path, folder: Path, *, kept: Path) -> None:
    """Move every file of `results` into `folder`; on any interruption put back what was.

    All files that get replaced leave before the first new one comes, `run.json` first, and
    it comes last: at no moment does the folder hold files of two runs.
    """
    names = [p.relative_to(results) for p in sorted(results.rglob("*")) if p.is_file()]
    names.sort(key=lambda name: name == Path(LAST))
    replaced = [name for name in reversed(names) if (folder / name).exists()]
    for name in replaced:
        if (folder / name).is_dir():
            raise BadArgument(f"{folder / name} is a folder; a result of that name is a file.")
    for name in names:
        (kept / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
    fresh = [name for name in names if name not in replaced]
    note = kept.parent / MOVING  # for who finds it, should this process be killed
    into = "." if kept.parent.parent == folder else folder.name
    note.write_text(json.dumps({"into": into, "fresh": list(map(str, fresh))}))
    try:
        for name in replaced:
            (folder / name).replace(kept / name)
        for name in names:
            (results / name).replace(folder / name)
    except BaseException:
        _persist(lambda: _put_back(results, folder, kept, replaced=replaced, fresh=fresh))
        raise
    _persist(lambda: note.unlink(missing_ok=True))
    _persist(lambda: shutil.rmtree(kept, ignore_errors=True))


def _put_back(
    results: Path, folder: Path, kept: Path, *, replaced: list[Path], fresh: list[Path]
) -> None:
    """Undo `_replace` from wherever it stopped; doing it twice does no harm."""
    for name in fresh:
        if not (results / name).exists():
            (folder / name).unlink(missing_ok=True)
    for name in replaced:
        if (kept / name).exists():
            try:
                (kept / name).replace(folder / name)
            except OSError as error:
                raise BadArgument(
                    f"Results of an earlier run could not be put back into {folder}.",
                    seen=str(error),
                    attempt=f"move them back yourself: they are in {kept}",
                ) from error


def _persist(step: Callable[[], None]) -> None:
    """Do `step` to its end, however often Ctrl-C is pressed meanwhile."""
    while True:
        try:
            return step()
        except KeyboardInterrupt:
            continue


def file_name(text: str) -> str:
    """`text` as the name of a file or folder: letters, digits, ".", "_" and "-" alone."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in text)


def write_whole(path: str | Path, content: str | bytes | Callable[[BinaryIO], None]) -> Path:
    """Write a file aside and rename it into place: never half a file, nor none.

    What UTF-8 cannot hold (lone surrogates of a broken tokenizer) becomes a backslash
    escape. `content` may also write to the file itself. On an error the file that was there
    stays, and nothing is left beside it; what a killed process left, the next one that writes
    the file takes away.
    """
    path = Path(path)
    if isinstance(content, str):
        content = content.encode("utf-8", errors="backslashreplace")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}.part")
    with _alone(path.parent):
        try:
            with aside.open("wb") as file:
                if callable(content):
                    content(file)
                else:
                    file.write(content)
                file.flush()
                os.fsync(file.fileno())
            aside.replace(path)
        finally:
            aside.unlink(missing_ok=True)
    return path
