"""Where the tokens of an attention call stand: rows and keys, on one axis or on several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import repeat
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import CacheLayerMixin

from ropelens.config_facts import slides
from ropelens.errors import UnsupportedModel

_given: dict[int, Tensor] = {}
"""Positions [_, row *axis] that a rotary module was last given, by the id of its attention."""

_caches: dict[int, ref[Cache]] = {}
"""The cache that an attention module was last given, by its id."""

_passed: dict[int, WeakKeyDictionary[object, Tensor]] = {}
"""Positions of the tokens in each cache that an edit met, by the id of an attention module."""


def forget_positions(module: int) -> None:
    """Forget what is known of the attention module of this id."""
    for known in (_given, _caches, _passed):
        known.pop(module, None)


def _note_positions(
    attention: tuple[int, ...], rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)][-1]
    by_axis = given.ndim == 3 and len(given) == 3
    if (by_axis or given.ndim == 2) and not given.is_floating_point():
        _given.update(dict.fromkeys(attention, given.movedim(0, -1) if by_axis else given))


def _note_cache(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    _caches.pop(id(module), None)
    caches = [x for x in (*args, *kwargs.values()) if isinstance(x, Cache)]
    _caches.update({id(module): ref(cache) for cache in caches})


@contextmanager
def calls_noted(model: PreTrainedModel, attention: list[nn.Module]) -> Iterator[None]:
    """Positions that rotary modules are given, and caches, are known while the block runs.

    Attention calls are told no cache, no positions on three axes (Qwen2-VL and its kin), and
    in some families (Llama 4, Persimmon) none at all.
    """
    note = partial(_note_positions, tuple(map(id, attention)))
    rotary = [m for m in model.get_decoder().modules() if "inv_freq" in " ".join(m._buffers)]
    noted = [*zip(rotary, repeat(note)), *zip(attention, repeat(_note_cache))]
    with ExitStack() as stack:
        for module, hook in noted:
            stack.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


def _cache_of(module: Any) -> Cache | None:
    return _caches.get(id(module), lambda: None)()


def own_keys(module: Any, rows: int, keys: int) -> tuple[range, int]:
    """Which keys of a call are those of its rows, and how many a window dropped before them.

    A cache holds the past too, a static one also places that are still empty.
    """
    cache, held = _cache_of(module), 0
    if cache is not None:
        at = module.layer_idx  # a layer that shares keys holds none of its own
        own: list[Any] = [
            x for x in cache.layers[at : at + 1] if isinstance(x, CacheLayerMixin)
        ]
        held = next(filter(None, (int(x.get_seq_length()) for x in (*own, cache))), 0)
    last = min(held or keys, keys)
    return range(last - rows, last), max(held - keys, 0)


def positions(
    module: Any, own: range, gone: int, key: Tensor, given: Tensor | None, mask: Tensor | None
) -> tuple[Int[Tensor, "_ row *axis"], Int[Tensor, "_ key *axis"]]:
    """Positions of the rows and keys of a call, up to a shift that a sequence has in common.

    `own` are the keys of the rows, `gone` counts keys dropped before them, `given` are the
    positions of all tokens that run; where no module is told any, they count from 0. Keys
    in a cache stand where they passed the doorway; those from before it, one after the other.
    Raises `UnsupportedModel` where a cache holds more or fewer keys than that.
    """
    keys = key.shape[2]
    noted = _given.get(id(module))
    given = noted if given is None or (noted is not None and noted.ndim == 3) else given
    if given is None or given.ndim == 1:
        index = torch.arange(keys, device=key.device)[None]
        return index[:, own.start : own.stop], index
    rows = given[:, -len(own) :]  # of all tokens, of which some rows are asked
    cache = _cache_of(module)
    known = _passed.setdefault(id(module), WeakKeyDictionary())
    of: object = module if cache is None else cache
    if given.shape[1] == keys:
        known[of] = given
        return rows, given
    past = own.start + gone
    passed = known.get(of, rows[:, :0])[:, : None if past and cache is None else past]
    if passed.shape[1] != past or len({len(passed), len(rows)} - {1}) > 1:
        count = torch.arange(-past, 0, device=rows.device).view(1, -1, *[1] * (rows.ndim - 2))
        passed = rows[:, :1] + count
        first = rows[:, 0] if rows.ndim == 2 else rows[:, 0].mT
        kinds = getattr(module.config, "layer_types", None)
        full = kinds is not None and kinds[module.layer_idx] == "full_attention"
        window = slides(module.config, past) and not full  # which hides more than padding
        mask = key.new_ones(1, keys) if mask is None else mask
        seen = (mask.bool() if mask.ndim == 2 else shown(mask[:, 0, 0]))[:, : own.start + 1]
        left = (seen[:, :-1] <= seen[:, 1:]).all(1)  # is all that is hidden
        own_text = seen.sum(1) <= first + 1  # else others stand before it in its row
        hidden = seen.byte().argmax(1)
        padded = left & own_text & (first < past) if window else first + hidden == past
        if not bool((padded | (first == past)).all()):
            raise UnsupportedModel(
                "It cannot be told where the keys in this cache stand.",
                seen=f"{past} keys, and a token at position {int(rows[:, 0].max())}",
                hint="open the block before the cache is filled, or use_cache=False",
            )
    batch = max(len(passed), len(rows))
    where = torch.cat([x.expand(batch, *x.shape[1:]) for x in (passed, rows)], dim=1)
    known[of], where = where, where[:, gone:]
    empty = where[:, -1:].expand(-1, keys - own.stop, *where.shape[2:])  # in a static cache
    return rows, torch.cat([where, empty], dim=1)


def shown(mask: Tensor) -> Bool[Tensor, ...]:
    """Which keys a mask shows, whether it says so or is added to scores."""
    return mask if mask.dtype == torch.bool else mask > -1
