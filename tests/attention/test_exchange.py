"""Attention after keys exchanged their contents, compared with a dense computation."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from oracles.recording import MASKS, with_mask
from oracles.tiny import TEN, keep, not_as_configured, random_tokens, tiny
from torch import Tensor
from transformers import PreTrainedModel

import ropelens as rl
from ropelens import profiles
from ropelens.attention import exchange
from ropelens.attention.call import AttentionCall
from ropelens.attention.exchange import DRAWS, EARLY
from ropelens.attention.formulas import FOLLOW
from ropelens.attention.visibility import Visibility
from ropelens.budget import held_out
from ropelens.budget.found_sinks import add_found_sinks
from ropelens.budget.held_out import LayerFit
from ropelens.budget.labels import follow_numbers
from ropelens.model import live_model
from ropelens.profiles.layer_fits import LayerFitter
from ropelens.profiles.measurement import Batch, Measurement
from ropelens.profiles.passes import collect
from ropelens.rope.planes import Planes

pytestmark = not_as_configured
across = pytest.mark.filterwarnings("ignore:in packed rows this model gives")
FAMILIES = (*TEN, "gemma3", "qwen3_moe")


def turned(x: Tensor, positions: Tensor, planes: Planes, sign: int) -> Tensor:
    """`x` [position, coordinate] with its planes turned as complex numbers."""
    angle = sign * positions[:, None] * planes.inv_freq.double()
    turn = torch.polar(torch.ones_like(angle), angle)
    pairs = torch.complex(x[:, planes.first], x[:, planes.second]) * turn
    result = x.clone()
    result[:, planes.first] = pairs.real
    result[:, planes.second] = pairs.imag
    return result


def permutation(order: list[float], movable: list[bool], block: int) -> list[int]:
    """pi: the movable tokens of each block, in the order of their random numbers."""
    contents = [*range(len(order))]
    for begin in range(0, len(order), block):
        end = min(begin + block, len(order))
        positions = [j for j in range(begin, end) if movable[j]]
        in_order = sorted(positions, key=order.__getitem__)
        for position, content in zip(positions, in_order, strict=True):
            contents[position] = content
    return contents


def overlap(a: Tensor, b: Tensor) -> Tensor:
    return 1 - (a / a.sum() - b / b.sum()).abs().sum() / 2


def follow(
    before: Tensor, after: Tensor, *, inverse: Tensor, compared: Tensor
) -> Tensor:
    """`FOLLOW` of a row with weight 1, from its attention before and after the exchange.

    `inverse` is pi^-1, and `compared` marks the keys that the overlaps compare.
    """
    zero = torch.zeros(()).double()
    one = torch.ones(()).double()
    if not compared.any():
        return torch.stack([zero, zero, zero, zero, one])
    mass = before[compared].sum()
    position = overlap(before[compared], after[compared])
    content = overlap(before[compared], after[inverse][compared])
    chance = overlap(before[compared], before[inverse][compared])
    return torch.stack([mass * position, mass * content, mass * chance, mass, one])


@dataclass(frozen=True, eq=False)
class DenseSequence:
    """The sequence of a call with this number, without padding."""

    call: AttentionCall
    batch: Batch
    sinks: Tensor  # [sequence, head or 1, key]
    number: int

    @cached_property
    def length(self) -> int:
        return int(self.batch.text.lengths[self.number])

    @cached_property
    def group(self) -> int:
        """Number of query heads that read a key."""
        return self.call.query.shape[1] // self.call.key.shape[1]

    @cached_property
    def hidden(self) -> Tensor:
        if self.batch.text.hidden is None:
            return torch.zeros(self.length, dtype=torch.bool)
        return self.batch.text.hidden[self.number, : self.length]

    @cached_property
    def sees(self) -> Tensor:
        """Which keys each row sees [row, key]."""
        by_sequence = self.call.visibility.sees().expand(len(self.call.query), -1, -1)
        return by_sequence[self.number, : self.length, : self.length]

    @cached_property
    def order(self) -> Tensor:
        """Random numbers [draw, token] that permute the tokens."""
        return self.batch.scored.order[self.number, :, : self.length]

    @cached_property
    def block(self) -> int:
        """Number of tokens that exchange their contents: half of a window that slides."""
        rows = (~self.hidden).nonzero()[:, 0]
        seen = [self.sees[row].nonzero()[:, 0] for row in rows]
        window = max(len(keys) for keys in seen)
        first_keys = {int(keys[0]) for keys in seen}
        slides = len(first_keys) > 1
        if self.call.visibility.mask is not None:
            slides = window < len(rows) * 2 / 3
        return window // 2 if slides else self.length

    def movable(self, head: int) -> Tensor:
        """The tokens that are not hidden, and not a sink of a head of the group."""
        first = head // self.group * self.group
        sinks = self.sinks[self.number, :, : self.length]
        of_heads = sinks.expand(self.call.query.shape[1], -1)
        of_group = of_heads[first : first + self.group]
        is_sink = (of_group > 0).any(0)
        return ~is_sink & ~self.hidden

    def rows_of(self, draw: int) -> dict[int, float]:
        """The weights, by position, of the rows that use the permutation of a draw.

        Rows use the permutations in turn, but each row of a single long sequence uses all
        permutations.
        """
        positions = self.batch.scored.position[self.number].tolist()
        weights = self.batch.scored.weight[self.number].tolist()
        rows = {}
        for index, position in enumerate(positions):
            if weights[index] == 0 or position < self.length * EARLY:
                continue
            if self.batch.text.single_long_sequence:
                rows[position] = weights[index] / DRAWS
            elif index % DRAWS == draw:
                rows[position] = weights[index]
        return rows


@dataclass(frozen=True, eq=False)
class DenseHead:
    """A query head of a sequence, and the planes of its layer."""

    sequence: DenseSequence
    planes: Planes
    head: int

    @cached_property
    def query(self) -> Tensor:
        return self.sequence.call.query[self.sequence.number, self.head].double()

    @cached_property
    def key(self) -> Tensor:
        kv_head = self.head // self.sequence.group
        key = self.sequence.call.key[self.sequence.number, kv_head]
        return key[: self.sequence.length].double()

    @cached_property
    def planes_of_head(self) -> Planes:
        if self.planes.inv_freq.ndim == 1:
            return self.planes
        return replace(self.planes, inv_freq=self.planes.inv_freq[self.head])

    def attention(self, row: int, key: Tensor) -> Tensor:
        call = self.sequence.call
        scores = call.squash(call.scale * key @ self.query[row])
        weights = scores.masked_fill(~self.sequence.sees[row], -math.inf).exp()
        total = weights.sum()
        if call.sink_logits is not None:
            total = total + call.sink_logits[self.head].double().exp()
        return weights / total

    def exchanged_key(self, pi: Tensor) -> Tensor:
        """The keys of which key j has the content of key pi(j)."""
        positions = torch.arange(self.sequence.length)
        still = turned(self.key, positions, self.planes_of_head, -1)
        return turned(still[pi], positions, self.planes_of_head, 1)

    def sums(self) -> Tensor:
        """`FOLLOW`, row by row."""
        total = torch.zeros(len(FOLLOW)).double()
        movable = self.sequence.movable(self.head)
        sees = self.sequence.sees
        order = self.sequence.order
        for draw, numbers in enumerate(order.tolist()):
            pi = permutation(numbers, movable.tolist(), self.sequence.block)
            inverse = torch.tensor(pi).argsort()
            exchanged_key = self.exchanged_key(torch.tensor(pi))
            for row, weight in self.sequence.rows_of(draw).items():
                total += weight * follow(
                    self.attention(row, self.key),
                    self.attention(row, exchanged_key),
                    inverse=inverse,
                    compared=sees[row] & sees[row][inverse] & movable,
                )
        return total


PADDED = rl.Text(random_tokens(), lengths=torch.tensor([30, 24]))
MASK = torch.arange(36) >= torch.tensor([[6], [12]])
HIDDEN = torch.zeros(2, 30, dtype=torch.bool)
HIDDEN[0, 5:9] = True
HIDDEN[1, 1] = True
BEGINS_HIDDEN = torch.arange(30) < torch.tensor([[9], [8]])
GAP = torch.arange(30) // 12 == torch.tensor([[1], [9]])
TEXTS: dict[str, rl.Text | Tensor | dict[str, Tensor]] = {
    "single": random_tokens(sequences=1),
    "hidden": rl.Text(random_tokens(), hidden=HIDDEN),
    "begins hidden": rl.Text(random_tokens(), hidden=BEGINS_HIDDEN),
    "gap": rl.Text(random_tokens(), hidden=GAP),
    "left": {
        "input_ids": random_tokens(length=36) * MASK,
        "attention_mask": MASK.long(),
    },
    "packed": {
        "input_ids": random_tokens().flatten()[None, :54],
        "position_ids": torch.arange(30).repeat(2)[None, :54],
    },
}


@dataclass(frozen=True)
class Case:
    """A family of models, and its text, mask or other situation."""

    family: str
    situation: str = "right"

    def __str__(self) -> str:
        return f"{self.family}: {self.situation}"


SITUATIONS = {
    "llama_gqa": [*MASKS, *TEXTS, "float32", "edited", "found sinks"],
    "gpt_oss": ["found sinks"],
    "mistral_sliding": ["packed", "begins hidden", "gap"],
}


def all_cases() -> list[Case]:
    cases = [Case(family) for family in FAMILIES]
    for family, situations in SITUATIONS.items():
        for situation in situations:
            cases.append(Case(family, situation))
    return cases


OPEN = ExitStack()  # edits of measured models


@pytest.fixture(scope="module", autouse=True)
def end_edits() -> Iterator[None]:
    with OPEN:
        yield


@dataclass(frozen=True, eq=False)
class Exchanged:
    """A measurement, its planes and fits, and the dense sums [sequence, head, value]."""

    measurement: Measurement
    planes: Sequence[Planes]
    fits: dict[int, LayerFit]
    expected: dict[int, Tensor]


def model_of(case: Case) -> PreTrainedModel:
    model = tiny(case.family)
    if case.situation != "float32":
        model = model.double()
    if case.situation in MASKS:
        model = with_mask(model, MASKS[case.situation])
    if case.situation in ("begins hidden", "gap"):
        # eager attention is NaN if a row sees no key
        model.set_attn_implementation("sdpa")
    return model


def dense_sums(
    measurement: Measurement,
    planes: Sequence[Planes],
    fits: dict[int, LayerFit],
    family: str,
) -> dict[int, Tensor]:
    """The dense sums [sequence, head, value] of each layer."""
    text = measurement.text
    (batch,) = measurement.batches()
    sums: dict[int, Tensor] = {}

    def compute(call: AttentionCall) -> None:
        assert_has_every_term(call, family)
        sinks = add_found_sinks(text.sinks, fits[call.layer].found_sinks)
        of_sequences = []
        for number in range(len(text)):
            sequence = DenseSequence(call, batch, sinks, number)
            of_heads = []
            for head in range(call.query.shape[1]):
                dense = DenseHead(sequence, planes[call.layer], head)
                of_heads.append(dense.sums())
            of_sequences.append(torch.stack(of_heads))
        sums[call.layer] = torch.stack(of_sequences)

    with measurement.live.observe(compute):
        measurement.live.forward(text.ids, hidden=text.hidden)
    return sums


def with_found_sinks(fits: dict[int, LayerFit]) -> dict[int, LayerFit]:
    """The fits as if sinks had been found, for 3 of 4 heads and differently within groups."""
    found = torch.zeros(4, 30, dtype=torch.bool)
    found[1, 4] = True
    found[2, 7] = True
    found[3, [7, 15]] = True
    return {layer: replace(fit, found_sinks=found) for layer, fit in fits.items()}


def assert_has_every_term(call: AttentionCall, family: str) -> None:
    assert (call.softcap is not None) == (family == "gemma2")
    assert (call.sink_logits is not None) == (family == "gpt_oss")


@cache
def exchanged(case: Case) -> Exchanged:
    model = model_of(case)
    if case.situation == "edited":  # heads of a group rotate in different planes
        stopped = rl.stop(rl.PlaneNumbers([1]), heads="0.1")
        OPEN.enter_context(rl.edit_rope(model, stopped))
    text = TEXTS.get(case.situation, PADDED)
    measurement = Measurement.of(model, text, seed=3)
    planes = measurement.rotation.planes(measurement.text.context)
    fits = LayerFitter(measurement, planes, surrogates=0).fit_layers()
    if case.situation == "found sinks":
        fits = with_found_sinks(fits)
    expected = dense_sums(measurement, planes, fits, case.family)
    return Exchanged(measurement, planes, fits, expected)


def follow_of(case: Case, *, batch_size: int | None = None) -> dict[int, np.ndarray]:
    """The measured sums `FOLLOW` [sequence, head, value] of each layer."""
    of_case = exchanged(case)
    measurement = replace(of_case.measurement, batch_size=batch_size)
    sums = collect(measurement, of_case.planes, fits=of_case.fits)
    sequences = range(len(measurement.text))
    of_layers = {}
    for layer, scores in sums.scores.items():
        of_layers[layer] = scores[sequences, 0, :, -len(FOLLOW) :].numpy()
    return of_layers


def check(case: Case, *, batch_size: int | None = None) -> None:
    """Measured sums are the dense sums."""
    sums = follow_of(case, batch_size=batch_size)
    expected = exchanged(case).expected
    tolerance = 1e-5 if case.situation == "float32" else 1e-6
    assert sums.keys() == expected.keys()
    for layer, ours in sums.items():
        assert_allclose(ours, expected[layer], atol=tolerance, rtol=tolerance)


@across
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_sums_are_those_of_a_dense_computation(case: Case):
    check(case)


@pytest.mark.parametrize("family", ["llama_gqa", "mistral_sliding", "gpt_oss"])
@pytest.mark.parametrize(
    ("batch_size", "chunk", "at_once"), [(1, 2**16, 1), (2, 13, 1), (2, 2**16, DRAWS)]
)
def test_sums_do_not_depend_on_batches(family, batch_size, chunk, at_once, monkeypatch):
    case = Case(family)
    live = exchanged(case).measurement.live
    monkeypatch.setattr(live_model, "ONE_PASS", chunk)
    monkeypatch.setitem(exchange.AT_ONCE, "cpu", at_once)
    expected_length = 13 if chunk == 13 else None
    assert live.chunk_length(30) == expected_length
    check(case, batch_size=batch_size)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exchange_of_nothing_changes_nothing(
    family: str, monkeypatch: pytest.MonkeyPatch
):
    case = Case(family)
    exchanged(case)
    order = torch.arange(30) / 30

    def in_place(length: Tensor, **_: object) -> Tensor:
        return order.expand(len(length), DRAWS, -1)

    monkeypatch.setattr(profiles.measurement, "exchange_order", in_place)
    for layer, sums in follow_of(case).items():
        numbers = follow_numbers(*sums.T).variables()
        for name in ("follows_position", "follows_content", "follows_chance"):
            message = f"{layer} {name}"
            assert_allclose(numbers[name], 1, atol=1e-9, err_msg=message)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_rotation_attention_moves_with_the_contents(family: str):
    still = keep(tiny(family).double(), torch.zeros)
    profile = rl.profile(still, PADDED, surrogates=0)
    assert_allclose(profile["follows_content"], 1, atol=1e-6)
    assert float(profile["follows_position"].max()) < 0.9


ROTATE = "unrotate(contents, sampled.key_position, planes, sign=1, out=keys[1])"
CHANCE = "torch.minimum(moved, parts[%s:], out=parts[%s:])"
SINKS = "by_kv_head(sinks, kv_heads)"
CALL = "visibility=self.visibility)"
PADDING = "rows.padding(index)"
LLAMA = Case("llama_gqa")


@dataclass(frozen=True)
class WrongVersion:
    """Changes of the code, from right to wrong, and a case that must then fail."""

    name: str
    case: Case
    changes: dict[str, str]

    def __str__(self) -> str:
        return f"{self.case}: {self.name}"


WRONG = [
    WrongVersion(
        "contents are exchanged after the rotation",
        LLAMA,
        {
            "still = sampled.k_still": "still = sampled.k",
            ROTATE: "keys[1].copy_(contents)",
        },
    ),
    WrongVersion(
        "sinks are exchanged",
        LLAMA,
        {"~is_sink & real[:, None]": "real[:, None]"},
    ),
    WrongVersion(
        "only the first head of a group keeps its sinks",
        Case("llama_gqa", "found sinks"),
        {f"({SINKS} > 0).any(2)": f"{SINKS}[:, :, 0] > 0"},
    ),
    WrongVersion(
        "padding is exchanged",
        LLAMA,
        {"~is_sink & real[:, None]": "~is_sink"},
    ),
    WrongVersion(
        "hidden tokens are exchanged",
        Case("llama_gqa", "hidden"),
        {PADDING: "(index >= rows.length[:, None])"},
    ),
    WrongVersion(
        "distributions have different keys",
        LLAMA,
        {"mass = torch.sum": "parts[1] = before_and_after[1]; mass = torch.sum"},
    ),
    WrongVersion(
        "contents that the row does not see count",
        LLAMA,
        {"before.sees_each(own)": "(own >= 0)[:, :, :, None]"},
    ),
    WrongVersion(
        "chance is omitted",
        LLAMA,
        {CHANCE % (2, 2): CHANCE % (3, 3)},
    ),
    WrongVersion(
        "pi is its inverse",
        LLAMA,
        {
            "[permuted.inverse, permuted.contents]": (
                "[permuted.contents, permuted.inverse]"
            )
        },
    ),
    WrongVersion(
        "contents move by the inverse",
        LLAMA,
        {"contents=permuted.contents.to": "contents=permuted.inverse.to"},
    ),
    WrongVersion(
        "the permutation ignores the window",
        Case("mistral_sliding"),
        {"torch.where(slides": "torch.where(slides & False"},
    ),
    WrongVersion(
        "heads read another group",
        LLAMA,
        {"keys.flatten(0, 2)": "keys.flip(3).flatten(0, 2)"},
    ),
    WrongVersion(
        "no scale",
        LLAMA,
        {CALL: f"{CALL[:-1]}, scale=1.0)"},
    ),
    WrongVersion(
        "no soft-cap",
        Case("gemma2"),
        {CALL: f"{CALL[:-1]}, softcap=None)"},
    ),
    WrongVersion(
        "no learned sink",
        Case("gpt_oss"),
        {"1 - learned_sink_mass(block)[: out.shape[1]]": "1"},
    ),
    WrongVersion(
        "early rows count",
        LLAMA,
        {"from_share(EARLY)": "from_share(0)"},
    ),
]


def test_the_size_of_a_block_does_not_depend_on_dropped_keys():
    real = torch.ones(1, 12, dtype=torch.bool)
    position = torch.arange(4, 12)[None]
    first = position - 4
    whole = Visibility(position, first, range(12))
    later = Visibility(position + 20, first + 20, range(20, 32))
    assert exchange.block_size(whole, real).tolist() == [[[2]]]
    assert exchange.block_size(later, real).tolist() == [[[2]]]


def changed_exchange(changes: dict[str, str]) -> ModuleType:
    """The module `exchange` with changes of its code, each in one place."""
    source = Path(str(exchange.__file__)).read_text()
    for right, wrong in changes.items():
        assert source.count(right) == 1, right
        source = source.replace(right, wrong)
    module = ModuleType(exchange.__name__)
    exec(source, vars(module))
    return module


@pytest.mark.parametrize("version", WRONG, ids=str)
def test_a_wrong_version_fails(version: WrongVersion, monkeypatch: pytest.MonkeyPatch):
    module = changed_exchange(version.changes)
    monkeypatch.setattr(held_out, "follow_sums", module.follow_sums)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check(version.case)
