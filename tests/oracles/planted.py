"""Attention calls whose heads do one known thing each, at any offset and with BOS anywhere.

As in `handmade.py`, but without a model around them: queries and keys are written plane by
plane (Barbero et al. 2024, arXiv 2410.06205, theorem 5.3). Keys hold the same vector in fast
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

from ropelens.rope.planes import Planes
from ropelens.statistics.call import AttentionCall

Complex = NDArray[np.complex128]
Floats = NDArray[np.float64]

BASE = 10_000.0
BOS = 0
KEY_NOISE = 0.003  # std of a key's coordinate; it writes 1 in each fast plane
OFFSETS = (0, 1, 2, 3, 6, 17, 70, 100, 200, 300)


@dataclass(frozen=True)
class Expected:
    """What a head does: its label, and for a positional one its offset (None: a band, which
    must hold `around`); `sink` is the attention on BOS that was mixed in, about."""

    label: str
    words: str
    offset: int | None = None
    around: int | None = None
    sink: float = 0.0


@dataclass(frozen=True)
class Site:
    """What all heads share: the planes and what keys write into them."""

    head_dim: int
    context: int
    random: np.random.Generator

    @property
    def inv_freq(self) -> Floats:
        return BASE ** (-np.arange(0, self.head_dim, 2) / self.head_dim)

    @property
    def fast(self) -> NDArray[np.int64]:
        """Planes that tell offsets in the context apart."""
        return np.flatnonzero(2 * np.pi / self.inv_freq < 2 * self.context)

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


@dataclass(frozen=True)
class Wanted:
    """The query of each token, by plane, before rotation, and what is expected."""

    query: Complex
    expected: Expected


def keys(site: Site) -> Complex:
    """The key of each token, by plane, before rotation: [token, plane]."""
    key = np.zeros((1 + site.words, site.head_dim // 2), dtype=complex)
    key[1:, site.fast] = 1
    code = np.eye(site.words, site.codes)
    key[1:, site.slow] = code[:, ::2] + 1j * code[:, 1::2]
    key[BOS, -1] = 1
    return key


def head(
    site: Site, expected: Expected, *, level: float, fast: Complex | None, codes: Floats | None
) -> Wanted:
    """A head with its scores in fast planes, on codes [token, code], and on BOS.

    `level` is the log of what the other keys weigh in all, beside which BOS's share is set.
    """
    query = np.zeros((1 + site.words, site.head_dim // 2), dtype=complex)
    if fast is not None:
        query[:, site.fast] = fast
    if codes is not None:
        query[1:, site.slow] = codes[:, ::2] + 1j * codes[:, 1::2]
    if expected.sink:
        query[:, -1] = level + np.log(expected.sink / (1 - expected.sink))
    return Wanted(query, expected)


def offset_head(site: Site, offset: int, sink: float) -> Wanted:
    """One offset, 4 to 6 nats above any other."""
    profile = site.profile(np.ones(len(site.fast)), offset)
    margin = len(site.fast) - np.delete(profile, offset).max()
    gain = np.full(len(site.fast), site.random.uniform(4, 6) / margin)
    fast = gain * np.exp(-1j * site.inv_freq[site.fast] * offset)
    expected = Expected("positional", f"{offset} back", offset=offset, sink=sink)
    return head(site, expected, level=gain.sum(), fast=fast, codes=None)


def band_head(site: Site, sink: float) -> Wanted:
    """A bump of deviation 4 to 5 tokens, some tokens back, through middle planes."""
    w = site.inv_freq[site.fast]
    middle = (2 * np.pi / w > 30) & (2 * np.pi / w < 0.8 * site.context)
    deviation, offset = site.random.uniform(4, 5), int(site.random.integers(8, 40))
    gain = middle / deviation**2 / (w[middle] ** 2).sum()
    level = float(np.log(np.exp(site.profile(gain, offset)).sum()))
    expected = Expected("positional", f"a band around {offset}", around=offset, sink=sink)
    return head(site, expected, level=level, fast=gain * np.exp(-1j * w * offset), codes=None)


def match_head(site: Site, sink: float) -> Wanted:
    """Every token attends to the tokens equal to it."""
    score = site.random.uniform(6, 8)
    level = score + np.log(site.context / 2 / site.codes)
    expected = Expected("semantic", "equal tokens", sink=sink)
    return head(site, expected, level=level, fast=None, codes=score * np.eye(site.codes))


def keyword_head(site: Site, sink: float) -> Wanted:
    """Every token attends to one of the tokens."""
    score = site.random.uniform(6, 8)
    codes = np.zeros((site.codes, site.codes))
    codes[:, site.random.integers(site.codes)] = score
    level = score + np.log(site.context / 2 / site.codes)
    return head(
        site, Expected("semantic", "a word", sink=sink), level=level, fast=None, codes=codes
    )


def every_kind(site: Site, offsets: tuple[int, ...]) -> Iterator[Wanted]:
    """Every kind of head alone, then again with a sink mixed in; sinks; and a head of noise."""
    for mixed in (False, True):

        def share(mixed: bool = mixed) -> float:
            return float(site.random.uniform(0.35, 0.5)) if mixed else 0.0

        for offset in offsets:
            yield offset_head(site, offset, share())
        yield band_head(site, share())
        if site.codes:
            yield match_head(site, share())
            yield keyword_head(site, share())
    for share_of_all in (0.95, 0.7):
        expected = Expected("sink", f"BOS, share {share_of_all}", sink=share_of_all)
        yield head(site, expected, level=np.log(site.context / 2), fast=None, codes=None)
    yield head(site, Expected("diffuse", "noise"), level=0.0, fast=None, codes=None)


def bos_places(where: str, context: int) -> list[int]:
    """Positions of BOS: "first", "fifth" (position 5 alone) or "packed" (every 100 tokens)."""
    return {"first": [0], "fifth": [5], "packed": list(range(0, context, 100))}[where]


@dataclass(frozen=True)
class Planted:
    """An attention call, its planes and tokens, and what is expected of each query head."""

    call: AttentionCall
    planes: Planes
    tokens: torch.Tensor
    expected: list[Expected]


def planted(
    seed: int,
    *,
    head_dim: int = 64,
    context: int = 512,
    group: int = 1,
    bos: str = "first",
    offsets: tuple[int, ...] = OFFSETS,
    sequences: int = 8,
) -> Planted:
    """A layer of such heads on random tokens; with `group` > 1, so many share a key."""
    site = Site(head_dim, context, np.random.default_rng(seed))
    heads = list(every_kind(site, offsets))
    heads = heads[: len(heads) // group * group]
    tokens = site.random.integers(1, 1 + site.words, size=(sequences, context))
    tokens[:, bos_places(bos, context)] = BOS
    planes = Planes(torch.from_numpy(site.inv_freq).float(), head_dim, "half")
    q = np.stack([wanted.query[tokens] for wanted in heads], axis=1)
    k = np.stack([keys(site)[tokens]] * (len(heads) // group), axis=1)
    noise = site.random.normal(size=(2, *k.shape)) * KEY_NOISE
    k = k + noise[0] + 1j * noise[1]
    call = AttentionCall(
        layer=0,
        query=_rotated(q, planes),
        key=_rotated(k, planes),
        value=_rotated(k, planes),
        output=_rotated(q, planes).transpose(1, 2),
        scale=1.0,
        softcap=None,
        sink_logits=None,
        start=torch.zeros(context, dtype=torch.long),
    )
    return Planted(call, planes, torch.from_numpy(tokens), [h.expected for h in heads])


def _rotated(x: Complex, planes: Planes) -> torch.Tensor:
    """Turned by float32 angles, as models round them, in half layout: [..., coordinate]."""
    position = torch.arange(x.shape[-2], dtype=torch.float32)
    angle = (position[:, None] * planes.inv_freq).double().numpy()
    turned = x * np.exp(1j * angle)
    return torch.from_numpy(np.concatenate([turned.real, turned.imag], axis=-1)).float()
