"""Queries and keys that any runtime wrote as arrays: their names, shapes and positions."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor

from ropelens.errors import BadArgument, explained

ArraySource = Mapping[str, Any] | str | Path
HeadVectors = Float[Tensor, "head position coordinate"]

LAYOUT = (
    "q and k after RoPE, [position, head, coordinate] (q.3 is layer 3) or [layer, position, "
    "head, coordinate]; q_before and k_before of the same shapes; positions, with 0 and 1"
)
ARRAY_NAME = re.compile(r"(?P<side>[qk])(?P<before>_before)?(\.(?P<layer>\d+))?")


@dataclass(frozen=True)
class LayerVectors:
    """The queries (`side` "q") or keys ("k") of one layer, after and before RoPE."""

    layer: int
    side: str
    after: HeadVectors
    before: HeadVectors | None


@dataclass(frozen=True)
class RuntimeArrays:
    """The arrays of a runtime, layer by layer, at ascending positions."""

    positions: Int[Tensor, " position"]
    vectors: list[LayerVectors]

    @property
    def layers(self) -> int:
        """One more than the number of the last layer."""
        return 1 + max(vectors.layer for vectors in self.vectors)

    @property
    def last_position(self) -> int:
        return int(self.positions[-1])


def read_arrays(source: ArraySource) -> RuntimeArrays:
    """Read the arrays of a runtime; raise `BadArgument` if they do not have the `LAYOUT`."""
    with explained("The arrays cannot be read.", LAYOUT, error=BadArgument):
        written = _by_layer(_tensors(source))
        written.check()
    return written.in_order()


def _tensors(source: ArraySource) -> dict[str, Tensor]:
    if isinstance(source, Mapping):
        arrays = source
    elif Path(source).suffix == ".npz":
        arrays = np.load(source, allow_pickle=False)
    else:
        arrays = load_file(source)
    tensors = {}
    for name, array in arrays.items():
        if isinstance(array, Tensor):
            tensors[name] = array.detach().cpu()
        else:
            tensors[name] = torch.from_numpy(np.array(array))
    return tensors


def _by_layer(tensors: dict[str, Tensor]) -> "WrittenArrays":
    written = WrittenArrays(tensors, after={}, before={}, unknown=[])
    for name, array in tensors.items():
        match = ARRAY_NAME.fullmatch(name)
        if name == "positions":
            continue
        if match is None or not array.is_floating_point():
            written.unknown.append(name)
            continue
        arrays = written.before if match["before"] else written.after
        if array.ndim == 4:
            for layer, of_layer in enumerate(array):
                arrays[layer, match["side"]] = of_layer
        else:
            arrays[int(match["layer"] or 0), match["side"]] = array
    return written


@dataclass(frozen=True)
class WrittenArrays:
    """Arrays [position, head, coordinate] by layer and side, as a runtime wrote them."""

    tensors: dict[str, Tensor]
    after: dict[tuple[int, str], Tensor]
    before: dict[tuple[int, str], Tensor]
    unknown: list[str]  # names that are not read

    @property
    def positions(self) -> Tensor:
        """The given positions; without them, 0, 1, 2, ..."""
        if "positions" in self.tensors:
            return self.tensors["positions"].long()
        longest = max((len(array) for array in self.after.values()), default=0)
        return torch.arange(longest, device="cpu")

    def in_order(self) -> RuntimeArrays:
        """The checked arrays by layer, q before k, at ascending positions."""
        order = self.positions.argsort()
        vectors = []
        for layer, side in sorted(self.after, key=lambda key: (key[0], key[1] == "k")):
            after = self.after[layer, side]
            before = self.before.get((layer, side))
            vectors.append(
                LayerVectors(
                    layer=layer,
                    side=side,
                    after=after[order].transpose(0, 1),
                    before=None if before is None else before[order].transpose(0, 1),
                )
            )
        return RuntimeArrays(self.positions[order], vectors)

    def check(self) -> None:
        """Raise ValueError with the first fault and all shapes."""
        fault = next(self._faults(), None)
        if fault is None:
            return
        shapes = [
            f"{name} {[*array.shape]} of {array.dtype}"
            for name, array in self.tensors.items()
        ]
        first = f"positions {self.positions[:3].tolist()}, ..."
        raise ValueError(f"{fault}: {', '.join(shapes)}, {first}")

    def _faults(self) -> Iterator[str]:
        yield from self._faults_of_names()
        yield from self._faults_of_positions()
        for (layer, side), array in self.after.items():
            yield from self._faults_of_array(f"{side} of layer {layer}", array)
        for (layer, side), array in self.before.items():
            name = f"{side}_before of layer {layer}"
            yield from self._faults_of_array(name, array)
            after = self.after.get((layer, side))
            if after is None or after.shape != array.shape:
                yield f"{name} and {side} of this layer have different shapes"

    def _faults_of_names(self) -> Iterator[str]:
        if self.unknown:
            yield f"{self.unknown[0]} is not an array of floats that is called q or k"
        if not self.after:
            yield "there is neither q nor k"
        sides = {side for _, side in self.after}
        sides_before = {side for _, side in self.before}
        if sides_before and sides_before != sides:
            yield "only one of q and k is given before RoPE"

    def _faults_of_positions(self) -> Iterator[str]:
        steps = self.positions.sort().values.diff().tolist()
        if steps[:1] != [1]:
            yield "the first two positions are not consecutive numbers"
        if 0 in steps:
            yield "a position occurs twice"

    def _faults_of_array(self, name: str, array: Tensor) -> Iterator[str]:
        if array.ndim != 3:
            yield f"{name} does not have three axes"
        if len(array) != len(self.positions):
            yield f"{name} has {len(array)} positions"
        if not array.isfinite().all():
            yield f"{name} has numbers that are NaN or infinite"
