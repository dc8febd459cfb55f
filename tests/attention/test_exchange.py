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
        places = [j for j in range(begin, end) if movable[j]]
        in_order = sorted(places, key=order.__getitem__)
        for place, content in zip(places, in_order, strict=True):
            contents[place] = content
    return contents


def overlap(a: Tensor, b: Tensor) -> Tensor:
    return 1 - (a / a.sum() - b / b.sum()).abs().sum() / 2


def dense_sums(
    call: AttentionCall, planes: Planes, sequence: int, sinks: Tensor, batch: Any
) -> Iterator[Tensor]:
    """`FOLLOW` of each query head, row by row; rows use the permutations in turn, or all."""
    length = int(batch.text.lengths[sequence])
    group = call.query.shape[1] // call.key.shape[1]
    hidden = torch.zeros(length, dtype=torch.bool)
    if batch.text.hidden is not None:
        hidden = batch.text.hidden[sequence, :length]
    sees = call.visibility.sees().expand(len(call.query), -1, -1)[
        sequence, :length, :length
    ]
    seen = [sees[row].nonzero()[:, 0] for row in range(length) if not hidden[row]]
    window = max(map(len, seen))
    real = int((~hidden).sum())
    first_keys = {int(keys[0]) for keys in seen}
    slides = len(first_keys) > 1
    if call.visibility.mask is not None:
        slides = window < real * 2 / 3
    block = window // 2 if slides else length
    at = torch.arange(length)
    for head in range(call.query.shape[1]):
        members = range(head // group * group, (head // group + 1) * group)
        kinds = sinks[sequence, :, :length].expand(call.query.shape[1], -1)
        movable = [not (kinds[[*members], j].any() or hidden[j]) for j in range(length)]
        q = call.query[sequence, head].double()
        k = call.key[sequence, head // group].double()
        by_head = planes.inv_freq.ndim > 1
        of_head = replace(planes, inv_freq=planes.inv_freq[head]) if by_head else planes
        still = turned(k[:length], at, of_head, -1)
        total = torch.zeros(len(FOLLOW)).double()
        for draw in range(batch.scored.order.shape[1]):
            order = batch.scored.order[sequence, draw, :length].tolist()
            pi = torch.tensor(permutation(order, movable, block))
            inverse = pi.argsort()
            exchanged = turned(still[pi], at, of_head, 1)
            scored = batch.scored.position[sequence], batch.scored.weight[sequence]
            for index, (row, weight) in enumerate(zip(*scored, strict=True)):
                if weight == 0 or row < length * EARLY:
                    continue
                if batch.text.single_long_sequence:
                    weight = weight / DRAWS
                elif index % DRAWS != draw:
                    continue
                scores = [
                    call.squash(call.scale * x @ q[row])
                    for x in (k[:length], exchanged)
                ]
                a, b = [x.masked_fill(~sees[row], -math.inf).exp() for x in scores]
                sink = (
                    0
                    if call.sink_logits is None
                    else call.sink_logits[head].double().exp()
                )
                a = a / (a.sum() + sink)
                b = b / (b.sum() + sink)
                v = sees[row] & sees[row][inverse] & torch.tensor(movable)
                total[4] += weight
                if not v.any():
                    continue
                mass = a[v].sum()
                others = b[v], b[inverse][v], a[inverse][v]
                overlaps = [overlap(a[v], x) for x in others]
                total[:3] += weight * mass * torch.stack(overlaps)
                total[3] += weight * mass
        yield total


PADDED = rl.Text(random_tokens(), lengths=torch.tensor([30, 24]))
MASK = torch.arange(36) >= torch.tensor([[6], [12]])
HIDDEN = torch.zeros(2, 30, dtype=torch.bool)
HIDDEN[0, 5:9] = HIDDEN[1, 1] = True
TEXTS: dict[str, Any] = {
    "single": random_tokens(sequences=1),
    "hidden": rl.Text(random_tokens(), hidden=HIDDEN),
    "begins hidden": rl.Text(
        random_tokens(), hidden=torch.arange(30) < torch.tensor([[9], [8]])
    ),
    "gap": rl.Text(
        random_tokens(), hidden=torch.arange(30) // 12 == torch.tensor([[1], [9]])
    ),
    "left": {
        "input_ids": random_tokens(length=36) * MASK,
        "attention_mask": MASK.long(),
    },
    "packed": {
        "input_ids": random_tokens().flatten()[None, :54],
        "position_ids": torch.arange(30).repeat(2)[None, :54],
    },
}
Case = tuple[str, str]
CASES: list[Case] = [
    *((family, "right") for family in FAMILIES),
    *(("llama_gqa", situation) for situation in (*MASKS, *TEXTS, "float32", "edited")),
    *((family, "found sinks") for family in ("llama_gqa", "gpt_oss")),
    *(
        ("mistral_sliding", situation)
        for situation in ("packed", "begins hidden", "gap")
    ),
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
        sums = []
        for sequence in range(len(text)):
            of_heads = dense_sums(call, planes[call.layer], sequence, sinks, batch)
            sums.append(torch.stack([*of_heads]))
        expected[call.layer] = torch.stack(sums)

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
