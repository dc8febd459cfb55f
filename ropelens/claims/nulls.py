"""Nulls of claims: arrays drawn again, so that only chance and geometry matter."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np

Arrays = tuple[np.ndarray, ...]
Draw = Callable[[Arrays, np.random.Generator, int], Iterator[Arrays]]


@dataclass(frozen=True)
class Null:
    """A rule that draws the arrays of a claim again.

    `draw(arrays, random, draws)` yields `draws` drawn versions of the arrays, or all that
    exist. `possible` counts the different draws of the first array. A verdict needs 40, and
    `min_size` is the smallest model that has them. The interval of the number is a jackknife
    over the first axis of the arrays, named `over` ("": no interval).
    """

    how: str
    min_size: str
    draw: Draw
    possible: Callable[[np.ndarray], float]
    over: str = ""


def _at_random(draw_once: Callable[[Arrays, np.random.Generator], Arrays]) -> Draw:
    """The rule that draws the arrays by chance, as often as wanted."""

    def draw(
        arrays: Arrays, random: np.random.Generator, draws: int
    ) -> Iterator[Arrays]:
        for _ in range(draws):
            yield draw_once(arrays, random)

    return draw


# Draws by chance. Most change the first array and keep the others.


def _reorder_planes(arrays: Arrays, random: np.random.Generator) -> Arrays:
    first, *others = arrays  # [..., plane]
    order = random.permutation(first.shape[-1])
    return first[..., order], *others


def _reorder_layers(arrays: Arrays, random: np.random.Generator) -> Arrays:
    (by_layer,) = arrays
    return (by_layer[random.permutation(len(by_layer))],)


def _reorder_heads(arrays: Arrays, random: np.random.Generator) -> Arrays:
    first, *others = arrays  # [layer, head]
    return random.permuted(first, axis=1), *others


def _reorder_partners(arrays: Arrays, random: np.random.Generator) -> Arrays:
    (pairs,) = arrays  # [layer, head, head whose mean vectors are compared]
    order = random.random(pairs.shape[:2]).argsort(1)
    return (np.take_along_axis(pairs, order[..., None], 1),)


def _exchange_roles(arrays: Arrays, random: np.random.Generator) -> Arrays:
    return tuple(random.permuted(np.stack(arrays), axis=0))


def _change_signs(arrays: Arrays, random: np.random.Generator) -> Arrays:
    (by_unit,) = arrays
    return (by_unit * random.choice([-1, 1], len(by_unit)),)


# All other versions, in a fixed order


def _other_pairs(
    arrays: Arrays, random: np.random.Generator, draws: int
) -> Iterator[Arrays]:
    """The layers in an order that starts and ends with another pair of layers."""
    (by_layer,) = arrays
    layers = np.arange(len(by_layer))
    for first, last in combinations(layers, 2):
        if last - first < len(layers) - 1:
            between = np.delete(layers, [first, last])
            yield (by_layer[[first, *between, last]],)


def _other_offsets(
    arrays: Arrays, random: np.random.Generator, draws: int
) -> Iterator[Arrays]:
    """A later offset in place of the offsets 0 and 1."""
    (kernel,) = arrays  # [layer, head, offset]
    for offset in range(2, kernel.shape[-1]):
        yield (kernel[..., [offset, offset]],)


def _other_sets(
    arrays: Arrays, random: np.random.Generator, draws: int
) -> Iterator[Arrays]:
    """The first array with each of its other sets (last axis) instead of set 0."""
    first, *others = arrays
    for index in range(1, first.shape[-1]):
        yield np.roll(first, -index, axis=-1), *others


# Numbers of different draws


def _orders_of_planes(by_plane: np.ndarray) -> int:
    return math.factorial(by_plane.shape[-1])


def _orders_of_layers(by_layer: np.ndarray) -> int:
    return math.factorial(int(np.isfinite(by_layer).sum()))


def _orders_of_heads(by_head: np.ndarray) -> int:
    layers, heads = by_head.shape[:2]
    return math.factorial(heads) ** layers


def _pairs_of_layers(by_layer: np.ndarray) -> int:
    return math.comb(len(by_layer), 2)


def _roles_of_values(by_layer: np.ndarray) -> int:
    """Exchanges that change a number: exchanged queries and keys have the same mean."""
    return 3 ** len(by_layer)


def _signs(by_unit: np.ndarray) -> int:
    return 2 ** len(by_unit)


def _later_offsets(kernel: np.ndarray) -> int:
    return kernel.shape[-1] - 2


def _sets_but_one(by_set: np.ndarray) -> int:
    return by_set.shape[-1] - 1


def _unlimited(numbers: np.ndarray) -> float:
    return math.inf


PLANES = Null(
    how="planes in a random order, the same in all layers and heads",
    min_size="8 planes",
    draw=_at_random(_reorder_planes),
    possible=_orders_of_planes,
    over="layers",
)
LENGTHS = replace(PLANES, over="")
LAYERS = Null(
    how="layers in a random order",
    min_size="5 layers whose heads choose keys",
    draw=_at_random(_reorder_layers),
    possible=_orders_of_layers,
)
PAIRS = Null(
    how="every other pair of layers as the first and last",
    min_size="10 layers",
    draw=_other_pairs,
    possible=_pairs_of_layers,
    over="layers",
)
PARTNERS = Null(
    how="the mean query and key of another head of the layer",
    min_size="2 layers of 4 heads, 3 of 3, or 6 of 2",
    draw=_at_random(_reorder_partners),
    possible=_orders_of_heads,
    over="layers",
)
HEADS = Null(
    how="the heads of each layer in a random order",
    min_size="2 layers of 4 heads, 3 of 3, or 5 heads",
    draw=_at_random(_reorder_heads),
    possible=_orders_of_heads,
    over="layers",
)
ROLES = Null(
    how="queries, keys and values change places at random in each layer",
    min_size="4 layers",
    draw=_at_random(_exchange_roles),
    possible=_roles_of_values,
    over="layers",
)
SIGNS = Null(
    how="the curves of random layers turned upside down",
    min_size="6 layers",
    draw=_at_random(_change_signs),
    possible=_signs,
    over="layers",
)
OFFSETS = Null(
    how="every other offset from 2 on",
    min_size="a context of 42",
    draw=_other_offsets,
    possible=_later_offsets,
)
FREQUENCIES = Null(
    how="the frequencies of each kv head in a random order",
    min_size="39 surrogates",
    draw=_other_sets,
    possible=_unlimited,
    over="layers",
)
QUARTERS = Null(
    how="40 random sets with the same number of planes, the same in all layers",
    min_size="10 planes",
    draw=_other_sets,
    possible=_sets_but_one,
    over="documents",
)
ORDERS = Null(
    how="the planes in 40 random orders, the same in all heads",
    min_size="5 planes",
    draw=_other_sets,
    possible=_sets_but_one,
    over="layers",
)
EIGHTHS = replace(QUARTERS, min_size="16 planes")
SWAPPED_RUNS = replace(
    SIGNS,
    how="the two runs of each draw of random tokens change places at random",
    min_size="6 draws",
    over="draws",
)
TOKENS = Null(
    how="the head that attends most to each of 40 random sets of equally frequent words",
    min_size="a text with 40 such sets of words",
    draw=_other_sets,
    possible=_sets_but_one,
)
