"""The folder of a training, with a record, and with a lock that one process has."""

import os
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from filelock import AcquireReturnProxy, FileLock, Timeout

from ropelens.errors import BadArgument, explained
from ropelens.profiles.measurement import versions
from ropelens.runtime.folder import RECORD
from ropelens.runtime.keys import Key
from ropelens.runtime.records import read_json_if_exists, write_json

STUDY = "study.json"  # the file of a study's folder that contains its settings
LOCK = ".lock"
BEFORE_RECORD = {"data", LOCK}  # files that come before the record
TEMPORARY = ".ropelens-"  # the beginning of the names of temporary files


class Busy(BadArgument):
    """Another process works on the run."""


def begin_record(
    out: Path,
    data: Path,
    settings: dict[str, Any],
    *,
    kind: str = "training",
    more: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Write run.json at the begin of a run, or read it again if the `settings` are equal."""
    record = read_settings(out, RECORD, key="settings")
    if not record:
        record = {
            "kind": kind,
            "settings": settings,
            "data": os.path.relpath(data, out),
            "versions": versions() | {"accelerate": version("accelerate")},
            "threads": torch.get_num_threads(),
            "started": now(),
            "command": sys.argv,
            **(more or {}),
        }
    Key(settings).require(record["settings"], what=f"the run in {out}")
    write_json(out / RECORD, record)
    return record


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def read_settings(out: Path, name: str, *, key: str) -> dict[str, Any]:
    """Read the file `name` in `out`; {} if nothing has begun. Refuses other folders."""
    # Another process may begin the run now. It writes its record before other files.
    names = _names_in(out) - BEFORE_RECORD
    record = read_json_if_exists(out / name)
    if key in record:
        return record
    others = sorted(name for name in names if not name.startswith(TEMPORARY))
    if others:
        raise BadArgument(
            f"{out} holds a model, a run, a study or other files, and files would mix.",
            seen=", ".join(others[:3]),
            hint="another --out",
        )
    return {}


def _names_in(folder: Path) -> set[str]:
    """The names of the files in a folder, which may be missing."""
    if not folder.exists():
        return set()
    with explained(f"{folder} cannot be read.", "another --out", error=BadArgument):
        return {file.name for file in folder.iterdir()}


def make_folder(folder: Path) -> None:
    """Make the folder of a run or a study; raises `BadArgument` if that is impossible."""
    fault = f"{folder} cannot be written to."
    with explained(fault, "another --out", error=BadArgument):
        folder.mkdir(parents=True, exist_ok=True)


def lock_run(out: Path) -> AcquireReturnProxy:
    """Lock the folder of a run, and remove what a killed process left there.

    Raises `Busy` if another process has the lock.
    """
    make_folder(out)
    fault = f"another process works on the run in {out}."
    unwritable = explained(f"{out} cannot be written to.", error=BadArgument)
    with unwritable, explained(fault, error=Busy, catch=Timeout):
        lock = FileLock(out / LOCK).acquire(blocking=False)
    for file in out.glob(f"{TEMPORARY}*.part"):  # of `whole_file`, after kill -9
        file.unlink()
    return lock
