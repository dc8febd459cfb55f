"""Where the parts of a model compute, and their weights while accelerate keeps them elsewhere.

A model that is spread over devices, or larger than they are, is dispatched by accelerate: a
hook on each module brings its weights and inputs to where it computes, and while it does not
run its weights may be "meta" tensors, without numbers.
"""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from accelerate.utils import align_module_device
from torch import nn


def device_of(model: nn.Module) -> torch.device:
    """The device on which the model takes its tokens; "meta" where it has no weights."""
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    return _computes_on(embeddings) or embeddings.weight.device  # which may lie in a wrapper


def devices_of(model: nn.Module) -> list[torch.device]:
    """Every device on which a part of the model computes, that of its tokens first."""
    found = [device_of(model), *map(_computes_on, model.modules())]
    return list(dict.fromkeys(device for device in found if device is not None))


def with_weights(module: nn.Module) -> AbstractContextManager[None]:
    """The weights of the module itself, not of those in it, are there while the block runs."""
    return align_module_device(module)


def _computes_on(module: nn.Module) -> torch.device | None:
    """Where a module computes; None for one that has no weights of its own."""
    hook = vars(module).get("_hf_hook")
    hooks = hook.hooks if isinstance(hook, SequentialHook) else [hook]
    for hook in hooks:
        if isinstance(hook, AlignDevicesHook) and hook.offload:
            return torch.device(hook.execution_device)
    return next((weight.device for weight in module.parameters(recurse=False)), None)
