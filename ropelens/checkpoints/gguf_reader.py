"""A reader of GGUF files that parses long lists of tokens quickly. It needs gguf."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np

ValueType = gguf.GGUFValueType


@dataclass(frozen=True)
class ListElements:
    """The elements of a list in the bytes of a file, and the offset of the byte after them."""

    elements: list[np.ndarray]
    end: int


class FastReader(gguf.GGUFReader):
    """GGUF reader with plain arrays, whose slices are quick, and with quick lists of tokens.

    The original makes several slices of a memory map for each token.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(value, np.memmap):
            value = np.asarray(value)
        super().__setattr__(name, value)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[np.ndarray], list[int], list[ValueType]]:
        """Size, parts, indices of values among the parts, and types; a string is one part."""
        swapped = self.byte_order == "S"
        if raw_type != ValueType.ARRAY or swapped:
            return super()._get_field_parts(orig_offs, raw_type)
        head = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
        element_type = ValueType(head[0][0])
        count = int(head[1][0])
        start = orig_offs + 12
        if element_type == ValueType.STRING:
            read = self._strings(start, count)
        elif element_type in self.gguf_scalar_to_np:
            dtype = self.gguf_scalar_to_np[element_type]
            read = self._numbers(start, count, dtype)
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        if len(read.elements) < count or read.end > len(self.data):
            raise ValueError("the file ends within a list")
        parts = [*head, *read.elements]
        first = len(head)
        indices = list(range(first, len(parts)))
        return read.end - orig_offs, parts, indices, [ValueType.ARRAY, element_type]

    def _strings(self, start: int, count: int) -> ListElements:
        """Strings, each after its length in 8 bytes, as far as the file has them."""
        file = self.data.data
        elements: list[np.ndarray] = []
        end = start
        while len(elements) < count and end < len(file):
            begin = end + 8
            end = begin + int.from_bytes(file[end:begin], sys.byteorder)
            elements.append(self.data[begin:end])
        return ListElements(elements, end)

    def _numbers(self, start: int, count: int, dtype: Any) -> ListElements:
        end = start + np.dtype(dtype).itemsize * count
        if end > len(self.data):
            return ListElements([], end)
        numbers = self._get(start, dtype, count)
        return ListElements(list(numbers[:, None]), end)


def parse_value(value: np.ndarray, types: Sequence[int]) -> Any:
    """A value of a GGUF file, by the last of its `types`; the original parses bytes singly."""
    if types[-1] == ValueType.STRING:
        return value.tobytes().decode()
    return value.item()
