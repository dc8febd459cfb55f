"""The models of a row, against dense fits by scipy and against whole matrices."""

from dataclasses import replace
from functools import reduce

import numpy as np
import pytest
import torch
from oracles.handmade import call_of
from oracles.logit import PARTS, HeadRows, gain, head_rows, information
from oracles.recording import attention_calls
from oracles.tiny import random_tokens, rotations, tiny
from small_measurements import normal, observed_calls

from ropelens.attention.block import blocks_of
from ropelens.attention.call import attention_map
from ropelens.attention.sampled_call import SampledCall
from ropelens.attention.visibility import Visibility
from ropelens.budget import content_models, fits, logit
from ropelens.budget.head_sums import HeadSums
from ropelens.budget.offsets import split_weights
from ropelens.rope.planes import Planes
from ropelens.text.rows import Rows, all_rows

FAMILIES = ("llama_gqa", "gemma2", "gpt_oss", "smollm3", "phi", "nanochat")
ALLOWED = 0.002
"""Error of a gain that is allowed, as a share of the bits that sinks leave."""


@pytest.mark.parametrize("name", FAMILIES)
def test_gains_are_scipys_on_tiny_models(name: str):
    model = tiny(name)
    tokens = random_tokens(sequences=2, length=40)
    recorded = [attention_calls(model, sequence)[0] for sequence in tokens]
    turning = rotations(model, name=name)
    ours = observed_calls(model, tokens)
    for layer, head in ((0, 3), (len(ours) - 1, 1)):
        call, planes = ours[layer]
        every_row = all_rows(torch.full((2,), 40))
        rows = SampledCall(call, every_row, planes)
        weights = fits.fit_models(rows)
        scores = logit.score_models(rows, weights).sum((0, 1))[head]
        gain_of = {key: float(values) for key, values in logit.gains(scores).items()}
        calls = (of_sequence[layer] for of_sequence in recorded)
        is_sink = np.arange(40) == 0
        parts = (
            head_rows(one, turning[layer], head=head, sinks=is_sink) for one in calls
        )
        true = reduce(HeadRows.joined, parts)
        total = information(true)
        allowed = ALLOWED
        assert gain_of["total"] == pytest.approx(total, rel=1e-3, abs=1e-5)
        for which, (content, offsets) in PARTS.items():
            dense = gain(true, content=content, offsets=offsets, ridge=logit.RIDGE)
            miss = abs(gain_of[f"{which}_gain"] - dense)
            assert miss < allowed * total, (layer, head, which, gain_of, dense)
            if which == "sink":
                allowed *= 1 - dense / total


def test_every_kind_of_sink_has_a_weight_of_its_own():
    """S and P by kind and head under a window, with log P from the whole matrix."""
    tokens = random_tokens(sequences=3, length=30)
    call, planes = observed_calls(tiny("mistral_sliding"), tokens)[0]
    sinks = torch.randint(0, 9, (3, 4, 30), generator=torch.Generator().manual_seed(0))
    sinks = sinks * (sinks <= 3)
    every_row = all_rows(torch.full((3,), 30))
    rows = SampledCall(call, every_row, planes, sinks=sinks)
    weights = fits.fit_models(rows)
    attention = attention_map(call).double()
    scores = logit.score_models(rows, weights)[:, 0]
    offset = (torch.arange(30)[:, None] - torch.arange(30)).clamp(min=0)
    for name, model in zip(("sink", "position"), weights[:, 0], strict=False):
        parts = split_weights(model, planes.terms, 30)
        sigma = parts.sigma
        kappa = parts.kappa
        tau = parts.tau
        assert (sigma.diff(dim=-1).abs() > 0.05).any(0).all()
        sigma = (
            torch.nn.functional.pad(sigma, (1, 0)).expand(3, -1, -1).gather(-1, sinks)
        )
        at_sinks = (sigma[:, :, None] + tau[:, offset]) * (sinks > 0)[:, :, None]
        log_p = (kappa[:, offset] + at_sinks).masked_fill(attention == 0, -torch.inf)
        log_p = log_p.log_softmax(-1).masked_fill(attention == 0, 0)
        true = (attention * log_p)[:, :, 1:].sum((2, 3))
        found = scores[..., logit.SCORES.index(name)]
        torch.testing.assert_close(found, true, rtol=1e-5, atol=1e-4)
    sums = HeadSums(rows, rows.row_q.shape[:3], squares=True)
    for block in blocks_of(rows, slice(0, 2)):
        sums.add(block, block.log_norm, block.attention, block.heads)
    parts = (
        sums.by_fold(1)[0]
        .flatten(0, 1)[:, planes.terms + 4 :]
        .split((30, 64) * 2, dim=1)
    )
    of = attention[:, :, 1:], (attention * (sinks > 0)[:, :, None])[:, :, 1:]
    for found, mass in zip(parts, (*of, *(x.square() for x in of)), strict=True):
        true = torch.stack(
            [mass[..., offset[1:] == d].sum((0, 2)) for d in range(30)], dim=-1
        )
        torch.testing.assert_close(found[:, :30], true, rtol=1e-5, atol=1e-5)


def test_a_row_that_sees_no_key_changes_no_model():
    """Hidden tokens that fill a window leave a hidden row without keys; its weight is 0."""
    mask = torch.ones(2, 40, 40, dtype=torch.bool).tril().triu(-7)
    mask[:, :, 10:20] = False
    q, k = [normal(2, 2, 40, 8, seed=s) for s in (1, 2)]
    visibility = Visibility.from_mask(mask, range(40))
    call = replace(call_of(q, k), visibility=visibility)
    hidden = (torch.arange(40) // 10 == 1).expand(2, -1)
    rows = all_rows(torch.full((2,), 40)).zero_hidden(hidden)
    seen = rows.weight[0].nonzero().mT + 1
    few = Rows(seen.repeat(2, 1), torch.ones(2, 29), rows.length, dense=False)
    planes = Planes(10.0 ** -torch.arange(4), 8, "half")
    weights = [fits.fit_models(SampledCall(call, some, planes)) for some in (rows, few)]
    assert (weights[0][1, 0, :, 7:40].abs() > 0.01).any()
    torch.testing.assert_close(weights[0][:2], weights[1][:2], rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("name", ["llama_gqa", "phi"])
def test_a_few_keys_of_each_row_give_the_covariance(name: str):
    call, planes = observed_calls(tiny(name), random_tokens(sequences=2, length=150))[0]
    every_row = all_rows(torch.full((2,), 150))
    rows = logit.normalize_weights(SampledCall(call, every_row, planes))
    first = planes.terms + 3
    heads = slice(0, rows.k.shape[1])
    weights = torch.zeros(1, *rows.row_q.shape[1:3], first).double()
    weights[..., : planes.terms] = 0.7
    drawn, true = torch.zeros(2, 1)
    for block in blocks_of(rows, heads):
        of_block = logit.head_weights(weights, block, "content")
        drawn = drawn + content_models.covariance(block, of_block).sum(0)
        log_p = logit.log_weights(block, of_block).clone()
        products = block.q_still[..., None, :] * block.k_still[:, :, None, None]
        values = block.planes.sum_coordinates(call.scale * products)
        at_first = torch.zeros(*values.shape[:-1], 3).index_fill_(-2, block.sinks, 1)
        at_first[..., 1:] = 0
        values = torch.cat([values, at_first], -1).double()
        share = log_p.double().softmax(-1)
        values = values - (share[..., None] * values).sum(-2, keepdim=True)
        share = share[..., None] * block.weight[:, None, None, :, None, None]
        true = true + ((share * values).flatten(3, 4).mT @ values.flatten(3, 4)).sum(0)
    error = (drawn - true).flatten(2).norm(dim=-1) / true.flatten(2).norm(dim=-1)
    assert (error < 0.05).all(), error
