"""The devices that a model may run on, and those that it does run on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from accelerate.hooks import AlignDevicesHook, SequentialHook
from torch import nn

from ropelens.errors import BadArgument, words_of
from ropelens.models.loading import DeviceMap


def device_named(name: str) -> torch.device:
    """The device of this name, tried; "auto" is CUDA where there is one.

    Raises `BadArgument` for a device that does not exist or does not work here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):  # the others have no float64 for the sums
            raise ValueError(f"{device.type} devices are not supported")
        torch.zeros(1, device=device).item()
    except (RuntimeError, TypeError, ValueError, AssertionError) as error:
        raise BadArgument(
            f"There is no device {name!r} that works here.",
            seen=words_of(error, kind=True),
            attempt="auto, cpu, cuda, or cuda:1 and the like",
        ) from error
    return device


def devices_in(device_map: DeviceMap) -> list[torch.device]:
    """The devices that compute under a device map: the GPUs, or the CPU where there is none.

    Raises `BadArgument` for a string that is not "auto", and for places that do not exist.
    """
    if device_map == "auto":
        gpus = range(torch.cuda.device_count())
        return [torch.device("cuda", gpu) for gpu in gpus] or [torch.device("cpu")]
    if not isinstance(device_map, Mapping) or not device_map:
        raise BadArgument(
            f"There is no device map {device_map!r}.",
            attempt='"auto", or a place ("cuda:0", "cpu", "disk") for each part of the model',
        )
    names = [f"cuda:{at}" if isinstance(at, int) else at for at in device_map.values()]
    named = [device_named(name) for name in dict.fromkeys(names) if name != "disk"]
    devices = named or [torch.device("cpu")]
    return [device for device in devices if device.type == "cuda"] or devices


def device_of(model: nn.Module) -> torch.device:
    """The device on which the model takes its tokens; "meta" where it has no weights."""
    embeddings = model.get_input_embeddings()  # type: ignore[operator]
    return _computes_on(embeddings) or embeddings.weight.device  # which may lie in a wrapper


def devices_of(model: nn.Module) -> list[torch.device]:
    """Every device on which a part of the model computes, that of its tokens first."""
    devices = [device_of(model), *map(_computes_on, model.modules())]
    return list(dict.fromkeys(device for device in devices if device is not None))


def _computes_on(module: nn.Module) -> torch.device | None:
    """The device of a module's weights; where accelerate offloads them, that which computes."""
    attached = vars(module).get("_hf_hook")
    for hook in attached.hooks if isinstance(attached, SequentialHook) else [attached]:
        if isinstance(hook, AlignDevicesHook) and hook.offload:
            return torch.device(hook.execution_device)
    return next((weight.device for weight in module.parameters(recurse=False)), None)
