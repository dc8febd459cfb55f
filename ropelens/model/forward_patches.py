"""Changes of how a model runs: without dropout, or with less work or memory."""

from collections.abc import Callable, Iterator
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

Forwards = dict[nn.Module, Callable[..., Any]]


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


def refuse_inference_mode(model: nn.Module) -> None:
    """Raise `UnsupportedModel` if torch computes no gradients for the model."""
    made_in_inference = any(x.is_inference() for x in model.parameters())
    if made_in_inference or torch.is_inference_mode_enabled():
        raise UnsupportedModel(
            f"{type(model).__name__} has no gradients in torch.inference_mode.",
            hint="load the model, and call ropelens, outside of torch.inference_mode",
        )


@contextmanager
def gradients_enabled(model: nn.Module, *, recomputed: bool) -> Iterator[None]:
    """Enable gradients; with `recomputed`, store only inputs of layers and run layers again."""
    refuse_inference_mode(model)
    forwards: Forwards = {}
    if recomputed:
        for module in model.modules():
            if isinstance(module, GradientCheckpointingLayer):
                run_again = partial(checkpoint, module.forward, use_reentrant=False)
                forwards[module] = run_again
    with torch.enable_grad(), without_dropout(model), _replaced_forwards(forwards):
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
    in_attention: set[nn.Module] = set()
    for module in attention_modules(model)[1:]:
        in_attention.update(module.modules())
    forwards: Forwards = {}
    for module in model.modules():
        is_linear = type(module).forward is nn.Linear.forward
        if is_linear and module not in in_attention:
            forwards[module] = partial(_of_first_token, module.forward)
    with _replaced_forwards(forwards):
        yield


def _of_first_token(run: Callable[[Tensor], Tensor], input: Tensor) -> Tensor:
    """The result of `run` for the first token, repeated for all tokens."""
    return run(input[..., :1, :]).repeat_interleave(input.shape[-2], dim=-2)


@contextmanager
def _replaced_forwards(forwards: Forwards) -> Iterator[None]:
    """Run these functions instead of `forward` of the modules; refuse other contexts."""

    def run(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        hooks_of(module)  # it refuses other contexts
        return forwards[module](*arguments, **options)

    replaced_before = {module: vars(module).get("forward") for module in forwards}
    with hooked(forwards):
        for module in forwards:
            module.forward = partial(run, module)
        try:
            yield
        finally:
            for module, forward in replaced_before.items():
                del module.forward
                if forward is not None:
                    module.forward = forward


class PreallocatedLayer(DynamicLayer):
    """Layer of a cache that allocates memory for all `tokens` once, not for each chunk."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values; return the keys and values of all tokens."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.all_keys = self._room_for(key_states)
            self.all_values = self._room_for(value_states)
        begin = self.get_seq_length()
        end = begin + key_states.shape[2]
        self.all_keys[:, :, begin:end] = key_states
        self.all_values[:, :, begin:end] = value_states
        self.keys = self.all_keys[:, :, :end]
        self.values = self.all_values[:, :, :end]
        return self.keys, self.values

    def _room_for(self, states: Tensor) -> Tensor:
        """Memory for the states of all tokens."""
        batch, heads, _, width = states.shape
        return states.new_empty((batch, heads, self.tokens, width))
