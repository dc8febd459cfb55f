"""Changes of how a model runs: without dropout, or with less work or memory."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.modeling_layers import GradientCheckpointingLayer

from ropelens.errors import UnsupportedModel
from ropelens.model.attention_hooks import attention_modules
from ropelens.model.hook_blocks import hooked, hooks_of


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Run the model without dropout, and restore the training flag of each module."""
    with hooked([model]):
        training = [module for module in model.modules() if module.training]
        try:
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True


@contextmanager
def gradients_enabled(model: nn.Module, *, recomputed: bool) -> Iterator[None]:
    """Enable gradients; with `recomputed`, store only inputs of layers and run layers again."""
    if (
        any(x.is_inference() for x in model.parameters())
        or torch.is_inference_mode_enabled()
    ):
        what = f"{type(model).__name__} has no gradients in torch.inference_mode."
        hint = "load the model, and call ropelens, outside of torch.inference_mode"
        raise UnsupportedModel(what, hint=hint)
    layers: list[Any] = [
        m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)
    ]
    again = {
        m: partial(checkpoint, m.forward, use_reentrant=False)
        for m in layers * recomputed
    }
    with torch.enable_grad(), without_dropout(model), _replaced_forwards(again):
        yield


@contextmanager
def cache_first_result(module: nn.Module, results: list[Any]) -> Iterator[None]:
    """Return the first entry of `results` from `module`; run `module` if it is empty."""
    forward = module.forward

    def cached(*args: Any, **kwargs: Any) -> Any:
        if not results:
            results.append(forward(*args, **kwargs))
        return results[0]

    with _replaced_forwards({module: cached}):
        yield


@contextmanager
def skip_mlp_work(model: PreTrainedModel) -> Iterator[None]:
    """Give all tokens the results of the first token in linear maps outside attention."""
    attention = {part for m in attention_modules(model)[1:] for part in m.modules()}
    linear = [x for x in model.modules() if type(x).forward is nn.Linear.forward]

    def of_first_token(run: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
        return run(input[..., :1, :]).repeat_interleave(input.shape[-2], dim=-2)

    others = {
        x: partial(of_first_token, x.forward) for x in linear if x not in attention
    }
    with _replaced_forwards(others):
        yield


@contextmanager
def _replaced_forwards(
    forwards: Mapping[nn.Module, Callable[..., Any]],
) -> Iterator[None]:
    """Run these functions instead of `forward` of the modules; refuse other contexts."""

    def run(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        hooks_of(module)  # it refuses other contexts
        return forwards[module](*arguments, **options)

    before = [(module, vars(module).get("forward")) for module in forwards]
    with hooked(forwards):
        for module in forwards:
            module.forward = partial(run, module)
        try:
            yield
        finally:
            for module, own in before:
                del module.forward
                if own is not None:
                    module.forward = own


class PreallocatedLayer(DynamicLayer):
    """Layer of a cache that allocates memory for all `tokens` once, not for each chunk."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        new = (key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(*new)
            self.room = [
                x.new_empty((*x.shape[:2], self.tokens, x.shape[3])) for x in new
            ]
        begin = self.get_seq_length()
        end = begin + key_states.shape[2]
        for room, states in zip(self.room, new, strict=True):
            room[:, :, begin:end] = states
        self.keys, self.values = (room[:, :, :end] for room in self.room)
        return self.keys, self.values
