"""What a run trains on: processes that share it, and the precision that is fast there."""

from __future__ import annotations

import atexit
import functools
import sys
from typing import Literal

import torch
from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from torch.utils.benchmark import Timer

Precision = Literal["auto", "bf16", "fp32"]
WORTH_IT = 1.5  # times as fast as float32, which bfloat16 has to be to be chosen


def processes() -> PartialState:
    """The processes that train together: one, or as many as torchrun or accelerate started."""
    state = PartialState(cpu=not torch.cuda.is_available())
    if state.use_distributed:
        _close_at_exit()
    return state


@functools.cache
def _close_at_exit() -> None:
    """The threads of an open process group now and then abort a process that ends."""
    atexit.register(PartialState().destroy_process_group)


def say(line: str) -> None:
    """One plain line on stderr, at once, by one of the processes that train together."""
    if processes().is_main_process:
        print(line, file=sys.stderr, flush=True)


def chosen_precision(wanted: Precision, *, kept: Precision | None) -> Precision:
    """`wanted`, or for "auto" the precision `kept` of what goes on, or else the faster one.

    The same in all processes. A machine without instructions for bfloat16 takes several times
    as long in it; with them it is several times as fast.
    """
    if wanted != "auto":
        return wanted
    if kept is None and processes().is_main_process:
        speed = bf16_speed()
        kept = "bf16" if speed >= WORTH_IT else "fp32"
        say(f"precision {kept}: here bf16 is {speed:.2g} times as fast as fp32")
    return broadcast_object_list([kept])[0]


def bf16_speed() -> float:
    """How many times as fast as in float32 matrices (512 x 512) are multiplied in bfloat16."""
    seconds = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(512, 512, dtype=dtype, device=processes().device)
        timer = Timer("x @ x", globals={"x": x}, num_threads=torch.get_num_threads())
        seconds.append(timer.blocked_autorange(min_run_time=0.1).median)
    return seconds[0] / seconds[1]
