"""The arrays that claims are about, and the nulls that draw them anew."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import xarray as xr
from jaxtyping import Float
from scipy import stats

from ropelens.budget.labels import Thresholds

SINKS = 0.05  # share of the bits below which a model has no sinks to speak of
MASSIVE = 5 / math.sqrt(2)  # times the mean length: of a plane with one value 5 times the mean
BAND_RATIO = 3.657  # Oka et al. 2026: the band is at plane (D/2) log_base(context / 3.657)

Arrays = tuple[np.ndarray, ...]
# Arrays drawn anew, so many times; or every one that there is.
Draw = Callable[[Arrays, np.random.Generator, int], Iterator[Arrays]]


@dataclass(frozen=True)
class Null:
    """How arrays are drawn anew where the claim says nothing, and what a test of it takes.

    `possible` counts the different draws of the first array: fewer than 40 decide nothing.
    `over`: what the first axis of the arrays is, of which the interval leaves out each in turn.
    """

    how: str
    takes: str
    draw: Draw
    possible: Callable[[np.ndarray], int]
    over: str = ""


def _at_random(one: Callable[[Arrays, np.random.Generator], Arrays]) -> Draw:
    return lambda arrays, random, draws: (one(arrays, random) for _ in range(draws))


def _pairs(arrays: Arrays, *_: object) -> Iterator[Arrays]:
    layers = np.arange(len(arrays[0]))
    for first, last in combinations(layers, 2):
        if last - first < len(layers) - 1:
            yield (arrays[0][[first, *np.delete(layers, [first, last]), last]],)


def _sets(arrays: Arrays, *_: object) -> Iterator[Arrays]:
    for number in range(1, arrays[0].shape[-1]):
        yield np.roll(arrays[0], -number, axis=-1), *arrays[1:]


# fmt: off
PLANES = Null("planes in a random order, the same in all layers and heads", "8 planes",
    _at_random(lambda x, random: (x[0][..., random.permutation(x[0].shape[-1])], *x[1:])),
    lambda x: math.factorial(x.shape[-1]), "layers")
LAYERS = Null("layers in a random order", "5 layers whose heads choose keys",
    _at_random(lambda x, random: (x[0][random.permutation(len(x[0]))],)),
    lambda x: math.factorial(len(x)))
PAIRS = Null("every other pair of layers as the first and last",
    "10 layers", _pairs, lambda x: math.comb(len(x), 2), "layers")
PARTNERS = Null("the mean query and key of another head of the layer",
    "2 layers of 4 heads, 3 of 3, or 6 of 2",
    _at_random(lambda x, random: (np.take_along_axis(
        x[0], random.random(x[0].shape[:2]).argsort(1)[..., None], 1),)),
    lambda x: math.factorial(x.shape[1]) ** len(x), "layers")
ROLES = Null("queries, keys and values change places at random in each layer", "4 layers",
    _at_random(lambda x, random: tuple(random.permuted(np.stack(x), axis=0))),
    lambda x: 3 ** len(x), "layers")
SIGNS = Null("the curves of each layer turned over at random", "6 layers",
    _at_random(lambda x, random: (x[0] * random.choice([-1, 1], len(x[0])),)),
    lambda x: 2 ** len(x), "layers")
OFFSETS = Null("every other offset from 2 on", "a context of 42",
    lambda x, *_: ((x[0][..., [offset] * 2],) for offset in range(2, x[0].shape[-1])),
    lambda x: x.shape[-1] - 2)
FREQUENCIES = Null("the frequencies of each kv head in a random order", "39 surrogates",
    _sets, len, "layers")
QUARTERS = Null("40 random sets of as many planes, the same in all layers",
    "10 planes", _sets, lambda x: x.shape[-1] - 1, "documents")
EIGHTHS = replace(QUARTERS, takes="16 planes")
DRAWS = replace(SIGNS, over="draws", takes="6 draws",
    how="the two runs of each draw of random tokens change places at random")
TOKENS = Null("the head that attends most to each of 40 random sets of words, as frequent",
    "a text with 40 such sets of words", _sets, lambda x: x.shape[-1] - 1)
# fmt: on


def claim_arrays(profile: xr.Dataset) -> dict[str, Float[np.ndarray, "layer ..."]]:
    """The arrays of the layers and planes that rotate, by the names in `Claim.arrays`.

    NaN where the profile has no such numbers.
    """
    wavelength = profile["wavelength"].transpose("layer", "frequency").values
    turns = np.isfinite(wavelength)
    layers = np.flatnonzero(turns.any(1))
    planes = np.flatnonzero(turns[layers].all(0))
    wavelength = wavelength[np.ix_(layers, planes)]
    of = profile.isel(layer=layers)

    def by_plane(name: str) -> np.ndarray:
        return of[name].isel(frequency=planes).values

    context, trained = (int(profile.attrs[n]) for n in ("context", "trained_context"))
    wanted = np.log(2 * np.pi * trained / BAND_RATIO)
    q, k, values, coherence = map(by_plane, ("q_norm", "k_norm", "v_norm", "q_coherence"))
    kernel, predicted = of["kernel"].values, of["predicted_kernel"].values
    single = (profile["offset_stop"] - profile["offset_start"] == 1).values
    chooses = of["total_bits"] >= Thresholds.diffuse
    sinks = float(of["sink_bits"].sum()) >= SINKS * float(of["total_bits"].sum())
    fitted = np.log(np.where(kernel > 0, kernel, np.nan))
    agreement = _correlate(predicted[:, :, None], fitted[:, None])
    agreement = np.where(chooses.values[:, None], agreement, np.nan)
    near = np.broadcast_to(-np.arange(predicted.shape[-1], dtype=float), predicted.shape)
    nearness = _correlate(stats.rankdata(predicted, axis=-1), near)
    rest, none = of["total_bits"] - of["sink_bits"], np.full(wavelength.shape, np.nan)
    counts = chooses & (rest > 0)
    of_planes, massive = {}, {}
    for name, x in (("q", q), ("k", k), ("v", values)):
        mean = x.mean(-1, keepdims=True)
        mean = np.where(mean > 0, mean, np.nan)  # a head may have no values, or be pruned
        massive[name] = x > MASSIVE * mean
        of_planes[f"{name}_uneven"] = _mean(x.std(-1) / mean[..., 0])
        of_planes[f"{name}_count"] = _mean(massive[name].sum(-1) + 0 * mean[..., 0])
    return of_planes | {
        "massive": (massive["q"].sum(1) + massive["k"].sum(1)).astype(float),
        "length": np.nanmean(q, 1) * np.nanmean(k, 1),
        "band": np.array([np.interp(wanted, np.log(w), np.arange(len(w))) for w in wavelength]),
        "slow": (wavelength > context).astype(float),
        "sink_push": np.nanmean(by_plane("selectivity_sink").clip(min=0), 1) if sinks else none,
        "positional": (of["position_bits"] / rest).where(counts).median("head").values,
        "q_coherence": coherence,
        "q_norm": q,
        "agreement": agreement * np.abs(agreement),
        "nearness": np.nanmean(nearness, 1),
        "kernel": kernel[..., single],
    }


def _mean(by_head: Float[np.ndarray, "layer head"]) -> Float[np.ndarray, " layer"]:
    """Mean over the heads that a layer has; NaN without any."""
    known = np.isfinite(by_head).sum(1)
    return np.nansum(by_head, 1) / np.where(known, known, np.nan)


def _correlate(
    x: Float[np.ndarray, "*batch point"], y: Float[np.ndarray, "*other point"]
) -> Float[np.ndarray, "*both"]:
    """Pearson's correlation along the last axis, over the points that both have."""
    x, y = (np.where(np.isfinite(x + y), of, np.nan) for of in (x, y))
    with np.errstate(invalid="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # no point at all: NaN
        x, y = (of - np.nanmean(of, axis=-1, keepdims=True) for of in (x, y))
        return np.nansum(x * y, -1) / np.sqrt(np.nansum(x * x, -1) * np.nansum(y * y, -1))
