"""Attention after keys exchanged their contents, compared with a dense computation."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from oracles.recording import MASKS, with_mask
from oracles.tiny import TEN, not_as_configured, random_tokens, tiny
from torch import Tensor
from transformers import PreTrainedModel

import ropelens as rl
from ropelens.attention.call import AttentionCall
from ropelens.attention.exchange import DRAWS, EARLY
from ropelens.attention.formulas import FOLLOW
from ropelens.budget.held_out import add_found_sinks
from ropelens.profiles.measurement import Measurement
from ropelens.profiles.passes import collect, fit_layers
from ropelens.rope.planes import Planes

pytestmark = not_as_configured
FAMILIES = (*TEN, "gemma3", "qwen3_moe")


def turned(x: Tensor, positions: Tensor, planes: Planes, sign: int) -> Tensor:
    """`x` [position, coordinate] with its planes turned as complex numbers."""
    pairs = torch.complex(x[:, planes.first], x[:, planes.second])
    turn = torch.polar(
        torch.ones(()).double(), sign * positions[:, None] * planes.inv_freq.double()
    )
    result, pairs = x.clone(), pairs * turn
    result[:, planes.first], result[:, planes.second] = pairs.real, pairs.imag
    return result


def permutation(order: list[float], movable: list[bool], block: int) -> list[int]:
    """pi: the movable tokens of each block, in the order of their random numbers."""
    contents = list(range(len(order)))
    for begin in range(0, len(order), block):
        places = [j for j in range(begin, min(begin + block, len(order))) if movable[j]]
        for place, content in zip(places, sorted(places, key=order.__getitem__), strict=True):
            contents[place] = content
    return contents


def overlap(a: Tensor, b: Tensor) -> Tensor:
    return 1 - (a / a.sum() - b / b.sum()).abs().sum() / 2


def dense_sums(
    call: AttentionCall, planes: Planes, sequence: int, sinks: Tensor, batch: Any
) -> Iterator[Tensor]:
    """`FOLLOW` of each query head, row by row; the rows use the permutations in turn."""
    length, group = int(batch.text.lengths[sequence]), call.query.shape[1] // call.key.shape[1]
    hidden = torch.zeros(length, dtype=torch.bool)
    if batch.text.hidden is not None:
        hidden = batch.text.hidden[sequence, :length]
    sees = call.visibility.sees().expand(len(call.query), -1, -1)[sequence, :length, :length]
    first = sees.long().argmax(1)
    window = int((torch.arange(length) - first).max()) + 1
    slides = call.visibility.mask is None and window < length
    block, at = window // 2 if slides else length, torch.arange(length)
    for head in range(call.query.shape[1]):
        members = range(head // group * group, (head // group + 1) * group)
        by_head = sinks[sequence, :, :length].expand(call.query.shape[1], -1)
        movable = [not (by_head[[*members], j].any() or hidden[j]) for j in range(length)]
        q, k = call.query[sequence, head].double(), call.key[sequence, head // group].double()
        of_head = planes if planes.inv_freq.ndim == 1 else planes.of_keys(call.key.shape[1])
        still, total = turned(k[:length], at, of_head, -1), torch.zeros(len(FOLLOW)).double()
        for draw in range(batch.scored.order.shape[1]):
            order = batch.scored.order[sequence, draw, :length].tolist()
            pi = torch.tensor(permutation(order, movable, block))
            inverse = pi.argsort()
            exchanged = turned(still[pi], at, of_head, 1)
            rows = zip(
                batch.scored.position[sequence], batch.scored.weight[sequence], strict=True
            )
            for index, (row, weight) in enumerate(rows):
                if weight == 0 or row < length * EARLY or index % DRAWS != draw:
                    continue
                a, b = (
                    call.squash(call.scale * keys @ q[row]) for keys in (k[:length], exchanged)
                )
                a, b = (x.masked_fill(~sees[row], -math.inf).exp() for x in (a, b))
                sink = (
                    0.0 if call.sink_logits is None else call.sink_logits[head].double().exp()
                )
                a, b = a / (a.sum() + sink), b / (b.sum() + sink)
                v = sees[row] & sees[row][inverse] & torch.tensor(movable)
                total[4] += weight
                if not v.any():
                    continue
                mass = a[v].sum()
                others = b[v], b[inverse][v], a[inverse][v]
                total[:3] += weight * mass * torch.stack([overlap(a[v], x) for x in others])
                total[3] += weight * mass
        yield total


def check(model: PreTrainedModel, text: Any, *, atol: float = 1e-6) -> None:
    measurement = Measurement.of(model, text, seed=3)
    planes, text = measurement.rotation.planes(measurement.text.context), measurement.text
    fits, _ = fit_layers(measurement, planes, surrogates=0)
    sums = collect(measurement, planes, fits=fits)
    (batch,) = measurement.batches()

    def compare(call: AttentionCall) -> None:
        sinks = add_found_sinks(text.sinks, fits[call.layer].found_sinks)
        heads = [
            torch.stack([*dense_sums(call, planes[call.layer], sequence, sinks, batch)])
            for sequence in range(len(text))
        ]
        ours = sums.scores[call.layer][:, 0, :, -len(FOLLOW) :].sum(0)
        np.testing.assert_allclose(ours, torch.stack(heads).sum(0), atol=atol, rtol=atol)

    with measurement.live.observe(compare):
        measurement.live.forward(text.ids, hidden=text.hidden)


@pytest.mark.parametrize("name", FAMILIES)
def test_sums_are_those_of_a_dense_computation(name: str):
    lengths = torch.tensor([30, 24])
    check(tiny(name).double(), rl.Text(random_tokens(), lengths=lengths))


@pytest.mark.parametrize("mask", MASKS)
def test_masks_stay_with_the_positions(mask: str):
    check(with_mask(tiny("llama_gqa").double(), MASKS[mask]), random_tokens())


def test_hidden_tokens_do_not_exchange():
    hidden = torch.zeros(2, 30, dtype=torch.bool)
    hidden[0, 5:9], hidden[1, 1] = True, True
    check(tiny("llama_gqa").double(), rl.Text(random_tokens(), hidden=hidden))
