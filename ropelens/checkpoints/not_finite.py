"""Numbers that are not finite: the first module that computes them, and a remedy."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

OTHER_DTYPE = 'dtype="bfloat16" or dtype="float32"'


def remedy(dtype: torch.dtype, other: str) -> str:
    """Another dtype for a model in float16, and the `other` remedy."""
    return f"{OTHER_DTYPE}; or {other}" if dtype == torch.float16 else other


def in_dtype(dtype: torch.dtype) -> str:
    """Words for the dtype in which numbers are not finite."""
    name = str(dtype).removeprefix("torch.")
    if dtype != torch.float16:
        return f"in {name}"
    largest = torch.finfo(dtype).max
    return f"in {name}, whose largest number is {largest:,.0f}"


@torch.no_grad()
def first_not_finite(model: nn.Module, run: Callable[[], object]) -> str:
    """The first module whose output is not finite while the model runs; "" if there is none."""
    found: list[str] = []

    def look(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        for tensor in _tensors(output):
            if not found and not tensor.isfinite().all():
                found.append(_described(name, module, tensor.dtype))

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            handle = module.register_forward_hook(partial(look, name))
            hooks.callback(handle.remove)
        run()
    return found[0] if found else ""


def _tensors(output: Any) -> Iterator[Tensor]:
    """The numbers of an output that is a tensor, or has tensors as its parts."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from _tensors(part)


def _described(name: str, module: nn.Module, dtype: torch.dtype) -> str:
    layer = re.search(r"\.(\d+)(\.|$)", name)
    place = name or type(module).__name__
    words = f"layer {layer[1]} ({place})" if layer else place
    words += f" {in_dtype(dtype)}"
    for parameter, weight in module.named_parameters(recurse=False):
        if not weight.isfinite().all():
            return f"{words} (its {parameter} is not finite)"
    return words
