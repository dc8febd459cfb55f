"""A Llama with one layer, whose heads each do one known thing.

Barbero et al. 2024 (arXiv 2410.06205), theorem 5.3: with q = a psi and k = R(offset) psi, the
score is a sum of cosines that peaks `offset` tokens back. In fast planes all keys have the same
vector, in slow planes they have a code of their token, and in the slowest plane a mark of BOS.
Queries select the keys that a head attends to. Tokens are codes 1, 2, ...; BOS is 0.

The residual stream has a code of each token (one-hot) and, in further coordinates, noise by
token. All tokens have the same length, so RMSNorm does not change them. Projections map each
code to the wanted query or key, with noise in every weight.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

from ropelens.attention.call import AttentionCall
from ropelens.attention.visibility import Visibility

from .recording import Floats

Complex = NDArray[np.complex128]

BASE = 10_000.0
BOS = 0
CONTEXT = 96
SEQUENCES = 8
NOISE_COORDINATES = 16  # at least
WEIGHT_NOISE = 0.02  # std of each coordinate of a query or key
OFFSETS = (0, 1, 3, 17, 60)
DIAGONAL = 8.0  # lead of the own token in nats
MIXTURES = (0.0, 0.25, 0.5, 0.75, 1.0)  # weights of offset 0 against a match of tokens
DIAGONALS = [(offset, 1 - offset) for offset in MIXTURES] + [(1.0, 0.05)]
WITH_SINK = [(0.0, 1.0), (1.0, 0.0), (1.0, 0.05)]
DISTINCT = 288  # coordinates of a head that has a code for each token of a sequence


@dataclass(frozen=True)
class Expected:
    """The expected label of a head and a description. A positional head has an offset, and the
    peak of a band may differ by `tolerance`. `sink` is about the attention on BOS."""

    label: str
    description: str
    offset: int | None = None
    tolerance: int = 0
    sink: float = 0.0


@dataclass(frozen=True)
class Wanted:
    """The query of each token by plane, before rotation, and the expected result."""

    query: Complex
    expected: Expected


@dataclass(frozen=True)
class Site:
    """The planes of all heads. Fast planes distinguish offsets, and the slowest marks BOS.

    Each coordinate of the other slow planes is the code of a token.
    """

    head_dim: int
    random: np.random.Generator

    @property
    def inv_freq(self) -> Floats:
        return BASE ** (-np.arange(0, self.head_dim, 2) / self.head_dim)

    @property
    def wavelength(self) -> Floats:
        return 2 * np.pi / self.inv_freq

    @property
    def fast(self) -> NDArray[np.int64]:
        return np.flatnonzero(self.wavelength < 400)

    @property
    def slow(self) -> NDArray[np.int64]:
        still = np.flatnonzero(self.wavelength > 20 * CONTEXT)
        return still[:-1]

    @property
    def shape(self) -> tuple[int, int]:
        """Number of tokens with BOS, and of planes."""
        return 1 + self.codes, self.head_dim // 2

    @property
    def codes(self) -> int:
        return 2 * len(self.slow)

    def profile(self, gain: Floats, offset: int) -> Floats:
        """Score at each distance for a head that attends `offset` tokens back."""
        beyond = np.arange(CONTEXT) - offset
        angles = np.outer(beyond, self.inv_freq[self.fast])
        return np.cos(angles) @ gain

    def turns(self, offset: int) -> Complex:
        """The rotation of a fast plane in `offset` tokens, backwards."""
        return np.exp(-1j * self.inv_freq[self.fast] * offset)

    def keys(self) -> Complex:
        """The key of each token, by plane, before rotation: [token, plane]."""
        key = np.zeros(self.shape, dtype=complex)
        key[1:, self.fast] = 1
        key[1:, self.slow] = as_planes(np.eye(self.codes))
        key[BOS, -1] = 1
        return key

    def head(
        self, expected: Expected, *, level: float, fast: Any = 0, slow: Any = 0
    ) -> Wanted:
        """Given queries; `level` is the log of the total weight of all keys except BOS."""
        query = np.zeros(self.shape, dtype=complex)
        query[:, self.fast] = fast
        query[1:, self.slow] = slow
        if expected.sink:
            odds = expected.sink / (1 - expected.sink)
            query[:, -1] = level + np.log(odds)
        return Wanted(query, expected)

    def offset_head(self, offset: int, sink: float) -> Wanted:
        """One offset, 4 to 6 nats above any other."""
        profile = self.profile(np.ones(len(self.fast)), offset)
        largest_other = np.delete(profile, offset).max()
        margin = len(self.fast) - largest_other
        lead = self.random.uniform(4, 6)
        gain = np.full(len(self.fast), lead / margin)
        fast = gain * self.turns(offset)
        expected = Expected("positional", f"{offset} back", offset=offset, sink=sink)
        return self.head(expected, level=gain.sum(), fast=fast)

    def band_head(self, sink: float) -> Wanted:
        """A bump of deviation 4 to 5 tokens, some tokens back, through middle planes."""
        w = self.inv_freq[self.fast]
        middle = 2 * np.pi / w > 30
        deviation = self.random.uniform(4, 5)
        offset = int(self.random.integers(8, 14))
        gain = middle / deviation**2 / (w[middle] ** 2).sum()
        weights = np.exp(self.profile(gain, offset))
        expected = Expected(
            label="positional",
            description="a band",
            offset=offset,
            tolerance=2,
            sink=sink,
        )
        level = float(np.log(weights.sum()))
        return self.head(expected, level=level, fast=gain * self.turns(offset))

    def content_head(self, description: str, sink: float) -> Wanted:
        """A head in which every token attends to equal tokens, or to one given token."""
        score = self.random.uniform(6, 8)
        codes = score * np.eye(self.codes)
        if description == "a word":
            word = self.random.integers(self.codes)
            codes = codes[[word] * self.codes]
        level = score + np.log(CONTEXT / 2 / self.codes)
        expected = Expected("semantic", description, sink=sink)
        return self.head(expected, level=level, slow=as_planes(codes))

    def diagonal_head(self, offset: float, match: float, sink: float) -> Wanted:
        """The own token, by its offset and by a match with its code, with these weights."""
        profile = self.profile(np.ones(len(self.fast)), 0)
        lead = len(self.fast) - profile[1:].max()
        gain = offset * DIAGONAL / lead
        codes = match * DIAGONAL * np.eye(self.codes)
        level = gain * len(self.fast) + codes[0, 0]
        label = "mixed"
        if offset == 1:
            label = "positional"
        elif match == 1:
            label = "semantic"
        expected = Expected(label, f"offset {offset}, match {match}", sink=sink)
        return self.head(expected, level=level, fast=gain, slow=as_planes(codes))

    def diagonals(self) -> Iterator[Wanted]:
        for offset, match in DIAGONALS:
            yield self.diagonal_head(offset, match, sink=0.0)
        for offset, match in WITH_SINK:
            yield self.diagonal_head(offset, match, sink=0.4)

    def sink_share(self, *, mixed: bool) -> float:
        """The attention on BOS of a head, which also reads other keys."""
        if not mixed:
            return 0.0
        return float(self.random.uniform(0.35, 0.5))

    def every_kind(self) -> Iterator[Wanted]:
        for mixed in (False, True):
            for offset in OFFSETS:
                yield self.offset_head(offset, self.sink_share(mixed=mixed))
            yield self.band_head(self.sink_share(mixed=mixed))
            yield self.content_head("equal tokens", self.sink_share(mixed=mixed))
            yield self.content_head("a word", self.sink_share(mixed=mixed))
        for share_of_all in (0.95, 0.7):
            expected = Expected("sink", "BOS", sink=share_of_all)
            yield self.head(expected, level=np.log(CONTEXT / 2))
        yield self.head(Expected("diffuse", "noise"), level=0.0)

    def residual_stream(self, *, multiple: int) -> Floats:
        """Embeddings [token, coordinate] of mean square 1; `multiple` divides the width."""
        tokens = 1 + self.codes
        width = math.ceil((tokens + NOISE_COORDINATES) / multiple) * multiple
        noise = self.random.normal(size=(tokens, width - tokens))
        noise /= np.linalg.norm(noise, axis=1, keepdims=True)
        stream = np.concatenate([np.eye(tokens), noise], axis=1)
        return stream * np.sqrt(width / 2)

    def projection(self, stream: Floats, wanted: Complex) -> torch.Tensor:
        """Weights [head x coordinate, stream] from codes to `wanted` [head, token, plane]."""
        by_coordinate = np.concatenate([wanted.real, wanted.imag], axis=-1)
        tokens, width = stream.shape
        rows = len(wanted) * self.head_dim
        weights = self.random.normal(size=(rows, width))
        weights *= WEIGHT_NOISE / np.sqrt(width)
        scaled = by_coordinate * self.head_dim**0.25 / stream[0, 0]
        weights[:, :tokens] += scaled.transpose(0, 2, 1).reshape(rows, tokens)
        return torch.from_numpy(weights)


def as_planes(codes: Floats) -> Complex:
    """Coordinates [..., 2 plane] as complex planes [..., plane]."""
    first = codes[..., ::2]
    second = codes[..., 1::2]
    return first + 1j * second


def handmade(
    seed: int,
    head_dim: int,
    kinds: Callable[[Site], Iterator[Wanted]] = Site.every_kind,
) -> tuple[LlamaForCausalLM, NDArray[np.int64], list[Expected]]:
    """The model, tokens [SEQUENCES, CONTEXT] after BOS, and the expected result of each head.

    A sequence repeats no token if there are enough codes.
    """
    site = Site(head_dim, np.random.default_rng(seed))
    heads = list(kinds(site))
    stream = site.residual_stream(multiple=len(heads))
    config = LlamaConfig(
        vocab_size=len(stream),
        hidden_size=stream.shape[1],
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=len(heads),
        num_key_value_heads=len(heads),
        head_dim=head_dim,
        max_position_embeddings=512,
        bos_token_id=BOS,
        eos_token_id=None,
        rms_norm_eps=1e-12,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
    )
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    attention = model.model.layers[0].self_attn
    queries = np.stack([head.query for head in heads])
    keys = np.stack([site.keys()] * len(heads))
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.from_numpy(stream))
        attention.q_proj.weight.copy_(site.projection(stream, queries))
        attention.k_proj.weight.copy_(site.projection(stream, keys))
    tokens = site.random.integers(1, len(stream), size=(SEQUENCES, CONTEXT))
    if site.codes >= CONTEXT:
        codes = np.arange(1, len(stream))
        repeated = np.broadcast_to(codes, (SEQUENCES, site.codes))
        tokens = site.random.permuted(repeated, axis=1)[:, :CONTEXT]
    tokens[:, 0] = BOS
    return model, tokens, [head.expected for head in heads]


def call_of(
    q: torch.Tensor, k: torch.Tensor, *, scale=1.0, window=10**6
) -> AttentionCall:
    """A call of queries and keys [batch, head, position, coordinate]; values do not matter."""
    return AttentionCall(
        layer=0,
        query=q,
        key=k,
        value=k,
        output=q.transpose(1, 2),
        scale=scale,
        softcap=None,
        sink_logits=None,
        visibility=Visibility.causal(range(q.shape[2]), window=window),
    )
