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
    return lambda arrays, random, draws: (
        draw_once(arrays, random) for _ in range(draws)
    )


def _other_pairs(arrays: Arrays, *_: object) -> Iterator[Arrays]:
    """The layers in an order that starts and ends with another pair of layers."""
    layers = np.arange(len(arrays[0]))
    for first, last in combinations(layers, 2):
        if last - first < len(layers) - 1:
            yield (arrays[0][[first, *np.delete(layers, [first, last]), last]],)


def _other_sets(arrays: Arrays, *_: object) -> Iterator[Arrays]:
    """The first array with each of its other sets (last axis) instead of set 0."""
    for index in range(1, arrays[0].shape[-1]):
        yield np.roll(arrays[0], -index, axis=-1), *arrays[1:]


# fmt: off
PLANES = Null(
    how="planes in a random order, the same in all layers and heads", min_size="8 planes",
    draw=_at_random(lambda x, random: (x[0][..., random.permutation(x[0].shape[-1])], *x[1:])),
    possible=lambda x: math.factorial(x.shape[-1]), over="layers")
LENGTHS = replace(PLANES, over="")
LAYERS = Null(
    how="layers in a random order", min_size="5 layers whose heads choose keys",
    draw=_at_random(lambda x, random: (x[0][random.permutation(len(x[0]))],)),
    possible=lambda x: math.factorial(int(np.isfinite(x).sum())))
PAIRS = Null(
    how="every other pair of layers as the first and last", min_size="10 layers",
    draw=_other_pairs, possible=lambda x: math.comb(len(x), 2), over="layers")
PARTNERS = Null(
    how="the mean query and key of another head of the layer",
    min_size="2 layers of 4 heads, 3 of 3, or 6 of 2",
    draw=_at_random(lambda x, random: (np.take_along_axis(
        x[0], random.random(x[0].shape[:2]).argsort(1)[..., None], 1),)),
    possible=lambda x: math.factorial(x.shape[1]) ** len(x), over="layers")
HEADS = Null(
    how="the heads of each layer in a random order",
    min_size="2 layers of 4 heads, 3 of 3, or 5 heads",
    draw=_at_random(lambda x, random: (random.permuted(x[0], axis=1), *x[1:])),
    possible=lambda x: math.factorial(x.shape[1]) ** len(x), over="layers")
ROLES = Null(
    how="queries, keys and values change places at random in each layer", min_size="4 layers",
    draw=_at_random(lambda x, random: tuple(random.permuted(np.stack(x), axis=0))),
    possible=lambda x: 3 ** len(x), over="layers")
SIGNS = Null(
    how="the curves of random layers turned upside down", min_size="6 layers",
    draw=_at_random(lambda x, random: (x[0] * random.choice([-1, 1], len(x[0])),)),
    possible=lambda x: 2 ** len(x), over="layers")
OFFSETS = Null(
    how="every other offset from 2 on", min_size="a context of 42",
    draw=lambda x, *_: ((x[0][..., [offset] * 2],) for offset in range(2, x[0].shape[-1])),
    possible=lambda x: x.shape[-1] - 2)
FREQUENCIES = Null(
    how="the frequencies of each kv head in a random order", min_size="39 surrogates",
    draw=_other_sets, possible=lambda x: math.inf, over="layers")
QUARTERS = Null(
    how="40 random sets with the same number of planes, the same in all layers",
    min_size="10 planes", draw=_other_sets, possible=lambda x: x.shape[-1] - 1,
    over="documents")
ORDERS = Null(
    how="the planes in 40 random orders, the same in all heads", min_size="5 planes",
    draw=_other_sets, possible=lambda x: x.shape[-1] - 1, over="layers")
EIGHTHS = replace(QUARTERS, min_size="16 planes")
SWAPPED_RUNS = replace(
    SIGNS, over="draws", min_size="6 draws",
    how="the two runs of each draw of random tokens change places at random")
TOKENS = Null(
    how="the head that attends most to each of 40 random sets of equally frequent words",
    min_size="a text with 40 such sets of words",
    draw=_other_sets, possible=lambda x: x.shape[-1] - 1)
# fmt: on
