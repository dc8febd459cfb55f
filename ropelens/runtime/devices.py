"""The devices that a model runs on, their memory, and how much a pass takes of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from torch import nn
from transformers import PreTrainedConfig

from ropelens.config_facts import stated_number
from ropelens.errors import BadArgument, explained, words_of

FIXED = {"cpu": 150_000_000, "cuda": 2_500_000_000}
"""Bytes that measuring takes whatever the batch, for blocks of scores and the like."""

LOGITS_AT_ONCE = {"cpu": 2**24, "cuda": 2**28}
"""Logits in memory at a time, where a model can be asked for some of them."""

LIBRARIES = 600_000_000
"""Bytes of main memory that a process takes with Python, torch and transformers in it."""


def device_named(name: str) -> torch.device:
    """The device of this name, tried; "auto" is CUDA where there is one.

    Raises `BadArgument` for a device that does not exist or does not work here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    what = f"There is no device {name!r} that works here."
    with explained(what, "auto, cpu, cuda, or cuda:1 and the like", error=BadArgument):
        device = torch.device(name)
        torch.zeros(1, dtype=torch.float64, device=device).item()  # of which the sums are
    return device


def device_of(model: nn.Module) -> torch.device:
    """The device on which the model takes its tokens; "meta" where it has no weights."""
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    return computes_on(embeddings) or embeddings.weight.device  # which may lie in a wrapper


def devices_of(model: nn.Module) -> list[torch.device]:
    """Every device on which a part of the model computes, that of its tokens first."""
    devices = [device_of(model), *map(computes_on, model.modules())]
    return list(dict.fromkeys(device for device in devices if device is not None))


def computes_on(module: nn.Module) -> torch.device | None:
    """The device of a module's weights; where accelerate offloads them, that which computes."""
    attached = vars(module).get("_hf_hook")
    for hook in attached.hooks if isinstance(attached, SequentialHook) else [attached]:
        if isinstance(hook, AlignDevicesHook) and hook.offload:
            return torch.device(hook.execution_device)
    return next((weight.device for weight in module.parameters(recurse=False)), None)


# memory


@contextmanager
def explain_full_memory(what: str, *, seen: str, hint: str) -> Iterator[None]:
    """Raise `BadArgument` for torch's errors over full memory: `what` does not fit."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not known and "can't allocate memory" not in str(error):
            raise
        raise BadArgument(
            f"{what} does not fit into memory.",
            seen=f"{seen}; {words_of(error)}",
            hint=hint,
        ) from error


def free_bytes(device: torch.device) -> int:
    """Bytes of memory that the device has left, for this process and others."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return psutil.virtual_memory().available


def room_for_weights(devices: list[torch.device]) -> dict[int | str, int]:
    """Bytes of weights that each device may take, so that room to measure is left."""
    reserved = {"cuda": 2 * FIXED["cuda"], "cpu": LIBRARIES + 2 * FIXED["cpu"]}
    room: dict[int | str, int] = {}
    for device in [*devices, torch.device("cpu")]:
        place = "cpu" if device.type == "cpu" else int(device.index)
        room[place] = max(0, free_bytes(device) - reserved[device.type])
    return room


def pass_bytes(
    config: PreTrainedConfig,
    *,
    sequences: int,
    context: int,
    width: int,
    device: str,
    scores: bool = False,
    logits: bool = True,
) -> int:
    """About how many bytes a pass over some sequences takes at its peak, without the weights.

    `width` is the bytes of one number of the model, `device` "cpu" or "cuda". `scores`: the
    model stores every score of a layer, as eager attention does, and all `logits`, before which
    a pass may stop. It is 1.0 to 1.4 times what `rl.profile` took (Llamas of width 512, CPU).
    """
    hidden = stated_number(config, "hidden_size", 1)
    heads = stated_number(config, "num_attention_heads", 1)
    head_dim = stated_number(config, "head_dim", hidden // heads)
    inner = stated_number(config, "intermediate_size", 4 * hidden)
    layers = stated_number(config, "num_hidden_layers", 1)
    query = heads * head_dim
    key = stated_number(config, "num_key_value_heads", heads) * head_dim
    attention = (2 * query + 3 * key) * width  # queries, keys, values, the output
    measuring = (3 * query + 5 * key) * 4  # with rotation, without it, and their running sums
    a_token = 4 * hidden * width + max(3 * inner * width, attention + measuring)
    by_offset = 48 * layers * heads * context
    total = FIXED[device] + sequences * context * a_token + by_offset
    if logits:
        every = sequences * context * config.get_text_config().vocab_size
        total += width * (every if scores else min(every, LOGITS_AT_ONCE[device]))
    if scores:
        total += sequences * heads * context**2 * (width + 4)
    if stated_number(config, "sliding_window", 0):
        total += context**2  # a mask
    return total
