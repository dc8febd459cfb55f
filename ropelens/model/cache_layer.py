"""A layer of a key-value cache that is allocated once."""

from typing import Any

from torch import Tensor
from transformers.cache_utils import DynamicLayer


class PreallocatedLayer(DynamicLayer):
    """Keys and values of one layer, written into memory that holds all `tokens`.

    The cache of transformers copies all keys for every chunk, which fragments memory.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        self.tokens = tokens

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        new = (key_states, value_states)
        if not self.is_initialized:
            self.lazy_initialization(*new)
            self.room = [x.new_empty((*x.shape[:2], self.tokens, x.shape[3])) for x in new]
        begin = self.get_seq_length()
        end = begin + key_states.shape[2]
        for room, states in zip(self.room, new, strict=True):
            room[:, :, begin:end] = states
        self.keys, self.values = (room[:, :, :end] for room in self.room)
        return self.keys, self.values
