"""Heads built by hand: a Llama of one layer in which every head does one known thing.

Barbero et al. 2024 (arXiv 2410.06205), theorem 5.3: with q = a psi and k = R(offset) psi the
score is a sum of cosines that peaks `offset` tokens back. Planes that turn fast make the
peak narrow, middle ones a band; slow planes hardly turn in the context, so what is written
there matches by content wherever it stands.

The residual stream carries each token's code (one-hot, BOS one more) and, in coordinates
beside it, noise of the token's own; all tokens have the same length, so RMSNorm changes
nothing. Projections write for each code what the head wants, plus noise in every weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

Floats = NDArray[np.float64]

BASE = 10_000.0
CONTEXT, SEQUENCES = 96, 8
BOS = 0
NOISE_COORDINATES = 16  # at least
WEIGHT_NOISE = 0.2  # std of each coordinate of a query or key: up to 1.3 nats of a score
OFFSETS = (0, 1, 2, 3, 6)


@dataclass(frozen=True)
class Expected:
    """What a head was built to do: its label by the documented thresholds; for a positional one
    the offset of its peak and how far noise may move it; for all, in words, and the
    attention on position 0 that was mixed in (0 for none)."""

    label: str
    offset: int | None
    tolerance: int
    description: str
    sink: float


@dataclass(frozen=True)
class Head:
    """Queries and keys [token, coordinate] before rotation, and what is expected of them."""

    query: Floats
    key: Floats
    expected: Expected


@dataclass(frozen=True)
class Workshop:
    """What all heads of one model share: planes, vocabulary, random numbers.

    Tokens: 0 is BOS, 1 .. codes the others. Vectors are written as complex planes, scaled
    so that the score in nats of a plane is the product of what is written.
    """

    head_dim: int
    random: np.random.Generator

    @property
    def inv_freq(self) -> Floats:
        return BASE ** (-np.arange(0, self.head_dim, 2) / self.head_dim)

    def planes(self, shortest: float, longest: float) -> NDArray[np.int64]:
        """Planes whose wavelength lies in [shortest, longest] tokens."""
        wavelength = 2 * np.pi / self.inv_freq
        return np.flatnonzero((wavelength >= shortest) & (wavelength <= longest))

    @property
    def slow(self) -> NDArray[np.int64]:
        """Planes for content: at most 0.31 rad over the context; the slowest is the sink's."""
        return self.planes(1900, np.inf)[:-1]

    @property
    def codes(self) -> int:
        """Different tokens beside BOS: one coordinate of the slow planes each."""
        return 2 * len(self.slow)

    def blank(self) -> NDArray[np.complex128]:
        """Nothing written yet, [token, plane]."""
        return np.zeros((1 + self.codes, self.head_dim // 2), dtype=complex)

    def coordinates(self, planes: NDArray[np.complex128]) -> Floats:
        """[token, coordinate] in Llama's layout (half), with the scale 1/sqrt(d) undone."""
        halves = np.concatenate([planes.real, planes.imag], axis=-1)
        return halves * self.head_dim**0.25

    def finished(
        self,
        query: NDArray[np.complex128],
        key: NDArray[np.complex128],
        *,
        expected: Expected,
        strength: float = 0.0,
    ) -> Head:
        """The head; with a score of `strength` nats on BOS for every query, if asked."""
        if strength:
            key[BOS] = 0  # or the sink's share would rise and fall with its distance
        query[:, -1] += np.sqrt(strength)
        key[BOS, -1] += np.sqrt(strength)
        return Head(self.coordinates(query), self.coordinates(key), expected)


def at_offset(
    shop: Workshop, planes: NDArray[np.int64], offset: int, gain: float
) -> tuple[NDArray[np.complex128], NDArray[np.complex128]]:
    """Queries and keys whose score is gain sum_f cos(w_f (distance - offset))."""
    query, key = shop.blank(), shop.blank()
    query[:, planes] = np.sqrt(gain)
    key[:, planes] = np.sqrt(gain) * np.exp(1j * shop.inv_freq[planes] * offset)
    return query, key


def strength_for(share: float, log_rest: float) -> float:
    """Score in nats that gives one key `share` of the attention beside exp(log_rest)."""
    return log_rest + np.log(share / (1 - share)) if share else 0.0


def offset_head(shop: Workshop, *, offset: int, sink: float) -> Head:
    """One offset, through planes faster than 120 tokens, 4 to 6 nats above any other."""
    planes = shop.planes(0, 120)
    distance = np.arange(-CONTEXT, CONTEXT)
    profile = np.cos(np.outer(distance, shop.inv_freq[planes])).sum(1)
    margin = len(planes) - profile[distance != 0].max()
    gain = shop.random.uniform(4, 6) / margin
    query, key = at_offset(shop, planes, offset, gain)
    expected = Expected("positional", offset, 0, f"{offset} back", sink)
    strength = strength_for(sink, gain * len(planes))
    return shop.finished(query, key, expected=expected, strength=strength)


def band_head(shop: Workshop, *, sink: float) -> Head:
    """A bump 9 to 12 tokens wide at half height, some tokens back, through middle planes."""
    planes = shop.planes(30, 400)
    deviation = shop.random.uniform(4, 5)
    offset = int(shop.random.integers(6, 13))
    gain = 1 / deviation**2 / (shop.inv_freq[planes] ** 2).sum()
    query, key = at_offset(shop, planes, offset, gain)
    words = f"a band of deviation {deviation:.1f} around {offset} back"
    log_rest = gain * len(planes) + np.log(deviation * np.sqrt(2 * np.pi))
    return shop.finished(
        query,
        key,
        expected=Expected("positional", offset, 2, words, sink),
        strength=strength_for(sink, log_rest),
    )


def equal_head(shop: Workshop, *, sink: float) -> Head:
    """Every token attends to the tokens equal to it, itself among them."""
    score = shop.random.uniform(7, 9)
    code = np.eye(1 + shop.codes)[:, 1:] * np.sqrt(score)
    query, key = shop.blank(), shop.blank()
    query[:, shop.slow] = key[:, shop.slow] = code[:, ::2] + 1j * code[:, 1::2]
    log_rest = score + np.log(1 + CONTEXT / 2 / shop.codes)
    return shop.finished(
        query,
        key,
        expected=Expected("semantic", None, 0, "equal tokens", sink),
        strength=strength_for(sink, log_rest),
    )


def class_head(shop: Workshop, *, sink: float) -> Head:
    """Every token attends to the tokens of one class, a fifth of the vocabulary."""
    score = shop.random.uniform(5, 7)
    members = 1 + shop.random.permutation(shop.codes)[: shop.codes // 5]
    plane = shop.random.choice(shop.slow)
    query, key = shop.blank(), shop.blank()
    query[:, plane] = np.sqrt(score)
    key[members, plane] = np.sqrt(score)
    log_rest = score + np.log(CONTEXT / 2 * len(members) / shop.codes)
    return shop.finished(
        query,
        key,
        expected=Expected("semantic", None, 0, "a class of tokens", sink),
        strength=strength_for(sink, log_rest),
    )


def sink_head(shop: Workshop, *, share: float) -> Head:
    """Position 0, with about `share` of the attention in the middle of the context."""
    strength = strength_for(share, np.log(CONTEXT / 2))
    expected = Expected("sink", None, 0, f"position 0, share {share}", share)
    return shop.finished(shop.blank(), shop.blank(), expected=expected, strength=strength)


def diffuse_head(shop: Workshop) -> Head:
    """Nothing but noise."""
    expected = Expected("diffuse", None, 0, "everything equally", 0.0)
    return shop.finished(shop.blank(), shop.blank(), expected=expected)


def heads(shop: Workshop) -> list[Head]:
    """Nineteen heads: what each does alone, then again with a sink mixed in."""
    several: list[Callable[[float], Head]] = [
        *(lambda sink, o=offset: offset_head(shop, offset=o, sink=sink) for offset in OFFSETS),
        lambda sink: band_head(shop, sink=sink),
        lambda sink: equal_head(shop, sink=sink),
        lambda sink: class_head(shop, sink=sink),
    ]
    return [
        *(build(0.0) for build in several),
        *(build(float(shop.random.uniform(0.3, 0.5))) for build in several),
        sink_head(shop, share=0.95),
        sink_head(shop, share=0.6),
        diffuse_head(shop),
    ]


def residual_stream(shop: Workshop, *, multiple: int) -> Floats:
    """Embeddings [token, coordinate]: one-hot code, then noise; mean square 1 each.

    Llama wants the width to be a `multiple` of the number of heads.
    """
    tokens = 1 + shop.codes
    width = -(-(tokens + NOISE_COORDINATES) // multiple) * multiple
    noise = shop.random.normal(size=(tokens, width - tokens))
    noise /= np.linalg.norm(noise, axis=1, keepdims=True)
    return np.concatenate([np.eye(tokens), noise], axis=1) * np.sqrt(width / 2)


def projection(shop: Workshop, stream: Floats, wanted: list[Floats]) -> Floats:
    """Weights [head x coordinate, stream] that turn each code into `wanted`, plus noise."""
    tokens, width = stream.shape
    weights = shop.random.normal(size=(len(wanted) * shop.head_dim, width))
    weights *= WEIGHT_NOISE / np.sqrt(width)
    weights[:, :tokens] += np.concatenate([vectors.T for vectors in wanted]) / stream[0, 0]
    return weights


def handmade(
    seed: int, head_dim: int
) -> tuple[LlamaForCausalLM, NDArray[np.int64], list[Expected]]:
    """A Llama of one layer in eval mode, tokens [SEQUENCES, CONTEXT] that begin with BOS,
    and what is expected of each head, in order. The output of the model means nothing."""
    shop = Workshop(head_dim=head_dim, random=np.random.default_rng(seed))
    built = heads(shop)
    stream = residual_stream(shop, multiple=len(built))
    config = LlamaConfig(
        vocab_size=len(stream),
        hidden_size=stream.shape[1],
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=len(built),
        num_key_value_heads=len(built),
        head_dim=head_dim,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
        bos_token_id=BOS,
        eos_token_id=None,
        rms_norm_eps=1e-12,
    )
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config).eval()
    attention = model.model.layers[0].self_attn
    weights = {
        model.model.embed_tokens.weight: stream,
        attention.q_proj.weight: projection(shop, stream, [head.query for head in built]),
        attention.k_proj.weight: projection(shop, stream, [head.key for head in built]),
    }
    with torch.no_grad():
        for weight, values in weights.items():
            weight.copy_(torch.from_numpy(values))
    tokens = shop.random.integers(1, len(stream), size=(SEQUENCES, CONTEXT))
    tokens[:, 0] = BOS
    return model, tokens, [head.expected for head in built]
