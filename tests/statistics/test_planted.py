"""Heads whose purpose is known: label, offset, and the bits in the right share."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce

import numpy as np
import pytest
import torch
from oracles.logit import HeadRows, gain, head_rows, information
from oracles.planted import BOS, OFFSETS, Expected, Planted, call_of, coordinates, planted
from oracles.recording import AttentionCall as RecordedCall
from oracles.recording import LayerRotation
from torch import Tensor

from ropelens.rope.planes import Planes
from ropelens.statistics.attention import sum_attention
from ropelens.statistics.block import CallRows
from ropelens.statistics.budget.held_out import Sample, scored_rows
from ropelens.statistics.budget.logit import gains
from ropelens.statistics.call import AttentionCall
from ropelens.statistics.corpus import Corpus
from ropelens.statistics.kernel import Kernel, describe_kernel
from ropelens.statistics.labels import (
    Thresholds,
    attention_budget,
    describe_wavelengths,
    label_heads,
)
from ropelens.statistics.rows import sample_rows
from ropelens.statistics.variables import named


@dataclass(frozen=True)
class Measured:
    """What a profile would say of the heads of one call."""

    bits: dict[str, np.ndarray]
    labels: list[str]
    kernel: Kernel
    wavelengths: dict[str, np.ndarray]


def measure(call: AttentionCall, planes: Planes, tokens: Tensor) -> Measured:
    """As a profile does: fitted to a sample, and scored on the other fold of all sequences."""
    sequences, context = tokens.shape
    lengths = torch.full((sequences,), context)
    text = Corpus.of(tokens, lengths, bos=BOS)
    sample = Sample.draw(text, seed=0)
    taken = (sample.text.tokens[:, None] == tokens).all(-1).int().argmax(1)
    batched = {name: vars(call)[name][taken] for name in ("query", "key", "value", "output")}
    fitted = sample.fit(replace(call, **batched), planes, surrogates=0, seed=0)
    rows = sample_rows(lengths, count=scored_rows(text), seed=0)
    of_call = CallRows(call, rows, planes, sinks=fitted.sinks(text))
    scores = fitted.score(of_call, text)
    bits = attention_budget(*(x.numpy() for x in gains(scores.sum(0)).values()))
    shares = {name: bits[name] for name in ("total", "sink", "position", "content")}
    seen_by = (rows.position.flatten()[:, None] >= torch.arange(context)).double().mean(0)
    (of_keys,) = named("selectivity_keys")
    sums = sum_attention(of_call, [of_keys])
    push = planes.sum_coordinates(sums[of_keys.name].sum(0))
    return Measured(
        bits=bits,
        labels=label_heads(Thresholds(), **shares).tolist(),
        kernel=describe_kernel(fitted.kappa, seen_by),
        wavelengths=describe_wavelengths(push.numpy(), planes.wavelength.numpy()[None]),
    )


def check(measured: Measured, head: int, expected: Expected) -> None:
    """Label, offset and shares of one head."""
    bits = {name: float(values[head]) for name, values in measured.bits.items()}
    parts = ("sink", "position", "content", "interaction")
    assert all(bits[part] >= 0 for part in parts)
    assert sum(bits[part] for part in parts) == pytest.approx(bits["total"], rel=1e-9)
    assert measured.labels[head] == expected.label, (expected, bits)
    rest = bits["total"] - bits["sink"]
    right = {"positional": "position", "semantic": "content"}.get(expected.label)
    if right is not None:
        assert bits[right] >= 0.9 * rest, (expected, bits)
    if expected.offset is not None:
        kernel, narrow = measured.kernel, not expected.tolerance
        assert (kernel.weight[head] >= Thresholds().offset) == narrow, expected
        assert not narrow or int(kernel.offset[head]) == expected.offset, expected
        assert kernel.low[head] <= expected.offset <= kernel.high[head], expected


def check_all(made: Planted) -> Measured:
    """Every head of a call; returns what was measured."""
    measured = measure(made.call, made.planes, made.tokens)
    for head, expected in enumerate(made.expected):
        check(measured, head, expected)
    return measured


def test_heads_are_what_they_were_built_to_be():
    """The mean wavelength of keys does not follow a sink that is mixed in: less than 5 %."""
    made = planted(0, head_dim=32, group=2, offsets=(0, 1, 17, 100), sequences=16)
    mean = check_all(made).wavelengths["mean_wavelength"]
    head = {(e.offset, e.sink > 0): h for h, e in enumerate(made.expected)}
    for offset in (0, 1, 17):
        mixed, alone = mean[head[offset, True]], mean[head[offset, False]]
        assert float(mixed / alone) == pytest.approx(1, abs=0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "head_dim", "group", "bos"),
    [
        (0, 32, 1, "first"),
        (1, 64, 2, "first"),
        (2, 128, 4, "first"),
        (3, 32, 2, "fifth"),
        (4, 64, 1, "fifth"),
        (5, 128, 1, "packed"),
        (6, 64, 2, "packed"),
        (7, 32, 4, "packed"),
    ],
)
def test_two_hundred_heads(seed: int, head_dim: int, group: int, bos: str):
    made = planted(seed, head_dim=head_dim, group=group, bos=bos, sequences=16)
    assert len(made.expected) >= 26
    assert {e.offset for e in made.expected} >= set(OFFSETS)
    check_all(made)


@pytest.mark.slow
@pytest.mark.parametrize("head_dim", [64, 128])
def test_heads_that_look_a_thousand_tokens_back(head_dim: int):
    check_all(
        planted(9, head_dim=head_dim, context=2048, offsets=(150, 500, 1000), sequences=12)
    )


def class_head(
    *, sequences: int = 8, context: int = 96
) -> tuple[AttentionCall, Planes, Tensor]:
    """The previous token if it is of a class, else position 0 (the paper's apostrophe head)."""
    random = np.random.default_rng(0)
    inv_freq = 10_000.0 ** (-np.arange(0, 32, 2) / 32)
    fast = np.flatnonzero(2 * np.pi / inv_freq < 120)
    tokens = np.where(random.random((sequences, context)) < 0.2, 1, 2)
    tokens[:, 0] = 0
    gain_of_plane = 1 / (len(fast) - np.cos(inv_freq[fast]).sum())
    q, k = np.zeros((2, sequences, 1, context, 16), dtype=complex)
    q[..., fast] = gain_of_plane
    q[..., -1] = gain_of_plane * len(fast) / 2
    k[..., fast] = (tokens == 1)[:, None, :, None] * np.exp(1j * inv_freq[fast])
    k[:, :, 0, -1] = 1
    turned = np.exp(1j * np.arange(context)[:, None] * inv_freq)
    call = call_of(*(torch.from_numpy(coordinates(x * turned)) for x in (q, k)))
    planes = Planes(torch.from_numpy(inv_freq), 32, "half")
    return call, planes, torch.from_numpy(tokens)


def test_a_head_that_needs_both_shares_its_bits_as_a_dense_fit_does():
    call, planes, tokens = class_head()
    bits = measure(call, planes, tokens).bits
    (sequences, context), half = tokens.shape, np.arange(16)
    seen = torch.ones(context, context, dtype=torch.bool).tril()
    pairs = np.stack([half, half + 16], axis=1)
    rotation = LayerRotation(pairs, planes.inv_freq.numpy(), head_dim=32)
    parts = []
    for b in range(sequences):
        q, k = call.query[b].double(), call.key[b].double()
        attention = (q @ k.mT).masked_fill(~seen, -torch.inf).softmax(-1)
        recorded = RecordedCall(q, k, seen, 1.0, None, attention)
        sinks = np.arange(context) == 0
        parts.append(head_rows(recorded, rotation, head=0, sinks=sinks))
    rows = reduce(HeadRows.joined, parts)
    both = [(False, False), (True, False), (True, True)]
    nested = [gain(rows, content=c, offsets=o, ridge=0.03) for c, o in both]
    rest = information(rows) - nested[0]
    true = np.diff([*nested, information(rows)]) / rest
    ours = [float(bits[name][0]) for name in ("content", "position", "interaction")]
    found = np.array(ours) / float(bits["total"][0] - bits["sink"][0])
    assert min(true) > 0.1, "it takes all three"
    np.testing.assert_allclose(found, true, atol=0.03)
