"""The processes that torchrun or accelerate started, and how they share a measurement.

All run the same code; each runs the model on its own part and gets the whole result.
"""

from __future__ import annotations

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
    """The processes that work together: one, or as many as torchrun or accelerate started."""
    state = PartialState(cpu=not torch.cuda.is_available())
    if state.use_distributed:  # its threads may abort a process that ends with its group
        atexit.register(state.destroy_process_group)
    return state


@contextmanager
def shared() -> Iterator[None]:
    """Share measurements in the block among the processes, all of which run the block."""
    state = processes()
    token = _place.set((state.process_index, state.num_processes))
    try:
        yield
    finally:
        _place.reset(token)


def place() -> tuple[int, int]:
    """The number of this process and the number of processes that share: 0, 1 alone."""
    return _place.get()


def shard(count: int) -> range:
    """The part of `range(count)` that this process measures."""
    number, among = place()
    return range(count * number // among, count * (number + 1) // among)


def gather(part: Part) -> list[Part]:
    """The `part` of every process that shares the measurement, in their order.

    Raises `RopelensError` where one of them has ended.
    """
    if place()[1] == 1:
        return [part]
    with explained(
        "One of the processes that measure together has ended.",
        "the same command, which goes on from what is saved",
        error=RopelensError,
    ):
        # Pickled between the processes of one command; no file and no user's data is unpickled.
        return list(gather_object([part]))
