"""Hooks in the attention calls of a model.

A model asks transformers for an attention function by the name in its config. While a block is
open, the model gets a wrapper around this function. The config does not change, so that the
model takes the same branches, makes the same masks and computes the same bits.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from threading import Lock
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from ropelens.attention.call import AttentionCall
from ropelens.model import cache_positions
from ropelens.model.masks import only_hides_keys, real_rows, refuse_hidden_mask, visible_keys
from ropelens.model.output_check import OutputCheck
from ropelens.rope.planes import Planes

Observer = Callable[[AttentionCall], None]
AttentionInput = Literal["query", "key", "value"]

InputPatch = Callable[[int, AttentionInput, Tensor, range, Tensor], Tensor]
"""Function that changes the queries, keys or values of a layer.

It is called as (layer, name, x [batch, head, token, coordinate], tokens, positions [_, token
*axis]) and returns the new `x`, with a head for each query head if heads of a group differ.
`tokens` are the indices of the tokens in their sequence, without tokens that a static cache
does not contain yet. `positions` may be shifted by a constant in each sequence.
"""


@runtime_checkable
class AttentionEdit(Protocol):
    """An `InputPatch` that changes the rotation of queries and keys."""

    def __call__(
        self, layer: int, name: AttentionInput, x: Tensor, tokens: range, positions: Tensor, /
    ) -> Tensor: ...

    def planes(self, layer: int, unedited: Planes, *, length: int) -> Planes:
        """Planes in a call of `length` tokens, with one row per head if heads differ."""


HeadSilence = Callable[..., tuple[Bool[Tensor, " head"], Tensor] | None]
"""Function that replaces the outputs of some heads before the output projection.

It is called as (layer, output [batch, row, head, feature], real [_, row], past=tokens) and
returns the silenced heads and outputs of the same shape, or None. `real` marks rows that are
tokens instead of padding. A cache holds `past` tokens before these rows.
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


_open_blocks: dict[int, list[Callable[[Hooks], Hooks]]] = {}
"""The changes of hooks that open blocks request, by module id."""


def hooks_of(module: object) -> Hooks | None:
    """The hooks of the calls of `module` in every thread; None outside all blocks."""
    changes = _open_blocks.get(id(module))
    return reduce(lambda hooks, change: change(hooks), changes, Hooks()) if changes else None


@contextmanager
def hooked(modules: Iterable[object], change: Callable[[Hooks], Hooks]) -> Iterator[None]:
    """Apply `change` to the hooks of `modules`. Blocks may be closed in any order."""
    ids = [id(module) for module in modules]
    for module in ids:
        _open_blocks.setdefault(module, []).append(change)
    try:
        yield
    finally:
        for module in ids:
            _open_blocks[module].remove(change)
            if not _open_blocks[module]:
                del _open_blocks[module]
                cache_positions.forget_positions(module)


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of `model` that may call an attention function, and `model` itself."""
    return [model, *(m for m in model.modules() if hasattr(m, "layer_idx") and m is not model)]


_lock = Lock()
_wrapping_blocks: set[object] = set()  # the open blocks of all models
_wrappers = ExitStack()  # in place from the first open block to the last


@contextmanager
def wrapped_attention(model: PreTrainedModel) -> Iterator[None]:
    """Pass every attention call of `model` through `_call_with_hooks` in the block."""
    configs = [vars(module).get("config") for module in model.modules()]
    names = {c._attn_implementation for c in configs if isinstance(c, PreTrainedConfig)}
    if "flex_attention" in names:
        refuse_hidden_mask("flex_attention")  # before it compiles kernels
    block = object()
    with _lock:
        if not _wrapping_blocks:
            # Code that was compiled before a block would not call the wrappers, and code that
            # is compiled in a block would still call them afterwards.
            _wrappers.enter_context(torch.compiler.set_stance("force_eager"))
            _wrappers.enter_context(_wrapped_functions())
        _wrapping_blocks.add(block)
    try:
        with cache_positions.positions_recorded(model, attention_modules(model)):
            yield
    finally:
        with _lock:
            _wrapping_blocks.remove(block)
            if not _wrapping_blocks:
                _wrappers.close()


@contextmanager
def _wrapped_functions() -> Iterator[None]:
    """Wrap attention functions of transformers, and eager functions of models."""
    interface: Any = AttentionInterface  # the class, because Doge has its own object
    get, get_interface = interface.__getitem__, interface.get_interface
    interface.__getitem__ = lambda self, name: _wrapper(get(self, name))
    interface.get_interface = lambda self, name, default: get_interface(
        self, name, _wrapper(default)
    )
    try:
        yield
    finally:
        interface.__getitem__, interface.get_interface = get, get_interface


def _wrapper(run: Callable[..., Any]) -> Callable[..., Any]:
    def attend(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        if (hooks := hooks_of(module)) is None:
            return run(module, *arguments, **options)
        return _call_with_hooks(module, *arguments, hooks=hooks, run=run, **options)

    return attend


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
    tokens, all_tokens = (range(x + dropped, rows.stop + dropped) for x in (rows.start, 0))
    if hooks.changes:
        ids, mask = options.get("position_ids"), attention_mask
        of_rows, of_keys = cache_positions.positions(module, rows, dropped, key, ids, mask)
        for change in hooks.changes:
            query = change(layer, "query", query, tokens, of_rows)
            key = change(layer, "key", key, all_tokens, of_keys)
            value = change(layer, "value", value, all_tokens, of_keys)
        most = max(key.shape[1], value.shape[1])
        key, value = (x.repeat_interleave(most // x.shape[1], dim=1) for x in (key, value))
    with nullcontext() if key.shape[1] == key_heads else _one_key_per_query(module):
        result = run(module, query, key, value, attention_mask, **options)
    real = real_rows(rows, attention_mask).to(query.device)
    if hooks.observers:
        scale, sinks = options.get("scaling"), options.get("s_aux")
        call = AttentionCall(
            layer=layer,
            query=query.detach(),
            key=key[:, :, : rows.stop].detach(),
            value=value[:, :, : rows.stop].detach(),
            output=result[0].detach(),
            scale=1 / math.sqrt(query.shape[-1]) if scale is None else float(scale),
            softcap=options.get("softcap"),
            sink_logits=None if sinks is None else sinks.detach(),
            visibility=visible_keys(rows, attention_mask, options.get("sliding_window")),
        )
        with torch.autocast(query.device.type, enabled=False):  # only the model uses autocast
            if hooks.output_check is not None and not options.get("dropout"):
                hooks.output_check(call, real, plain_mask=only_hides_keys(attention_mask))
            for observer in hooks.observers:
                observer(call)
    if not hooks.silences:
        return result
    output = silence_outputs(hooks.silences, layer, result[0], real, past=tokens.start)
    return output, *result[1:]


@contextmanager
def _one_key_per_query(module: nn.Module) -> Iterator[None]:
    """Let the module expect a key and a value for every query head in the block."""
    groups = module.num_key_value_groups
    module.num_key_value_groups = 1  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_key_value_groups = groups


def silence_outputs(
    silences: tuple[HeadSilence, ...],
    layer: int,
    output: Float[Tensor, "batch row head feature"],
    real: Bool[Tensor, "_ row"],
    *,
    past: int,
) -> Float[Tensor, "batch row head feature"]:
    """The outputs of a layer after all `silences`; each of them receives the model's output."""
    silenced = output
    for silence in silences:
        if (replacement := silence(layer, output, real, past=past)) is not None:
            heads, outputs = replacement
            silenced = torch.where(heads.to(output.device)[:, None], outputs, silenced)
    return silenced
