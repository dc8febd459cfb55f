"""Context managers that change how a model runs: without dropout, or with less work."""

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
    """Run the model without dropout, and restore the training flag of each module."""
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
    """Store only the inputs of layers; a backward pass in the block runs each layer again."""
    with without_dropout(model), ExitStack() as stack:
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                again = partial(checkpoint, module.forward, use_reentrant=False)
                stack.enter_context(_replaced_forward(module, again))
        yield


@contextmanager
def cache_first_result(module: nn.Module, results: list[Any]) -> Iterator[None]:
    """Return the first entry of `results` from `module`; run `module` if it is empty."""
    forward = module.forward

    def cached(*args: Any, **kwargs: Any) -> Any:
        if not results:
            results.append(forward(*args, **kwargs))
        return results[0]

    with _replaced_forward(module, cached):
        yield


@contextmanager
def skip_mlp_work(model: PreTrainedModel) -> Iterator[None]:
    """Run linear maps outside attention, which take most of a pass, on only the first token.

    Every other token gets the result of the first token.
    """
    attention = {part for m in attention_modules(model)[1:] for part in m.modules()}
    with ExitStack() as stack:
        for module in set(model.modules()) - attention:
            if type(module).forward is nn.Linear.forward:
                stack.enter_context(
                    _replaced_forward(module, partial(_first_token, module.forward))
                )
        yield


def _first_token(run: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    return run(input[..., :1, :]).repeat_interleave(input.shape[-2], dim=-2)


@contextmanager
def _replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
