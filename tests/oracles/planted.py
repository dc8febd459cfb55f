"""Heads that do one known thing each, at any offset.

Barbero et al. 2024 (arXiv 2410.06205), theorem 5.3: with q = a psi and k = R(offset) psi the
score is a sum of cosines that peaks `offset` tokens back. Keys have the same vector in fast
planes whatever the token, a code of their token in slow ones, and a mark of BOS in the
slowest, so that all heads of a group can read one key; queries say what a head looks for.
Tokens are codes 1, 2, ...; BOS is 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from ropelens.statistics.call import AttentionCall

Complex = NDArray[np.complex128]
Floats = NDArray[np.float64]

BASE = 10_000.0
BOS = 0


@dataclass(frozen=True)
class Expected:
    """What a head does: its label, in words; a positional one's offset, and for a band how far
    its peak may be from there; about the attention on BOS that was mixed in."""

    label: str
    description: str
    offset: int | None = None
    tolerance: int = 0
    sink: float = 0.0


@dataclass(frozen=True)
class Site:
    """The planes of all heads."""

    head_dim: int
    context: int
    random: np.random.Generator

    @property
    def inv_freq(self) -> Floats:
        return BASE ** (-np.arange(0, self.head_dim, 2) / self.head_dim)

    @property
    def fast(self) -> NDArray[np.int64]:
        """Planes that tell offsets in the context apart."""
        return np.flatnonzero(2 * np.pi / self.inv_freq < max(400, 2 * self.context))

    @property
    def slow(self) -> NDArray[np.int64]:
        """Planes that hardly turn in the context; the very slowest is BOS's."""
        return np.flatnonzero(2 * np.pi / self.inv_freq > 20 * self.context)[:-1]

    @property
    def codes(self) -> int:
        """Coordinates of the slow planes: one for each token beside BOS."""
        return 2 * len(self.slow)

    @property
    def words(self) -> int:
        """Different tokens beside BOS; without codes, all are alike."""
        return max(1, self.codes)

    def profile(self, gain: Floats, offset: int) -> Floats:
        """Score at each distance of the context of a head that looks `offset` back."""
        distance = np.arange(self.context) - offset
        return np.cos(np.outer(distance, self.inv_freq[self.fast])) @ gain


Wanted = tuple[Complex, Expected]
"""The query of each token, by plane, before rotation, and what is expected."""


def keys(site: Site) -> Complex:
    """The key of each token, by plane, before rotation: [token, plane]."""
    key = np.zeros((1 + site.words, site.head_dim // 2), dtype=complex)
    key[1:, site.fast] = 1
    code = np.eye(site.words, site.codes)
    key[1:, site.slow] = code[:, ::2] + 1j * code[:, 1::2]
    key[BOS, -1] = 1
    return key


def head(
    site: Site,
    expected: Expected,
    *,
    level: float,
    fast: Complex | None = None,
    codes: Floats | None = None,
) -> Wanted:
    """A head with its scores in fast planes, on codes [token, code], and on BOS.

    `level` is the log of the weight of all other keys, beside which BOS has its share.
    """
    query = np.zeros((1 + site.words, site.head_dim // 2), dtype=complex)
    if fast is not None:
        query[:, site.fast] = fast
    if codes is not None:
        query[1:, site.slow] = codes[:, ::2] + 1j * codes[:, 1::2]
    if expected.sink:
        query[:, -1] = level + np.log(expected.sink / (1 - expected.sink))
    return query, expected


def offset_head(site: Site, offset: int, sink: float) -> Wanted:
    """One offset, 4 to 6 nats above any other."""
    profile = site.profile(np.ones(len(site.fast)), offset)
    margin = len(site.fast) - np.delete(profile, offset).max()
    gain = np.full(len(site.fast), site.random.uniform(4, 6) / margin)
    fast = gain * np.exp(-1j * site.inv_freq[site.fast] * offset)
    expected = Expected("positional", f"{offset} back", offset=offset, sink=sink)
    return head(site, expected, level=gain.sum(), fast=fast)


def band_head(site: Site, sink: float) -> Wanted:
    """A bump of deviation 4 to 5 tokens, some tokens back, through middle planes."""
    w = site.inv_freq[site.fast]
    middle = (2 * np.pi / w > 30) & (2 * np.pi / w < max(400, 0.8 * site.context))
    farthest = min(40, 8 + site.context // 16)
    deviation, offset = site.random.uniform(4, 5), int(site.random.integers(8, farthest))
    gain = middle / deviation**2 / (w[middle] ** 2).sum()
    level = float(np.log(np.exp(site.profile(gain, offset)).sum()))
    expected = Expected("positional", "a band", offset=offset, tolerance=2, sink=sink)
    return head(site, expected, level=level, fast=gain * np.exp(-1j * w * offset))


def content_head(site: Site, description: str, sink: float) -> Wanted:
    """Every token attends to the tokens equal to it, or to one of the tokens."""
    score = site.random.uniform(6, 8)
    codes = score * np.eye(site.codes)
    if description == "a word":
        codes = codes[[site.random.integers(site.codes)] * site.codes]
    level = score + np.log(site.context / 2 / site.codes)
    return head(site, Expected("semantic", description, sink=sink), level=level, codes=codes)


def every_kind(site: Site, offsets: tuple[int, ...]) -> Iterator[Wanted]:
    """Every kind of head alone, then again with a sink mixed in; sinks; and a head of noise."""
    for mixed in (False, True):

        def share(mixed: bool = mixed) -> float:
            return float(site.random.uniform(0.35, 0.5)) if mixed else 0.0

        for offset in offsets:
            yield offset_head(site, offset, share())
        yield band_head(site, share())
        if site.codes:
            yield content_head(site, "equal tokens", share())
            yield content_head(site, "a word", share())
    for share_of_all in (0.95, 0.7):
        expected = Expected("sink", "BOS", sink=share_of_all)
        yield head(site, expected, level=np.log(site.context / 2))
    yield head(site, Expected("diffuse", "noise"), level=0.0)


def call_of(
    q: torch.Tensor, k: torch.Tensor, *, scale: float = 1.0, window: int = 10**6
) -> AttentionCall:
    """A call of queries and keys [batch, head, position, coordinate], values of no interest."""
    return AttentionCall(
        layer=0,
        query=q,
        key=k,
        value=k,
        output=q.transpose(1, 2),
        scale=scale,
        softcap=None,
        sink_logits=None,
        interval=(torch.arange(q.shape[2]) - window + 1).clamp(min=0),
    )


def coordinates(x: Complex) -> Floats:
    """By coordinate, in half layout."""
    return np.concatenate([x.real, x.imag], axis=-1)
