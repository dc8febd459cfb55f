"""The devices that a model may run on, and the memory that they have left."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch.utils.benchmark import Timer

from ropelens.errors import BadArgument, words_of

DeviceMap = str | Mapping[str, int | str]
"""Where the parts of a model go: "auto", or the place of each part by its name."""

WORTH_IT = 1.5
"""Times as fast as float32, which bfloat16 has to be to be chosen."""


def device_named(name: str) -> torch.device:
    """The device of this name, "auto" for CUDA where there is one; tried, not looked up.

    Raises `BadArgument` for one that does not exist or does not work here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    unknown = BadArgument(
        f"There is no device {name!r}.", attempt="auto, cpu, cuda, or cuda:1 and the like"
    )
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError, ValueError) as error:
        raise unknown from error
    if device.type not in ("cpu", "cuda"):  # sums are in float64, which others lack
        raise unknown
    if device.type == "cuda" and not torch.cuda.is_available():
        raise BadArgument(
            f"The device {name!r} needs CUDA, which is not available.",
            seen=f"torch {torch.__version__}",
            attempt="device cpu, or a torch built for CUDA on a machine with a GPU",
        )
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BadArgument(
            f"The device {name!r} does not work here.",
            seen=words_of(error, kind=True),
            attempt="device cpu",
        ) from error
    return device


def devices_in(device_map: DeviceMap) -> list[torch.device]:
    """The devices that parts of a model compute on: beside a GPU none of them on the CPU.

    Raises `BadArgument` for a map that is neither "auto" nor names a place for each part.
    """
    if device_map == "auto":
        gpus = range(torch.cuda.device_count())
        return [torch.device("cuda", gpu) for gpu in gpus] or [torch.device("cpu")]
    if not isinstance(device_map, Mapping) or not device_map:
        raise BadArgument(
            f"There is no device map {device_map!r}.",
            attempt='"auto", or a place ("cuda:0", "cpu", "disk") for each part of the model',
        )
    names = [f"cuda:{at}" if isinstance(at, int) else str(at) for at in device_map.values()]
    computing = [name for name in names if name != "disk"] or ["cpu"]
    found = list(dict.fromkeys(map(device_named, computing)))
    return [device for device in found if device.type == "cuda"] or found


def free_bytes(device: torch.device) -> int:
    """Bytes of memory that the device has left, for this process and others."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return min([psutil.virtual_memory().available, *_left_to_groups()])


GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
"""Where Linux tells of control groups: containers and batch jobs are such."""

FILE_PAGES = ("inactive_file", "active_file", "slab_reclaimable")
"""What a group gives back where memory is asked for, as memory.stat names it."""


def _left_to_groups() -> Iterator[int]:
    """Bytes that each group which this process is in has left, where it has a limit."""
    try:
        lines = OWN_GROUPS.read_text().splitlines()
    except OSError:
        return
    for _, kinds, name in (line.split(":", 2) for line in lines if line.count(":") > 1):
        if kinds == "":  # version 2
            place, files = GROUPS, ("memory.max", "memory.current")
        elif "memory" in kinds.split(","):
            place = GROUPS / "memory"
            files = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        group = place / name.lstrip("/")
        for folder in (group, *group.parents[: len(group.parts) - len(place.parts)]):
            with suppress(OSError, ValueError):  # "max": no limit
                limit, used = (int((folder / file).read_text()) for file in files)
                stat = (folder / "memory.stat").read_text().splitlines()
                facts = dict(line.removeprefix("total_").split() for line in stat)
                yield max(0, limit - used + sum(int(facts.get(name, 0)) for name in FILE_PAGES))


def bf16_speed(device: torch.device) -> float:
    """How many times as fast as in float32 matrices (512 x 512) are multiplied in bfloat16.

    A machine without instructions for bfloat16 takes several times as long in it.
    """
    seconds = []
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(512, 512, dtype=dtype, device=device)
        timer = Timer("x @ x", globals={"x": x}, num_threads=torch.get_num_threads())
        seconds.append(timer.blocked_autorange(min_run_time=0.1).median)
    return seconds[0] / seconds[1]
