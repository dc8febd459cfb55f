"""Processes of torchrun or accelerate: each measures a part, and gets the whole result."""

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from ropelens.errors import RopelensError, explained

Part = TypeVar("Part")


@dataclass(frozen=True)
class Sharing:
    """The index of this process, and the number of processes that share a measurement."""

    index: int
    count: int


ALONE = Sharing(index=0, count=1)
_sharing = ContextVar("ropelens_sharing", default=ALONE)


@cache
def processes() -> PartialState:
    """The processes that torchrun or accelerate started, or one process."""
    state = PartialState(cpu=not torch.cuda.is_available())
    if state.use_distributed:
        # Otherwise threads of the group may abort the process at its end.
        atexit.register(state.destroy_process_group)
    return state


@contextmanager
def shared() -> Iterator[None]:
    """Share the measurements in the block among the processes. All processes run the block."""
    state = processes()
    token = _sharing.set(Sharing(index=state.process_index, count=state.num_processes))
    try:
        yield
    finally:
        _sharing.reset(token)


def process_index() -> int:
    """The index of this process among those that share a measurement."""
    return _sharing.get().index


def process_count() -> int:
    """The number of processes that share a measurement."""
    return _sharing.get().count


def shard(count: int) -> range:
    """The part of `range(count)` that this process measures."""
    sharing = _sharing.get()
    begin = count * sharing.index // sharing.count
    end = count * (sharing.index + 1) // sharing.count
    return range(begin, end)


def gather(part: Part) -> list[Part]:
    """Collect the `part` of each process in order; raise `RopelensError` if one has ended."""
    if process_count() == 1:
        return [part]
    with explained(
        "One of the processes that measure together has ended.",
        "the same command again; it continues from the saved progress",
        error=RopelensError,
    ):
        # Only the processes of one command exchange pickles. No file is unpickled.
        return list(gather_object([part]))


def all_agree(here: bool) -> bool:
    """Whether `here` is true in all processes that share a measurement."""
    return all(gather(here))
