"""Rounding noise of a model, measured on short sequences."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel

from ropelens.attention.call import AttentionCall, attention_map, output_error
from ropelens.model.attention_hooks import attention_modules
from ropelens.model.hook_blocks import Observer
from ropelens.noise import run_noise
from ropelens.runtime.devices import device_of
from ropelens.text.rows import Ids

EMBEDDING_CHANGE = 2.0**-14  # relative change after which every call rounds otherwise
CHANGED_WEIGHT = 1 / 8  # of the run with this change, in which all roundings differ


@dataclass(frozen=True)
class Noise:
    """Relative noise of a model, and the number of query heads of each layer."""

    run: float  # noise of logits
    call: dict[int, float]  # noise of the attention call of each layer
    heads: dict[int, int]


def changed_embeddings(
    model: PreTrainedModel, share: Float[Tensor, " sequence"]
) -> Any:
    """Change the embeddings of each sequence by a random relative `share` in the block."""

    def change(module: Any, args: Any, x: Tensor) -> Tensor:
        if len(share) not in (1, len(x)):
            return x
        random = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(x)
        return x * (1 + share.view(-1, *[1] * (x.ndim - 1)).to(x) * random)

    return model.get_input_embeddings().register_forward_hook(change)


_measured: WeakKeyDictionary[PreTrainedModel, dict[object, Noise]] = WeakKeyDictionary()


@torch.no_grad()
def measure_noise(
    model: PreTrainedModel, run: Callable[[Ids, Observer], Tensor], ids: Ids
) -> Noise:
    """Rounding noise, measured once for a model, its dtype, its device and its precision."""
    device = device_of(model)
    autocast = torch.is_autocast_enabled(device.type)
    heads_now = tuple(  # heads and layers may be pruned later
        (
            vars(module).get("layer_idx"),
            *(weight.shape for weight in module.parameters()),
        )
        for module in attention_modules(model)[1:]
    )
    key = (
        model.dtype,
        device,
        autocast,
        torch.get_float32_matmul_precision(),
        heads_now,
    )
    by_key = _measured.setdefault(model, {})
    if key in by_key:
        return by_key[key]
    errors, heads = list[dict[int, Tensor]](), dict[int, int]()
    share = max(torch.finfo(model.dtype).eps / 2, EMBEDDING_CHANGE)

    def record(call: AttentionCall) -> None:
        call = call.of_rows(
            torch.arange(1, call.query.shape[2])
        )  # other blocks of rows
        error = output_error(call, attention_map(call).nan_to_num(0))
        heads[call.layer] = call.query.shape[1]
        errors[-1][call.layer] = error[-1] * math.sqrt(len(error))

    def observed(ids: Ids) -> Tensor:
        errors.append({})
        return run(ids, record)

    noise = run_noise(observed, ids)
    with changed_embeddings(model, torch.tensor([share])):
        observed(ids[-1:])
    calls = {}
    for layer, error in errors[0].items():
        changes = [(other[layer] - error).nan_to_num(0).norm() for other in errors[1:]]
        calls[layer] = float(max(*changes[:-1], CHANGED_WEIGHT * changes[-1]))
    return by_key.setdefault(key, Noise(noise, calls, heads))
