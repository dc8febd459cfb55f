"""Saved progress: a long measurement saves its state each minute and continues from it."""

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
from ropelens.runtime.keys import Key
from ropelens.runtime.processes import all_agree, process_count, process_index

FORMAT = 2  # progress in another format is discarded
SECONDS = 60.0  # between two saves
DAMAGED = "it is damaged"
ANOTHER_VERSION = "it is from another version of ropelens"


class SaveTimer:
    """Tells when work should be saved: `SECONDS` after its start or the save before."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self._due = time.monotonic() + SECONDS

    @property
    def is_due(self) -> bool:
        return time.monotonic() >= self._due


class SavedProgress:
    """Progress of a measurement: the `state` in which it was stopped, or None.

    A state contains JSON values, tensors, sums, fits and dataclasses. Without a `path`, the
    state is not saved.
    """

    def __init__(
        self, path: Path | None = None, key: Key | None = None, state: Any = None
    ) -> None:
        self.path = path
        self.key = key or Key({})
        self.state = state
        self.timer = SaveTimer()

    def save(self, state: Any) -> None:
        """Save `state` if a minute has passed; warn if it cannot be written."""
        if self.path is None or not self.timer.is_due:
            return
        try:
            write_whole(self.path, state_to_bytes(state, self.key))
        except (OSError, SafetensorError) as error:
            with suppress(OSError):  # remove empty folders
                self.path.parent.rmdir()
                self.path.parent.parent.rmdir()
            self.path = None
            warnings.warn(f"the progress could not be saved: {error}", stacklevel=2)
        self.timer.restart()


@dataclass
class Savepoint:
    """The folder and the key of measurements, and how many of them have begun."""

    folder: Path
    key: Key
    begun: int = 0


_savepoint: ContextVar[Savepoint | None] = ContextVar(
    "ropelens_savepoint", default=None
)


@contextmanager
def savepoint(folder: Path, values: Mapping[str, object]) -> Iterator[None]:
    """Save measurements in the block to `folder`, and continue from progress that fits.

    `values` are all settings that affect the numbers.
    """
    if folder.is_symlink():  # ropelens did not create it
        folder.unlink()
    key = Key(values, format=FORMAT)
    token = _savepoint.set(Savepoint(folder, key))
    try:
        yield
    finally:
        _savepoint.reset(token)


def resume(*classes: type) -> SavedProgress:
    """Begin the next measurement of the savepoint, from its saved state if there is one.

    `classes` are the dataclasses in the state, next to sums and fits.
    """
    opened = _savepoint.get()
    if opened is None:
        return SavedProgress()
    process = f"{process_index()}-of-{process_count()}"
    path = opened.folder / f"{opened.begun}-{process}.safetensors"
    opened.begun += 1
    state = None
    if path.exists():
        reason = why_useless(path, opened.key)
        if not reason:
            state = read_state(path, classes)
        if state is None:
            reason = reason or DAMAGED
            line = f"removed the progress in {opened.folder}: {reason}"
            shutil.rmtree(opened.folder, ignore_errors=True)
        else:
            line = f"continuing from the saved progress in {opened.folder}"
        with suppress(OSError):  # nobody reads stderr
            print(line, file=sys.stderr, flush=True)
    if not all_agree(state is not None):  # another process may have no state
        state = None
    return SavedProgress(path, opened.key, state)


def state_to_bytes(state: Any, key: Key) -> bytes:
    """A file of safetensors with the tensors of `state`, and its form and key as metadata."""
    tensors: dict[str, Any] = {}

    def as_json(value: Any) -> dict[str, Any]:
        if not isinstance(value, Tensor):
            return {"kind": type(value).__name__, **vars(value)}
        name = str(len(tensors))
        tensors[name] = value.cpu().contiguous().numpy()
        return {"tensor": name, "device": str(value.device)}

    form = json.dumps(state, default=as_json)
    metadata = {"key": json.dumps(key.recorded), "form": form}
    return safetensors.numpy.save(tensors, metadata)


def why_useless(path: Path, key: Key) -> str:
    """Why the state in a file does not belong to `key`; "" if it does."""
    try:
        with safe_open(path, framework="np") as file:
            saved = json.loads(file.metadata()["key"])
    except (OSError, SafetensorError, KeyError, TypeError):
        return DAMAGED
    except ValueError:  # before format 2, the key was a digest
        return ANOTHER_VERSION
    if not isinstance(saved, dict) or saved.get("format") != key.format:
        return ANOTHER_VERSION
    if key.fits(saved):
        return ""
    return f"it is from other settings ({key.changes(saved)})"


def read_state(path: Path, classes: tuple[type, ...]) -> Any:
    """The state in a file, or None if it is damaged."""
    class_by_name = {
        known.__name__: known for known in (LayerFit, LayerSums, Sums, *classes)
    }

    def restored(value: dict[str, Any]) -> Any:
        if "tensor" in value:
            return file.get_tensor(value["tensor"]).to(value["device"])
        if "kind" in value:
            return class_by_name[value.pop("kind")](**value)
        return {
            int(name) if name.isdigit() else name: item for name, item in value.items()
        }

    with (
        suppress(OSError, SafetensorError, KeyError, TypeError, ValueError),
        safe_open(path, framework="pt") as file,
    ):
        return json.loads(file.metadata()["form"], object_hook=restored)
    return None
