"""Excerpts of the payload: tokens, attention, and the queries and keys of heads.

The script computes the attention of most heads from their queries and keys, which takes less
space than the weights.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xarray as xr
from jaxtyping import Bool, Float, Int
from scipy.special import softmax

from ropelens.figures.attention import excerpt_tokens
from ropelens.figures.formats import plotly_text, visible_token
from ropelens.figures.inputs import kv_heads
from ropelens.report.render import packed

FINE_CELLS = 700_000  # a page with more attention weights stores whole percents
LARGEST_MISS = 0.01  # accepted error of an attention weight that the script computes
STEPS = 2**13 - 1  # from 0 to the largest coordinate: finer there than a half float
LARGEST_STEP = 2**15 - 1  # in 16 bits
FINE_NUMBERS = 400_000  # a page with more queries and keys rounds them more coarsely
SCORE_NOISE = 0.008  # nats: deviation of a score of such a page, due to rounding

OfHeads = Float[np.ndarray, "layer head position coordinate"]
StepSizes = Float[np.ndarray, "layer head coordinate"]


def tokens_of(profile: xr.Dataset) -> list[list[str]]:
    """The tokens of each excerpt."""
    excerpts = range(profile.sizes["excerpt"])
    return [excerpt_tokens(profile, number) for number in excerpts]


def excerpt_payload(profile: xr.Dataset) -> dict[str, Any]:
    """Excerpts for the script, and the rotation of each layer.

    `live[layer][head]` is True if the script can compute the attention of a head from its
    queries and keys, with an error of at most `LARGEST_MISS`. Otherwise (without queries, or
    with a soft-cap, a window or a sink) it gets a byte for each visible weight, ordered by key
    (`WeightCoding`).
    """
    rotation = LayerRotations.of(profile)
    live = np.ones(rotation.reads.shape, bool)
    excerpts = []
    measured = []
    for number, tokens in enumerate(tokens_of(profile)):
        vectors = ExcerptVectors.of(profile.isel(excerpt=number), len(tokens))
        steps = CoarseSteps(None, None)
        numbers = profile.sizes["excerpt"] * vectors.query[vectors.known].size
        if numbers > FINE_NUMBERS:
            steps = coarse_step_sizes(vectors, rotation)
        read = vectors.read_keys(rotation.reads)
        query = quantize(vectors.query, vectors.known, steps.of_query)
        key = quantize(vectors.key, read, steps.of_key)
        live &= vectors.known
        for layer, head in np.argwhere(live):
            scores = rotation.scores(query.values, key.values, layer, head)
            miss = vectors.largest_miss(scores, layer, head)
            live[layer, head] = miss <= LARGEST_MISS
        excerpt = _named_tokens(tokens)
        excerpt["query"] = query.payload
        excerpt["key"] = key.payload
        excerpt["lead"] = _lead(profile.isel(excerpt=number), vectors)
        excerpts.append(excerpt)
        measured.append(vectors.visible_weights())
    given = [np.nan_to_num(weights[~live]).clip(0, 1) for weights in measured]
    coding = WeightCoding.of_size(sum(cells.size for cells in given))
    for excerpt, cells in zip(excerpts, given, strict=True):
        excerpt["attention"] = packed(coding.bytes_of(cells))
    return {
        "excerpts": excerpts,
        "coding": [coding.steps, coding.root],
        "live": live.tolist(),
        "planes": rotation.planes.tolist(),
        "scale": rotation.scale.tolist(),
        "frequencies": np.nan_to_num(rotation.inv_freq).tolist(),
    }


@dataclass(frozen=True)
class WeightCoding:
    """A byte is `steps` times the `root`-th root of a weight."""

    steps: int
    root: int

    @classmethod
    def of_size(cls, weights: int) -> "WeightCoding":
        """Square roots in fine steps, or whole percents if there are many weights."""
        if weights > FINE_CELLS:
            return cls(steps=100, root=1)
        return cls(steps=255, root=2)

    def bytes_of(self, weights: np.ndarray) -> np.ndarray:
        return np.round(self.steps * weights ** (1 / self.root)).astype(np.uint8)


def _named_tokens(tokens: list[str]) -> dict[str, Any]:
    visible = [visible_token(token) for token in tokens]
    ticks = [visible_token(token, longest=12) for token in tokens]
    return {
        "tokens": visible,
        "names": [plotly_text(token) for token in visible],
        "ticks": [plotly_text(token) for token in ticks],
    }


@dataclass(frozen=True)
class LayerRotations:
    """Number of planes, scale of scores, and frequencies (rad/token) of each layer.

    `reads` are the key-value heads that the query heads read.
    """

    planes: Int[np.ndarray, " layer"]
    scale: Float[np.ndarray, " layer"]
    inv_freq: Float[np.ndarray, "layer frequency"]
    reads: Int[np.ndarray, "layer head"]

    @classmethod
    def of(cls, profile: xr.Dataset) -> "LayerRotations":
        planes = np.nan_to_num(profile["excerpt_planes"].values)
        return cls(
            planes=planes.astype(int),
            scale=np.nan_to_num(profile["excerpt_scale"].values),
            inv_freq=profile["inv_freq"].values,
            reads=kv_heads(profile),
        )

    def scores(
        self, query: OfHeads, key: OfHeads, layer: int, head: int
    ) -> Float[np.ndarray, "query key"]:
        """The scores that the script computes for a head, in nats."""
        inv_freq = self.inv_freq[layer, : self.planes[layer]]
        q = rotated(query[layer, head], inv_freq)
        k = rotated(key[layer, self.reads[layer, head]], inv_freq)
        return self.scale[layer] * q @ k.T


@dataclass(frozen=True)
class ExcerptVectors:
    """Queries and keys without rotation, and attention, on one excerpt.

    `known` marks the heads whose queries were captured.
    """

    query: OfHeads
    key: Float[np.ndarray, "layer kv_head position coordinate"]
    attention: Float[np.ndarray, "layer head query key"]
    known: Bool[np.ndarray, "layer head"]

    @classmethod
    def of(cls, excerpt: xr.Dataset, count: int) -> "ExcerptVectors":
        """The first `count` positions of an excerpt."""
        query = excerpt["excerpt_query_still"].values[..., :count, :]
        return cls(
            query=query,
            key=excerpt["excerpt_key_still"].values[..., :count, :],
            attention=excerpt["excerpt_attention"].values[..., :count, :count],
            known=np.isfinite(query).any((2, 3)),
        )

    @cached_property
    def causal(self) -> Bool[np.ndarray, "query key"]:
        """Whether a query may see a key."""
        count = self.attention.shape[-1]
        return np.tril(np.ones((count, count), bool))

    def read_keys(
        self, reads: Int[np.ndarray, "layer head"]
    ) -> Bool[np.ndarray, "layer kv_head"]:
        """The key-value heads that heads with known queries read."""
        read = np.zeros(self.key.shape[:2], bool)
        layers = self.known.nonzero()[0]
        read[layers, reads[self.known]] = True
        return read

    def largest_miss(
        self, scores: Float[np.ndarray, "query key"], layer: int, head: int
    ) -> float:
        """Largest error of the attention that follows from the scores."""
        computed = softmax(np.where(self.causal, scores, -np.inf), axis=-1)
        return np.abs(computed - self.attention[layer, head]).max()

    def visible_weights(self) -> Float[np.ndarray, "layer head weight"]:
        """Weights that a query may see, ordered by key."""
        return self.attention.swapaxes(-1, -2)[..., self.causal.T]


@dataclass(frozen=True)
class Quantized:
    """Queries or keys as the script restores them, and the payload from which it does."""

    values: OfHeads
    payload: dict[str, Any]


def quantize(
    vectors: OfHeads, known: Bool[np.ndarray, "layer head"], size: StepSizes | None
) -> Quantized:
    """Quantize queries or keys in steps of `size`.

    By default the largest coordinate of a head has `STEPS` steps. The payload contains the
    heads in `known`: `place[layer][head]` is the index of a head in `step` [place, coordinate]
    and `steps` [place, coordinate, position].
    """
    vectors = np.nan_to_num(vectors)
    largest = np.abs(vectors).max(2)
    fine = size is None
    if size is None:
        size = np.maximum(largest.max(2, keepdims=True) / STEPS, 1e-30) + 0 * largest
    else:
        size = np.maximum(size, largest / LARGEST_STEP).clip(1e-30)
        size = np.exp2(np.ceil(2 * np.log2(size)) / 2)  # few numbers, which pack well
    steps = np.round(vectors / size[:, :, None]).astype(np.int16)
    coded = steps
    if not fine:
        coded = (steps << 1) ^ (steps >> 15)  # 0, -1, 1, ...: small upper bytes
    index = known.cumsum().reshape(known.shape) - 1
    payload = {
        "step": packed(size[known]),
        "steps": packed(coded[known].swapaxes(1, 2)),
        "zigzag": not fine,
        "place": np.where(known, index, -1).tolist(),
    }
    return Quantized(steps * size[:, :, None], payload)


@dataclass(frozen=True)
class CoarseSteps:
    """Sizes of the steps of queries and keys; None for fine steps, which `quantize` chooses."""

    of_query: StepSizes | None
    of_key: StepSizes | None


def coarse_step_sizes(vectors: ExcerptVectors, rotation: LayerRotations) -> CoarseSteps:
    """Steps of queries and keys for `SCORE_NOISE` in each score.

    The other vector multiplies the error of a coordinate, so its size sets the step.
    """
    query_size = _sizes(vectors.query, rotation.planes)
    key_size = _sizes(vectors.key, rotation.planes)
    layers = np.arange(len(rotation.reads))[:, None]
    largest_query = np.zeros_like(key_size)  # of the heads that read the key
    np.maximum.at(largest_query, (layers, rotation.reads), query_size)
    coordinates = vectors.query.shape[-1]
    scale = np.maximum(rotation.scale, 1e-30)
    unit = (SCORE_NOISE * np.sqrt(6 / coordinates) / scale)[:, None, None]
    return CoarseSteps(
        of_query=unit / np.maximum(key_size[layers, rotation.reads], 1e-6),
        of_key=unit / np.maximum(largest_query, 1e-6),
    )


def _sizes(vectors: OfHeads, planes: Int[np.ndarray, " layer"]) -> StepSizes:
    """Root mean square of each coordinate; a rotation mixes both coordinates of a plane."""
    square = np.nan_to_num(vectors**2).mean(2)
    for layer, count in enumerate(planes):
        heads = len(square[layer])
        both = square[layer, :, : 2 * count].reshape(heads, 2, count)
        both[:] = both.mean(1, keepdims=True)
    return np.sqrt(square)


def _lead(excerpt: xr.Dataset, vectors: ExcerptVectors) -> dict[str, Any] | None:
    """The two likeliest next tokens of an excerpt, the lead of the first, and its gradients.

    A byte n means `largest` times ((n - 127) / 127) squared, with the sign of n - 127.
    """
    nats = float(excerpt.get("excerpt_lead", np.nan))
    if not np.isfinite(nats):  # no gradient, or logits that overflow
        return None
    count = len(vectors.causal)
    gradient = excerpt["excerpt_score_gradient"].values[..., :count, :count]
    by_key = gradient[vectors.known].swapaxes(1, 2)
    cells = np.nan_to_num(by_key[:, vectors.causal.T])
    largest = max(float(np.abs(cells).max(initial=0)), 1e-30)
    steps = 127 + np.round(127 * np.sign(cells) * np.sqrt(np.abs(cells) / largest))
    answers = excerpt["excerpt_answer"].values
    return {
        "steps": packed(steps.astype(np.uint8)),
        "largest": largest,
        "words": [visible_token(str(token)) for token in answers],
        "nats": nats,
    }


def rotated(
    still: Float[np.ndarray, "position coordinate"], inv_freq: np.ndarray
) -> Float[np.ndarray, "position coordinate"]:
    """Queries or keys, rotated to their positions."""
    count = len(inv_freq)
    plane = still[:, :count] + 1j * still[:, count : 2 * count]
    plane = plane * np.exp(1j * inv_freq * np.arange(len(still))[:, None])
    return np.concatenate([plane.real, plane.imag, still[:, 2 * count :]], axis=1)
