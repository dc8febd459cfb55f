"""Saved progress: a long measurement saves its state each minute and continues from it."""

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

import safetensors.numpy
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ropelens.attention.sums import LayerSums, Sums
from ropelens.budget.held_out import LayerFit
from ropelens.runtime.folder import write_whole
from ropelens.runtime.processes import gather, place

SECONDS = 60.0
UNFINISHED = ".unfinished"  # the folder of saved progress, in a folder of results


@dataclass
class SavedStage:
    """A measurement and its saved `state`, or None."""

    path: Path | None = None
    key: str = ""
    state: Any = None
    due: float = 0.0

    def save(self, state: Any) -> None:
        """Save `state` if a minute has passed; warn if it cannot be written."""
        if self.path is None or time.monotonic() < self.due:
            return
        tensors: dict[str, Any] = {}

        def as_json(value: Any) -> dict[str, Any]:
            if not isinstance(value, Tensor):
                return {"kind": type(value).__name__} | vars(value)
            tensors[str(len(tensors))] = value.cpu().contiguous().numpy()
            return {"tensor": str(len(tensors) - 1), "device": str(value.device)}

        facts = {"key": self.key, "form": json.dumps(state, default=as_json)}
        try:
            write_whole(self.path, safetensors.numpy.save(tensors, facts))
        except (OSError, SafetensorError) as error:
            with suppress(OSError):  # remove empty folders
                self.path.parent.rmdir()
                self.path.parent.parent.rmdir()
            self.path = None
            warnings.warn(f"the progress could not be saved: {error}", stacklevel=2)
        self.due = time.monotonic() + SECONDS


_savepoint: ContextVar[list[Any] | None] = ContextVar(
    "ropelens_savepoint", default=None
)


@contextmanager
def savepoint(folder: Path, key: Mapping[str, object]) -> Iterator[None]:
    """Save measurements in the block to `folder`, and continue from progress with this key."""
    digest = hashlib.sha256(
        json.dumps(key, sort_keys=True, default=str).encode()
    ).hexdigest()
    if folder.is_symlink():  # ropelens did not create it
        folder.unlink()
    token = _savepoint.set([folder, digest, 0])
    try:
        yield
    finally:
        _savepoint.reset(token)


def begin_stage(*kinds: type) -> SavedStage:
    """Begin the next measurement of the savepoint, from its saved state if there is one.

    A state contains JSON values, tensors, sums, fits and dataclasses of the given `kinds`.
    """
    if (opened := _savepoint.get()) is None:
        return SavedStage()
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
            return {
                int(key) if key.isdigit() else key: value for key, value in form.items()
            }

        if file.metadata()["key"] == key:
            state = json.loads(file.metadata()["form"], object_hook=restored)
    if path.exists():
        line = f"continuing from the saved progress in {folder}"
        if state is None:
            line = f"removed the progress in {folder}: it is damaged or from other settings"
            shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            print(line, file=sys.stderr, flush=True)
    if not all(gather(state is not None)):  # another process may have no state
        state = None
    return SavedStage(path, key, state, time.monotonic() + SECONDS)
