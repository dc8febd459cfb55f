"""Positions of the rows and keys of an attention call, also with a cache and with M-RoPE.

Attention calls do not receive the cache. They do not receive positions on three axes (Qwen2-VL
and similar families), and some families (Llama 4, Persimmon) pass them no positions at all.
Therefore hooks record what rotary modules and attention modules receive.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import repeat
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Int
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from ropelens.config_facts import slides
from ropelens.errors import UnsupportedModel
from ropelens.model.masks import shown

# By the id of an attention module: positions [_, row *axis] in the last call of its rotary
# module, cache of its last call, and positions of the tokens in each cache.
_rotary_positions: dict[int, Tensor] = {}
_caches: dict[int, ref[Cache]] = {}
_cached_positions: dict[int, WeakKeyDictionary[object, Tensor]] = {}


def forget_positions(module: int) -> None:
    """Forget the positions and the cache of the attention module with this id."""
    for by_module in (_rotary_positions, _caches, _cached_positions):
        by_module.pop(module, None)


def _record_positions(
    attention: tuple[int, ...], rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    positions = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)][-1]
    by_axis = positions.ndim == 3 and len(positions) == 3
    if (by_axis or positions.ndim == 2) and not positions.is_floating_point():
        positions = positions.movedim(0, -1) if by_axis else positions
        _rotary_positions.update(dict.fromkeys(attention, positions))


def _record_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _caches.pop(id(module), None)
    caches = [x for x in (*args, *kwargs.values()) if isinstance(x, Cache)]
    _caches.update({id(module): ref(cache) for cache in caches})


@contextmanager
def positions_recorded(model: PreTrainedModel, attention: list[nn.Module]) -> Iterator[None]:
    """Record the positions and caches of every call while the block runs."""
    record = partial(_record_positions, tuple(map(id, attention)))
    rotary = [m for m in model.get_decoder().modules() if "inv_freq" in " ".join(m._buffers)]
    hooks = [*zip(rotary, repeat(record)), *zip(attention, repeat(_record_cache))]
    with ExitStack() as stack:
        for module, hook in hooks:
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def _cache_of(module: Any) -> Cache | None:
    return _caches.get(id(module), lambda: None)()


def row_keys(module: Any, rows: int, keys: int) -> tuple[range, int]:
    """Keys of a call that belong to its rows, and the number of keys dropped before them.

    A cache also holds earlier keys, and a static cache has empty slots at the end.
    """
    cache, length = _cache_of(module), 0
    if cache is not None:
        layer = module.layer_idx  # the cache has no keys of a layer that shares keys
        layers: Any = [x for x in cache.layers[layer:][:1] if isinstance(x, CacheLayerMixin)]
        length = next(filter(None, (int(x.get_seq_length()) for x in (*layers, cache))), 0)
    last = min(length or keys, keys)
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

    `rows` are the keys of the rows, and `dropped_keys` counts the keys dropped before the first
    key. `position_ids` has the positions of all tokens that run; without any positions, tokens
    count from 0. Keys in a cache keep their positions. Keys that were added before the block
    get consecutive positions. Raises `UnsupportedModel` if their number contradicts this.
    """
    keys, recorded = key.shape[2], _rotary_positions.get(id(module))
    if position_ids is None or (recorded is not None and recorded.ndim == 3):
        position_ids = recorded
    if position_ids is None or position_ids.ndim == 1:
        index = torch.arange(keys, device=key.device)[None]
        return index[:, rows.start : rows.stop], index
    of_rows = position_ids[:, -len(rows) :]  # attention may run on only the last tokens
    cache = _cache_of(module)
    by_cache = _cached_positions.setdefault(id(module), WeakKeyDictionary())
    owner: object = module if cache is None else cache
    if position_ids.shape[1] == keys:
        by_cache[owner] = position_ids
        return of_rows, position_ids
    past = rows.start + dropped_keys
    of_past = by_cache.get(owner, of_rows[:, :0])
    of_past = of_past[:, : None if past and cache is None else past]
    if of_past.shape[1] != past or len({len(of_past), len(of_rows)} - {1}) > 1:
        count = torch.arange(-past, 0, device=of_rows.device)
        of_past = of_rows[:, :1] + count.view(1, -1, *[1] * (of_rows.ndim - 2))
        _check_consecutive(module, rows, past, of_rows, mask)
    batch = max(len(of_past), len(of_rows))
    of_all = torch.cat([x.expand(batch, *x.shape[1:]) for x in (of_past, of_rows)], dim=1)
    by_cache[owner], of_keys = of_all, of_all[:, dropped_keys:]
    empty = of_keys[:, -1:].expand(-1, keys - rows.stop, *of_keys.shape[2:])  # static cache
    return of_rows, torch.cat([of_keys, empty], dim=1)


def _check_consecutive(
    module: Any, rows: range, past: int, of_rows: Int[Tensor, "_ row *axis"], mask: Any
) -> None:
    """Raise `UnsupportedModel` unless the keys of the cache have consecutive positions.

    The first position must be the number of keys before it, less the padding on the left.
    """
    first = of_rows[:, 0] if of_rows.ndim == 2 else of_rows[:, 0].mT
    types = getattr(module.config, "layer_types", None)
    full = types is not None and types[module.layer_idx] == "full_attention"
    window = slides(module.config, past) and not full  # the mask of a window hides more keys
    mask = of_rows.new_ones(1, rows.start + 1) if mask is None else mask
    visible = mask.bool() if mask.ndim == 2 else shown(mask[:, 0, 0])
    visible = visible[:, : rows.start + 1]
    only_left = (visible[:, :-1] <= visible[:, 1:]).all(1)
    unpacked = visible.sum(1) <= first + 1  # no other sequence precedes this one in its row
    hidden = visible.byte().argmax(1)
    padded = only_left & unpacked & (first < past) if window else first + hidden == past
    if not bool((padded | (first == past)).all()):
        raise UnsupportedModel(
            "ropelens cannot infer the positions of the keys in this cache.",
            seen=f"{past} keys, and a token at position {int(of_rows[:, 0].max())}",
            hint="open the block before the cache is filled, or use_cache=False",
        )
