"""Errors, restored models, progress, and what a public function runs and checks once."""

import dataclasses
import re
import sys
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from unittest import mock

import numpy as np
import pandas as pd
import pytest
import torch
import xarray as xr
from oracles.tiny import logits, random_tokens, tiny
from small_measurements import evaluate, token_progress
from tiny_checkpoints import tiny_llama

import ropelens as rl
from ropelens.errors import BadArgument, BadText, RopelensError, UnsupportedModel
from ropelens.interventions.measure_names import DEFAULT_MEASURES
from ropelens.interventions.rotation_edit import RotationEdit
from ropelens.measured_rotation import model_layers
from ropelens.model.as_live_model import as_live_model
from ropelens.model.live_model import LiveModel
from ropelens.profiles import checked_text, measurement
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


COPIES = {"measures": "copying"}
NEEDLES = {"measures": "retrieval"}
NO_PLANE = {"a": rl.stop(rl.PlaneNumbers([8]))}


@pytest.mark.parametrize(
    ("call", "text", "options", "line"),
    [
        (rl.profile, TOKENS[:, :2], {}, "A text must have 3 tokens or more"),
        (
            rl.profile,
            TOKENS[0],
            {},
            "text must be a Text.* token ids .sequence, position.",
        ),
        (
            rl.profile,
            TOKENS + 90,
            {},
            "not in the vocabulary of the model.*ids 93 to 116",
        ),
        (rl.profile, TOKENS.to("meta"), {}, "ids must be whole numbers.*meta"),
        (rl.profile, {}, {}, "must have input_ids in rows"),
        (
            rl.profile,
            rl.Text(TOKENS, hidden=TOKENS > 0),
            {},
            "A text must have 3 tokens or more",
        ),
        (
            rl.profile,
            TOKENS,
            {"sinks": [96]},
            "not in the vocabulary of the model.*ids 96",
        ),
        (rl.profile, TOKENS, {"surrogates": 10**9}, "10,000 surrogates"),
        (rl.profile, "a \ud800", {"tokenizer": NO_TOKENS}, "half of a char"),
        (rl.capture, [], {}, "There is no prompt to capture"),
        (rl.capture, TOKENS[:1], {"heads": f"{10**20}.1"}, "has no head '1000"),
        (rl.reach, "a text", {"tokenizer": 5}, "needs the tokenizer of .*: int"),
        (rl.truncate, TOKENS, {"controls": 10**9}, "at most 10,000 controls"),
        (
            rl.evaluate,
            TOKENS,
            {"measures": ["loss", "speed"]},
            "no measure 'speed'; try: meas",
        ),
        (rl.evaluate, TOKENS, {"measures": []}, "No measure was given"),
        (
            rl.evaluate,
            TOKENS,
            {"edits": {"none": "nope"}},
            'An edit cannot be called "none"',
        ),
        (rl.evaluate, TOKENS, {"edits": NO_PLANE}, "The model has no plane for Pl"),
        (
            rl.evaluate,
            TOKENS,
            COPIES | {"distances": [1]},
            "of copies must be 2 tokens",
        ),
        (
            rl.evaluate,
            TOKENS,
            COPIES | {"distances": [10**9]},
            "tokens of copies, not 16,00",
        ),
        (
            rl.evaluate,
            TOKENS,
            NEEDLES | {"prompt_lengths": [10**9]},
            "at most 100,000,000 tok",
        ),
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
    with pytest.raises(
        RopelensError, match=r"No checkpoint and no folder is called \./nope\."
    ):
        rl.load("./nope")


def test_a_profile_without_budget_has_the_same_sums_and_no_labels():
    model = tiny("llama_gqa")
    sums = rl.profile(model, TOKENS, budget=False)
    full = rl.profile(model, TOKENS, surrogates=0)
    for name in ("q_norm", "selectivity", "offset_mass", "induction"):
        np.testing.assert_array_equal(sums[name], full[name])
    assert "total_bits" not in sums
    rl.plot_norms(sums)
    for refuse in (rl.classify_heads, rl.test_claims):
        with pytest.raises(BadArgument, match="has no attention budget"):
            refuse(sums)
    with pytest.raises(BadArgument, match="has no attention budget"):
        rl.write_report(sums, "nowhere.html")


def test_tokens_and_seeds_of_numpy():
    plain = rl.profile(tiny("llama_gqa"), TOKENS, surrogates=1, rows=3, seed=-1)
    narrow = rl.profile(
        tiny("llama_gqa"),
        TOKENS.to(torch.uint8).numpy(),
        surrogates=1,
        rows=3,
        seed=np.int64(-1),
    )
    xr.testing.assert_equal(plain, narrow)
    expected = rl.classify_heads(plain, seed=-1)
    pd.testing.assert_frame_equal(rl.classify_heads(narrow, seed=-1), expected)


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
def test_an_error_inside_the_model_restores_it(
    measure: str, monkeypatch: pytest.MonkeyPatch
):
    model = tiny("llama_gqa")
    plain = logits(model)
    configured = model.config._attn_implementation

    def fail(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(RotationEdit, "change_input", fail)
        with pytest.raises(KeyboardInterrupt):
            evaluate(model, edits={"a": "nope"}, measures=[measure])
    assert torch.equal(logits(model), plain)
    assert model.config._attn_implementation == configured


def test_progress_moves_by_layer_within_a_batch():
    done: list[int] = []
    evaluate(
        tiny("llama_gqa"),
        lengths=torch.tensor([40, 20, 3]),
        edits={"a": "nope"},
        measures="loss",
        rows=9,
        batch_size=2,
        progress=token_progress(done.append),
    )
    by_layer = [0, 26, 34]  # before and after the first layer, and after the head
    assert done == [*by_layer, *by_layer, 0, 1, 2, 0, 1, 2]


def test_logits_of_a_wide_vocabulary_are_most_of_the_progress():
    tied = tiny_llama(vocab_size=5_000, tie_word_embeddings=True)
    untied = tiny_llama(vocab_size=5_000, tie_word_embeddings=False)
    cost = as_live_model(tied).logits_cost
    assert cost == as_live_model(untied).logits_cost
    assert cost == pytest.approx(160_000 / 15_520, rel=0.01)


@pytest.mark.parametrize("measures", [("loss",), (*DEFAULT_MEASURES, "copying")])
def test_progress_adds_up_to_the_total(measures: tuple[str, ...]):
    totals = []
    done = []

    def show(*stages: Stage) -> object:
        totals.append(stages[0].total)
        return token_progress(done.append)(*stages)

    evaluate(
        tiny("llama_gqa"),
        lengths=torch.tensor([40, 20, 3]),
        progress=show,
        measures=measures,
        prompt_lengths=(33, 40),
        edits={"a": "nope"},
    )
    assert [sum(done)] == totals
    assert measures != ("loss",) or totals == [2 * 63]


IDS = random_tokens(sequences=4, length=40)
LENGTHS = torch.tensor([40, 40, 23, 31])
FEW = rl.Options(surrogates=2)
SWEEP = {"keep": (0.5,), "ends": ["slow"], "controls": 0}
MEASURED = {
    "analyze": lambda model, text: rl.analyze(model, text, FEW),
    "sweep": lambda model, text: rl.analyze(model, text, FEW, truncation=SWEEP),
    "truncate": lambda model, text: rl.truncate(model, text, **SWEEP),
    "evaluate": lambda model, text: rl.evaluate(
        model, text, edits={"half": "p-rope:0.5"}
    ),
    "reach": lambda model, text: rl.reach(model, text, copies=[48], draws=1),
    "claims": lambda model, text: rl.test_claims(
        profile(), model=model, text=text, draws=10
    ),
}
RUNS = {
    "analyze": 8,
    "sweep": 24,
    "truncate": 19,
    "evaluate": 13,
    "reach": 4,
    "claims": 41,
}
"""Number of times that the model runs. It runs once more for packed rows."""
DOCUMENTS = torch.arange(4).repeat_interleave(40).reshape(2, 80)
TEXTS = {
    "plain": lambda: IDS,
    "padded": lambda: rl.Text(IDS, lengths=LENGTHS),
    "packed": lambda: rl.Text(IDS.reshape(2, 80), documents=DOCUMENTS),
}


@cache
def profile() -> xr.Dataset:
    return rl.profile(tiny("llama_gqa", num_hidden_layers=1), IDS, surrogates=2)


@pytest.mark.parametrize("kind", TEXTS)
@pytest.mark.parametrize("measure", MEASURED)
def test_a_text_is_checked_once(measure: str, kind: str):
    model = tiny("llama_gqa", num_hidden_layers=1)
    text = TEXTS[kind]()
    profile()
    assert as_live_model(model).noise  # measured once for a model
    calls: dict[str, mock.Mock] = {}
    runs: list[torch.Size] = []

    def note(_: object, ids: tuple[torch.Tensor, ...], inputs: dict) -> None:
        runs.append((ids[0] if ids else inputs["input_ids"]).shape)

    model.register_forward_pre_hook(note, with_kwargs=True)

    def count(module: object, name: str) -> mock.Mock:
        calls[name] = mock.Mock(wraps=getattr(module, name))
        return mock.patch.object(module, name, calls[name])

    with ExitStack() as patches, warnings.catch_warnings(record=True) as caught:
        for name in ("model_text", "attention_across", "count_length_mismatches"):
            patches.enter_context(count(measurement, name))
        patches.enter_context(count(checked_text, "check_padding"))
        patches.enter_context(count(model_layers, "probe_single_tokens"))
        warnings.simplefilter("always")
        MEASURED[measure](model, text)
    assert calls.pop("attention_across").call_count == (kind == "packed")
    counts = {name: call.call_count for name, call in calls.items()}
    assert counts == dict.fromkeys(calls, 1)
    messages = [str(warning.message) for warning in caught]
    expected = RUNS[measure]
    if kind == "packed":
        expected += 1
    if kind == "padded" and measure in ("analyze", "sweep"):  # two lengths
        expected += 1
    assert len(runs) == expected, runs
    assert len(messages) == (kind == "packed")
    assert all("in packed rows" in message for message in messages)


PACKAGE = str(Path(rl.__file__).parent)
OWN_FILES = ("model/live_model.py", "text/text.py")
TEXT = rl.Text(random_tokens(sequences=8, length=20), documents=range(8))


def contains(value: object, kind: type, *, depth: int = 2) -> bool:
    if isinstance(value, kind) or depth == 0:
        return isinstance(value, kind)
    parts: list[object] = []
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        parts = [
            getattr(value, field.name, None) for field in dataclasses.fields(value)
        ]
    elif isinstance(value, list | tuple) and len(value) < 20:
        parts = [*value]
    return any(contains(part, kind, depth=depth - 1) for part in parts)


def receivers(call: Callable[[], object]) -> dict[type, set[str]]:
    """Functions and classes of ropelens whose calls receive the model or the text."""
    names: dict[type, set[str]] = {LiveModel: set(), rl.Text: set()}

    def record(frame, event: str, _: object):
        code = frame.f_code
        file = code.co_filename
        if event != "call" or not file.startswith(PACKAGE) or file.endswith(OWN_FILES):
            return
        name = f"{file}.{code.co_qualname.partition('.')[0]}"
        arguments = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        for kind, receiving in names.items():
            if name not in receiving and any(
                contains(frame.f_locals.get(argument), kind) for argument in arguments
            ):
                receiving.add(name)

    sys.setprofile(record)
    try:
        call()
    finally:
        sys.setprofile(None)
    return names


MEASURES: dict[str, Callable[..., object]] = {
    "profile": lambda model, _: rl.profile(model, TEXT, surrogates=2),
    "truncate": lambda model, _: rl.truncate(model, TEXT, keep=[0.5], controls=1),
    "claims": lambda model, made: rl.test_claims(
        made, model=model, text=TEXT, draws=10
    ),
}


@pytest.mark.parametrize("name", MEASURES)
def test_few_functions_receive_the_model_or_the_text(name: str):
    model = tiny("llama_gqa")
    made = rl.profile(model, TEXT, surrogates=2) if name == "claims" else None
    for kind, names in receivers(lambda: MEASURES[name](model, made)).items():
        assert 14 < len(names) <= 25, (kind, sorted(names))
