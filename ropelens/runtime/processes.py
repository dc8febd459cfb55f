"""Processes of torchrun or accelerate: each measures a part, and gets the whole result."""

import atexit
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from ropelens.errors import RopelensError, explained

Part = TypeVar("Part")

_place: ContextVar[tuple[int, int]] = ContextVar("ropelens_place", default=(0, 1))


@cache
def processes() -> PartialState:
    """The processes that torchrun or accelerate started, or one process."""
    state = PartialState(cpu=not torch.cuda.is_available())
    if (
        state.use_distributed
    ):  # else threads of the group may abort the process at its end
        atexit.register(state.destroy_process_group)
    return state


@contextmanager
def shared() -> Iterator[None]:
    """Share the measurements in the block among the processes. All processes run the block."""
    state = processes()
    token = _place.set((state.process_index, state.num_processes))
    try:
        yield
    finally:
        _place.reset(token)


place = _place.get
"""Return the index of this process, and the number of processes that share a measurement."""


def shard(count: int) -> range:
    """The part of `range(count)` that this process measures."""
    number, among = place()
    return range(count * number // among, count * (number + 1) // among)


def gather(part: Part) -> list[Part]:
    """Collect the `part` of each process in order; raise `RopelensError` if one has ended."""
    if place()[1] == 1:
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
