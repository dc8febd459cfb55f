"""Errors of measurements, restored models, and progress."""

import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from measured import evaluate, token_progress
from oracles.tiny import logits, tiny

import ropelens as rl
from ropelens.errors import BadArgument, RopelensError, UnsupportedModel
from ropelens.interventions.edit import ModelEdit
from ropelens.interventions.truncation_table import DEFAULT_MEASURES
from ropelens.runtime.progress import Stage
from ropelens.text.tokenize import read_text

NO_TOKENS = mock.Mock(bos_token_id=None)
TOKENS = torch.arange(24).reshape(2, 12) + 3  # the vocabulary has 96 tokens


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        (TOKENS[:, :2], "A text must have 3 tokens or more"),
        (TOKENS[0], r"profile: text must be a Text.* token ids .sequence, position."),
        (TOKENS + 90, "not in the vocabulary of the model.*ids 93 to 116"),
        (TOKENS.to("meta"), "ids must be whole numbers.*meta"),
        ({}, "The batch has no input_ids"),
        (rl.Text(TOKENS, hidden=torch.ones_like(TOKENS)), "All tokens of the text are hidden"),
        (rl.Text(TOKENS, hidden=None), "Sinks must be tokens of the vocabulary.*96"),
    ],
)
def test_profile_refuses_bad_texts(tokens: torch.Tensor, line: str):
    with pytest.raises(BadArgument) as refused:
        rl.profile(tiny("llama_gqa"), tokens, sinks=[96] if isinstance(tokens, rl.Text) else ())
    assert re.search(line, refused.value.line), refused.value.line


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_tokens_of_any_kind_are_read():
    wide = TOKENS.to(torch.uint64)
    for ids in (TOKENS.to_sparse(), TOKENS.to_sparse_csr(), wide, wide.numpy()):
        assert torch.equal(read_text(ids).ids, TOKENS)
        assert torch.equal(read_text({"input_ids": ids}).ids, TOKENS)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda model: rl.capture(model, []), "There is no prompt to capture"),
        (lambda model: rl.reach(model, "a text", tokenizer=5), "must be a tokenizer .*int"),
        (lambda model: rl.profile(model, TOKENS, surrogates=10**9), "10,000 surrogates"),
        (lambda model: rl.truncate(model, TOKENS, controls=10**9), "at most 10,000 controls"),
        (lambda model: rl.capture(model, TOKENS[:1], heads=f"{10**20}.1"), "has no head '1000"),
        (lambda model: rl.profile(model, "a \ud800", tokenizer=NO_TOKENS), "half of a char"),
        (lambda _: rl.save(xr.Dataset(), "/"), "/ is a folder"),
        (lambda _: rl.load("./nope"), "No checkpoint and no folder is called ./nope; try"),
    ],
)
def test_odd_arguments_are_refused(call: Callable[[Any], object], line: str):
    with pytest.raises(RopelensError) as refused:
        call(tiny("llama_gqa"))
    assert re.search(line, refused.value.line), refused.value.line


def test_a_profile_without_budget_has_the_same_sums_and_no_labels():
    options = ({"budget": False}, {"surrogates": 0})
    sums, full = (rl.profile(tiny("llama_gqa"), TOKENS, **each) for each in options)
    for name in ("q_norm", "selectivity", "offset_mass", "induction"):
        np.testing.assert_array_equal(sums[name], full[name])
    assert "total_bits" not in sums
    rl.plot_norms(sums)
    for refuse in (rl.classify_heads, rl.test_claims, rl.write_report):
        with pytest.raises(BadArgument, match="has no attention budget"):
            refuse(sums, *["nowhere.html"] * (refuse is rl.write_report))


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"measures": ["loss", "speed"]}, "There is no measure 'speed'; try: measures: any of"),
        ({"measures": []}, "No measure was given"),
        ({"edits": {"none": "nope"}}, 'An edit cannot be called "none"'),
        ({"edits": {"a": rl.stop(rl.PlaneNumbers([8]))}}, "The model has no plane for Pl"),
        ({"measures": "copying", "distances": [1]}, "Distances of copies must be 2 tokens"),
        ({"measures": "copying", "distances": [10**9]}, "tokens of copies, not 16,00"),
        ({"measures": "retrieval", "prompt_lengths": [10**9]}, "at most 100,000,000 tokens"),
    ],
)
def test_evaluate_refuses_bad_options(options: dict[str, object], line: str):
    model = tiny("llama_gqa")
    before = model.config._attn_implementation
    with pytest.raises(BadArgument) as refused:
        evaluate(model, **options)
    assert re.search(line, refused.value.line), refused.value.line
    assert model.config._attn_implementation == before


def test_tokens_and_seeds_of_numpy():
    options: dict[str, Any] = {"surrogates": 1, "rows": 3, "seed": np.int64(-1)}
    plain = rl.profile(tiny("llama_gqa"), TOKENS, surrogates=1, rows=3, seed=-1)
    narrow = rl.profile(tiny("llama_gqa"), TOKENS.to(torch.uint8).numpy(), **options)
    xr.testing.assert_equal(plain, narrow)
    first, second = (rl.classify_heads(profile, seed=-1) for profile in (plain, narrow))
    pd.testing.assert_frame_equal(first, second)


@pytest.mark.parametrize(
    ("factor", "words"),
    [
        (torch.nan, "queries or keys that are NaN or infinite(.|\n)*layer 1"),
        (1e12, "The attention budget of layer 1 cannot be fitted(.|\n)*queries up to"),
    ],
)
def test_scores_that_are_not_finite_are_refused(factor: float, words: str):
    model = tiny("llama_gqa")
    attention = model.model.layers[1].self_attn
    with torch.no_grad():
        for projection in (attention.q_proj, attention.k_proj):
            projection.weight *= factor
    with pytest.raises(UnsupportedModel, match=words):
        rl.profile(model, TOKENS)


@pytest.mark.parametrize("measure", DEFAULT_MEASURES)
def test_an_error_inside_the_model_restores_it(measure: str, monkeypatch: pytest.MonkeyPatch):
    model = tiny("llama_gqa")
    plain, configured = logits(model), model.config._attn_implementation

    def fail(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ModelEdit, "__call__", fail)
        with pytest.raises(KeyboardInterrupt):
            evaluate(model, edits={"a": "nope"}, measures=[measure])
    assert torch.equal(logits(model), plain)
    assert model.config._attn_implementation == configured


def test_progress_moves_by_layer_within_a_batch():
    done: list[int] = []
    options = {"edits": {"a": "nope"}, "measures": "loss", "rows": 9, "batch_size": 2}
    options |= {"lengths": torch.tensor([40, 20, 3]), "progress": token_progress(done.append)}
    evaluate(tiny("llama_gqa"), **options)
    by_layer = [20, 20, 20]  # after each of two layers, and after the head
    assert done == [*by_layer, *by_layer, 1, 1, 1, 1, 1, 1]


@pytest.mark.parametrize("measures", [("loss",), (*DEFAULT_MEASURES, "copying")])
def test_progress_adds_up_to_the_total(measures: tuple[str, ...]):
    totals, done = [], []

    def show(*stages: Stage) -> object:
        totals.append(stages[0].total)
        return token_progress(done.append)(*stages)

    options = {"measures": measures, "prompt_lengths": (33, 40), "edits": {"a": "nope"}}
    evaluate(tiny("llama_gqa"), lengths=torch.tensor([40, 20, 3]), progress=show, **options)
    assert [sum(done)] == totals
    assert measures != ("loss",) or totals == [2 * 63]
