"""Where the tokens of an attention call stand: rows and keys, on one axis or on several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from ropelens.errors import UnsupportedModel

_axes: dict[int, Tensor] = {}
"""Positions [_, row, axis] that a rotary module was last given, by the id of its attention."""

_passed: dict[int, Tensor] = {}
"""Positions of the keys that an edit met last, by the id of their attention module."""


def forget_positions(module: int) -> None:
    """Forget what is known of the attention module of this id."""
    _axes.pop(module, None)
    _passed.pop(module, None)


def turning_by_axes(model: nn.Module) -> list[nn.Module]:
    """The rotary modules that take positions on three axes (M-RoPE)."""
    return [module for module in model.modules() if "mrope_section" in vars(module)]


@contextmanager
def axes_noted(model: nn.Module, attention: list[nn.Module]) -> Iterator[None]:
    """Positions on three axes (Qwen2-VL and its kin) are known while the block runs.

    Rotary modules are given them, attention calls are not.
    """

    def note(rotary: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)][-1]
        if given.ndim == 3 and len(given) == 3 and not given.is_floating_point():
            _axes.update({id(module): given.movedim(0, -1) for module in attention})

    with ExitStack() as stack:
        for rotary in turning_by_axes(model):
            stack.callback(rotary.register_forward_pre_hook(note, with_kwargs=True).remove)
        yield


def positions(
    module: nn.Module, own: range, key: Tensor, given: Tensor | None, mask: Tensor | None
) -> tuple[Int[Tensor, "_ row *axis"], Int[Tensor, "_ key *axis"]]:
    """Positions of the rows and keys of a call, up to a shift that a sequence has in common.

    `own` are the keys of the rows, `given` the positions of all tokens that run; models to
    whose attention none are given count from 0. Keys in a cache stand where they passed the
    doorway; those from before it, one after the other. Raises `UnsupportedModel` where a cache
    holds more or fewer keys than that.
    """
    keys, past = key.shape[2], own.start
    given = _axes.get(id(module), given)
    if given is None or given.ndim == 1:
        index = torch.arange(keys, device=key.device)[None]
        return index[:, past : own.stop], index
    rows = given[:, -len(own) :]  # of all tokens, of which some rows are asked
    if given.shape[1] == keys:
        _passed[id(module)] = given
        return rows, given
    passed = _passed.get(id(module), rows[:, :0])[:, : None if past else 0]
    full = slides(module.config, past)
    if full and bool((passed[:, -1:] + 1 == rows[:, :1]).all()):
        passed = passed[:, -past:]
    if passed.shape[1] != past or len({len(passed), len(rows)} - {1}) > 1:
        count = torch.arange(-past, 0, device=rows.device).view(1, -1, *[1] * (rows.ndim - 2))
        passed = rows[:, :1] + count
        first = rows[:, 0] if rows.ndim == 2 else rows[:, 0].mT
        if not full and bool((first + _first_seen(mask, key) != past).any()):
            raise UnsupportedModel(
                "It cannot be told where the keys in this cache stand.",
                seen=f"{past} keys, and a token at position {int(rows[:, 0].max())}",
                attempt="open the block before the cache is filled, or use_cache=False",
            )
    batch = max(len(passed), len(rows))
    where = torch.cat([x.expand(batch, *x.shape[1:]) for x in (passed, rows)], dim=1)
    _passed[id(module)] = where
    empty = where[:, -1:].expand(-1, keys - own.stop, *where.shape[2:])  # in a static cache
    return rows, torch.cat([where, empty], dim=1)


def slides(config: Any, past: int) -> bool:
    """Whether a cache of so many keys may have dropped those before a window."""
    names = ("sliding_window", "attention_chunk_size")
    widths = [getattr(config, name, None) for name in names]
    return any(past + 1 >= width for width in widths if width is not None)


def _first_seen(mask: Tensor | None, key: Tensor) -> Int[Tensor, " _"]:
    """The first key that the last row of each sequence sees."""
    if mask is None:
        return torch.zeros(1, dtype=torch.long, device=key.device)
    if mask.dtype != torch.bool:  # added to scores, or of ones and zeros for each key
        mask = mask > (-1 if mask.ndim == 4 else 0)
    return (mask if mask.ndim == 2 else mask[:, 0, -1]).byte().argmax(1)
