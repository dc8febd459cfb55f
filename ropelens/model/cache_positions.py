"""Positions of the rows and keys of an attention call, also with a cache and with M-RoPE.

Attention calls do not receive the cache. They do not receive positions on three axes (Qwen2-VL
and similar families), and some families (Llama 4, Persimmon) pass them no positions at all.
Therefore hooks record what rotary modules and attention modules receive.
"""

from collections.abc import Collection, Iterator, MutableMapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from ropelens.config_facts import slides
from ropelens.errors import UnsupportedModel
from ropelens.model.masks import shown


@dataclass(frozen=True)
class CallRows:
    """The `keys` of an attention call that belong to its rows.

    Later keys are empty slots of a static cache. A cache dropped `dropped` keys before the
    first key of the call.
    """

    keys: range
    dropped: int

    @property
    def past(self) -> int:
        """Number of tokens before the first row."""
        return self.keys.start + self.dropped


@dataclass(frozen=True)
class CallPositions:
    """Positions of the rows and keys of a call, up to a common shift of each sequence."""

    of_rows: Int[Tensor, "_ row *axis"]
    of_keys: Int[Tensor, "_ key *axis"]


@dataclass(frozen=True)
class CachedKeys:
    """Marks and positions of all tokens in a cache, in the order in which they were added."""

    marks: Int[Tensor, "sequence token"]
    positions: Int[Tensor, "_ token *axis"]

    def extended(
        self, marks: Int[Tensor, "sequence new"], positions: Int[Tensor, "_ new *axis"]
    ) -> "CachedKeys":
        """These tokens, followed by new tokens."""
        batch = max(len(self.positions), len(positions))
        before = self.positions.expand(batch, *self.positions.shape[1:])
        after = positions.expand(batch, *positions.shape[1:])
        return CachedKeys(
            torch.cat([self.marks, marks], dim=1), torch.cat([before, after], dim=1)
        )

    def found_again(
        self, marks: Int[Tensor, "sequence key"], past: int
    ) -> "CachedKeys | None":
        """The rows whose first `past` tokens end with keys that have these `marks`.

        None if there are no such rows. A cache may select, repeat or crop rows.
        """
        old = self.marks[:, past - marks.shape[1] : past]
        row = torch.arange(len(marks), device="cpu")
        if not torch.equal(old, marks):
            if old.shape[1] != marks.shape[1]:
                return None
            same = (marks[:, None] == old).all(-1)
            if not same.any(1).all():
                return None
            row = same.byte().argmax(1)
        positions = self.positions
        if len(positions) > 1:
            positions = positions[row]
        return CachedKeys(self.marks[row, :past], positions[:, :past])


CacheOwner = object
KeysByCache = MutableMapping[CacheOwner, CachedKeys]

_cached_keys: dict[int, WeakKeyDictionary[CacheOwner, CachedKeys]] = {}
"""By the id of an attention module: the keys in each cache."""

# In this context, by the id of an attention module: positions [_, row *axis] in the last call
# of its rotary module, and the cache of its last call.
_rotary_positions = ContextVar[dict[int, Tensor]]("_rotary_positions")
_caches = ContextVar[dict[int, Any]]("_caches")


def forget_positions(modules: Collection[int]) -> None:
    """Forget the positions and caches of the attention modules with these ids."""
    for module in modules:
        _cached_keys.pop(module, None)
    for recorded in (_rotary_positions, _caches):
        values: dict[int, Any] = recorded.get({})
        recorded.set({key: values[key] for key in values.keys() - modules})


def _record_positions(
    attention: list[int],
    rotary: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Record the positions that a rotary module receives for the attention modules."""
    tensors = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
    positions = tensors[-1]
    if positions.is_floating_point():
        return
    if positions.ndim == 3 and len(positions) == 3:
        positions = positions.movedim(0, -1)
    elif positions.ndim != 2:
        return
    recorded = dict.fromkeys(attention, positions)
    _rotary_positions.set(_rotary_positions.get({}) | recorded)


def _record_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Record the cache that an attention module receives."""
    caches = dict(_caches.get({}))
    caches.pop(id(module), None)
    for argument in (*args, *kwargs.values()):
        if isinstance(argument, Cache):
            caches[id(module)] = ref(argument)
    _caches.set(caches)


@contextmanager
def recording_positions(
    model: PreTrainedModel, attention: list[nn.Module]
) -> Iterator[None]:
    """Record positions and caches in the block, for each attention module.

    Each attention module gets the positions that a rotary module received last, and the cache
    of its own last call. `call_positions` reads both, and `forget_positions` removes them.
    """
    record_positions = partial(_record_positions, [id(module) for module in attention])
    with ExitStack() as stack:
        for module in model.get_decoder().modules():
            if _is_rotary(module):
                handle = module.register_forward_pre_hook(
                    record_positions, with_kwargs=True
                )
                stack.enter_context(handle)
        for module in attention:
            handle = module.register_forward_pre_hook(_record_cache, with_kwargs=True)
            stack.enter_context(handle)
        yield


def _is_rotary(module: nn.Module) -> bool:
    """Whether a module has a buffer of frequencies."""
    return any("inv_freq" in name for name in module._buffers)


def cache_of(module: nn.Module) -> Cache | None:
    """The cache that an attention module received in its last call."""
    reference = _caches.get({}).get(id(module))
    return None if reference is None else reference()


def rounds_keys(module: Any) -> bool:
    """Whether the cache of a layer keeps all keys, and quantizes those that are old."""
    cache = cache_of(module)
    if cache is None or module.layer_idx >= len(cache.layers):
        return False
    of_layer = type(cache.layers[module.layer_idx])
    # transformers 5.15 has another base class than before: BaseQuantizedLayer.
    return any("QuantizedLayer" in base.__name__ for base in of_layer.__mro__)


def call_rows(module: Any, rows: int, keys: int) -> CallRows:
    """The place of `rows` among the `keys` of a call; both are counts."""
    cache = cache_of(module)
    length = 0
    last = keys
    if cache is not None:
        length = _tokens_in(cache, module.layer_idx)
        is_static = any(isinstance(layer, StaticLayer) for layer in cache.layers)
        if length and is_static:
            last = min(length, keys)
    return CallRows(keys=range(last - rows, last), dropped=max(length - keys, 0))


def _tokens_in(cache: Cache, layer: int) -> int:
    """Number of tokens that a layer of a cache has seen, or all layers if it has no keys."""
    for of_layer in cache.layers[layer : layer + 1]:
        if isinstance(of_layer, CacheLayerMixin):
            length = int(of_layer.get_seq_length())
            if length:
                return length
    return int(cache.get_seq_length())  # a layer may share the keys of another layer


def call_positions(
    module: Any,
    rows: CallRows,
    key: Tensor,
    position_ids: Tensor | None,
    mask: Tensor | None,
) -> CallPositions:
    """Positions of the rows and keys of a call, up to a common shift of each sequence.

    `position_ids` has the positions of all tokens that run; without any positions, tokens count
    from 0. Keys in a cache keep their positions, and keys from before the block get consecutive
    positions.

    Raises `UnsupportedModel` if the cache contradicts this.
    """
    slots = key.shape[2]
    position_ids = _known_positions(module, position_ids)
    if position_ids is None or position_ids.ndim == 1:
        index = torch.arange(slots, device=key.device)[None]
        return CallPositions(index[:, rows.keys.start : rows.keys.stop], index)
    of_rows = position_ids[:, -len(rows.keys) :]  # attention may run on the last tokens
    owner = _owner_of_keys(module)
    by_cache = _cached_keys.setdefault(id(module), WeakKeyDictionary())
    marks = key_marks(key[:, :, : rows.keys.stop])
    if position_ids.shape[1] == slots:
        by_cache[owner] = CachedKeys(marks, position_ids)
        return CallPositions(of_rows, position_ids)
    past_marks = marks[:, : rows.keys.start]
    before = _keys_before(by_cache, owner, past_marks, rows, of_rows)
    if before is None:
        _check_consecutive(module, rows, of_rows, mask)
        before = _consecutive_keys(past_marks, rows, of_rows)
    tokens = before.extended(marks[:, rows.keys.start :], of_rows)
    by_cache[owner] = tokens
    of_keys = tokens.positions[:, rows.dropped :]
    return CallPositions(of_rows, _with_empty_slots(of_keys, slots))


def _owner_of_keys(module: nn.Module) -> CacheOwner:
    cache = cache_of(module)
    return module if cache is None else cache


def _known_positions(module: nn.Module, given: Tensor | None) -> Tensor | None:
    """Positions that a call passes, or that its rotary module received."""
    recorded = _rotary_positions.get({}).get(id(module))
    has_axes = recorded is not None and recorded.ndim == 3
    return recorded if given is None or has_axes else given


def _with_empty_slots(
    of_keys: Int[Tensor, "_ key *axis"], slots: int
) -> Int[Tensor, "_ slot *axis"]:
    """Positions of all slots of a static cache; empty slots have the last position."""
    empty = slots - of_keys.shape[1]
    of_empty = of_keys[:, -1:].expand(-1, empty, *of_keys.shape[2:])
    return torch.cat([of_keys, of_empty], dim=1)


def _keys_before(
    by_cache: KeysByCache,
    owner: CacheOwner,
    marks: Int[Tensor, "sequence past"],
    rows: CallRows,
    of_rows: Int[Tensor, "_ row *axis"],
) -> CachedKeys | None:
    """The tokens before the rows, from the same cache or from a copy; None if unknown."""
    if not rows.past:
        return CachedKeys(marks, of_rows[:, :0])
    for earlier in (by_cache.get(owner), *by_cache.values()):
        if earlier is not None:
            again = earlier.found_again(marks, rows.past)
            if again is not None:
                return again
    return None


def _consecutive_keys(
    marks: Int[Tensor, "sequence past"],
    rows: CallRows,
    of_rows: Int[Tensor, "_ row *axis"],
) -> CachedKeys:
    """Tokens with consecutive positions before the rows, of which a cache dropped some."""
    count = torch.arange(-rows.past, 0, device=of_rows.device)
    axes = [1] * (of_rows.ndim - 2)
    positions = of_rows[:, :1] + count.view(1, -1, *axes)
    return CachedKeys(pad(marks, (rows.dropped, 0)), positions)


def places_in_sequence(
    positions: Int[Tensor, "_ key *axis"], dropped_keys: int = 0
) -> Int[Tensor, "_ key"]:
    """Index of each token in its sequence.

    In a packed row, a sequence starts at a token whose position is at most the position of the
    token before it, and at most the first position of the row.
    """
    index = torch.arange(positions.shape[1], device=positions.device) + dropped_keys
    not_after_first = positions <= positions[:, :1]
    not_after_previous = positions <= positions.roll(1, 1)
    starts = (not_after_first & not_after_previous)[..., None].flatten(2).all(-1)
    start = (index * starts).index_fill(1, index[:1] - dropped_keys, 0)
    return index - start.cummax(1).values


def key_marks(key: Tensor) -> Int[Tensor, "sequence key"]:
    """A number for each key, by which it is found again after rows of a cache have moved."""
    integers = getattr(torch, f"int{8 * key.element_size()}")
    return key.detach().view(integers).sum((1, 3), dtype=torch.int64)


def _check_consecutive(
    module: Any, rows: CallRows, of_rows: Int[Tensor, "_ row *axis"], mask: Any
) -> None:
    """Raise `UnsupportedModel` unless keys are consecutive, after padding on the left.

    A cache of another library, or one that the block filled, may have dropped or moved keys.
    """
    cache = cache_of(module)
    hint = "open the block before the cache is filled"
    other_library = _class_of_another_library(cache)
    if rounds_keys(module):
        seen = f"a {type(cache).__name__}, which rounds old keys"
        hint = "a cache that keeps every key, such as DynamicCache"
    elif cache is not None and cache in _cached_keys[id(module)]:
        seen = "keys that were dropped, moved or changed after the block added them"
        hint = "a cache that keeps every key, such as DynamicCache"
    elif other_library is not None:
        seen = f"a {other_library}, filled before the block"
    elif not _are_consecutive(module, rows, of_rows, mask):
        last = int(of_rows[:, 0].max())
        seen = f"{rows.past} keys, and a token at position {last}"
    else:
        return
    what = "ropelens cannot infer the positions of the keys in this cache."
    raise UnsupportedModel(what, seen=seen, hint=f"{hint}, or use_cache=False")


def _class_of_another_library(cache: Cache | None) -> str | None:
    """Name of the class of a cache, or of one of its layers, that is not of transformers."""
    if cache is None:
        return None
    for part in (cache, *cache.layers):
        if not type(part).__module__.startswith("transformers."):
            return type(part).__name__
    return None


def _are_consecutive(
    module: Any, rows: CallRows, of_rows: Int[Tensor, "_ row *axis"], mask: Any
) -> bool:
    """Whether the keys before the first row can have consecutive positions.

    The position of the first row is compared with the number of earlier tokens. Positions are
    smaller after padding on the left, which the mask shows.
    """
    first_position = of_rows[:, 0]
    if of_rows.ndim == 3:
        first_position = first_position.mT  # [axis, sequence]
    without_padding = first_position == rows.past
    visible = _visible_until_first_row(mask, rows, of_rows)
    if _hides_old_keys(module, rows.past):
        after_padding = _may_follow_padding(visible, first_position, rows.past)
    else:
        padding = visible.byte().argmax(1)
        after_padding = first_position + padding == rows.past
    return bool((without_padding | after_padding).all())


def _may_follow_padding(
    visible: Bool[Tensor, "_ key"],
    first_position: Int[Tensor, "*axis _"],
    past: int,
) -> Bool[Tensor, "*axis _"]:
    """Whether some amount of padding on the left explains a position.

    A window hides padding and old keys alike, so the mask does not show how much is padding.
    """
    hidden_only_on_the_left = (visible[:, :-1] <= visible[:, 1:]).all(1)
    # If a row sees more keys than its position allows, another sequence precedes in the row.
    sees_one_sequence = visible.sum(1) <= first_position + 1
    return hidden_only_on_the_left & sees_one_sequence & (first_position < past)


def _visible_until_first_row(
    mask: Any, rows: CallRows, of_rows: Int[Tensor, "_ row *axis"]
) -> Bool[Tensor, "_ key"]:
    """The keys up to the key of the first row that this row sees."""
    count = rows.keys.start + 1
    if mask is None:
        return of_rows.new_ones(1, count).bool()
    visible = mask.bool() if mask.ndim == 2 else shown(mask[:, 0, 0])
    return visible[:, :count]


def _hides_old_keys(module: Any, past: int) -> bool:
    """Whether a layer attends only to a window after `past` tokens."""
    types = getattr(module.config, "layer_types", None)
    is_full = types is not None and types[module.layer_idx] == "full_attention"
    return slides(module.config, past) and not is_full
