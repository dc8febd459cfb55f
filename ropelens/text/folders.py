"""The files of text in a folder; other names are counted, and pipes and devices refused."""

import os
import stat
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from ropelens.errors import BadText, explained
from ropelens.text.file_formats import ACCEPTED, format_of

SHOWN = 5  # names or endings in a warning


@dataclass
class FolderContents:
    """Names in a folder, at any depth."""

    files: list[Path] = field(default_factory=list)  # files that are read
    hidden: list[str] = field(default_factory=list)  # names that begin with a dot
    others: Counter[str] = field(default_factory=Counter)  # files by their ending

    @property
    def left_out(self) -> str:
        """The names that are not read, in words; "" if there is none."""
        parts = []
        if self.hidden:
            names = ", ".join(sorted(set(self.hidden))[:SHOWN])
            count = len(self.hidden)
            parts.append(f"names that begin with a dot: {count:,} ({names})")
        if self.others:
            endings = ", ".join(sorted(self.others)[:SHOWN])
            parts.append(f"other files: {self.others.total():,} ({endings})")
        return "; ".join(parts)


def files_in(folder: Path) -> list[Path]:
    """The files of text in the folder at any depth, in the order of their paths.

    Warns about the names that are left out. Raises `BadText` if no file has text, and
    for a pipe, a device, a dead link or a folder that cannot be read.
    """
    contents = _contents_of(folder)
    left_out = contents.left_out
    if not contents.files:
        raise BadText(
            f"{folder} contains no text.",
            seen=left_out or "an empty folder",
            hint=f"a folder of {ACCEPTED}",
        )
    if left_out:
        warnings.warn(f"left out in {folder}: {left_out}", stacklevel=3)
    return sorted(contents.files)


def _contents_of(folder: Path) -> FolderContents:
    contents = FolderContents()
    for place, folders, names in os.walk(folder, onerror=_refuse_folder):
        contents.hidden += [name for name in folders + names if name.startswith(".")]
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in folders:
            if Path(place, name).is_symlink():  # could lead in a circle
                contents.others["links to folders"] += 1
        for name in names:
            if not name.startswith("."):
                _add_file(Path(place, name), contents)
    return contents


def _refuse_folder(error: OSError) -> None:
    raise BadText(
        f"The folder {error.filename} cannot be read.",
        seen=str(error.strerror),
        hint="the permission to read it, or another folder without it",
    ) from error


def _add_file(path: Path, contents: FolderContents) -> None:
    """Count a file as a text or as another file. Pipes and devices are refused."""
    is_text = format_of(path).may_be_text
    if is_text or not is_dead_link(path):
        check_regular(path, piped=False)
    if is_text:
        contents.files.append(path)
    else:
        contents.others[path.suffix or "without an ending"] += 1


def is_dead_link(path: Path) -> bool:
    """Whether the path is a link to nothing, or to itself."""
    # Methods of Path have errors for some names.
    return os.path.islink(path) and not os.path.exists(path)  # noqa: PTH110, PTH114


def check_regular(path: Path, *, piped: bool = True) -> None:
    """Raise `BadText` for a device, a missing file, and a pipe unless it may be `piped`.

    A device may have no end, and a pipe to which nobody writes blocks.
    """
    if is_dead_link(path):
        raise BadText(
            f"{path} is a link to a file that does not exist.",
            seen=f"it leads to {path.readlink()}",
            hint="restore the file, or remove the link",
        )
    with explained(
        f"{path} cannot be read.", f"a file, or a folder of {ACCEPTED}", error=BadText
    ):
        mode = path.stat().st_mode
    if stat.S_ISREG(mode) or (piped and stat.S_ISFIFO(mode)):
        return
    kind = "a named pipe" if stat.S_ISFIFO(mode) else "a device or a socket"
    raise BadText(
        f"{path} is {kind}, not a file.",
        means="reading it may never end",
        hint="a file; the output of a command is read by --text <(COMMAND)",
    )
