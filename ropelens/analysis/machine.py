"""Where an analysis ran, and what it took."""

from __future__ import annotations

import platform
import re
import resource
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from ropelens.measure.profile import versions
from ropelens.models.device import device_of


def machine(model: PreTrainedModel) -> dict[str, Any]:
    """Where it ran, and the most memory that was in use at a time, in bytes."""
    device = device_of(model)
    facts = {
        "versions": versions(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "peak_memory_bytes": _peak_memory(),
    }
    if device.type == "cuda":
        facts["peak_cuda_memory_bytes"] = torch.cuda.max_memory_allocated(device)
    return facts


def _peak_memory() -> int:
    """Bytes that this process held at most."""
    # On Linux getrusage also counts what the process that started this one held by then.
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    if found:
        return 1024 * int(found[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024)
