"""The processes that torchrun or accelerate started, and how they share a measurement.

All of them run the same code; each runs the model on its own part, and gets the whole result.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from ropelens.errors import RopelensError

Part = TypeVar("Part")

_shared: ContextVar[bool] = ContextVar("ropelens_shared", default=False)


class ProcessLost(RopelensError):
    """One of the processes that share a measurement is gone."""


def processes() -> PartialState:
    """The processes that work together: one, or as many as torchrun or accelerate started."""
    state = PartialState(cpu=not torch.cuda.is_available())
    if state.use_distributed:
        _close_at_exit()
    return state


@functools.cache
def _close_at_exit() -> None:
    """The threads of an open process group now and then abort a process that ends."""
    atexit.register(PartialState().destroy_process_group)


@contextmanager
def shared() -> Iterator[None]:
    """What is measured in the block is shared among the processes, which all run the block."""
    token = _shared.set(processes().num_processes > 1)
    try:
        yield
    finally:
        _shared.reset(token)


def place() -> tuple[int, int]:
    """The number of this process, and how many share the measurement: 0 of 1 alone."""
    if not _shared.get():
        return 0, 1
    return processes().process_index, processes().num_processes


def shard(count: int) -> range:
    """Which of `count` things are this process's: neighbours, in the order of processes."""
    number, among = place()
    return range(count * number // among, count * (number + 1) // among)


def gather(own: Part) -> list[Part]:
    """`own` of every process that shares the measurement, in their order.

    Raises `ProcessLost` where one of them has ended.
    """
    if not _shared.get():
        return [own]
    try:
        # Pickled on its way, between processes of one command: nothing else is read here.
        return list(gather_object([own]))
    except RuntimeError as error:
        raise ProcessLost(
            "One of the processes that measure together has ended.",
            means="the others end too; what was kept until then is kept",
            attempt="the same command, which goes on from there",
        ) from error
