"""Positions of the rows and keys of an attention call, also with a cache and with M-RoPE.

Attention calls do not receive the cache. They do not receive positions on three axes (Qwen2-VL
and similar families), and some families (Llama 4, Persimmon) pass them no positions at all.
Therefore hooks record what rotary modules and attention modules receive.
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import repeat
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Int
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from ropelens.config_facts import slides
from ropelens.errors import UnsupportedModel
from ropelens.model.masks import shown


class CachedKeys(NamedTuple):
    """Marks and positions of all tokens in a cache, in the order in which they were added."""

    marks: Int[Tensor, "sequence token"]
    positions: Int[Tensor, "_ token *axis"]


_cached_keys: dict[int, WeakKeyDictionary[object, CachedKeys]] = {}
"""By the id of an attention module: the keys in each cache."""

# In this context, by the id of an attention module: positions [_, row *axis] in the last call
# of its rotary module, and the cache of its last call.
_rotary_positions = ContextVar[dict[int, Any]]("_rotary_positions")
_caches = ContextVar[dict[int, Any]]("_caches")


def forget_positions(modules: Collection[int]) -> None:
    """Forget the positions and caches of the attention modules with these ids."""
    for module in modules:
        _cached_keys.pop(module, None)
    for recorded in (_rotary_positions, _caches):
        values = recorded.get({})
        recorded.set({key: values[key] for key in values.keys() - modules})


def _record_positions(
    attention: tuple[int, ...],
    rotary: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    positions = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)][-1]
    by_axis = positions.ndim == 3 and len(positions) == 3
    if (by_axis or positions.ndim == 2) and not positions.is_floating_point():
        positions = positions.movedim(0, -1) if by_axis else positions
        _rotary_positions.set(
            _rotary_positions.get({}) | dict.fromkeys(attention, positions)
        )


def _record_cache(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    caches = [x for x in (*args, *kwargs.values()) if isinstance(x, Cache)]
    others = {key: cache for key, cache in _caches.get({}).items() if key != id(module)}
    _caches.set(others | {id(module): ref(cache) for cache in caches})


@contextmanager
def positions_recorded(
    model: PreTrainedModel, attention: list[nn.Module]
) -> Iterator[None]:
    """Record the positions and caches of every call while the block runs."""
    record = partial(_record_positions, tuple(map(id, attention)))
    rotary = [
        m for m in model.get_decoder().modules() if "inv_freq" in " ".join(m._buffers)
    ]
    with ExitStack() as stack:
        for module, hook in (
            *zip(rotary, repeat(record)),
            *zip(attention, repeat(_record_cache)),
        ):
            stack.enter_context(
                module.register_forward_pre_hook(hook, with_kwargs=True)
            )
        yield


def cache_of(module: Any) -> Cache | None:
    return _caches.get({}).get(id(module), lambda: None)()


def row_keys(module: Any, rows: int, keys: int) -> tuple[range, int]:
    """Keys of a call that belong to its rows, and the number of keys dropped before them."""
    cache, length = cache_of(module), 0
    if cache is not None:
        layer = module.layer_idx  # the cache has no keys of a layer that shares keys
        layers: Any = [
            x for x in cache.layers[layer:][:1] if isinstance(x, CacheLayerMixin)
        ]
        length = next(
            filter(None, (int(x.get_seq_length()) for x in (*layers, cache))), 0
        )
        static = any(isinstance(x, StaticLayer) for x in cache.layers)
    last = min(length, keys) if length and static else keys
    return range(last - rows, last), max(length - keys, 0)


def positions(
    module: Any,
    rows: range,
    dropped_keys: int,
    key: Tensor,
    position_ids: Tensor | None,
    mask: Tensor | None,
) -> tuple[Int[Tensor, "_ row *axis"], Int[Tensor, "_ key *axis"]]:
    """Positions of the rows and keys of a call, up to a common shift of each sequence.

    `position_ids` has the positions of all tokens that run; without any positions, tokens count
    from 0. Keys in a cache keep their positions, and keys from before the block get consecutive
    positions.

    Raises `UnsupportedModel` if the cache contradicts this.
    """
    keys, recorded = key.shape[2], _rotary_positions.get({}).get(id(module))
    if position_ids is None or (recorded is not None and recorded.ndim == 3):
        position_ids = recorded
    if position_ids is None or position_ids.ndim == 1:
        index = torch.arange(keys, device=key.device)[None]
        return index[:, rows.start : rows.stop], index
    of_rows = position_ids[:, -len(rows) :]  # attention may run on only the last tokens
    cache = cache_of(module)
    by_cache = _cached_keys.setdefault(id(module), WeakKeyDictionary())
    owner: object = module if cache is None else cache
    marks = key_marks(key[:, :, : rows.stop])
    if position_ids.shape[1] == keys:
        by_cache[owner] = CachedKeys(marks, position_ids)
        return of_rows, position_ids
    past, new = rows.start + dropped_keys, marks[:, rows.start :]
    earlier = [x for x in (by_cache.get(owner), *by_cache.values()) if x is not None]
    known = (_continued(x, marks[:, : rows.start], past) for x in earlier)
    nothing = CachedKeys(new[:, :0], of_rows[:, :0])
    before = next(filter(None, known), None) if past else nothing
    if before is None:
        _check_consecutive(module, rows, past, of_rows, mask, by_cache)
        count = torch.arange(-past, 0, device=of_rows.device)
        of_past = of_rows[:, :1] + count.view(1, -1, *[1] * (of_rows.ndim - 2))
        before = CachedKeys(pad(marks[:, : rows.start], (dropped_keys, 0)), of_past)
    batch = max(len(before.positions), len(of_rows))
    both = (x.expand(batch, *x.shape[1:]) for x in (before.positions, of_rows))
    of_all = torch.cat([*both], dim=1)
    by_cache[owner] = CachedKeys(torch.cat([before.marks, new], dim=1), of_all)
    of_keys = of_all[:, dropped_keys:]
    empty = of_keys[:, -1:].expand(
        -1, keys - rows.stop, *of_keys.shape[2:]
    )  # static cache
    return of_rows, torch.cat([of_keys, empty], dim=1)


def places_in_sequence(
    positions: Int[Tensor, "_ key *axis"], dropped_keys: int = 0
) -> Int[Tensor, "_ key"]:
    """Index of each token in its sequence.

    In a packed row, a sequence starts at a token whose position is at most the position of the
    token before it, and at most the first position of the row.
    """
    index = torch.arange(positions.shape[1], device=positions.device) + dropped_keys
    starts = (positions <= positions[:, :1]) & (positions <= positions.roll(1, 1))
    starts = index * starts[..., None].flatten(2).all(-1)
    return index - starts.index_fill(1, index[:1] - dropped_keys, 0).cummax(1).values


def key_marks(key: Tensor) -> Int[Tensor, "sequence key"]:
    """A number for each key, by which it is found again after rows of a cache have moved."""
    integers = getattr(torch, f"int{8 * key.element_size()}")
    return key.detach().view(integers).sum((1, 3), dtype=torch.int64)


def _continued(
    earlier: CachedKeys, marks: Int[Tensor, "sequence key"], past: int
) -> CachedKeys | None:
    """Rows of `earlier` whose first `past` tokens end with keys that have these `marks`."""
    old, row = earlier.marks[:, past - marks.shape[1] : past], torch.arange(len(marks))
    if not torch.equal(
        old, marks
    ):  # rows were selected or cropped, or other keys were added
        if old.shape[1] != marks.shape[1]:
            return None
        same = (marks[:, None] == old).all(-1)
        if not same.any(1).all():
            return None
        row = same.byte().argmax(1)
    of_row = (
        earlier.positions if len(earlier.positions) == 1 else earlier.positions[row]
    )
    return CachedKeys(earlier.marks[row, :past], of_row[:, :past])


def _check_consecutive(
    module: Any,
    rows: range,
    past: int,
    of_rows: Int[Tensor, "_ row *axis"],
    mask: Any,
    by_cache: Collection[object],
) -> None:
    """Raise `UnsupportedModel` unless keys are consecutive, after padding on the left.

    A cache of another library, or one that the block filled, may have dropped or moved keys.
    """
    cache, hint = cache_of(module), "open the block before the cache is filled"
    parts = () if cache is None else (cache, *cache.layers)
    others = [x for x in parts if not type(x).__module__.startswith("transformers.")]
    first = of_rows[:, 0] if of_rows.ndim == 2 else of_rows[:, 0].mT
    types = getattr(module.config, "layer_types", None)
    full = types is not None and types[module.layer_idx] == "full_attention"
    window = (
        slides(module.config, past) and not full
    )  # the mask of a window hides more keys
    mask = of_rows.new_ones(1, rows.start + 1) if mask is None else mask
    visible = mask.bool() if mask.ndim == 2 else shown(mask[:, 0, 0])
    visible = visible[:, : rows.start + 1]
    only_left = (visible[:, :-1] <= visible[:, 1:]).all(1)
    unpacked = (
        visible.sum(1) <= first + 1
    )  # no other sequence precedes this one in its row
    hidden = visible.byte().argmax(1)
    padded = only_left & unpacked & (first < past) if window else first + hidden == past
    if cache is not None and cache in by_cache:
        seen = "keys that were dropped, moved or changed after the block added them"
        hint = "a cache that keeps every key, such as DynamicCache"
    elif others:
        seen = f"a {type(others[0]).__name__}, filled before the block"
    elif not bool((padded | (first == past)).all()):
        seen = f"{past} keys, and a token at position {int(of_rows[:, 0].max())}"
    else:
        return
    what = "ropelens cannot infer the positions of the keys in this cache."
    raise UnsupportedModel(what, seen=seen, hint=f"{hint}, or use_cache=False")
