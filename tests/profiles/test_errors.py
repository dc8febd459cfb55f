"""Errors of measurements, restored models, and progress."""

import re
from typing import Any
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from measured import evaluate, token_progress
from oracles.tiny import logits, tiny
from tiny_checkpoints import tiny_llama

import ropelens as rl
from ropelens.errors import BadArgument, BadText, RopelensError, UnsupportedModel
from ropelens.interventions.edit import ModelEdit
from ropelens.interventions.truncation_table import DEFAULT_MEASURES
from ropelens.model.as_live_model import as_live_model
from ropelens.runtime.progress import Stage
from ropelens.text.tokenize import read_text

NO_TOKENS = mock.Mock(bos_token_id=None, decode=str)  # Python 3.13 sees what was set
TOKENS = torch.arange(24).reshape(2, 12) + 3  # the vocabulary has 96 tokens


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_tokens_of_any_kind_are_read():
    wide = TOKENS.to(torch.uint64)
    for ids in (TOKENS.to_sparse(), TOKENS.to_sparse_csr(), wide, wide.numpy()):
        assert torch.equal(read_text(ids).ids, TOKENS)
        assert torch.equal(read_text({"input_ids": ids}).ids, TOKENS)


COPIES, NEEDLES = {"measures": "copying"}, {"measures": "retrieval"}
NO_PLANE = {"a": rl.stop(rl.PlaneNumbers([8]))}


@pytest.mark.parametrize(
    ("call", "text", "options", "line"),
    [
        (rl.profile, TOKENS[:, :2], {}, "A text must have 3 tokens or more"),
        (rl.profile, TOKENS[0], {}, "text must be a Text.* token ids .sequence, position."),
        (rl.profile, TOKENS + 90, {}, "not in the vocabulary of the model.*ids 93 to 116"),
        (rl.profile, TOKENS.to("meta"), {}, "ids must be whole numbers.*meta"),
        (rl.profile, {}, {}, "must have input_ids in rows"),
        (rl.profile, rl.Text(TOKENS, hidden=TOKENS > 0), {}, "All tokens of the text are hid"),
        (rl.profile, TOKENS, {"sinks": [96]}, "Sinks must be tokens of the vocabulary.*96"),
        (rl.profile, TOKENS, {"surrogates": 10**9}, "10,000 surrogates"),
        (rl.profile, "a \ud800", {"tokenizer": NO_TOKENS}, "half of a char"),
        (rl.capture, [], {}, "There is no prompt to capture"),
        (rl.capture, TOKENS[:1], {"heads": f"{10**20}.1"}, "has no head '1000"),
        (rl.reach, "a text", {"tokenizer": 5}, "needs the tokenizer of .*: int"),
        (rl.truncate, TOKENS, {"controls": 10**9}, "at most 10,000 controls"),
        (rl.evaluate, TOKENS, {"measures": ["loss", "speed"]}, "no measure 'speed'; try: meas"),
        (rl.evaluate, TOKENS, {"measures": []}, "No measure was given"),
        (rl.evaluate, TOKENS, {"edits": {"none": "nope"}}, 'An edit cannot be called "none"'),
        (rl.evaluate, TOKENS, {"edits": NO_PLANE}, "The model has no plane for Pl"),
        (rl.evaluate, TOKENS, COPIES | {"distances": [1]}, "of copies must be 2 tokens"),
        (rl.evaluate, TOKENS, COPIES | {"distances": [10**9]}, "tokens of copies, not 16,00"),
        (rl.evaluate, TOKENS, NEEDLES | {"prompt_lengths": [10**9]}, "at most 100,000,000 tok"),
    ],
)
def test_odd_arguments_are_refused(call, text, options: dict, line: str):
    model = tiny("llama_gqa")
    before = model.config._attn_implementation
    with pytest.raises((BadArgument, BadText)) as refused:
        call(model, text, **options)
    assert re.search(line, refused.value.line), refused.value.line
    assert model.config._attn_implementation == before


def test_places_that_cannot_be_used_are_named():
    with pytest.raises(RopelensError, match="/ is a folder"):
        rl.save(xr.Dataset(), "/")
    with pytest.raises(RopelensError, match=r"No checkpoint and no folder is called \./nope\."):
        rl.load("./nope")


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
    by_layer = [0, 26, 34]  # before and after the first layer, and after the head
    assert done == [*by_layer, *by_layer, 0, 1, 2, 0, 1, 2]


def test_logits_of_a_wide_vocabulary_are_most_of_the_progress():
    wide = [tiny_llama(vocab_size=5_000, tie_word_embeddings=tied) for tied in (True, False)]
    cost = [as_live_model(model).logits_cost for model in wide]
    assert cost[0] == cost[1] == pytest.approx(160_000 / 15_520, rel=0.01)


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
