"""A key-value cache that has its room from the start, for sequences that run in chunks."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer


def cache_with_room(tokens: int) -> DynamicCache:
    """A cache of `tokens` tokens, into whose room each chunk is written.

    transformers' own is copied for every chunk, and leaves behind what it was, each time a
    little larger, in holes that nothing more fits into.
    """
    cache = DynamicCache()
    # Whatever makes a layer will do.
    cache.layer_class_to_replicate = partial(_LayerWithRoom, tokens)  # type: ignore[assignment]
    return cache


class _LayerWithRoom(DynamicLayer):
    """Keys and values of one layer: the part of its room that is filled."""

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        self.room = [
            states.new_empty((*states.shape[:-2], self.tokens, states.shape[-1]))
            for states in (key_states, value_states)
        ]

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        first = self.get_seq_length()
        end = first + key_states.shape[-2]
        for room, states in zip(self.room, (key_states, value_states), strict=True):
            room[..., first:end, :] = states
        self.keys, self.values = (room[..., :end, :] for room in self.room)
        return self.keys, self.values
