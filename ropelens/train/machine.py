"""What a run trains on: processes that share it, and the precision that is fast there."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Literal

from accelerate.utils import broadcast_object_list

from ropelens.errors import BadArgument
from ropelens.models.device import WORTH_IT, bf16_speed
from ropelens.models.processes import processes

Precision = Literal["auto", "bf16", "fp32"]


def check_compiler() -> None:
    """See that `torch.compile` has what it needs.

    Raises:
        BadArgument: there is no C++ compiler.
    """
    compiler = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    if shutil.which(compiler) is None:
        raise BadArgument(
            f"compile needs a C++ compiler, and there is no {compiler}.",
            attempt="compile = false, one that is installed, or its name in CXX",
        )


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
        speed = bf16_speed(processes().device)
        kept = "bf16" if speed >= WORTH_IT else "fp32"
        say(f"precision {kept}: here bf16 is {speed:.2g} times as fast as fp32")
    return broadcast_object_list([kept])[0]
