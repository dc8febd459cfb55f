"""Attention after keys exchanged their contents, compared with a dense computation."""

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
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
from ropelens.profiles.measurement import Measurement
from ropelens.profiles.passes import collect
from ropelens.rope.planes import Planes

pytestmark = not_as_configured
across = pytest.mark.filterwarnings("ignore:in packed rows this model gives")
FAMILIES = (*TEN, "gemma3", "qwen3_moe")


def turned(x: Tensor, positions: Tensor, planes: Planes, sign: int) -> Tensor:
    """`x` [position, coordinate] with its planes turned as complex numbers."""
    pairs = torch.complex(x[:, planes.first], x[:, planes.second])
    angle = sign * positions[:, None] * planes.inv_freq.double()
    turn = torch.polar(torch.ones_like(angle), angle)
    result = x.clone()
    pairs = pairs * turn
    result[:, planes.first] = pairs.real
    result[:, planes.second] = pairs.imag
    return result


def permutation(order: list[float], movable: list[bool], block: int) -> list[int]:
    """pi: the movable tokens of each block, in the order of their random numbers."""
    contents = list(range(len(order)))
    for begin in range(0, len(order), block):
        end = min(begin + block, len(order))
        positions = [j for j in range(begin, end) if movable[j]]
        in_order = sorted(positions, key=order.__getitem__)
        for position, content in zip(positions, in_order, strict=True):
            contents[position] = content
    return contents


def overlap(a: Tensor, b: Tensor) -> Tensor:
    return 1 - (a / a.sum() - b / b.sum()).abs().sum() / 2


def block_of_exchange(call: AttentionCall, sees: Tensor, hidden: Tensor) -> int:
    """Tokens that exchange their contents: all, or half a window if the window slides."""
    rows = sees[~hidden]
    window = int(rows.sum(1).max())
    first_keys = {int(row.nonzero()[0]) for row in rows}
    slides = len(first_keys) > 1
    if call.visibility.mask is not None:
        slides = window < len(rows) * 2 / 3
    return window // 2 if slides else len(sees)


@dataclass(frozen=True, eq=False)
class OneHead:
    """The queries and keys [position, coordinate] of a head on one sequence."""

    call: AttentionCall
    head: int
    query: Tensor
    key: Tensor
    planes: Planes
    sees: Tensor  # [row, key]
    movable: Tensor  # [key]: neither hidden nor a sink of the group of the head
    block: int

    @classmethod
    def of(
        cls,
        call: AttentionCall,
        planes: Planes,
        head: int,
        sinks: Tensor,
        text: rl.Text,
    ) -> list["OneHead"]:
        """The head on each sequence of the text."""
        heads = call.query.shape[1]
        group = heads // call.key.shape[1]
        key_head = head // group
        members = slice(key_head * group, (key_head + 1) * group)
        if planes.inv_freq.ndim > 1:
            planes = replace(planes, inv_freq=planes.inv_freq[head])
        visible = call.visibility.sees().expand(len(call.query), -1, -1)
        of_sequences = []
        for sequence, length in enumerate(text.lengths.tolist()):
            hidden = torch.zeros(length, dtype=torch.bool)
            if text.hidden is not None:
                hidden = text.hidden[sequence, :length]
            is_sink = sinks[sequence, :, :length].expand(heads, -1)[members].any(0)
            sees = visible[sequence, :length, :length]
            of_sequence = cls(
                call,
                head,
                query=call.query[sequence, head].double(),
                key=call.key[sequence, key_head, :length].double(),
                planes=planes,
                sees=sees,
                movable=~(is_sink | hidden),
                block=block_of_exchange(call, sees, hidden),
            )
            of_sequences.append(of_sequence)
        return of_sequences

    def exchanged_keys(self, contents: Tensor) -> Tensor:
        """The keys if the token `contents[j]` is at position j."""
        positions = torch.arange(len(self.key))
        still = turned(self.key, positions, self.planes, -1)
        return turned(still[contents], positions, self.planes, 1)

    def attention(self, row: int, key: Tensor) -> Tensor:
        score = self.call.squash(self.call.scale * key @ self.query[row])
        odds = score.masked_fill(~self.sees[row], -math.inf).exp()
        total = odds.sum()
        if self.call.sink_logits is not None:
            total = total + self.call.sink_logits[self.head].double().exp()
        return odds / total

    def follow(self, row: int, exchanged: Tensor, inverse: Tensor) -> Tensor:
        """The values `FOLLOW` of a row."""
        before = self.attention(row, self.key)
        after = self.attention(row, exchanged)
        compared = self.sees[row] & self.sees[row][inverse] & self.movable
        values = torch.zeros(len(FOLLOW)).double()
        values[4] = 1
        if compared.any():
            mass = before[compared].sum()
            at_positions = overlap(before[compared], after[compared])
            with_contents = overlap(before[compared], after[inverse][compared])
            by_chance = overlap(before[compared], before[inverse][compared])
            values[0] = mass * at_positions
            values[1] = mass * with_contents
            values[2] = mass * by_chance
            values[3] = mass
        return values

    def sums(self, batch: Any, sequence: int) -> Tensor:
        """`FOLLOW`, row by row; rows use the permutations in turn, or all."""
        length = len(self.key)
        rows = batch.scored.position[sequence].tolist()
        weights = batch.scored.weight[sequence].tolist()
        total = torch.zeros(len(FOLLOW)).double()
        for draw in range(batch.scored.order.shape[1]):
            order = batch.scored.order[sequence, draw, :length].tolist()
            contents = permutation(order, self.movable.tolist(), self.block)
            inverse = torch.tensor(contents).argsort()
            exchanged = self.exchanged_keys(torch.tensor(contents))
            for index, (row, weight) in enumerate(zip(rows, weights, strict=True)):
                if weight == 0 or row < length * EARLY:
                    continue
                if batch.text.single_long_sequence:
                    weight = weight / DRAWS
                elif index % DRAWS != draw:
                    continue
                total += weight * self.follow(row, exchanged, inverse)
        return total


def dense_sums(
    call: AttentionCall, planes: Planes, sinks: Tensor, batch: Any
) -> Tensor:
    """`FOLLOW` [sequence, head, value]."""
    by_head = []
    for head in range(call.query.shape[1]):
        of_sequences = OneHead.of(call, planes, head, sinks, batch.text)
        sums = [one.sums(batch, sequence) for sequence, one in enumerate(of_sequences)]
        by_head.append(torch.stack(sums))
    return torch.stack(by_head, dim=1)


PADDED = rl.Text(random_tokens(), lengths=torch.tensor([30, 24]))
MASK = torch.arange(36) >= torch.tensor([[6], [12]])
HIDDEN = torch.zeros(2, 30, dtype=torch.bool)
HIDDEN[0, 5:9] = HIDDEN[1, 1] = True
POSITIONS = torch.arange(30)
TEXTS: dict[str, Any] = {
    "single": random_tokens(sequences=1),
    "hidden": rl.Text(random_tokens(), hidden=HIDDEN),
    "begins hidden": rl.Text(
        random_tokens(), hidden=torch.tensor([[9], [8]]) > POSITIONS
    ),
    "gap": rl.Text(random_tokens(), hidden=torch.tensor([[1], [9]]) == POSITIONS // 12),
    "left": {
        "input_ids": random_tokens(length=36) * MASK,
        "attention_mask": MASK.long(),
    },
    "packed": {
        "input_ids": random_tokens().flatten()[None, :54],
        "position_ids": POSITIONS.repeat(2)[None, :54],
    },
}
Case = tuple[str, str]
CASES: list[Case] = [(family, "right") for family in FAMILIES]
CASES += [("llama_gqa", name) for name in (*MASKS, *TEXTS, "float32", "edited")]
CASES += [("llama_gqa", "found sinks"), ("gpt_oss", "found sinks")]
CASES += [
    ("mistral_sliding", "packed"),
    ("mistral_sliding", "begins hidden"),
    ("mistral_sliding", "gap"),
]

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


def model_of(family: str, situation: str) -> PreTrainedModel:
    model = tiny(family)
    if situation != "float32":
        model = model.double()
    if situation in MASKS:
        model = with_mask(model, MASKS[situation])
    if situation in ("begins hidden", "gap"):
        # eager attention is NaN if a row sees no key
        model.set_attn_implementation("sdpa")
    return model


@cache
def exchanged(case: Case) -> Exchanged:
    family, situation = case
    model = model_of(family, situation)
    if situation == "edited":  # heads of a group rotate in different planes
        stopped = rl.stop(rl.PlaneNumbers([1]), heads="0.1")
        OPEN.enter_context(rl.edit_rope(model, stopped))
    measurement = Measurement.of(model, TEXTS.get(situation, PADDED), seed=3)
    text = measurement.text
    planes = measurement.rotation.planes(text.context)
    fits = LayerFitter(measurement, planes, surrogates=0).fit_layers()
    if situation == "found sinks":
        found = torch.zeros(4, 30, dtype=torch.bool)
        found[1, 4] = found[2, 7] = found[3, [7, 15]] = True
        fits = {layer: replace(fit, found_sinks=found) for layer, fit in fits.items()}
    (batch,) = measurement.batches()
    expected: dict[int, Tensor] = {}

    def compute(call: AttentionCall) -> None:
        assert (call.softcap is not None) == (family == "gemma2")
        assert (call.sink_logits is not None) == (family == "gpt_oss")
        sinks = add_found_sinks(text.sinks, fits[call.layer].found_sinks)
        expected[call.layer] = dense_sums(call, planes[call.layer], sinks, batch)

    with measurement.live.observe(compute):
        measurement.live.forward(text.ids, hidden=text.hidden)
    return Exchanged(measurement, planes, fits, expected)


def follow_of(case: Case, **options: Any) -> dict[int, np.ndarray]:
    """The sums `FOLLOW` [sequence, head, value] of each layer, measured with these options."""
    of_case = exchanged(case)
    measurement = replace(of_case.measurement, **options)
    sums = collect(measurement, of_case.planes, fits=of_case.fits)
    sequences = range(len(measurement.text))
    follow = {}
    for layer, scores in sums.scores.items():
        follow[layer] = scores[sequences, 0, :, -len(FOLLOW) :].numpy()
    return follow


def check(case: Case, **options: Any) -> None:
    sums = follow_of(case, **options)
    expected = exchanged(case).expected
    atol = 1e-5 if case[1] == "float32" else 1e-6
    assert sums.keys() == expected.keys()
    for layer, ours in sums.items():
        np.testing.assert_allclose(ours, expected[layer], atol=atol, rtol=atol)


@across
@pytest.mark.parametrize("case", CASES, ids=": ".join)
def test_sums_are_those_of_a_dense_computation(case: Case):
    check(case)


@pytest.mark.parametrize("family", ["llama_gqa", "mistral_sliding", "gpt_oss"])
@pytest.mark.parametrize(
    ("batch_size", "chunk", "at_once"), [(1, 2**16, 1), (2, 13, 1), (2, 2**16, DRAWS)]
)
def test_sums_do_not_depend_on_batches(family, batch_size, chunk, at_once, monkeypatch):
    live = exchanged((family, "right")).measurement.live
    monkeypatch.setattr(live_model, "ONE_PASS", chunk)
    monkeypatch.setitem(exchange.AT_ONCE, "cpu", at_once)
    assert live.chunk_length(30) == (13 if chunk == 13 else None)
    check((family, "right"), batch_size=batch_size)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_exchange_of_nothing_changes_nothing(
    family: str, monkeypatch: pytest.MonkeyPatch
):
    exchanged((family, "right"))
    order = torch.arange(30) / 30
    in_place = lambda length, **_: order.expand(len(length), DRAWS, -1)  # noqa: E731
    monkeypatch.setattr(profiles.measurement, "exchange_order", in_place)
    for layer, sums in follow_of((family, "right")).items():
        numbers = follow_numbers(*sums.T).variables()
        for name in ("follows_position", "follows_content", "follows_chance"):
            np.testing.assert_allclose(
                numbers[name], 1, atol=1e-9, err_msg=f"{layer} {name}"
            )


@pytest.mark.parametrize("family", FAMILIES)
def test_without_rotation_attention_moves_with_the_contents(family: str):
    still = keep(tiny(family).double(), torch.zeros)
    profile = rl.profile(still, PADDED, surrogates=0)
    np.testing.assert_allclose(profile["follows_content"], 1, atol=1e-6)
    assert float(profile["follows_position"].max()) < 0.9


ROTATE = "unrotate(contents, sampled.key_position, planes, sign=1, out=keys[1])"
CHANCE = "torch.minimum(moved, parts[%s:], out=parts[%s:])"
SINKS = "by_kv_head(sinks, kv_heads)"
CALL = "visibility=self.visibility)"
PADDING = "rows.padding(index)"
# fmt: off
WRONG: dict[str, list[tuple[str, str]]] = {
    "llama_gqa: right: contents are exchanged after the rotation": [
        ("still = sampled.k_still", "still = sampled.k"),
        (ROTATE, "keys[1].copy_(contents)")],
    "llama_gqa: right: sinks are exchanged": [("~is_sink & real[:, None]", "real[:, None]")],
    "llama_gqa: found sinks: only the first head of a group keeps its sinks": [
        (f"({SINKS} > 0).any(2)", f"{SINKS}[:, :, 0] > 0")],
    "llama_gqa: right: padding is exchanged": [("~is_sink & real[:, None]", "~is_sink")],
    "llama_gqa: hidden: hidden tokens are exchanged": [
        (PADDING, "(index >= rows.length[:, None])")],
    "llama_gqa: right: distributions have different keys": [
        ("mass = torch.sum", "parts[1] = before_and_after[1]; mass = torch.sum")],
    "llama_gqa: right: contents that the row does not see count": [
        ("before.sees_each(own)", "(own >= 0)[:, :, :, None]")],
    "llama_gqa: right: chance is omitted": [(CHANCE % (2, 2), CHANCE % (3, 3))],
    "llama_gqa: right: pi is its inverse": [
        ("[permuted.inverse, permuted.contents]", "[permuted.contents, permuted.inverse]")],
    "llama_gqa: right: contents move by the inverse": [
        ("contents=permuted.contents.to", "contents=permuted.inverse.to")],
    "mistral_sliding: right: the permutation ignores the window": [
        ("torch.where(slides", "torch.where(slides & False")],
    "llama_gqa: right: heads read another group": [
        ("keys.flatten(0, 2)", "keys.flip(3).flatten(0, 2)")],
    "llama_gqa: right: no scale": [(CALL, f"{CALL[:-1]}, scale=1.0)")],
    "gemma2: right: no soft-cap": [(CALL, f"{CALL[:-1]}, softcap=None)")],
    "gpt_oss: right: no learned sink": [("1 - learned_sink_mass(block)[: out.shape[1]]", "1")],
    "llama_gqa: right: early rows count": [("from_share(EARLY)", "from_share(0)")],
}
# fmt: on


def test_the_size_of_a_block_does_not_depend_on_dropped_keys():
    real = torch.ones(1, 12, dtype=torch.bool)
    position = torch.arange(4, 12)[None]
    first = position - 4
    whole = Visibility(position, first, range(12))
    later = Visibility(position + 20, first + 20, range(20, 32))
    assert exchange.block_size(whole, real).tolist() == [[[2]]]
    assert exchange.block_size(later, real).tolist() == [[[2]]]


@pytest.mark.parametrize("version", WRONG)
def test_a_wrong_version_fails(version: str, monkeypatch: pytest.MonkeyPatch):
    source = Path(str(exchange.__file__)).read_text()
    for right, wrong in WRONG[version]:
        assert source.count(right) == 1, right
        source = source.replace(right, wrong)
    module: dict[str, Any] = {"__name__": exchange.__name__}
    exec(source, module)
    monkeypatch.setattr(held_out, "follow_sums", module["follow_sums"])
    family, situation, _ = version.split(": ")
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        check((family, situation))
