"""Long measurements save how far they are now and then, and go on from there when stopped."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from ropelens.files.folder import write_whole
from ropelens.measure.batches import Progress
from ropelens.models.processes import gather, place
from ropelens.statistics.budget.held_out import LayerFit
from ropelens.statistics.sums import LayerSums, Sums

SECONDS = 60.0
"""Between two times that a stage is saved; longer where saving takes long."""

SHARE = 0.05
"""Of the time that saving takes at most."""

UNFINISHED = ".unfinished"
"""The folder in that of the results which keeps how far a command is."""

KINDS = {kind.__name__: kind for kind in (LayerFit, LayerSums, Sums)}
"""What a state may hold beside numbers, texts, tensors, arrays, lists and dictionaries."""


@dataclass
class Stage:
    """One part of a measurement: `state` is what there is of it so far, None at its begin.

    `tokens` counts those that went into it. Without a `path` nothing is saved.
    """

    path: Path | None = None
    key: str = ""
    state: Any = None
    tokens: int = 0
    due: float = field(default_factory=lambda: time.monotonic() + SECONDS)

    def counting(self, progress: Progress | None) -> Progress:
        """`progress`, which also counts the tokens of this stage."""

        def count(tokens: int) -> None:
            self.tokens += tokens
            if progress is not None:
                progress(tokens)

        return count

    def save(self, state: Callable[[], Any]) -> None:
        """Keep what `state` gives, where the last is old enough: whole, or the last one stays.

        What cannot be written is warned of, and the measurement goes on.
        """
        begin = time.monotonic()
        if self.path is None or begin < self.due:
            return
        arrays: dict[str, np.ndarray] = {}
        told = json.dumps(
            {"key": self.key, "tokens": self.tokens, "state": pack(state(), arrays)}
        )

        def write(file: BinaryIO) -> None:
            np.savez(file, allow_pickle=False, told=np.array(told), **arrays)

        try:
            write_whole(self.path, write)
        except OSError as error:
            self.path = None
            warnings.warn(
                f"how far the measurement is could not be saved: {error}", stacklevel=2
            )
        now = time.monotonic()
        self.due = now + max(SECONDS, (now - begin) / SHARE)


@dataclass
class _Savepoint:
    """The stages of one measurement in a folder, in the order in which they come."""

    folder: Path
    key: str
    taken: int = 0
    ahead: Stage | None = None


_open: ContextVar[_Savepoint | None] = ContextVar("ropelens_savepoint", default=None)


@contextmanager
def savepoint(folder: Path, key: Mapping[str, object]) -> Iterator[None]:
    """What is measured in the block is saved in `folder` now and then, and goes on from there.

    `key` is everything that decides the numbers, in JSON's types: what was saved under another
    is removed. The folder is made when there is something to save. It stays: whoever has
    written the results calls `remove_savepoint`.
    """
    text = json.dumps(key, sort_keys=True, default=str)
    token = _open.set(_Savepoint(folder, hashlib.sha256(text.encode()).hexdigest()))
    try:
        yield
    except KeyboardInterrupt as error:
        if error.args or not folder.exists():
            raise
        raise KeyboardInterrupt(
            f"stopped; the same command goes on from what is kept in {folder}"
        ) from None
    finally:
        _open.reset(token)


def remove_savepoint(folder: Path) -> None:
    """Remove what a `savepoint` kept, if anything."""
    shutil.rmtree(folder, ignore_errors=True)


def next_stage() -> Stage:
    """The stage that comes next in the open savepoint, as far as it was; not yet begun."""
    kept = _open.get()
    if kept is None:
        return Stage()
    if kept.ahead is None:
        number, among = place()
        path = kept.folder / f"{kept.taken}-{number + 1}-of-{among}.npz"
        kept.ahead = _read(path, kept.key)
        if not all(gather(kept.ahead.state is not None)):  # all go on, or none
            kept.ahead = Stage(path, kept.key)
    return kept.ahead


def begin_stage() -> Stage:
    """The same, begun: the next one is another."""
    stage, kept = next_stage(), _open.get()
    if kept is not None:
        kept.ahead, kept.taken = None, kept.taken + 1
    return stage


def _read(path: Path, key: str) -> Stage:
    """The stage in a file; a new one where there is none, or one that is of no use."""
    stage = Stage(path, key)
    if not path.exists():
        return stage
    try:
        # Opened here: numpy leaves a damaged file open.
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            told = json.loads(str(arrays["told"]))
            if told["key"] == key:
                stage.state, stage.tokens = unpack(told["state"], arrays), told["tokens"]
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        pass  # damaged
    if stage.state is None:
        _say(f"what {path.parent} keeps is of another measurement, and is removed")
        remove_savepoint(path.parent)
    else:
        _say(f"going on from what was measured before: {stage.tokens:,} tokens")
    return stage


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def pack(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """`value` in JSON's types; what is an array in it joins `arrays`."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [pack(one, arrays) for one in value]
    if isinstance(value, dict):
        return {"dict": [[key, pack(one, arrays)] for key, one in value.items()]}
    if isinstance(value, (Tensor, np.ndarray)):
        name = f"array{len(arrays)}"
        if isinstance(value, np.ndarray):
            arrays[name] = value
            return {"array": name}
        arrays[name] = value.cpu().numpy()
        return {"array": name, "device": str(value.device)}
    kind = type(value).__name__
    assert KINDS.get(kind) is type(value), f"{kind} is not of KINDS"
    parts = [[part.name, pack(getattr(value, part.name), arrays)] for part in fields(value)]
    return {"kind": kind, "parts": parts}


def unpack(told: Any, arrays: Mapping[str, np.ndarray]) -> Any:
    """What `pack` was given; of a tuple a list."""
    if isinstance(told, list):
        return [unpack(one, arrays) for one in told]
    if not isinstance(told, dict):
        return told
    if "dict" in told:
        return {key: unpack(one, arrays) for key, one in told["dict"]}
    if "kind" in told:
        return KINDS[told["kind"]](**{name: unpack(one, arrays) for name, one in told["parts"]})
    array = arrays[told["array"]]
    return torch.from_numpy(array).to(told["device"]) if "device" in told else array
