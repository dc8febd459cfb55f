"""Causes of other logits after an export: parts that a checkpoint does not carry."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ropelens.checkpoints.identity import module_properties
from ropelens.model.attention_hooks import attention_modules
from ropelens.model.live_model import LiveModel
from ropelens.model.user_hooks import package_of
from ropelens.noise import noise_tokens

PROBED = 16  # tokens of the sequence on which outputs of modules are compared
SHOWN = 3


def cause_of_difference(
    live: LiveModel, loaded: LiveModel, *, run: Callable[[Tensor], object], close: float
) -> str:
    """The difference between the edited model and the loaded checkpoint, in words.

    `run` runs the edited model on tokens. The cause is a class, an attribute or a hook of a
    module, or the first module whose output differs by more than `close` of its size.
    """
    found = [*_other_properties(live.model, loaded.model), *_hooks(live.model)]
    if found:
        more = ", ..." if len(found) > SHOWN else ""
        return f"the checkpoint does not carry {', '.join(found[:SHOWN])}{more}"
    tokens = noise_tokens(live.vocabulary, min(live.context, PROBED))[:1]
    expected = _outputs(live, run, tokens)
    outputs = _outputs(loaded, loaded.forward, tokens)
    for name, output in expected.items():
        other = outputs.get(name)
        if other is None:
            return f"the checkpoint does not call {name}"
        change = (output - other.to(output)).norm() / output.norm()
        if not change <= close:
            return f"the output of {name} is the first that differs"
    return "no output of a module differs on a short sequence"


def _other_properties(model: nn.Module, loaded: nn.Module) -> Iterator[str]:
    """Classes and attributes of modules that differ, except in modules that rotate."""
    others = dict(loaded.named_modules())
    for name, module in model.named_modules():
        if any("inv_freq" in buffer for buffer in module._buffers):
            continue
        other = others.get(name)
        if other is None:
            yield f"{name} ({type(module).__name__})"
            continue
        values = {item.name: item.value for item in module_properties(name, other)}
        for item in module_properties(name, module):
            if values.get(item.name) != item.value:
                yield f"{item.name} = {item.value}"


def _hooks(model: nn.Module) -> Iterator[str]:
    """The hooks of modules that change calls, and methods `forward` that were replaced."""
    for name, module in model.named_modules():
        shown = name or type(module).__name__
        hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
        for hook in hooks:
            if package_of(hook) != "ropelens":  # of an open block
                yield f"a hook of {shown}"
        if "forward" in vars(module):
            yield f"another forward of {shown}"


@torch.no_grad()
def _outputs(
    live: LiveModel, run: Callable[[Tensor], object], tokens: Tensor
) -> dict[str, Tensor]:
    """First outputs of modules by name, in the order of their calls, outside of attention."""
    inside: set[nn.Module] = set()
    for attention in attention_modules(live.model)[1:]:
        inside.update(
            module for module in attention.modules() if module is not attention
        )
    outputs: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, Tensor) and first.is_floating_point():
            outputs.setdefault(name, first.detach().float().cpu())

    with ExitStack() as hooks:
        for name, module in live.model.named_modules():
            if name and module not in inside:
                handle = module.register_forward_hook(partial(keep, name))
                hooks.callback(handle.remove)
        run(tokens)
    return outputs
