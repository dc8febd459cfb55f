"""Hooks in the attention calls of a model.

A model asks transformers for an attention function by the name in its config, which does not
change. While a block is open, the model gets a wrapper around this function. A block belongs to
the context (a thread or an asyncio task) that opened it, and to copies of this context.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from copy import copy
from dataclasses import dataclass, replace
from functools import reduce, wraps
from operator import attrgetter
from threading import RLock
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils import checkpoint
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel
from transformers.generation.continuous_batching import (
    ContinuousBatchingManager,
    ContinuousMixin,
)

from ropelens.attention.call import AttentionCall
from ropelens.errors import BadArgument, UnsupportedModel
from ropelens.model import cache_positions
from ropelens.model.masks import (
    only_hides_keys,
    real_rows,
    refuse_hidden_mask,
    visible_keys,
)
from ropelens.model.output_check import OutputCheck
from ropelens.rope.planes import Planes

Observer = Callable[[AttentionCall], None]
AttentionInput = Literal["query", "key", "value"]

InputPatch = Callable[[int, AttentionInput, Tensor, Tensor, Tensor], Tensor]
"""Function that changes the queries, keys or values of a layer.

It is called as (layer, name, x [batch, head, token, coordinate], tokens [_, token], positions
[_, token *axis]) and returns the new `x`, with a head for each query head if heads of a group
differ. `tokens` are the indices of the tokens in their sequence, except the empty slots of a
static cache. `positions` may be shifted by a constant in each sequence.
"""


@runtime_checkable
class AttentionEdit(Protocol):
    """An `InputPatch` that changes the rotation of queries and keys."""

    def __call__(
        self,
        layer: int,
        name: AttentionInput,
        x: Tensor,
        tokens: Tensor,
        positions: Tensor,
        /,
    ) -> Tensor: ...

    def planes(self, layer: int, unedited: Planes, *, length: int) -> Planes:
        """Planes in a call of `length` tokens, with one row per head if heads differ."""


HeadSilence = Callable[..., tuple[Bool[Tensor, " head"], Tensor] | None]
"""Function that replaces the outputs of some heads before the output projection.

It is called as (layer, output [batch, row, head, feature], real [_, row], tokens [_, row]) and
returns the silenced heads and outputs of the same shape, or None. `real` marks rows that are
tokens instead of padding, and `tokens` are their indices in their sequence.
"""


@dataclass(frozen=True)
class Hooks:
    """Functions that the attention calls of one module run."""

    observers: tuple[Observer, ...] = ()
    patches: tuple[InputPatch, ...] = ()
    edit: AttentionEdit | None = None
    silences: tuple[HeadSilence, ...] = ()
    output_check: OutputCheck | None = None

    @property
    def changes(self) -> tuple[InputPatch, ...]:
        """The patches, then the edit."""
        return self.patches if self.edit is None else (*self.patches, self.edit)


@dataclass(frozen=True, eq=False)
class HookBlock:
    modules: frozenset[int]  # by id
    change: Callable[[Hooks], Hooks]


_lock = RLock()
_open_blocks: dict[HookBlock, None] = {}  # in all contexts, the oldest first
_own_blocks: ContextVar[tuple[HookBlock, ...]] = ContextVar("_own_blocks", default=())
_repeats: ContextVar[bool] = ContextVar(
    "_repeats", default=False
)  # a recomputation runs


def _blocks_now() -> tuple[HookBlock, ...]:
    """The open blocks of this context, or the blocks of the pass that is recomputed."""
    own = _own_blocks.get()
    return (
        own
        if _repeats.get()
        else tuple(block for block in own if block in _open_blocks)
    )


def hooks_of(module: object) -> Hooks | None:
    """The hooks of calls of `module` in this context, or None; refuses other contexts."""
    blocks, opened = (
        [block for block in list(group) if id(module) in block.modules]
        for group in (_blocks_now(), _open_blocks)
    )
    if not _repeats.get() and not set(opened) <= set(blocks):
        what = "Another thread or asyncio task uses this model in a block of ropelens."
        seen = f"a call of {type(module).__name__} outside the context of this block"
        hint = "one thread after the other, a copy of the model for each thread, or "
        hint += "contextvars.copy_context().run for a call that belongs to the block"
        raise BadArgument(what, seen=seen, hint=hint)
    hooks = reduce(lambda hooks, block: block.change(hooks), blocks, Hooks())
    if not set(blocks) <= set(opened):
        hooks = replace(hooks, observers=())
    return hooks if blocks else None


@contextmanager
def hooked(
    modules: Iterable[object], change: Callable[[Hooks], Hooks] = lambda hooks: hooks
) -> Iterator[None]:
    """Apply `change` to the hooks of `modules`. Blocks may be closed in any order."""
    modules = list(modules)
    block = HookBlock(frozenset(map(id, modules)), change)
    with _lock:
        for module in modules:
            hooks_of(module)
        _open_blocks[block] = None
    _own_blocks.set((*_blocks_now(), block))
    try:
        yield
    finally:
        del _open_blocks[block]
        _own_blocks.set(_blocks_now())
        still_open = frozenset[int]().union(*(b.modules for b in list(_open_blocks)))
        cache_positions.forget_positions(block.modules - still_open)


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of `model` that may call an attention function, and `model` itself."""
    return [
        model,
        *(m for m in model.modules() if hasattr(m, "layer_idx") and m is not model),
    ]


@contextmanager
def wrapped_attention(model: PreTrainedModel) -> Iterator[None]:
    """Pass every attention call of `model` through `_call_with_hooks` in the block."""
    configs = [vars(module).get("config") for module in model.modules()]
    names = {c._attn_implementation for c in configs if isinstance(c, PreTrainedConfig)}
    if "flex_attention" in names:
        refuse_hidden_mask("flex_attention")  # before it compiles kernels
    if "paged|eager" in names:
        raise UnsupportedModel(
            f"A manager of continuous batching uses {type(model).__name__}.",
            seen='attn_implementation "paged|eager"',
            hint="manager.stop() before the block",
        )
    recorded = cache_positions.positions_recorded(model, attention_modules(model))
    with _wrappers_in_use(), recorded:
        yield


_wrapping_blocks: set[object] = set()  # the blocks and recomputations of all models
_eager = ExitStack()


@contextmanager
def _wrappers_in_use() -> Iterator[None]:
    """Let models get wrappers around their attention functions while the block runs."""
    block = object()
    with _lock:
        if not _wrapping_blocks:
            # Code that was compiled before a block would not call the wrappers, and code that
            # is compiled in a block would still call them afterwards.
            _eager.enter_context(torch.compiler.set_stance("force_eager"))
        _wrapping_blocks.add(block)
    try:
        yield
    finally:
        with _lock:
            _wrapping_blocks.remove(block)
            if not _wrapping_blocks:
                _eager.close()


def _wrapper(run: Callable[..., Any]) -> Callable[..., Any]:
    def attend(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        if (hooks := hooks_of(module)) is None:
            return run(module, *arguments, **options)
        return _call_with_hooks(module, *arguments, hooks=hooks, run=run, **options)

    return attend if _wrapping_blocks else run


def _repeatable(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` for a recomputation, in the blocks of the forward pass that runs now."""
    blocks, context = _blocks_now(), copy_context()
    context.run(_own_blocks.set, blocks)
    context.run(_repeats.set, True)

    def repeat(*arguments: Any, **options: Any) -> Any:
        with _wrappers_in_use() if blocks else nullcontext():
            return context.copy().run(run, *arguments, **options)

    return repeat


def _install() -> None:
    """Wrap functions of transformers and torch once: Python 3.13 ignores many class changes."""
    interface: Any = AttentionInterface  # the class, because Doge has its own object
    get, get_interface = interface.__getitem__, interface.get_interface
    interface.__getitem__ = lambda self, name: _wrapper(get(self, name))
    interface.get_interface = lambda self, name, default: get_interface(
        self, name, _wrapper(default)
    )
    torch_checkpoint: Any = checkpoint
    segment = torch_checkpoint._checkpoint_without_reentrant_generator
    forward = torch_checkpoint.CheckpointFunction.forward

    def forward_reentrant(ctx: Any, run: Callable[..., Any], *arguments: Any) -> Any:
        output = forward(ctx, run, *arguments)
        ctx.run_function = _repeatable(run)
        return output

    torch_checkpoint.CheckpointFunction.forward = staticmethod(forward_reentrant)
    torch_checkpoint._checkpoint_without_reentrant_generator = (
        lambda run, *arguments, **options: segment(
            _repeatable(run), *arguments, **options
        )
    )


def _refuse_continuous_batching() -> None:
    """Refuse continuous batching of a model in a block, in the thread that asks for it.

    Its own thread does not belong to the block, and its cache does not show the sequences and
    keys of a row.
    """
    mixin: Any = ContinuousMixin
    manager: Any = ContinuousBatchingManager
    mixin.init_continuous_batching = _outside_blocks(
        mixin.init_continuous_batching, model_of=lambda model: model
    )
    of_manager = attrgetter("model")
    manager.start = _outside_blocks(manager.start, model_of=of_manager)
    manager.warmup = _outside_blocks(manager.warmup, model_of=of_manager)
    manager.add_request = _outside_blocks(manager.add_request, model_of=of_manager)


def _outside_blocks(
    method: Callable[..., Any], *, model_of: Callable[[Any], nn.Module]
) -> Callable[..., Any]:
    """`method`, which raises `UnsupportedModel` if the model of its object is in a block."""

    @wraps(method)
    def checked(self: Any, *arguments: Any, **options: Any) -> Any:
        model = model_of(self)
        if hooks_of(model) is not None:
            raise UnsupportedModel(
                "A model in a block of ropelens cannot use continuous batching.",
                seen=f"{method.__name__} of {type(self).__name__}",
                hint="model.generate in the block, or generate_batch outside of it",
            )
        return method(self, *arguments, **options)

    return checked


_install()
_refuse_continuous_batching()


def _call_with_hooks(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    hooks: Hooks,
    run: Callable[..., Any],
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    """One attention call: change its inputs, run it, observe it, and silence its heads."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    rows, dropped = cache_positions.row_keys(module, query.shape[2], key.shape[2])
    key_heads = key.shape[1]
    places = torch.arange(rows.start + dropped, rows.stop + dropped)[None]
    cached = cache_positions.cache_of(module) is not None
    if hooks.changes or (hooks.observers and cached):
        of_rows, of_keys = cache_positions.positions(
            module,
            rows,
            dropped,
            key,
            options.get("position_ids"),
            attention_mask,
        )
    if hooks.changes:
        of_all = cache_positions.places_in_sequence(of_keys[:, : rows.stop], dropped)
        places = of_all[:, rows.start :]
        for change in hooks.changes:
            query = change(layer, "query", query, places, of_rows)
            key = change(layer, "key", key, of_all, of_keys)
            value = change(layer, "value", value, of_all, of_keys)
        most = max(key.shape[1], value.shape[1])
        key, value = (
            x.repeat_interleave(most // x.shape[1], dim=1) for x in (key, value)
        )
    if key.shape[1] != key_heads:
        module = copy(module)
        module.num_key_value_groups = 1  # type: ignore[assignment]
    result = run(module, query, key, value, attention_mask, **options)
    real = real_rows(rows, attention_mask).to(query.device)
    if hooks.observers:
        scale, sinks, window = map(options.get, ("scaling", "s_aux", "sliding_window"))
        call = AttentionCall(
            layer=layer,
            query=query.detach(),
            key=key[:, :, : rows.stop].detach(),
            value=value[:, :, : rows.stop].detach(),
            output=result[0].detach(),
            scale=1 / math.sqrt(query.shape[-1]) if scale is None else float(scale),
            softcap=options.get("softcap"),
            sink_logits=None if sinks is None else sinks.detach(),
            visibility=visible_keys(rows, attention_mask, window),
            window=window,
        )
        with torch.autocast(
            query.device.type, enabled=False
        ):  # only the model uses autocast
            if hooks.output_check is not None and not options.get("dropout"):
                hooks.output_check(
                    call, real, plain_mask=only_hides_keys(attention_mask)
                )
            for observer in hooks.observers:
                observer(call)
    if not hooks.silences:
        return result
    return silence_outputs(hooks.silences, layer, result[0], real, places), *result[1:]


def silence_outputs(
    silences: tuple[HeadSilence, ...],
    layer: int,
    output: Float[Tensor, "batch row head feature"],
    real: Bool[Tensor, "_ row"],
    tokens: Int[Tensor, "_ row"],
) -> Float[Tensor, "batch row head feature"]:
    """The outputs of a layer after all `silences`; each of them receives the model's output."""
    silenced = output
    for silence in silences:
        if (replacement := silence(layer, output, real, tokens)) is not None:
            heads, outputs = replacement
            silenced = torch.where(heads.to(output.device)[:, None], outputs, silenced)
    return silenced
