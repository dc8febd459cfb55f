"""The models of a row, against dense fits by scipy and against whole matrices."""

from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
import torch
from oracles import recording
from oracles.handmade import call_of
from oracles.logit import PARTS, HeadRows, gain, head_rows, information
from oracles.recording import LayerRotation, attention_calls
from oracles.tiny import random_tokens, rotations, tiny
from small_measurements import normal, observed_calls
from torch import Tensor
from torch.nn.functional import pad
from torch.testing import assert_close

from ropelens.attention.block import Block, blocks_of
from ropelens.attention.call import AttentionCall, attention_map
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.visibility import Visibility
from ropelens.budget import content_models, fits, logit
from ropelens.budget.head_sums import HeadSums
from ropelens.budget.logit import HeadWeights
from ropelens.budget.offsets import ModelWeights, split_weights
from ropelens.rope.planes import Planes
from ropelens.text.rows import Rows, all_rows

FAMILIES = ("llama_gqa", "gemma2", "gpt_oss", "smollm3", "phi", "nanochat")
ALLOWED = 0.002
"""Error of a gain that is allowed, as a share of the bits that sinks leave."""


def gains_of_head(call: AttentionCall, planes: Planes, head: int) -> dict[str, float]:
    """Gains of the models of a head, fitted to all rows and scored on them."""
    every_row = all_rows(torch.full((2,), 40))
    sampled = SampledCall(call, every_row, planes)
    weights = fits.fit_models(sampled)
    scores = logit.score_models(sampled, weights).sum((0, 1))
    gains = logit.gains(scores[head])
    return {name: float(bits) for name, bits in gains.items()}


def assert_gains_are_scipys(
    gains: dict[str, float], rows: HeadRows, *, where: str
) -> None:
    total = information(rows)
    expected = {}
    for model, (content, offsets) in PARTS.items():
        expected[model] = gain(
            rows, content=content, offsets=offsets, ridge=logit.RIDGE
        )
    left_by_sinks = total - expected["sink"]
    assert gains["total"] == pytest.approx(total, rel=1e-3, abs=1e-5)
    for model, bits in expected.items():
        of_total = total if model == "sink" else left_by_sinks
        error = abs(gains[f"{model}_gain"] - bits)
        assert error < ALLOWED * of_total, (where, model, gains, bits)


def true_rows(
    calls: list[recording.AttentionCall], rotation: LayerRotation, head: int
) -> HeadRows:
    """The rows of a head, from the recorded calls of all sequences."""
    is_sink = np.arange(40) == 0
    rows = [head_rows(call, rotation, head=head, sinks=is_sink) for call in calls]
    return reduce(HeadRows.joined, rows)


@pytest.mark.parametrize("name", FAMILIES)
def test_gains_are_scipys_on_tiny_models(name: str):
    model = tiny(name)
    tokens = random_tokens(sequences=2, length=40)
    recorded = [attention_calls(model, sequence)[0] for sequence in tokens]
    true_rotations = rotations(model, name=name)
    calls = observed_calls(model, tokens)
    for layer, head in ((0, 3), (len(calls) - 1, 1)):
        call, planes = calls[layer]
        gains = gains_of_head(call, planes, head)
        recorded_calls = [of_sequence[layer] for of_sequence in recorded]
        rows = true_rows(recorded_calls, true_rotations[layer], head)
        assert_gains_are_scipys(gains, rows, where=f"layer {layer}, head {head}")


def offset_of_keys(context: int) -> Tensor:
    """Number of tokens from each key to each row [row, key]; 0 for keys ahead of the row."""
    position = torch.arange(context)
    return (position[:, None] - position).clamp(min=0)


def log_p_of_keys(weights: ModelWeights, sinks: Tensor, is_hidden: Tensor) -> Tensor:
    """log P [sequence, head, row, key] of S or P, and 0 for hidden keys.

    The context has less than 64 tokens, so a bin has one offset.
    """
    offset = offset_of_keys(30)
    by_kind = pad(weights.sigma, (1, 0))  # 0 for keys that are not sinks
    sigma = by_kind.expand(3, -1, -1).gather(-1, sinks)
    tau = weights.tau[:, offset]
    is_sink = (sinks > 0)[:, :, None]
    at_sinks = (sigma[:, :, None] + tau) * is_sink
    scores = weights.kappa[:, offset] + at_sinks
    log_p = scores.masked_fill(is_hidden, -torch.inf).log_softmax(-1)
    return log_p.masked_fill(is_hidden, 0)


def sum_by_offset(mass: Tensor) -> Tensor:
    """Sums [head, offset] of masses [sequence, head, row, key] over all rows but the first."""
    offset = offset_of_keys(30)[1:]
    rows = mass[:, :, 1:]
    sums = []
    for distance in range(30):
        at_distance = rows[..., offset == distance]
        sums.append(at_distance.sum((0, 2)))
    return torch.stack(sums, dim=-1)


def sliding_call_with_sinks() -> SampledCall:
    """A call under a window, with random sinks of 3 kinds for each head."""
    tokens = random_tokens(sequences=3, length=30)
    call, planes = observed_calls(tiny("mistral_sliding"), tokens)[0]
    generator = torch.Generator().manual_seed(0)
    sinks = torch.randint(0, 9, (3, 4, 30), generator=generator)
    sinks[sinks > 3] = 0
    every_row = all_rows(torch.full((3,), 30))
    return SampledCall(call, every_row, planes, sinks=sinks)


def test_every_kind_of_sink_has_a_weight_of_its_own():
    """S and P by kind and head under a window, with log P from the whole matrix."""
    sampled = sliding_call_with_sinks()
    terms = sampled.planes.terms
    fitted = fits.fit_models(sampled)
    attention = attention_map(sampled.call).double()
    scores = logit.score_models(sampled, fitted)[:, 0]
    for name, variables in zip(("sink", "position"), fitted[:, 0], strict=False):
        weights = split_weights(variables, terms, 30)
        differs_by_kind = weights.sigma.diff(dim=-1).abs() > 0.05
        assert differs_by_kind.any(0).all()
        log_p = log_p_of_keys(weights, sampled.sinks, is_hidden=attention == 0)
        by_key = attention * log_p
        expected = by_key[:, :, 1:].sum((2, 3))
        score = scores[..., logit.SCORES.index(name)]
        assert_close(score, expected, rtol=1e-5, atol=1e-4)
    assert_masses_by_offset(sampled, attention)


def assert_masses_by_offset(sampled: SampledCall, attention: Tensor) -> None:
    """Masses by offset on all keys and on sinks, and their squares."""
    sums = HeadSums(sampled, sampled.row_q.shape[:3], squares=True)
    for block in blocks_of(sampled, slice(0, 2)):
        sums.add(block, block.log_norm, block.attention, block.heads)
    by_head = sums.by_fold(1)[0].flatten(0, 1)
    first = sampled.planes.terms + 4  # after a value, the planes and 3 kinds of sinks
    offsets_and_bins = (30, 64, 30, 64)
    by_offset = by_head[:, first:].split(offsets_and_bins, dim=1)
    on_sinks = attention * (sampled.sinks > 0)[:, :, None]
    masses = (attention, on_sinks, attention.square(), on_sinks.square())
    for ours, mass in zip(by_offset, masses, strict=True):
        expected = sum_by_offset(mass)
        assert_close(ours[:, :30], expected, rtol=1e-5, atol=1e-5)


def test_a_row_that_sees_no_key_changes_no_model():
    """Hidden tokens that fill a window leave a hidden row of weight 0 without keys."""
    mask = torch.ones(2, 40, 40, dtype=torch.bool).tril().triu(-7)
    mask[:, :, 10:20] = False
    q = normal(2, 2, 40, 8, seed=1)
    k = normal(2, 2, 40, 8, seed=2)
    visibility = Visibility.from_mask(mask, range(40))
    call = replace(call_of(q, k), visibility=visibility)
    planes = Planes(10.0 ** -torch.arange(4), 8, "half")
    hidden = torch.arange(40) // 10 == 1
    every_row = all_rows(torch.full((2,), 40))
    rows = every_row.zero_hidden(hidden.expand(2, -1))
    position = rows.weight[0].nonzero().mT + 1
    only_seen = Rows(
        position=position.repeat(2, 1),
        weight=torch.ones(2, 29),
        length=rows.length,
        dense=False,
    )

    weights = fits.fit_models(SampledCall(call, rows, planes))

    expected = fits.fit_models(SampledCall(call, only_seen, planes))
    some_weights_of_position = weights[1, 0, :, 7:40]
    assert (some_weights_of_position.abs() > 0.01).any()
    assert_close(weights[:2], expected[:2], rtol=1e-3, atol=1e-2)


def dense_covariance(block: Block, weights: HeadWeights) -> Tensor:
    """The covariance under P of what beta and sigma multiply, from all keys of each row.

    Position 0 is the only sink.
    """
    log_p = logit.log_weights(block, weights).clone()
    q = block.q_still[..., None, :]
    k = block.k_still[:, :, None, None]
    by_plane = block.planes.sum_coordinates(block.call.scale * (q * k))
    by_kind = torch.zeros(*by_plane.shape[:-1], 3)
    by_kind = by_kind.index_fill_(-2, block.sinks, 1)
    by_kind[..., 1:] = 0
    values = torch.cat([by_plane, by_kind], -1).double()
    share = log_p.double().softmax(-1)[..., None]
    centred = values - (share * values).sum(-2, keepdim=True)
    row_weight = block.weight[:, None, None, :, None, None]
    weighted = row_weight * share * centred
    covariance = weighted.flatten(3, 4).mT @ centred.flatten(3, 4)
    return covariance.sum(0)


def frobenius_norm(matrices: Tensor) -> Tensor:
    return matrices.flatten(2).norm(dim=-1)


@pytest.mark.parametrize("name", ["llama_gqa", "phi"])
def test_a_few_keys_of_each_row_give_the_covariance(name: str):
    tokens = random_tokens(sequences=2, length=150)
    call, planes = observed_calls(tiny(name), tokens)[0]
    every_row = all_rows(torch.full((2,), 150))
    sampled = logit.normalize_weights(SampledCall(call, every_row, planes))
    variables = planes.terms + 3
    kv_heads, group = sampled.row_q.shape[1:3]
    weights = torch.zeros(1, kv_heads, group, variables).double()
    weights[..., : planes.terms] = 0.7
    estimates = []
    dense = []
    for block in blocks_of(sampled, slice(0, kv_heads)):
        of_block = logit.head_weights(weights, block, "content")
        estimate = content_models.covariance(block, of_block)
        estimates.append(estimate.sum(0))
        dense.append(dense_covariance(block, of_block))
    expected = sum(dense)
    error = frobenius_norm(sum(estimates) - expected) / frobenius_norm(expected)
    assert (error < 0.05).all(), error
