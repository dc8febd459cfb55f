"""The transformers model inside what people put around one: peft, compile, data parallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ropelens.errors import UnsupportedModel

HOLDS = {
    "OptimizedModule": "_orig_mod",  # torch.compile(model)
    "DataParallel": "module",
    "DistributedDataParallel": "module",
}
"""The attribute of each wrapper, by the name of its class, that holds the same model."""


def unwrapped(model: nn.Module) -> nn.Module:
    """The model that `model` is wrapped around, however deep; itself where nothing is.

    A `PeftModel` gives its base model, in which the adapters stand that are active, a compiled
    model the one that it was compiled from, `DataParallel` and its kin the one they share
    out. All of them have the same weights and outputs. Raises `UnsupportedModel` for wrappers
    that add to what the model inside computes, or of which it holds a part only.
    """
    while True:
        kind = type(model).__name__
        if kind in HOLDS:
            model = getattr(model, HOLDS[kind])
        elif kind == "FullyShardedDataParallel":
            raise UnsupportedModel(
                "FullyShardedDataParallel has a part of the model on each process.",
                attempt="the whole model, loaded in one process",
            )
        elif hasattr(model, "get_base_model") and hasattr(model, "peft_config"):
            model = _without_peft(model)
        else:
            return model


def _without_peft(model: nn.Module) -> nn.Module:
    """The model in which the adapters of a `PeftModel` stand."""
    prompts = [
        str(config.peft_type)
        for config in model.peft_config.values()  # type: ignore[operator]
        if config.is_prompt_learning
    ]
    if prompts:
        raise UnsupportedModel(
            f"{type(model).__name__} puts trained tokens before those that it is given.",
            seen=f"peft type {prompts[0]}",
            means="its base model alone would not compute what it computes",
            attempt="model.get_base_model(), for the model without them",
        )
    return model.get_base_model()  # type: ignore[operator]


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """`model`, and its modules, run as they are written while the block runs.

    What `model.compile()` made would keep the observers of the call that it was traced in.
    """
    compiled = {
        module: module._compiled_call_impl
        for module in model.modules()
        if module._compiled_call_impl is not None
    }
    try:
        for module in compiled:
            module._compiled_call_impl = None
        yield
    finally:
        for module, call in compiled.items():
            module._compiled_call_impl = call
