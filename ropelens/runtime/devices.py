"""Devices on which a model runs, their free memory, and the memory that a pass needs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from torch import nn
from transformers import PreTrainedConfig

from ropelens.config_facts import stated_number
from ropelens.errors import BadArgument, explained, words_of

# Bytes that a measurement takes for any batch size, mainly for blocks of scores
FIXED_BYTES = {"cpu": 150_000_000, "cuda": 2_500_000_000}
LOGITS_AT_ONCE = {
    "cpu": 2**24,
    "cuda": 2**28,
}  # if the model can compute logits in parts
LIBRARIES = 600_000_000  # bytes of main memory that torch and transformers take


def device_named(name: str, *, used: bool = True) -> torch.device:
    """The device called `name`, CUDA or CPU for "auto"; `BadArgument` if `used` and absent."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    what = f"The device {name!r} does not exist or does not work."
    with explained(
        what, "auto, cpu, cuda, or a number as in cuda:1", error=BadArgument
    ):
        device = torch.device(name)
        if used or device.type != "cuda" or torch.cuda.is_available():
            torch.zeros(
                1, dtype=torch.float64, device=device
            ).item()  # sums need float64
    return device


def device_of(model: nn.Module) -> torch.device:
    """The device on which the model takes its tokens; "meta" if it has no weights."""
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    return (
        computes_on(embeddings) or embeddings.weight.device
    )  # also of a wrapped module


def devices_of(model: nn.Module) -> list[torch.device]:
    """All devices on which the model computes. The device of its tokens is the first."""
    devices = [device_of(model), *map(computes_on, model.modules())]
    return list(dict.fromkeys(device for device in devices if device is not None))


def computes_on(module: nn.Module) -> torch.device | None:
    """Device of a module's weights, or the device to which accelerate moves them."""
    attached = vars(module).get("_hf_hook")
    for hook in attached.hooks if isinstance(attached, SequentialHook) else [attached]:
        if isinstance(hook, AlignDevicesHook) and hook.offload:
            return torch.device(hook.execution_device)
    return next((weight.device for weight in module.parameters(recurse=False)), None)


@contextmanager
def explain_full_memory(what: str, *, seen: str, hint: str) -> Iterator[None]:
    """Raise `BadArgument` if memory runs out: "`what` does not fit into memory."."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not known and "can't allocate memory" not in str(error):
            raise
        seen = f"{seen}; {words_of(error)}"
        raise BadArgument(
            f"{what} does not fit into memory.", seen=seen, hint=hint
        ) from error


def free_bytes(device: torch.device) -> int:
    """Free memory of a device in bytes; `sys.maxsize` for a GPU that this machine lacks."""
    if device.type == "cuda":
        return (
            torch.cuda.mem_get_info(device)[0]
            if torch.cuda.is_available()
            else sys.maxsize
        )
    return psutil.virtual_memory().available


def room_for_weights(devices: list[torch.device]) -> dict[int | str, int]:
    """Bytes of weights that each device may hold; the rest of its memory is for measuring."""
    reserved = {
        "cuda": 2 * FIXED_BYTES["cuda"],
        "cpu": LIBRARIES + 2 * FIXED_BYTES["cpu"],
    }
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
    """Estimated peak memory of a pass over some sequences, in bytes, without the weights.

    `width` is the size of one number in bytes. With `scores`, the model stores all scores of a
    layer and all logits at once, as eager attention does. The estimate is 1.0 to 1.4 times the
    memory that `rl.profile` took (Llamas with hidden size 512, on a CPU).
    """
    hidden = stated_number(config, "hidden_size", 1)
    heads = stated_number(config, "num_attention_heads", 1)
    head_dim = stated_number(config, "head_dim", hidden // heads)
    inner = stated_number(config, "intermediate_size", 4 * hidden)
    layers = stated_number(config, "num_hidden_layers", 1)
    query = heads * head_dim
    key = stated_number(config, "num_key_value_heads", heads) * head_dim
    attention = (2 * query + 3 * key) * width  # queries, keys, values, output
    measuring = (3 * query + 5 * key) * 4  # rotated, not rotated, running sums
    a_token = 4 * hidden * width + max(3 * inner * width, attention + measuring)
    by_offset = 48 * layers * heads * context
    total = FIXED_BYTES[device] + sequences * context * a_token + by_offset
    if logits:
        count = sequences * context * config.get_text_config().vocab_size
        total += width * (count if scores else min(count, LOGITS_AT_ONCE[device]))
    if scores:
        total += sequences * heads * context**2 * (width + 4)
    if stated_number(config, "sliding_window", 0):
        total += context**2  # the mask
    return total
