"""Devices on which a model runs, their free memory, and the memory that a pass needs."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from torch import nn
from transformers import PreTrainedConfig

from ropelens.config_facts import stated_number
from ropelens.errors import BadArgument, explained, words_of

# Bytes that a measurement takes for any batch size, mainly for blocks of scores
FIXED_BYTES = {"cpu": 150_000_000, "cuda": 2_500_000_000}
# Logits that a model computes at once if it can compute them in parts
LOGITS_AT_ONCE = {"cpu": 2**24, "cuda": 2**28}
LIBRARIES = 580_000_000  # bytes of main memory that torch and transformers take


def device_named(name: str, *, used: bool = True) -> torch.device:
    """The device called `name`, CUDA or CPU for "auto"; `BadArgument` if `used` and absent."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    what = f"The device {name!r} does not exist or does not work."
    hint = "auto, cpu, cuda, or a number as in cuda:1"
    with explained(what, hint, error=BadArgument):
        device = torch.device(name)
        if used or device.type != "cuda" or torch.cuda.is_available():
            zero = torch.zeros(1, dtype=torch.float64, device=device)  # as sums need
            zero.item()
    return device


def device_of(model: nn.Module) -> torch.device:
    """The device on which the model takes its tokens; "meta" if it has no weights."""
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    device = computes_on(embeddings)
    if device is None:  # a wrapped module
        device = embeddings.weight.device
    return device


def devices_of(model: nn.Module) -> list[torch.device]:
    """All devices on which the model computes. The device of its tokens is the first."""
    devices = [device_of(model), *map(computes_on, model.modules())]
    return list(dict.fromkeys(device for device in devices if device is not None))


def computes_on(module: nn.Module) -> torch.device | None:
    """Device of a module's weights, or the device to which accelerate moves them."""
    attached = vars(module).get("_hf_hook")
    hooks = [attached]
    if isinstance(attached, SequentialHook):
        hooks = list(attached.hooks)
    for hook in hooks:
        if isinstance(hook, AlignDevicesHook) and hook.offload:
            return torch.device(hook.execution_device)
    for weight in module.parameters(recurse=False):
        return weight.device
    return None


@contextmanager
def explain_full_memory(what: str, *, seen: str, hint: str) -> Iterator[None]:
    """Raise `BadArgument` if memory runs out: "`what` does not fit into memory."."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not is_known and "can't allocate memory" not in str(error):
            raise
        raise BadArgument(
            f"{what} does not fit into memory.",
            seen=f"{seen}; {words_of(error)}",
            hint=hint,
        ) from error


def free_bytes(device: torch.device) -> int:
    """Free memory of a device in bytes; `sys.maxsize` for a GPU that this machine lacks."""
    if device.type != "cuda":
        return psutil.virtual_memory().available
    if not torch.cuda.is_available():
        return sys.maxsize
    free, _ = torch.cuda.mem_get_info(device)
    return free


def room_for_weights(devices: list[torch.device]) -> dict[int | str, int]:
    """Bytes of weights that each device may hold; the rest of its memory is for measuring."""
    reserved = {
        "cuda": 2 * FIXED_BYTES["cuda"],
        "cpu": LIBRARIES + 2 * FIXED_BYTES["cpu"],
    }
    room: dict[int | str, int] = {}
    for device in [*devices, torch.device("cpu")]:
        name = "cpu" if device.type == "cpu" else int(device.index)
        room[name] = max(0, free_bytes(device) - reserved[device.type])
    return room


@dataclass(frozen=True, kw_only=True)
class LayerWidths:
    """Numbers of a layer for each token, in queries, keys and the feed-forward part."""

    hidden: int
    query: int
    key: int
    inner: int

    @classmethod
    def of(cls, config: PreTrainedConfig) -> "LayerWidths":
        """The widths that a configuration states, or else usual widths."""
        hidden = stated_number(config, "hidden_size", 1)
        heads = stated_number(config, "num_attention_heads", 1)
        head_dim = stated_number(config, "head_dim", hidden // heads)
        return cls(
            hidden=hidden,
            query=heads * head_dim,
            key=stated_number(config, "num_key_value_heads", heads) * head_dim,
            inner=stated_number(config, "intermediate_size", 4 * hidden),
        )

    def token_bytes(self, width: int) -> int:
        """Memory for a token in one layer, if a number of the model has `width` bytes."""
        attention = (2 * self.query + 3 * self.key) * width  # and values, output
        measuring = (3 * self.query + 5 * self.key) * 4  # rotated, not rotated, sums
        feed_forward = 3 * self.inner * width
        return 4 * self.hidden * width + max(feed_forward, attention + measuring)


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
    heads = stated_number(config, "num_attention_heads", 1)
    layers = stated_number(config, "num_hidden_layers", 1)
    tokens = sequences * context
    total = FIXED_BYTES[device] + tokens * LayerWidths.of(config).token_bytes(width)
    total += 48 * layers * heads * context  # sums by offset
    if logits:
        all_logits = tokens * config.get_text_config().vocab_size
        at_once = all_logits if scores else min(all_logits, LOGITS_AT_ONCE[device])
        total += width * at_once
    if scores:
        total += sequences * heads * context**2 * (width + 4)
    if stated_number(config, "sliding_window", 0):
        total += context**2  # the mask
    return total
