"""The excerpts as the page's script needs them: what it shows, and what it computes anew."""

from __future__ import annotations

from typing import Any

import numpy as np
import xarray as xr
from scipy.special import softmax

from ropelens.figures.head import excerpt_tokens
from ropelens.figures.inputs import kv_heads
from ropelens.figures.text import plotly_text, visible_token
from ropelens.report.render import packed

LARGEST_MISS = 0.01
"""Largest difference of an attention weight that the script computes from the measured one."""

STEPS = 2**13 - 1
"""Steps from zero to the largest number of a head's queries, or keys: there as fine as half
precision, in which profiles hold them."""
LETTER = 67
"""The letter of 0 times 256 steps, "C": 32 such steps either way are letters of ASCII."""


class Stepped:
    """Queries or keys of some heads in whole steps, [place, position, coordinate] int16.

    `place[layer, head]` is where a head's are, -1 of a head without; `step` is the size of one
    step. Made from [layer, head, position, coordinate], for the heads that are `known`.
    """

    def __init__(self, values: np.ndarray, known: np.ndarray) -> None:
        chosen = np.nan_to_num(values[known])
        self.step = np.abs(chosen).max((1, 2), initial=1e-30) / STEPS
        self.steps = np.round(chosen / self.step[:, None, None]).astype(np.int16)
        self.place = np.where(known, known.cumsum().reshape(known.shape) - 1, -1)

    def __getitem__(self, at: tuple[int, int]) -> np.ndarray:
        place = self.place[at]
        return self.steps[place] * self.step[place]

    def payload(self) -> dict[str, Any]:
        return {
            "place": self.place.tolist(),
            "step": self.step.tolist(),
            # Low bytes are noise, high ones are not: apart, and as letters, these pack well.
            "low": packed((self.steps & 255).astype(np.uint8)),
            "high": "".join(map(chr, ((self.steps >> 8) + LETTER).ravel().tolist())),
        }


class Excerpt:
    """One excerpt of a profile: its tokens, attention as measured, and queries and keys.

    `live[layer, head]` is whether its attention follows from queries and keys alone.
    """

    def __init__(self, profile: xr.Dataset, number: int) -> None:
        self.tokens = excerpt_tokens(profile, number)
        one, count = profile.isel(excerpt=number), len(self.tokens)
        self.weights = one["excerpt_attention"].values[..., :count, :count]
        queries = one["excerpt_query_still"].values[..., :count, :]
        known = np.isfinite(queries).any((2, 3))
        layers, heads = known.nonzero()
        reads = kv_heads(profile)
        read = np.zeros((profile.sizes["layer"], profile.sizes["kv_head"]), bool)
        read[layers, reads[layers, heads]] = True
        self.query = Stepped(queries, known)
        self.key = Stepped(one["excerpt_key_still"].values[..., :count, :], read)
        self.live = np.zeros(known.shape, bool)
        planes = profile["excerpt_planes"].values
        for layer, head in zip(layers, heads, strict=True):
            turning = profile["inv_freq"].values[layer, : planes[layer]]
            q = turned(self.query[layer, head], turning)
            k = turned(self.key[layer, reads[layer, head]], turning)
            computed = attention(float(profile["excerpt_scale"][layer]) * q @ k.T)
            miss = np.abs(computed - self.weights[layer, head]).max()
            self.live[layer, head] = miss <= LARGEST_MISS

    def payload(self, live: np.ndarray) -> dict[str, Any]:
        """For the script, with the attention of heads that are not `live` in every excerpt."""
        visible = [visible_token(token) for token in self.tokens]
        return {
            "tokens": visible,
            "names": [plotly_text(token) for token in visible],
            "ticks": [plotly_text(visible_token(token, longest=12)) for token in self.tokens],
            "attention": packed(attention_bytes(self.weights[~live])),
            "query": self.query.payload(),
            "key": self.key.payload(),
        }


def excerpt_payload(profile: xr.Dataset) -> dict[str, Any]:
    """The excerpts for the script; `planes` is how many a layer has.

    `live[layer][head]` says whether the script can compute the head's attention from queries
    and keys, to `LARGEST_MISS`. It gets the weights instead where the profile holds none, or
    where a soft-cap, a window or a learned sink stands between scores and weights.
    """
    excerpts = [Excerpt(profile, number) for number in range(profile.sizes["excerpt"])]
    live = np.all([excerpt.live for excerpt in excerpts], axis=0)
    return {
        "excerpts": [excerpt.payload(live) for excerpt in excerpts],
        "live": live.tolist(),
        "planes": profile["excerpt_planes"].values.tolist(),
        "frequencies": np.nan_to_num(profile["inv_freq"].values).tolist(),
        "scale": np.nan_to_num(profile["excerpt_scale"].values).tolist(),
    }


def turned(still: np.ndarray, inv_freq: np.ndarray) -> np.ndarray:
    """Queries or keys [position, coordinate] rotated to their positions, as RoPE does."""
    count = len(inv_freq)
    plane = still[:, :count] + 1j * still[:, count : 2 * count]
    plane = plane * np.exp(1j * inv_freq * np.arange(len(still))[:, None])
    return np.concatenate([plane.real, plane.imag, still[:, 2 * count :]], axis=1)


def attention(scores: np.ndarray) -> np.ndarray:
    """Causal attention of [query, key] scores in nats."""
    ahead = np.triu(np.ones(scores.shape, bool), 1)
    return softmax(np.where(ahead, -np.inf, scores), axis=-1)


def attention_bytes(weights: np.ndarray) -> np.ndarray:
    """Attention [head, query, key] in a byte a cell, [head, cell] uint8.

    The byte is 255 times the square root of the weight, so small weights keep their digits
    (a step is at most 0.8% at weight 1 and far less below). Cells are the ones a query may
    see, row after row: half the square.
    """
    seen = np.tril(np.ones(weights.shape[-2:], bool))
    root = np.sqrt(np.nan_to_num(weights[..., seen]).clip(0, 1))
    return np.round(255 * root).astype(np.uint8)
