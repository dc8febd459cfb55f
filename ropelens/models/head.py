"""A model run piece by piece: its layers once, its own head on some positions at a time."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ropelens.models.wrappers import uncompiled


@contextmanager
def as_measured(model: nn.Module) -> Iterator[None]:
    """The model without dropout, which is no part of what a head does, and uncompiled."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        with uncompiled(model):
            yield
    finally:
        for module in training:
            module.training = True


def head_by_itself(model: PreTrainedModel) -> bool:
    """Whether the model can be asked for the logits of some positions alone."""
    return (
        "logits_to_keep" in inspect.signature(model.forward).parameters
        and model.base_model is not model
    )


@contextmanager
def once(module: nn.Module, found: list[Any]) -> Iterator[None]:
    """While the block runs `module` gives what it `found` before, if it did."""
    own = module.forward

    def first(*args: Any, **kwargs: Any) -> Any:
        if not found:
            found.append(own(*args, **kwargs))
        return found[0]

    before = vars(module).get("forward")
    module.forward = first
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
