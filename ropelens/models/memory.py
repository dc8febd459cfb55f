"""What a pass takes of memory: told before it runs, and explained where it did not fit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from transformers import PreTrainedConfig

from ropelens.errors import BadArgument, words_of
from ropelens.models.device import free_bytes


@contextmanager
def explain_full_memory(what: str, *, seen: str, attempt: str) -> Iterator[None]:
    """Turn torch's errors over full memory in the block into one that says what helps.

    Raises:
        BadArgument: `what` does not fit.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        known = isinstance(error, (MemoryError, torch.OutOfMemoryError))
        if not known and "can't allocate memory" not in str(error):
            raise
        raise BadArgument(
            f"{what} does not fit into memory.",
            seen=f"{seen}; {words_of(error)}",
            attempt=attempt,
        ) from error


FIXED = {"cpu": 150_000_000, "cuda": 2_500_000_000}
"""Bytes that measuring takes whatever the batch: blocks of scores, and what lies between."""

LIBRARIES = 600_000_000
"""Bytes of main memory that a process takes with Python, torch and transformers in it."""


def room_for_weights(devices: list[torch.device]) -> dict[int | str, int]:
    """Bytes of weights that each device may take, so that room to measure is left."""
    kept = {"cuda": 2 * FIXED["cuda"], "cpu": LIBRARIES + 2 * FIXED["cpu"]}
    room: dict[int | str, int] = {}
    for device in [*devices, torch.device("cpu")]:
        place = "cpu" if device.type == "cpu" else int(device.index)
        room[place] = max(0, free_bytes(device) - kept[device.type])
    return room


def pass_bytes(
    config: PreTrainedConfig,
    *,
    sequences: int,
    context: int,
    logits: int,
    width: int,
    device: str,
    scores: bool = False,
) -> int:
    """About how many bytes a pass over some sequences takes, beside the weights, at its peak.

    `width` is the bytes of a number of the model's, `logits` how many of the logits are held
    at once (0 for a pass that is stopped before them), `device` "cpu" or "cuda"; `scores` says
    that the model holds every score of a layer, as eager attention does. Held against what
    `rl.profile` took (Llamas of width 512 on a CPU): 1.0 to 1.4 times as much from 250 MB on.
    """
    hidden, heads = (
        stated_number(config, "hidden_size", 1),
        stated_number(config, "num_attention_heads", 1),
    )
    head_dim = stated_number(config, "head_dim", hidden // heads)
    kv_heads = stated_number(config, "num_key_value_heads", heads)
    inner = stated_number(config, "intermediate_size", 4 * hidden)
    queries, keys = heads * head_dim, kv_heads * head_dim
    own = (2 * queries + 3 * keys) * width  # queries, keys, values, the output
    beside = (3 * queries + 5 * keys) * 4  # with rotation, without it, and their running sums
    a_token = 4 * hidden * width + max(3 * inner * width, own + beside)
    by_offset = 48 * stated_number(config, "num_hidden_layers", 1) * heads * context
    total = FIXED[device] + sequences * context * a_token + by_offset + logits * width
    if scores:
        total += sequences * heads * context**2 * (width + 4)
    if stated_number(config, "sliding_window", 0):
        total += context**2  # a mask
    return total


def stated_number(config: PreTrainedConfig, name: str, otherwise: int) -> int:
    """What the config states; for an estimate alone, so that a family may not state it."""
    config = config.get_text_config()
    stated = config.attribute_map.get(name, name)  # some families have names of their own
    value = config.to_dict().get(stated)  # layers may differ in it
    return value if isinstance(value, int) else otherwise
