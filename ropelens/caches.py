"""Results that an object keeps, and copies of tensors on other devices."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ropelens.arguments import Function


def kept(most: int = 1000) -> Callable[[Function], Function]:
    """Let the first argument of a function keep the results for the other arguments.

    Only the `most` latest are kept. Tensors, compared by identity, must not change in place.
    """

    def decorate(function: Function) -> Function:
        name = f"kept {function.__name__}"

        @wraps(function)
        def call(owner: Any, *key: Any) -> Any:
            results = vars(owner).setdefault(name, {})
            result = results.get(key)
            if result is not None:
                return result
            result = function(owner, *key)
            results[key] = result
            keys = list(results)  # a copy, because threads share owners
            for old in keys[:-most]:
                results.pop(old, None)
            return result

        return call  # type: ignore[return-value]

    return decorate


def on_device(x: Tensor, device: torch.device) -> Tensor:
    """`x` on the `device`. `x` keeps the copy, so that a table moves once for all layers."""
    if x.device == device:
        return x
    # Inference tensors do not count their changes.
    version = None if x.is_inference() else x._version
    return _copy(x, device, version)


@kept(most=1)
def _copy(x: Tensor, device: torch.device, _version: int | None) -> Tensor:
    return x.to(device)
