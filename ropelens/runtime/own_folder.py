"""The folder of results that nobody named, which never replaces the results of another run."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from ropelens.runtime.folder import RECORD, UNFINISHED, numbered, write_whole
from ropelens.runtime.run_record import read_record, this_command

COMMAND = "command.txt"  # the command that has begun to measure, next to its progress


def own_folder(first: Path, owns: Callable[[Path], bool]) -> Path:
    """The first of `first`, `first`-2, ... that has no results, or whose results it `owns`."""
    for folder in numbered(first):
        is_free = not (folder / RECORD).exists() and not (folder / UNFINISHED).exists()
        if is_free or owns(folder):
            return folder
    raise AssertionError("the numbers have no end")


def is_of_this_command(folder: Path) -> bool:
    """Whether this command wrote the results in `folder`, or was stopped before it did."""
    begun = _begun_command(folder)
    command = read_record(folder).get("command", begun)
    return command == this_command() and begun in ("", this_command())


def is_begun_by_another(folder: Path) -> bool:
    """Whether another command was stopped, whose progress is in `folder`."""
    return _begun_command(folder) not in ("", this_command())


def _begun_command(folder: Path) -> str:
    with suppress(OSError):
        return (folder / UNFINISHED / COMMAND).read_text(encoding="utf-8")
    return ""


@contextmanager
def begun(folder: Path) -> Iterator[None]:
    """Mark `folder` as the folder of this command, so that only this command continues in it.

    The mark stays if the block is stopped, and is removed if it fails before any progress.
    Whoever writes the results removes it together with the progress.
    """
    mark = folder / UNFINISHED / COMMAND
    if mark.parent.is_symlink():  # ropelens did not create it
        mark.parent.unlink()
    write_whole(mark, this_command())
    try:
        yield
    except BaseException:
        with suppress(OSError):
            others = {path.name for path in folder.iterdir()} - {UNFINISHED}
            if not others or read_record(folder):
                _remove_alone(mark)
        raise


def _remove_alone(mark: Path) -> None:
    """Remove the mark and its folders if they have no other files."""
    if [*mark.parent.iterdir()] != [mark]:
        return
    mark.unlink()
    mark.parent.rmdir()
    mark.parent.parent.rmdir()
