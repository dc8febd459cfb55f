"""The folder of a run: whose it is, who is at work on it, how it began and ended."""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from filelock import FileLock, Timeout

from ropelens.errors import BadArgument
from ropelens.files.folder import make_folder
from ropelens.models.processes import processes
from ropelens.train.checkpoints import last_whole_checkpoint
from ropelens.train.data import require_same
from ropelens.train.machine import chosen_precision, say
from ropelens.train.record import differences, read_json, write_json
from ropelens.train.settings import Settings

UNSAID = {"history_every": 0, "decay": 1.0, "compile": False}
"""Settings of runs that were begun before there was a choice."""

PACKAGES = ("ropelens", "torch", "transformers", "accelerate", "tokenizers", "numpy")


WRITTEN = (
    *("config.json", "generation_config.json", "model.safetensors", "study.json"),
    *("tokenizer.json", "tokenizer_config.json", "metrics.csv", "history", "checkpoints"),
)
"""What a run writes after its run.json; without that it is somebody else's."""


class Busy(BadArgument):
    """Another process is at work on the run."""


def check_free(out: Path, *, of: Sequence[str]) -> None:
    """Refuse a folder that has one of the files `of` a model, a run or a study."""
    taken = [name for name in of if (out / name).exists()]
    if taken:
        raise BadArgument(
            f"{out} holds a model, a run or a study already; this would mix with it.",
            seen=", ".join(taken),
            attempt="another --out",
        )


def settled(out: Path, settings: Settings) -> Settings:
    """`settings` as the run in `out` takes them: with a precision, its own if it has begun.

    Raises:
        BadArgument: run.json tells of a run with other settings, or of something else.
    """
    path = out / "run.json"
    if not path.exists():
        check_free(out, of=WRITTEN)
        precision = chosen_precision(settings.precision, kept=None)
        return dataclasses.replace(settings, precision=precision)
    before = read_json(path).get("settings")
    if not isinstance(before, dict):
        raise BadArgument(
            f"{out} holds the results of another command; a run would mix with them.",
            attempt="another --out",
        )
    precision = chosen_precision(settings.precision, kept=before.get("precision"))
    settings = dataclasses.replace(settings, precision=precision)
    require_same(UNSAID | before, settings.facts(), what=f"the run in {out}")
    return settings


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """Keep every other command from the run while the block runs, however this one ends.

    The main process holds the lock for those that train with it, and tells them if it has it.
    """
    lock = FileLock(out / ".lock")
    if processes().is_main_process:
        make_folder(out)
        with suppress(Timeout):
            lock.acquire(blocking=False)
    if not broadcast_object_list([lock.is_locked])[0]:
        raise Busy(
            f"another process is at work on the run in {out}.",
            attempt="wait for it, or pass another folder",
        )
    try:
        yield
    finally:
        lock.release()


def what_is_kept(out: Path) -> str:
    """In words: the last whole checkpoint of the run in `out`, if there is one."""
    kept = last_whole_checkpoint(out / "checkpoints")
    return f"{kept.name} is kept" if kept else "no checkpoint had been written"


def how_to_go_on(out: Path) -> str:
    """In words: what the same command does with the run in `out`."""
    kept = last_whole_checkpoint(out / "checkpoints")
    return f"goes on from {kept.name}" if kept else "begins again, for no checkpoint was due"


def begin_record(out: Path, decides: dict[str, Any], *, data: Path) -> None:
    """Write run.json; on a later call, see that what decides the run is what it was.

    A run that goes on in another way is told so: its sums are rounded otherwise.
    """
    path = out / "run.json"
    computed = {
        "versions": {name: version(name) for name in PACKAGES},
        "processes": processes().num_processes,
        "threads": torch.get_num_threads(),
    }
    if path.exists():
        record = read_json(path)
        require_same(UNSAID | record["settings"], decides, what=f"the run in {out}")
        before, now = _flat(record), _flat(computed)
        changed = differences(before, now, now, between=", now ")
        if changed and "finished" not in record:
            say(f"{changed}: not bit for bit the run that it would have been")
        return
    record = {
        "kind": "training",
        "settings": decides,
        "data": os.path.relpath(data, out),
        "started": _clock(),
        "command": sys.argv,
        **computed,
    }
    write_json(path, record)


def _flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """What rounds the sums of a run: versions, processes, threads."""
    return record["versions"] | {name: record[name] for name in ("processes", "threads")}


def is_finished(out: Path) -> bool:
    """Whether there is a run in `out`, and its run.json says that it came to its end."""
    path = out / "run.json"
    return path.exists() and "finished" in read_json(path)


def finish_record(out: Path, *, tokens: int) -> None:
    """Say in run.json that the run ended, now, after so many tokens."""
    path = out / "run.json"
    write_json(path, read_json(path) | {"finished": _clock(), "tokens": tokens})


def _clock() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
