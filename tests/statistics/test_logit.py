"""The models of a row, against scipy's dense fits; their laws; what padding may not change."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch
from observed import observed_calls
from oracles.logit import HeadRows, gain, head_rows, information
from oracles.planted import call_of, coordinates
from oracles.recording import AttentionCall as RecordedCall
from oracles.recording import LayerRotation, attention_calls
from oracles.tiny import random_tokens, rotations, tiny
from torch import Tensor
from transformers import PreTrainedModel

import ropelens as rl
from ropelens.rope.planes import Planes
from ropelens.statistics.block import CallRows
from ropelens.statistics.budget.held_out import Sample, scored_rows
from ropelens.statistics.budget.logit import RIDGE, SCORES, fit, gains, score, sums
from ropelens.statistics.budget.offsets import split
from ropelens.statistics.call import AttentionCall, attention_map
from ropelens.statistics.corpus import Corpus
from ropelens.statistics.labels import attention_budget
from ropelens.statistics.rows import all_rows, sample_rows

ALLOWED = 0.005
"""Share of the bits beside the sink's that a gain may miss."""


def compare(
    model: PreTrainedModel,
    tokens: np.ndarray,
    *,
    name: str,
    ridge: float = RIDGE,
    heads: list[tuple[int, int]],
) -> None:
    """Gains of some (layer, head) over all rows with those of scipy's fits."""
    sinks = np.arange(tokens.shape[1]) == 0
    recorded = [attention_calls(model, sequence)[0] for sequence in tokens]
    turning = rotations(model, name=name)
    ours = observed_calls(model, torch.from_numpy(tokens))
    for layer, head in heads:
        call, planes = ours[layer]
        rows = CallRows(call, all_rows(torch.full((len(tokens),), tokens.shape[1])), planes)
        scores = score(rows, fit(rows, ridge=ridge)).sum(0)[head]
        gain_of = {key: float(values) for key, values in gains(scores).items()}
        calls = (of_sequence[layer] for of_sequence in recorded)
        parts = (head_rows(one, turning[layer], head=head, sinks=sinks) for one in calls)
        true = reduce(HeadRows.joined, parts)
        total, allowed = information(true), ALLOWED
        assert gain_of["total"] == pytest.approx(total, rel=1e-3, abs=1e-5)
        for which, content, offsets in (
            ("sink", False, False),
            ("position", False, True),
            ("content", True, False),
            ("both", True, True),
        ):
            dense = gain(true, content=content, offsets=offsets, ridge=ridge)
            miss = abs(gain_of[f"{which}_gain"] - dense)
            assert miss < allowed * total, (layer, head, which, gain_of, dense)
            if which == "sink":
                allowed *= 1 - dense / total


@pytest.mark.parametrize(
    "name", ["llama_mha", "llama_gqa", "gemma2", "gpt_oss", "smollm3", "glm", "phi", "nanochat"]
)
def test_gains_are_scipys_on_tiny_models(name: str):
    model = tiny(name)
    last = model.config.num_hidden_layers - 1
    tokens = random_tokens(sequences=2, length=40)
    compare(model, tokens, name=name, heads=[(0, 0), (0, 3), (last, 1)])


@pytest.mark.slow
@pytest.mark.parametrize("ridge", [RIDGE, 1e-6])
@pytest.mark.parametrize("checkpoint", ["babyllama105", "stories260k", "bundled"])
def test_gains_are_scipys_on_trained_models(shared: Path, checkpoint: str, ridge: float):
    bundled = Path(rl.__file__).parent / "bundled" / "rope"
    own = shared / "checkpoints" / checkpoint
    model, tokenizer = rl.load(str(bundled if checkpoint == "bundled" else own))
    text = (shared / "corpora/tinystories/1.txt").read_text()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"][: 2 * 95]
    first = model.config.bos_token_id
    tokens = np.array([[first, *ids[:95]], [first, *ids[95:]]])
    model.set_attn_implementation("eager")
    compare(model, tokens, name="llama_gqa", ridge=ridge, heads=[(0, 5), (1, 2), (4, 1)])


def test_every_kind_of_sink_has_a_weight_of_its_own():
    """S and P by kind and head, on rows of a window: log P from the whole matrix."""
    tokens = torch.from_numpy(random_tokens(sequences=3, length=30))
    call, planes = observed_calls(tiny("mistral_sliding"), tokens)[0]
    sinks = torch.randint(0, 9, (3, 4, 30), generator=torch.Generator().manual_seed(0))
    sinks = sinks * (sinks <= 3)
    rows = CallRows(call, all_rows(torch.full((3,), 30)), planes, sinks=sinks)
    weights = fit(rows)
    attention, offset = (
        attention_map(call).double(),
        torch.arange(30)[:, None] - torch.arange(30),
    )
    offset, scores = offset.clamp(min=0), score(rows, weights)
    for name, model in zip(("sink", "position"), weights, strict=False):
        _, sigma, kappa, tau = split(model, planes.terms, 30)
        assert (sigma.diff(dim=-1).abs() > 0.05).any(0).all()
        sigma = torch.nn.functional.pad(sigma, (1, 0)).expand(3, -1, -1).gather(-1, sinks)
        at_sinks = (sigma[:, :, None] + tau[:, offset]) * (sinks > 0)[:, :, None]
        log_p = (kappa[:, offset] + at_sinks).masked_fill(attention == 0, -torch.inf)
        log_p = log_p.log_softmax(-1).masked_fill(attention == 0, 0)
        true = (attention * log_p)[:, :, 1:].sum((2, 3))
        found = scores[..., SCORES.index(name)]
        torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-4)
    blocks = rows.blocks(slice(0, 2))
    masses = sum(sums(block, block.attention, content=False) for block in blocks).flatten(0, 1)
    on_sinks = (attention * (sinks > 0)[:, :, None])[:, :, 1:]
    by_bin = torch.stack(
        [on_sinks[..., offset[1:] == d].sum((0, 2)) for d in range(30)], dim=-1
    )
    torch.testing.assert_close(masses[:, 33:63], by_bin, rtol=1e-5, atol=1e-5)


def measured_bits(call: AttentionCall, planes: Planes, tokens: Tensor) -> dict[str, np.ndarray]:
    """As a profile does: fitted to a sample, and scored on the other fold of all sequences."""
    sequences, context = tokens.shape
    lengths = torch.full((sequences,), context)
    text = Corpus.of(tokens, lengths, bos=0)
    sample = Sample.draw(text, seed=0)
    taken = (sample.text.tokens[:, None] == tokens).all(-1).int().argmax(1)
    batched = {name: vars(call)[name][taken] for name in ("query", "key", "value", "output")}
    fitted = sample.fit(replace(call, **batched), planes, surrogates=0, seed=0)
    rows = sample_rows(lengths, count=scored_rows(text), seed=0)
    scores = fitted.score(CallRows(call, rows, planes, sinks=fitted.sinks(text)), text)
    return attention_budget(*(x.numpy() for x in gains(scores.sum(0)).values()))


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
    bits = measured_bits(call, planes, tokens)
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
