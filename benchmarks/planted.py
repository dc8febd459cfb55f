"""Two models for each claim of the ledger: in one it holds, in the other it is contradicted.

    python benchmarks/planted.py [CLAIM]...

Each line has the claim, the verdict for which the model was built, the verdict of the ledger
and the reason. Queries, keys and values are tables with an entry for every token. In some
planes the vectors are the same for all tokens, so that a head looks back a fixed distance. In
other planes each token has a code, so that a head matches tokens.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from transformers import LlamaConfig, LlamaForCausalLM

import ropelens as rl

Floats = NDArray[np.float64]
Complex = NDArray[np.complex128]
BOS = 0

CONTEXT = 96
SEQUENCES = 8
PLANES = 16
PLACE = np.arange(PLANES)
RAMP = np.linspace(1, 4, PLANES)
APOSTROPHES = (3, 4, 5)


class Letters:
    """A tokenizer with one letter per token; some tokens are apostrophes."""

    def decode(self, token_ids: list[int], **_: object) -> str:
        return "".join("'" if n in APOSTROPHES else chr(1000 + n) for n in token_ids)


def llama_of(
    query: Complex,
    key: Complex,
    value: Complex,
    *,
    base: float,
    context: int = 256,
    copies_to: int = 0,
) -> LlamaForCausalLM:
    """A Llama in eval mode with tables [layer, head, token, plane] of vectors before rotation.

    Scores are in nats. The residual stream has three blocks with one coordinate per token.
    Embeddings are one-hot in block 0. Queries read block 0, and the logits are block 2. Heads
    write nothing, so every layer sees the embeddings. With `copies_to`, head 0 of layer 0
    writes its values to this block, and keys of later layers read block 1.
    """
    layers, heads, tokens, planes = query.shape
    width = -(-3 * tokens // heads) * heads
    config = LlamaConfig(
        vocab_size=tokens,
        hidden_size=width,
        intermediate_size=4,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=2 * planes,
        max_position_embeddings=context,
        rope_parameters={"rope_type": "default", "rope_theta": base},
        bos_token_id=BOS,
        eos_token_id=None,
        rms_norm_eps=1e-12,
    )
    config._attn_implementation = "eager"
    model = LlamaForCausalLM(config).eval()
    block = [slice(n * tokens, (n + 1) * tokens) for n in range(3)]
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.zero_()
        model.model.embed_tokens.weight[:, block[0]] = torch.eye(tokens)
        model.lm_head.weight[:, block[2]] = torch.eye(tokens)
        for number, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            # RMSNorm divides one code, or two codes if a head has written its values.
            codes = 2 if copies_to and number else 1
            scale = np.sqrt(codes / width)
            q = scale * rows_of(query[number] * np.sqrt(2 * planes))
            k = scale * rows_of(key[number])
            v = scale * rows_of(value[number])
            attention.q_proj.weight[:, block[0]] = torch.from_numpy(q).float()
            attention.k_proj.weight[:, block[codes - 1]] = torch.from_numpy(k).float()
            attention.v_proj.weight[:, block[0]] = torch.from_numpy(v).float()
        if copies_to:
            first = model.model.layers[0].self_attn.o_proj.weight
            first[block[copies_to], : 2 * planes] = torch.eye(tokens, 2 * planes)
    return model


def rows_of(table: Complex) -> Floats:
    """Weights [row, token] of a projection, for a table [head, token, plane]."""
    by_coordinate = np.concatenate([table.real, table.imag], -1)
    tokens = by_coordinate.shape[1]
    return by_coordinate.transpose(0, 2, 1).reshape(-1, tokens)


@dataclass
class Planted:
    """Tables of a model, and the text on which the model is measured.

    With `places`, there is a token for each pair of a place in the sequence and a code. A
    vector may then rotate with its place, so that any plane can have any frequency.
    """

    layers: int = 12
    heads: int = 4
    planes: int = PLANES
    codes: int = 24
    places: int = 1
    base: float = 1e4
    noise: float = 0.0
    copies_to: int = 0
    repeats: bool = False
    random: np.random.Generator = field(
        default_factory=lambda: np.random.default_rng(0)
    )

    def __post_init__(self) -> None:
        self.vocabulary = 1 + self.codes * self.places
        shape = self.layers, self.heads, self.vocabulary, self.planes
        self.q = self.noise * self.gaussian(shape)
        self.k = self.noise * self.gaussian(shape)
        self.v = self.gaussian(shape)
        if self.copies_to:
            one_hot = np.eye(self.vocabulary, 2 * self.planes)
            self.v[0, 0] = one_hot[:, : self.planes] + 1j * one_hot[:, self.planes :]
        self.inv_freq = self.base ** (-np.arange(self.planes) / self.planes)
        token = np.arange(-1, self.vocabulary - 1)
        self.place = token % self.places
        self.code = token // self.places

    def gaussian(self, shape: tuple[int, ...]) -> Complex:
        real, imaginary = self.random.normal(size=(2, *shape))
        return real + 1j * imaginary

    def look(
        self, head: tuple[Any, Any], back: int, gain: float, planes: slice
    ) -> "Planted":
        """Heads whose score peaks `back` tokens back: each plane adds a cosine of `gain`."""
        self.q[*head, :, planes] += gain * np.exp(-1j * self.inv_freq[planes] * back)
        self.k[*head, :, planes] += 1
        return self

    def match(
        self,
        head: tuple[int, int],
        gain: float,
        planes: slice,
        *,
        back: int = 0,
        other: int = 0,
    ) -> "Planted":
        """Heads that search for the token with the same code, or with the code `other` later.

        The match is best at `back` tokens back. With `places`, the rotation is removed.
        """
        shape = 2, self.codes + 1, len(self.inv_freq[planes])
        real, imaginary = self.random.choice([-1, 1], shape)
        code = (real + 1j * imaginary)[self.code]
        off = np.exp(-1j * np.outer(self.place, self.inv_freq[planes]))
        turn = np.exp(-1j * self.inv_freq[planes] * back)
        self.q[*head, :, planes] += gain * np.roll(code, other, 0) * off * turn
        self.k[*head, :, planes] += code * off
        return self

    def turn(
        self, head: tuple[int, int], gain: float, plane: int, inv_freq: float
    ) -> "Planted":
        """A cosine of another frequency, from vectors that rotate with their place."""
        turned = np.exp(1j * self.place * (inv_freq - self.inv_freq[plane]))
        self.q[*head, :, plane] += gain * turned
        self.k[*head, :, plane] += turned
        return self

    def model(self) -> LlamaForCausalLM:
        tables = self.q, self.k, self.v
        return llama_of(*tables, base=self.base, copies_to=self.copies_to)

    def tokens(self) -> torch.Tensor:
        """Random tokens; with `repeats`, nine in ten repeat the token three places before."""
        text = self.random.integers(0, self.codes, (SEQUENCES, CONTEXT)) * self.places
        tokens = 1 + text + np.arange(CONTEXT) % self.places
        for place in range(3, CONTEXT if self.repeats else 0):
            repeated = self.random.random(len(tokens)) < 0.9
            tokens[repeated, place] = tokens[repeated, place - 3]
        tokens[:, 0] = BOS
        return torch.from_numpy(tokens)


# ---- lengths


def long_in(qk: Any = 1.0, v: Any = 1.0) -> Planted:
    """Random vectors with these lengths [plane] or [layer, plane]."""
    qk = np.atleast_2d(qk)[:, None, None]
    v = np.atleast_2d(v)[:, None, None]
    planted = Planted(layers=max(6, len(qk), len(v)), heads=2, noise=0.3)
    planted.q = planted.q * qk
    planted.k = planted.k * qk
    planted.v = planted.v * v
    return planted


def fast_in(*layers: int) -> Floats:
    chosen = np.isin(np.arange(10), np.array(layers) % 10)
    return 1.0 + (chosen[:, None] & (PLACE < 4))


def peaks(planes: Sequence[int], height: float = 8) -> Floats:
    """Six layers whose longest plane is one of `planes`, in turn."""
    return 1 + (height - 1) * (np.resize(planes, 6)[:, None] == PLACE)


def fixed(*, longest: bool) -> Planted:
    """All tokens have the same vector in the longest plane, or in every plane except it."""
    planted = long_in(np.ones((6, PLANES)))
    chosen = (np.arange(6)[:, None] == PLACE)[:, None, None]
    q = np.where(chosen == longest, 1 + 0.1 * planted.q, planted.q)
    planted.q = q * (1 + 3 * chosen)
    return planted


# ---- heads


def sinks(planes: Sequence[int], back: int, gain: float) -> Planted:
    """Each head looks at BOS through one of the planes."""
    planted = Planted(layers=4, noise=0.06)
    for head, plane in enumerate(planes):
        turn = np.exp(-1j * planted.inv_freq[plane] * back)
        planted.q[:, head, :, plane] += gain * turn
        planted.k[:, head, BOS, plane] += 1
    return planted


def near_or_far(backs: Sequence[int]) -> Planted:
    """Heads that look this far back; the first two also attend to BOS."""
    planted = looking(backs, 6, 4, 1.0)
    planted.q[:, :2, :, -1] += 9
    planted.k[:, :2, BOS, -1] += 1
    return planted


def matching(planes: slice) -> Planted:
    """Every head matches codes through these planes."""
    planted = Planted(layers=4, noise=0.03)
    for head in np.ndindex(4, 4):
        planted.match(head, 0.3, planes)
    return planted


def mixed(planted: Planted, positional: Floats) -> Planted:
    """Heads that look back in fast planes and match in slow planes, by share [layer, head]."""
    for head in np.ndindex(positional.shape):
        share = positional[head]
        planted.look(head, 1, 1.5 * share, slice(0, 4))
        planted.match(head, 0.05 + 1.2 * (1 - share), slice(12, 16), other=1)
    return planted


def by_depth(shares: Floats) -> Planted:
    planted = Planted(layers=len(shares), heads=2, noise=0.03)
    return mixed(planted, np.tile(shares[:, None], 2))


def by_head() -> Planted:
    """Heads from positional to content, in each of four layers."""
    planted = Planted(layers=4, noise=0.015)
    content = np.arange(16).reshape(4, 4).T / 15
    return mixed(planted, 1 - content)


def slow_positional() -> Planted:
    """Slow planes look back, and fast planes match."""
    planted = Planted(layers=4, codes=8, places=CONTEXT)
    for layer, head in np.ndindex(4, 2):
        planted.look((layer, head), head + 1 + layer, 1000, slice(8, 10))
        planted.match((layer, 2 + head), 0.8, slice(head, head + 4))
    return planted


def others_predict() -> Planted:
    """Mean vectors that predict the curves of other heads better than the head's own curve."""
    planted = Planted(
        layers=4, heads=8, base=30.0, codes=2, places=CONTEXT, noise=0.006
    )
    for layer, head in np.ndindex(4, 8):
        for plane, gain in ((0, 1.5), (1 + head, -0.7)):
            planted.look((layer, head), 0, gain, slice(plane, plane + 1))
        planted.turn((layer, head), 1.4, 12, planted.inv_freq[1 + head])
    return planted


def looking(
    backs: Sequence[int],
    layers: int,
    heads: int,
    gain: float = 2,
    planes: slice = slice(0, 8),
) -> Planted:
    """A head for each number of tokens back, in turn."""
    planted = Planted(layers=layers, heads=heads, noise=0.015)
    for number, head in enumerate(np.ndindex(layers, heads)):
        planted.look(head, backs[number % len(backs)], gain, planes)
    return planted


# ---- losses


def reader(planes: slice, gain: float, *, heads: int = 1) -> Planted:
    """The next token repeats the token two back, which the head reads through `planes`."""
    planted = Planted(layers=1, heads=heads, base=10.0, copies_to=2, repeats=True)
    return planted.look((0, 0), 2, gain, planes)


def long_for_nothing(first: int, gain: float) -> Planted:
    """Queries and keys of the planes from `first` on are long in different heads."""
    planted = reader(slice(0, first), gain, heads=2)
    planted.q[0, 0, :, first:] = 30
    planted.k[0, 1, :, first:] = 30
    return planted


def induction(planes: slice, back: int, gain: float, base: float) -> Planted:
    """Head 1.0 matches keys of the previous token, best at `back` tokens back."""
    planted = Planted(
        layers=2,
        heads=1,
        planes=48,
        codes=89,
        base=base,
        copies_to=1,
        repeats=True,
    )
    planted.look((0, 0), 1, 4, slice(0, 30))
    return planted.match((1, 0), gain, planes, back=back)


def still_selectors() -> Planted:
    """Planes that select most and hardly turn, and planes that select less and must turn."""
    planted = induction(slice(0, 36), 63, 0.1, 1e4)
    return planted.match((1, 0), 0.1, slice(36, 48))


def words(tokens: Sequence[int], layers: int) -> Planted:
    """One head for each token."""
    planted = Planted(layers=layers, noise=0.03)
    for head, token in zip(np.ndindex(layers, 4), tokens, strict=True):
        planted.q[*head, :, -1] += 5
        planted.k[*head, token, -1] += 1
    return planted


def massive(planes: Sequence[int]) -> Floats:
    """Lengths of queries and keys with one very long plane in each layer."""
    return 0.4 * peaks(planes, height=20)


Make = Callable[[], Planted]
MODELS: dict[str, tuple[Make, Make]] = {
    "slow_norms": (lambda: long_in(RAMP), lambda: long_in(RAMP[::-1])),
    "fast_at_the_ends": (
        lambda: long_in(fast_in(0, -1)), lambda: long_in(fast_in(*range(1, 9)))
    ),
    "flat_values": (lambda: long_in(RAMP), lambda: long_in(v=RAMP)),
    "band": (lambda: long_in(peaks((7, 8))), lambda: long_in(peaks((0, 15)))),
    "massive_slow": (
        lambda: long_in(massive(range(8, 16))), lambda: long_in(massive(range(8)))
    ),
    "massive_not_in_values": (
        lambda: long_in(massive(range(16))), lambda: long_in(v=peaks(range(16), height=20))
    ),
    "sinks_slow": (lambda: sinks((13, 13, 14, 14), 0, 6), lambda: sinks((1, 2, 3, 4), 30, 8)),
    "sinks_shorten": (lambda: near_or_far((1, 2, 30, 60)), lambda: near_or_far((60, 30, 2, 1))),
    "positional_fast": (
        by_head, slow_positional
    ),
    "positional_early": (
        lambda: by_depth(np.linspace(1, 0, 6)), lambda: by_depth(np.linspace(0, 1, 6))
    ),
    "fixed_vectors": (lambda: fixed(longest=True), lambda: fixed(longest=False)),
    "mean_vectors_predict": (
        lambda: looking((1, 4, 9, 16), 4, 4, 1, slice(0, 6)), others_predict
    ),
    "decay": (
        lambda: looking([0], 6, 4, 0.3, slice(5, 10)),
        lambda: looking([0], 6, 4, -0.3, slice(5, 10)),
    ),
    "previous_token": (lambda: looking((0, 1), 1, 4), lambda: looking(range(2, 98), 12, 8)),
    "diagonal": (lambda: looking((0, 1), 1, 4), lambda: looking(range(2, 98), 12, 8)),
    "slow_stop": (lambda: reader(slice(0, 12), 0.6), lambda: reader(slice(12, 16), 150)),
    "fast_stop": (lambda: reader(slice(0, 4), 4), lambda: reader(slice(4, 16), 2)),
    "long_planes": (lambda: reader(slice(0, 2), 8), lambda: long_for_nothing(14, 0.6)),
    "norms_not_worth": (lambda: long_for_nothing(8, 1), lambda: reader(slice(0, 2), 8)),
    "retrieval_planes": (lambda: induction(slice(36, 48), 63, 2, 28), still_selectors),
    "preferences_reverse": (lambda: matching(slice(0, 4)), lambda: matching(slice(12, 16))),
    "slow_induction": (
        lambda: induction(slice(36, 48), 63, 2, 28),
        lambda: induction(slice(0, 36), 63, 0.1, 28),
    ),
    "slow_reach": (
        lambda: induction(slice(42, 48), 30, 4, 62),
        lambda: induction(slice(42, 48), 120, 8, 100),
    ),
    "apostrophes": (
        lambda: words([*APOSTROPHES, 3], 1), lambda: words((1, 2, *range(6, 24)), 5)
    ),
}  # fmt: skip
"""The claim holds in the first model and is contradicted in the second model."""


def row_of(name: str, planted: Planted) -> pd.Series:
    """Row of a claim in the ledger of a planted model."""
    tokens = planted.tokens()
    model = planted.model()
    text = rl.Text(tokens, documents=range(len(tokens)))
    surrogates = 40 if name == "positional_fast" else 0
    excerpt = tokens[0, :8]
    profile = rl.profile(model, text, excerpts=[excerpt], surrogates=surrogates)
    table = rl.test_claims(profile, draws=200)
    if name not in {*table["claim"]}:  # the model runs again for this claim
        table = rl.test_claims(
            profile, model=model, text=text, tokenizer=Letters(), draws=200
        )
    return table.set_index("claim").loc[name]


def main() -> None:
    for name in sys.argv[1:] or MODELS:
        for built_for, make in zip(
            ("holds", "contradicted"), MODELS[name], strict=True
        ):
            row = row_of(name, make())
            print(f"{name} | {built_for} | {row['verdict']} | {row['why']}", flush=True)


if __name__ == "__main__":
    main()
