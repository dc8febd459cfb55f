"""Hooks in the attention calls of a model.

A model asks transformers for an attention function by the name in its config, which does not
change. While a block is open, the model gets a wrapper around this function, which runs the
hooks of the block.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from ropelens.errors import UnsupportedModel
from ropelens.model import cache_positions
from ropelens.model.continuous_batching import PAGED, refuse_continuous_batching
from ropelens.model.hook_blocks import (
    block_lock,
    context_of_recomputation,
    has_blocks,
    hooks_of,
)
from ropelens.model.hooked_call import call_with_hooks
from ropelens.model.masks import refuse_hidden_mask

AnyFunction = Callable[..., Any]


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of `model` that may call an attention function, and `model` itself."""
    others = [x for x in model.modules() if hasattr(x, "layer_idx") and x is not model]
    return [model, *others]


@contextmanager
def wrapped_attention(model: PreTrainedModel) -> Iterator[None]:
    """Pass every attention call of `model` through `call_with_hooks` in the block."""
    configs = [vars(module).get("config") for module in model.modules()]
    names = {c._attn_implementation for c in configs if isinstance(c, PreTrainedConfig)}
    if "flex_attention" in names:
        refuse_hidden_mask("flex_attention")  # before it compiles kernels
    if PAGED in names:
        raise UnsupportedModel(
            f"A manager of continuous batching uses {type(model).__name__}.",
            seen=f'attn_implementation "{PAGED}"',
            hint="manager.stop() before the block",
        )
    recorded = cache_positions.recording_positions(model, attention_modules(model))
    with _wrappers_in_use(), recorded:
        yield


_wrapping_blocks: set[object] = set()  # the blocks and recomputations of all models
_eager = ExitStack()


@contextmanager
def _wrappers_in_use() -> Iterator[None]:
    """Let models get wrappers around their attention functions while the block runs."""
    block = object()
    with block_lock:
        if not _wrapping_blocks:
            # Code that was compiled before a block would not call the wrappers, and code that
            # is compiled in a block would still call them afterwards.
            _eager.enter_context(torch.compiler.set_stance("force_eager"))
        _wrapping_blocks.add(block)
    try:
        yield
    finally:
        with block_lock:
            _wrapping_blocks.remove(block)
            if not _wrapping_blocks:
                _eager.close()


def _wrapper(run: AnyFunction) -> AnyFunction:
    """An attention function that runs the hooks of its module; `run` outside of all blocks."""

    def attend(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        hooks = hooks_of(module)
        if hooks is None:
            return run(module, *arguments, **options)
        return call_with_hooks(module, *arguments, hooks=hooks, run=run, **options)

    return attend if _wrapping_blocks else run


def _repeatable(run: AnyFunction) -> AnyFunction:
    """`run` for a recomputation, in the blocks of the forward pass that runs now."""
    in_blocks = has_blocks()
    context = context_of_recomputation()

    def repeat(*arguments: Any, **options: Any) -> Any:
        with _wrappers_in_use() if in_blocks else nullcontext():
            return context.copy().run(run, *arguments, **options)

    return repeat


# Functions of transformers and torch are wrapped once, when this module is imported, because
# Python 3.13 ignores changes of a class after many of them.


def _wrap_attention_functions() -> None:
    interface: Any = AttentionInterface  # the class, because Doge has its own object
    get_item = interface.__getitem__
    get_interface = interface.get_interface

    def wrapped_item(self: Any, name: str) -> AnyFunction:
        return _wrapper(get_item(self, name))

    def wrapped_interface(self: Any, name: str, default: AnyFunction) -> AnyFunction:
        return get_interface(self, name, _wrapper(default))

    interface.__getitem__ = wrapped_item
    interface.get_interface = wrapped_interface


def _wrap_recomputation() -> None:
    torch_checkpoint: Any = checkpoint
    begin_segment = torch_checkpoint._checkpoint_without_reentrant_generator
    forward = torch_checkpoint.CheckpointFunction.forward

    def begin_repeatable(run: AnyFunction, *arguments: Any, **options: Any) -> Any:
        return begin_segment(_repeatable(run), *arguments, **options)

    def forward_reentrant(ctx: Any, run: AnyFunction, *arguments: Any) -> Any:
        output = forward(ctx, run, *arguments)
        ctx.run_function = _repeatable(run)
        return output

    torch_checkpoint._checkpoint_without_reentrant_generator = begin_repeatable
    torch_checkpoint.CheckpointFunction.forward = staticmethod(forward_reentrant)


_wrap_attention_functions()
_wrap_recomputation()
refuse_continuous_batching()
