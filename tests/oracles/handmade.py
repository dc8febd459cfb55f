"""A Llama with one layer, whose heads each do one known thing.

Barbero et al. 2024 (arXiv 2410.06205), theorem 5.3: with q = a psi and k = R(offset) psi, the
score is a sum of cosines that peaks `offset` tokens back. In fast planes all keys have the same
vector, in slow planes they have a code of their token, and in the slowest plane a mark of BOS.
Queries select the keys that a head attends to. Tokens are codes 1, 2, ...; BOS is 0.

The residual stream has a code of each token (one-hot) and, in further coordinates, noise by
token. All tokens have the same length, so RMSNorm does not change them. Projections map each
code to the wanted query or key, with noise in every weight.
"""

from collections.abc import Iterator
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

BASE, BOS = 10_000.0, 0
CONTEXT, SEQUENCES = 96, 8
NOISE_COORDINATES = 16  # at least
WEIGHT_NOISE = 0.02  # std of each coordinate of a query or key
OFFSETS = (0, 1, 3, 17, 60)
DIAGONAL = 8.0  # lead of the own token in nats
MIXTURES = (0.0, 0.25, 0.5, 0.75, 1.0)  # weights of offset 0 against a match of tokens
DIAGONALS = (*((a, 1 - a) for a in MIXTURES), (1.0, 0.05))
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


Wanted = tuple[Complex, Expected]
"""The query of each token by plane, before rotation, and the expected result."""


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
    def fast(self) -> NDArray[np.int64]:
        return np.flatnonzero(2 * np.pi / self.inv_freq < 400)

    @property
    def slow(self) -> NDArray[np.int64]:
        return np.flatnonzero(2 * np.pi / self.inv_freq > 20 * CONTEXT)[:-1]

    @property
    def codes(self) -> int:
        return 2 * len(self.slow)

    def profile(self, gain: Floats, offset: int) -> Floats:
        """Score at each distance for a head that attends `offset` tokens back."""
        return (
            np.cos(np.outer(np.arange(CONTEXT) - offset, self.inv_freq[self.fast]))
            @ gain
        )

    def keys(self) -> Complex:
        """The key of each token, by plane, before rotation: [token, plane]."""
        key = np.zeros((1 + self.codes, self.head_dim // 2), dtype=complex)
        key[1:, self.fast] = 1
        code = np.eye(self.codes)
        key[1:, self.slow] = code[:, ::2] + 1j * code[:, 1::2]
        key[BOS, -1] = 1
        return key

    def head(
        self, expected: Expected, *, level: float, fast: Any = 0, slow: Any = 0
    ) -> Wanted:
        """Given queries; `level` is the log of the total weight of all keys except BOS."""
        query = np.zeros((1 + self.codes, self.head_dim // 2), dtype=complex)
        query[:, self.fast], query[1:, self.slow] = fast, slow
        if expected.sink:
            query[:, -1] = level + np.log(expected.sink / (1 - expected.sink))
        return query, expected

    def offset_head(self, offset: int, sink: float) -> Wanted:
        """One offset, 4 to 6 nats above any other."""
        profile = self.profile(np.ones(len(self.fast)), offset)
        margin = len(self.fast) - np.delete(profile, offset).max()
        gain = np.full(len(self.fast), self.random.uniform(4, 6) / margin)
        fast = gain * np.exp(-1j * self.inv_freq[self.fast] * offset)
        expected = Expected("positional", f"{offset} back", offset=offset, sink=sink)
        return self.head(expected, level=gain.sum(), fast=fast)

    def band_head(self, sink: float) -> Wanted:
        """A bump of deviation 4 to 5 tokens, some tokens back, through middle planes."""
        w = self.inv_freq[self.fast]
        middle = 2 * np.pi / w > 30
        deviation, offset = self.random.uniform(4, 5), int(self.random.integers(8, 14))
        gain = middle / deviation**2 / (w[middle] ** 2).sum()
        level = float(np.log(np.exp(self.profile(gain, offset)).sum()))
        expected = Expected(
            "positional", "a band", offset=offset, tolerance=2, sink=sink
        )
        return self.head(expected, level=level, fast=gain * np.exp(-1j * w * offset))

    def content_head(self, description: str, sink: float) -> Wanted:
        """A head in which every token attends to equal tokens, or to one given token."""
        score = self.random.uniform(6, 8)
        codes = score * np.eye(self.codes)
        if description == "a word":
            codes = codes[[self.random.integers(self.codes)] * self.codes]
        level = score + np.log(CONTEXT / 2 / self.codes)
        expected = Expected("semantic", description, sink=sink)
        return self.head(
            expected, level=level, slow=codes[:, ::2] + 1j * codes[:, 1::2]
        )

    def diagonal_head(self, offset: float, match: float, sink: float) -> Wanted:
        """The own token, by its offset and by a match with its code, with these weights."""
        lead = len(self.fast) - self.profile(np.ones(len(self.fast)), 0)[1:].max()
        gain, codes = offset * DIAGONAL / lead, match * DIAGONAL * np.eye(self.codes)
        slow, level = (
            codes[:, ::2] + 1j * codes[:, 1::2],
            gain * len(self.fast) + codes[0, 0],
        )
        label = "positional" if offset == 1 else "semantic" if match == 1 else "mixed"
        expected = Expected(label, f"offset {offset}, match {match}", sink=sink)
        return self.head(expected, level=level, fast=gain, slow=slow)

    def diagonals(self) -> Iterator[Wanted]:
        yield from (self.diagonal_head(*weights, 0.0) for weights in DIAGONALS)
        pure = DIAGONALS[:1] + DIAGONALS[-2:]
        yield from (self.diagonal_head(*weights, 0.4) for weights in pure)

    def every_kind(self) -> Iterator[Wanted]:
        for mixed in (False, True):

            def share(mixed: bool = mixed) -> float:
                return float(self.random.uniform(0.35, 0.5)) if mixed else 0.0

            yield from (self.offset_head(offset, share()) for offset in OFFSETS)
            yield self.band_head(share())
            yield self.content_head("equal tokens", share())
            yield self.content_head("a word", share())
        for share_of_all in (0.95, 0.7):
            expected = Expected("sink", "BOS", sink=share_of_all)
            yield self.head(expected, level=np.log(CONTEXT / 2))
        yield self.head(Expected("diffuse", "noise"), level=0.0)

    def residual_stream(self, *, multiple: int) -> Floats:
        """Embeddings [token, coordinate] of mean square 1; `multiple` divides the width."""
        tokens = 1 + self.codes
        width = -(-(tokens + NOISE_COORDINATES) // multiple) * multiple
        noise = self.random.normal(size=(tokens, width - tokens))
        noise /= np.linalg.norm(noise, axis=1, keepdims=True)
        return np.concatenate([np.eye(tokens), noise], axis=1) * np.sqrt(width / 2)

    def projection(self, stream: Floats, wanted: Complex) -> torch.Tensor:
        """Weights [head x coordinate, stream] from codes to `wanted` [head, token, plane]."""
        by_coordinate = np.concatenate([wanted.real, wanted.imag], axis=-1)
        tokens, width = stream.shape
        weights = self.random.normal(size=(len(wanted) * self.head_dim, width))
        weights *= WEIGHT_NOISE / np.sqrt(width)
        scaled = by_coordinate * self.head_dim**0.25 / stream[0, 0]
        weights[:, :tokens] += scaled.transpose(0, 2, 1).reshape(len(weights), tokens)
        return torch.from_numpy(weights)


def handmade(seed: int, head_dim: int, kinds=Site.every_kind) -> tuple:
    """The model, tokens [SEQUENCES, CONTEXT] after BOS, and the expected result of each head.

    A sequence repeats no token if there are enough codes.
    """
    site = Site(head_dim, np.random.default_rng(seed))
    heads = list(kinds(site))
    stream = site.residual_stream(multiple=len(heads))
    config = LlamaConfig(
        **{
            "vocab_size": len(stream),
            "hidden_size": stream.shape[1],
            "intermediate_size": 8,
        },
        **{
            "num_hidden_layers": 1,
            "num_attention_heads": len(heads),
            "head_dim": head_dim,
        },
        **{"num_key_value_heads": len(heads), "max_position_embeddings": 512},
        **{"bos_token_id": BOS, "eos_token_id": None, "rms_norm_eps": 1e-12},
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
    )
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    attention = model.model.layers[0].self_attn
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.from_numpy(stream))
        queries = np.stack([query for query, _ in heads])
        attention.q_proj.weight.copy_(site.projection(stream, queries))
        keys = np.stack([site.keys()] * len(heads))
        attention.k_proj.weight.copy_(site.projection(stream, keys))
    tokens = site.random.integers(1, len(stream), size=(SEQUENCES, CONTEXT))
    if site.codes >= CONTEXT:
        codes = np.broadcast_to(np.arange(1, len(stream)), (SEQUENCES, site.codes))
        tokens = site.random.permuted(codes, axis=1)[:, :CONTEXT]
    tokens[:, 0] = BOS
    return model, tokens, [expected for _, expected in heads]


def call_of(
    q: torch.Tensor, k: torch.Tensor, *, scale=1.0, window=10**6
) -> AttentionCall:
    """A call of queries and keys [batch, head, position, coordinate]; values do not matter."""
    visibility = Visibility.causal(range(q.shape[2]), window=window)
    return AttentionCall(0, q, k, k, q.transpose(1, 2), scale, None, None, visibility)
