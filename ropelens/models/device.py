"""Where a model runs, and in which numbers: names become a device and a dtype, or an error."""

from __future__ import annotations

import psutil
import torch

from ropelens.errors import BadArgument, words_of

DTYPES = ("float32", "float16", "bfloat16", "float64", "auto")


def check_dtype(name: str) -> None:
    """Raise `BadArgument` for a dtype that models are not loaded in."""
    if name not in DTYPES:
        raise BadArgument(f"There is no dtype {name!r}.", attempt=f"one of {', '.join(DTYPES)}")


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
    except RuntimeError as error:
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


def free_bytes(device: torch.device) -> int:
    """Bytes of memory that the device has left, for this process and others."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available
