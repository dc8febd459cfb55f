"""A long measurement saves its state once a minute, and goes on from there when stopped."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from torch import Tensor

from ropelens.attention.sums import LayerSums, Sums
from ropelens.budget.held_out import LayerFit
from ropelens.runtime.processes import gather, place

SECONDS = 60.0
UNFINISHED = ".unfinished"  # in the folder of a command's results


@dataclass
class Stage:
    """One measurement, and its `state` as it was saved: None at the start."""

    path: Path | None = None
    key: str = ""
    state: Any = None
    due: float = 0.0

    def save(self, state: Any) -> None:
        """Save `state`, if the last is a minute old; warn where it cannot be written."""
        if self.path is None or time.monotonic() < self.due:
            return
        tensors: dict[str, Any] = {}

        def form(value: Any) -> dict[str, Any]:
            if not isinstance(value, Tensor):
                return {"kind": type(value).__name__} | vars(value)
            tensors[str(len(tensors))] = value.cpu().contiguous().numpy()
            return {"tensor": str(len(tensors) - 1), "device": str(value.device)}

        written, aside = json.dumps(state, default=form), self.path.with_suffix(".part")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            aside.unlink(missing_ok=True)  # a link there would be followed
            save_file(tensors, aside, {"key": self.key, "form": written})
            aside.replace(self.path)
        except (OSError, SafetensorError) as error:
            with suppress(OSError):  # empty folders go
                self.path.parent.rmdir()
                self.path.parent.parent.rmdir()
            self.path = None
            warnings.warn(f"the measurement so far could not be saved: {error}", stacklevel=2)
        self.due = time.monotonic() + SECONDS


_open: ContextVar[list[Any] | None] = ContextVar("ropelens_savepoint", default=None)


@contextmanager
def savepoint(folder: Path, key: Mapping[str, object]) -> Iterator[None]:
    """Measurements in the block are saved in `folder`, and go on from what it holds.

    `key` is everything that decides the numbers; what was saved under another is removed.
    """
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
    if folder.is_symlink():  # nothing of ours
        folder.unlink()
    token = _open.set([folder, digest, 0])
    try:
        yield
    except KeyboardInterrupt as error:
        if error.args or not folder.exists():
            raise
        raise KeyboardInterrupt(f"stopped; the same command goes on from {folder}") from None
    finally:
        _open.reset(token)


def begin_stage(*kinds: type) -> Stage:
    """The next measurement of the open savepoint, in the state that was saved.

    A state holds what JSON does, tensors, sums, fits and dataclasses of these `kinds`.
    """
    if (opened := _open.get()) is None:
        return Stage()
    folder, key, begun = opened
    opened[2] += 1
    path = folder / f"{begun}-{'-of-'.join(map(str, place()))}.safetensors"
    named = {kind.__name__: kind for kind in (LayerFit, LayerSums, Sums, *kinds)}
    state: Any = None
    with suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:

        def restored(form: dict[str, Any]) -> Any:
            if "tensor" in form:
                return file.get_tensor(form["tensor"]).to(form["device"])
            if "kind" in form:
                return named[form.pop("kind")](**form)
            return {int(key) if key.isdigit() else key: value for key, value in form.items()}

        if file.metadata()["key"] == key:
            state = json.loads(file.metadata()["form"], object_hook=restored)
    if path.exists():
        word = "of no use here, and removed:" if state is None else "going on from"
        print(f"{word} what was measured in {folder}", file=sys.stderr, flush=True)
        if state is None:
            shutil.rmtree(folder, ignore_errors=True)
    if not all(gather(state is not None)):  # of the processes that share the measurement
        state = None
    return Stage(path, key, state, time.monotonic() + SECONDS)
