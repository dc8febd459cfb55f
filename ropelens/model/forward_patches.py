"""A model that runs otherwise for a block: without dropout, or in part."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from ropelens.model.attention_hooks import attention_modules


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """The model without dropout, which is no part of what a head does."""
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def recomputed(model: nn.Module) -> Iterator[None]:
    """Layers keep only their input for a backward pass in the block, and run again in it."""
    with without_dropout(model), ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                again = partial(checkpoint, module.forward, use_reentrant=False)
                stack.enter_context(_running(module, again))
        yield


@contextmanager
def cache_first_result(module: nn.Module, results: list[Any]) -> Iterator[None]:
    """`module` gives its first result of `results` again while the block runs."""
    own = module.forward

    def first(*args: Any, **kwargs: Any) -> Any:
        if not results:
            results.append(own(*args, **kwargs))
        return results[0]

    with _running(module, first):
        yield


@contextmanager
def skip_mlp_work(model: PreTrainedModel) -> Iterator[None]:
    """Linear maps outside attention give every token what they give the first, in the block.

    They take most of a pass.
    """
    attention = {part for m in attention_modules(model)[1:] for part in m.modules()}
    with ExitStack() as stack:
        for module in set(model.modules()) - attention:
            if type(module).forward is nn.Linear.forward:
                stack.enter_context(_running(module, partial(_cut_short, module.forward)))
        yield


def _cut_short(run: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    return run(input[..., :1, :]).repeat_interleave(input.shape[-2], dim=-2)


@contextmanager
def _running(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """`module` runs `forward` in place of its own while the block runs."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
