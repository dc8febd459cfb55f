"""The one place where ropelens meets a model: its attention calls.

A model asks transformers for an attention function by the name in its config. While a block
runs, it is given one of ours, which hands every call on to the function that it asked for. The
config is not touched: the model takes the branches that it always takes, makes the masks that
it always makes, and computes the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import reduce
from threading import Lock
from typing import Any, Literal, NoReturn, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedConfig, PreTrainedModel

from ropelens.attention.call import AttentionCall, sees
from ropelens.errors import UnsupportedModel
from ropelens.model.cache_positions import (
    forget_positions,
    positions,
    positions_recorded,
    row_keys,
    shown,
)
from ropelens.model.output_check import OutputCheck
from ropelens.rope.planes import Planes

Observer = Callable[[AttentionCall], None]

Side = Literal["query", "key", "value"]

Patch = Callable[[int, Side, Tensor, range, Tensor], Tensor]
"""What chosen heads are given in place of their queries, keys or values.

Called as (layer, side, x [batch, head, place, coordinate], places, positions [_, place *axis]):
it gives `x`, changed, with a head for each query head where heads of a group differ. `places`
count the tokens of a sequence from 0, without those that a static cache still lacks;
`positions` are up to a shift that a sequence has in common.
"""


@runtime_checkable
class AttentionEdit(Protocol):
    """A patch that makes queries and keys rotate otherwise."""

    def __call__(
        self, layer: int, side: Side, x: Tensor, places: range, positions: Tensor, /
    ) -> Tensor: ...

    def inv_freq(
        self, layer: int, planes: Planes, *, length: int
    ) -> Float[Tensor, "head frequency"]:
        """Frequencies of each head under the edit, in rad/token; `planes` are those without."""


HeadSilence = Callable[..., tuple[Bool[Tensor, " head"], Tensor] | None]
"""What stands in for the outputs of some heads, before the output projection.

Called as (layer, output [batch, row, head, feature], real [_, row], past=tokens): it gives the
silenced heads, and their outputs, as large as `output`; or None. `real` marks the rows that are
no padding; a cache holds `past` tokens before them.
"""


@dataclass(frozen=True)
class Hooks:
    """What the attention calls of one model meet."""

    observers: tuple[Observer, ...] = ()
    patches: tuple[Patch, ...] = ()
    edit: AttentionEdit | None = None
    silences: tuple[HeadSilence, ...] = ()
    judge: OutputCheck | None = None

    @property
    def changes(self) -> tuple[Patch, ...]:
        """The patches, then the edit."""
        return self.patches if self.edit is None else (*self.patches, self.edit)


Change = Callable[[Hooks], Hooks]

_open: dict[int, list[Change]] = {}
"""What the open blocks over each module make of its hooks, by the module's id."""

_lock = Lock()


def hooks_of(module: object) -> Hooks | None:
    """The hooks that calls of `module` meet, in every thread; None outside all blocks."""
    changes = _open.get(id(module))
    return reduce(lambda hooks, change: change(hooks), changes, Hooks()) if changes else None


@contextmanager
def hooked(modules: Iterable[object], change: Change) -> Iterator[None]:
    """Calls of `modules` meet what `change` makes of their hooks while the block runs.

    Blocks may be closed in any order.
    """
    ids = [id(module) for module in modules]
    for at in ids:
        _open.setdefault(at, []).append(change)
    try:
        yield
    finally:
        for at in ids:
            _open[at].remove(change)
            if not _open[at]:
                del _open[at]
                forget_positions(at)


# transformers' attention functions, wrapped


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The modules of `model` that may call an attention function, and `model` itself."""
    return [model, *(m for m in model.modules() if hasattr(m, "layer_idx") and m is not model)]


_blocks: set[object] = set()
"""The blocks that are open, over any model."""

_around_blocks = ExitStack()
"""What lasts from the first open block to the last."""


@contextmanager
def wrapped_attention(model: PreTrainedModel) -> Iterator[None]:
    """Every attention call of `model` passes through `_attend` while the block runs."""
    configs = [vars(module).get("config") for module in model.modules()]
    own = [config for config in configs if isinstance(config, PreTrainedConfig)]
    if "flex_attention" in {config._attn_implementation for config in own}:
        _refuse_hidden_mask("flex_attention")  # before it compiles kernels for nothing
    block = object()
    with _lock:
        if not _blocks:
            # Code compiled before a block would not see it, code compiled in one outlive it.
            _around_blocks.enter_context(torch.compiler.set_stance("force_eager"))
            _around_blocks.enter_context(_wrapped_functions())
        _blocks.add(block)
    try:
        with positions_recorded(model, attention_modules(model)):
            yield
    finally:
        with _lock:
            _blocks.remove(block)
            if not _blocks:
                _around_blocks.close()


@contextmanager
def _wrapped_functions() -> Iterator[None]:
    """transformers gives out its functions wrapped, and eager ones, which models bring."""
    interface: Any = AttentionInterface  # also of files with one of their own (Doge)
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
    """What a model gets in place of the function `run`, which it asked for by its name."""

    def attend(module: nn.Module, *arguments: Any, **options: Any) -> Any:
        hooks = hooks_of(module)
        if hooks is None:
            return run(module, *arguments, **options)
        return _attend(module, *arguments, hooks=hooks, run=run, **options)

    return attend


def _attend(
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
    """One attention call: edited, run by the model's own function, shown, then silenced."""
    layer: int = module.layer_idx  # type: ignore[assignment]
    own, gone = row_keys(module, query.shape[2], key.shape[2])
    by_module = key.shape[1]
    places, all_places = (range(first + gone, own.stop + gone) for first in (own.start, 0))
    if hooks.changes:
        told = options.get("position_ids")
        rows, keys = positions(module, own, gone, key, told, attention_mask)
        for change in hooks.changes:
            query = change(layer, "query", query, places, rows)
            key = change(layer, "key", key, all_places, keys)
            value = change(layer, "value", value, all_places, keys)
        most = max(key.shape[1], value.shape[1])
        key, value = (x.repeat_interleave(most // x.shape[1], dim=1) for x in (key, value))
    with nullcontext() if key.shape[1] == by_module else _a_key_for_every_query(module):
        result = run(module, query, key, value, attention_mask, **options)
    real = real_rows(own, attention_mask).to(query.device)
    if hooks.observers:
        scale, sinks = options.get("scaling"), options.get("s_aux")
        start, visible = visible_keys(own, attention_mask, options.get("sliding_window"))
        call = AttentionCall(
            layer=layer,
            query=query.detach(),
            key=key[:, :, : own.stop].detach(),
            value=value[:, :, : own.stop].detach(),
            output=result[0].detach(),
            scale=1 / math.sqrt(query.shape[-1]) if scale is None else float(scale),
            softcap=options.get("softcap"),
            sink_logits=None if sinks is None else sinks.detach(),
            interval=start,
            past=own.start,
            visible=visible,
        )
        with torch.autocast(query.device.type, enabled=False):  # which is for the model alone
            if hooks.judge is not None and not options.get("dropout"):
                hooks.judge(call, real, known=_hides_alike(attention_mask))
            for observer in hooks.observers:
                observer(call)
    if not hooks.silences:
        return result
    output = silence_outputs(hooks.silences, layer, result[0], real, past=places.start)
    return output, *result[1:]


@contextmanager
def _a_key_for_every_query(module: nn.Module) -> Iterator[None]:
    """The module expects a key and a value for every query head while the block runs."""
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
    """The outputs of a layer's heads as `silences` leave them; each is given the heads' own."""
    silenced = output
    for silence in silences:
        replaced = silence(layer, output, real, past=past)
        if replaced is not None:
            heads, instead = replaced
            silenced = torch.where(heads.to(output.device)[:, None], instead, silenced)
    return silenced


# what an attention call says of its rows


def real_rows(own: range, mask: Tensor | None) -> Bool[Tensor, "_ row"]:
    """Which rows are tokens, not padding, as far as the mask says: a token sees itself.

    Under a sparse mask, where later rows see again what a row does not, it sees any key.
    """
    if mask is None:
        return torch.ones(1, len(own), dtype=torch.bool)
    if mask.ndim == 2:  # of keys alone, as flash attention takes it
        return mask[:, own.start : own.stop].bool()
    visible = shown(mask[:, 0, : len(own)])
    seen = visible[..., own.start : own.stop]
    itself = seen.diagonal(dim1=1, dim2=2)
    if bool(itself.all()):
        return itself
    sparse = len(own) == 1 or bool((~seen[:, :-1] & seen[:, 1:]).tril().any())
    return visible.any(-1) if sparse else itself


def visible_keys(
    own: range, mask: Tensor | None, window: int | None
) -> tuple[Int[Tensor, "*sequence position"] | None, Bool[Tensor, "batch row key"] | None]:
    """First key that each row sees; which keys instead, where they are not all up to its own.

    Read from the mask that the model was about to use. There is one row of first keys for all
    sequences, or one each where padding on the left tells them apart.
    """
    if mask is None:
        window = window or own.stop
        return (torch.arange(own.start, own.stop) - window + 1).clamp_min(0), None
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        _refuse_hidden_mask(type(mask).__name__)
    return between(shown(mask[:, 0, : len(own), : own.stop]).expand(-1, len(own), -1), own)


def between(
    visible: Bool[Tensor, "batch row key"], own: range
) -> tuple[Int[Tensor, "*sequence position"] | None, Bool[Tensor, "batch row key"] | None]:
    """First key of each row; `visible` instead where a row does not see all up to its own.

    One row of first keys for all sequences where they are alike.
    """
    start = visible.byte().argmax(dim=-1).cpu()
    row, key = torch.arange(own.start, own.stop), torch.arange(own.stop)
    interval = sees(start, row.expand_as(start), key).to(visible.device)
    of_padding = ~visible.any(-1, keepdim=True)
    if not bool(((visible == interval) | of_padding).all()):
        return None, visible
    return start[0] if bool((start == start[0]).all()) else start, None


def _hides_alike(mask: Tensor | None) -> bool:
    """Whether a mask hides keys, the same for all heads, and does nothing else to scores."""
    if mask is None:
        return True
    alike = mask.shape[1] == 1 or bool((mask == mask[:, :1]).all())
    return alike and (mask.dtype == torch.bool or bool(((mask == 0) | (mask < -1e4)).all()))


def _refuse_hidden_mask(seen: str) -> NoReturn:
    raise UnsupportedModel(
        "This attention implementation hides its mask.",
        seen=seen,
        hint='load the model with attn_implementation="sdpa" or "eager"',
    )
