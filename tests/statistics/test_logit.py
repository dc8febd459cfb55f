"""The models of a row, against scipy's dense fits; their laws; what padding may not change."""

from __future__ import annotations

from functools import reduce
from pathlib import Path

import numpy as np
import pytest
import torch
from observed import observed_calls
from oracles.logit import HeadRows, gain, head_rows, information
from oracles.recording import attention_calls
from oracles.tiny import random_tokens, rotations, tiny
from torch import Tensor
from transformers import PreTrainedModel

import ropelens as rl
from ropelens.rope.planes import Planes
from ropelens.statistics.block import CallRows
from ropelens.statistics.budget.logit import RIDGE, SCORES, fit, score, sums
from ropelens.statistics.budget.offsets import split
from ropelens.statistics.call import AttentionCall, attention_map
from ropelens.statistics.rows import all_rows

ALLOWED = 0.005
"""Share of the bits beside the sink's that a gain may miss."""


def in_sample(
    call: AttentionCall, planes: Planes, tokens: Tensor, *, ridge: float
) -> dict[str, Tensor]:
    """The `SCORES` of each head, of all rows by what was fitted to them."""
    rows = all_rows(torch.full((len(tokens),), tokens.shape[1]))
    of_call = CallRows(call, rows, planes)
    scores = score(of_call, fit(of_call, ridge=ridge)).sum(0)
    return dict(zip(SCORES, scores.unbind(-1), strict=True))


def compare(
    model: PreTrainedModel,
    tokens: np.ndarray,
    *,
    name: str,
    ridge: float = RIDGE,
    heads: list[tuple[int, int]],
) -> None:
    """Gains of some (layer, head) with those of scipy's fits."""
    sinks = np.arange(tokens.shape[1]) == 0
    recorded = [attention_calls(model, sequence)[0] for sequence in tokens]
    turning = rotations(model, name=name)
    ours = observed_calls(model, torch.from_numpy(tokens))
    for layer in sorted({layer for layer, _ in heads}):
        scores = in_sample(*ours[layer], torch.from_numpy(tokens), ridge=ridge)
        for head in (head for own, head in heads if own == layer):
            true = reduce(
                HeadRows.joined,
                (
                    head_rows(calls[layer], turning[layer], head=head, sinks=sinks)
                    for calls in recorded
                ),
            )
            total = information(true)
            bits = float(scores["weight"][head]) * np.log(2)
            found = {
                model_name: float((values - scores["uniform"])[head]) / bits
                for model_name, values in scores.items()
            }
            assert found["information"] == pytest.approx(total, rel=1e-3, abs=1e-5)
            sink = gain(true, content=False, offsets=False, ridge=ridge)
            assert abs(found["sink"] - sink) < ALLOWED * total
            for which, content, offsets in (
                ("position", False, True),
                ("content", True, False),
                ("both", True, True),
            ):
                dense = gain(true, content=content, offsets=offsets, ridge=ridge)
                miss = abs(found[which] - dense)
                assert miss < ALLOWED * (total - sink), (layer, head, which, found, dense)


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
