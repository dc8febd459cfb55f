"""Files and folders that are written completely or not at all."""

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir

from filelock import FileLock

from ropelens.errors import BadArgument, explained

RECORD = "run.json"  # marks a complete set: it is removed first and written last
PAGE = "index.html"
UNFINISHED = ".unfinished"  # the folder of saved progress, in a folder of results


@contextmanager
def locked(path: str | Path) -> Iterator[None]:
    """Keep other processes of the user from writing to the folder `path`; they wait.

    The lock is a temporary file, because results may be read-only. It may be missing.
    """
    with ExitStack() as stack:
        with suppress(OSError, ValueError):
            lock = FileLock(_lock_file(Path(path)), is_singleton=True)
            stack.enter_context(lock)
        yield


def _lock_file(folder: Path) -> Path:
    """The lock of a folder. All names of the folder share it."""
    name = os.fsencode(folder.resolve())
    digest = hashlib.sha256(name).hexdigest()[:32]
    return Path(gettempdir()) / f"ropelens-{os.getuid()}-{digest}.lock"


def numbered(folder: Path) -> Iterator[Path]:
    """`folder`, `folder`-2, `folder`-3, ... without end."""
    yield folder
    for number in count(2):
        yield folder.with_name(f"{folder.name}-{number}")


def new_folder(folder: Path) -> Path:
    """Make the first of the `numbered` folders that does not exist, and return it.

    Raises BadArgument if it cannot be made.
    """
    candidates = numbered(folder)
    with explained(f"{folder} cannot be written to.", error=BadArgument):
        while True:
            candidate = next(candidates)
            with suppress(FileExistsError):
                candidate.mkdir(parents=True)
                return candidate


def make_parents(folder: Path) -> None:
    """Make the folders above `folder`; raises BadArgument if they cannot be made."""
    with explained(f"{folder} cannot be written to.", error=BadArgument):
        folder.parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def output_folder(path: str | Path) -> Iterator[Path]:
    """Give a temporary folder, whose files move to `path` at the end of the block.

    After an error or Ctrl-C in the block, `path` is unchanged. Missing folders above `path` are
    created. If `path` exists, its files are replaced one by one and other files stay.
    `run.json` is removed first and written last, so a folder without it may contain files of
    two runs.
    """
    folder = Path(path).absolute()  # the block may change the working directory
    with _scratch(folder) as results:
        yield results
        if not folder.exists():
            folder.parent.mkdir(parents=True, exist_ok=True)
            results.rename(folder)
            return
        if (results / RECORD).exists():
            (folder / RECORD).unlink(missing_ok=True)
        record_last = sorted(results.iterdir(), key=lambda file: file.name == RECORD)
        for file in record_last:
            # A symbolic link is replaced, not followed.
            file.replace(folder / file.name)


def check_writable(path: str | Path) -> None:
    """Raise BadArgument if the folder `path` cannot be written to, or cannot be created."""
    with _scratch(Path(path).absolute()):
        pass  # permissions do not show that a disk is read-only


def check_new_folder(path: str | Path) -> None:
    """Raise BadArgument if `path` is not an empty folder, or cannot be created."""
    folder = Path(path)
    check_writable(folder)
    if folder.exists() and any(folder.iterdir()):
        raise BadArgument(f"{path} is not an empty folder.", hint="a new folder")


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """A hidden folder for the block: in `folder`, or in the first folder above that exists."""
    parent = folder
    while not os.path.lexists(parent):
        parent = parent.parent
    with explained(f"{folder} cannot be written to.", error=BadArgument):
        hidden = TemporaryDirectory(
            prefix=".ropelens-", dir=parent, ignore_cleanup_errors=True
        )
    with hidden as name:
        results = Path(name) / "results"
        results.mkdir()  # others can read it, unlike the temporary folder
        yield results


def file_name(text: str) -> str:
    """Replace all characters except letters, digits, ".", "_" and "-" with "-"."""
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in text)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Give the path of a temporary file, which replaces `path` at the end of the block.

    `path` is never incomplete: after an error in the block, it is unchanged.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".ropelens-{secrets.token_hex(8)}.part")
    try:
        yield aside
        with aside.open("rb") as file:
            os.fsync(file.fileno())
        aside.replace(path)
    finally:
        aside.unlink(missing_ok=True)


def write_whole(path: str | Path, content: str | bytes) -> Path:
    """Write a file under another name and rename it, so that `path` is never incomplete."""
    path = Path(path)
    if isinstance(content, str):
        content = content.encode("utf-8", errors="backslashreplace")  # lone surrogates
    with whole_file(path) as aside, aside.open("xb") as file:
        file.write(content)
    return path
