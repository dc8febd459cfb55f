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
from ropelens.runtime.records import read_json, write_json

STUDY = "study.json"  # the file of a study's folder that contains its settings
BEFORE_RECORD = {"data", ".lock"}  # files that come before the record
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
    record = read_json(out / name) if (out / name).exists() else {}
    if key in record or not out.exists():
        return record
    names = {file.name for file in out.iterdir()} - BEFORE_RECORD
    others = sorted(name for name in names if not name.startswith(TEMPORARY))
    if others:
        raise BadArgument(
            f"{out} holds a model, a run, a study or other files, and files would mix.",
            seen=", ".join(others[:3]),
            hint="another --out",
        )
    return {}


def lock_run(out: Path) -> AcquireReturnProxy:
    out.mkdir(parents=True, exist_ok=True)
    fault = f"another process works on the run in {out}."
    with explained(fault, error=Busy, catch=Timeout):
        return FileLock(out / ".lock").acquire(blocking=False)
